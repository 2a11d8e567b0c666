"""What `import tq` gives."""

import pytest

import tq


def test_every_name_is_listed_and_can_be_had() -> None:
    assert set(tq.__all__) <= set(dir(tq))
    assert all(getattr(tq, name) is not None for name in tq.__all__)
    assert {"Lease", "NoRows", "QueueFull", "LeaseFenced"} <= set(tq.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'tq' has no attribute 'Leash'"):
        _ = tq.Leash
