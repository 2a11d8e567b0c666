"""The estimate of device memory against the peak of the allocator of `late`, for the settings of several engines."""

import pytest

from .conftest import Run

_DEADLINE_S = 800
"""bfloat16 products take eight times as long on some CPUs as float32 ones."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_estimate_is_within_fifteen_percent_of_what_engines_hold(run: Run, num_ranks: int) -> None:
    said = run("memory", num_ranks=num_ranks, deadline_s=_DEADLINE_S)[0]
    assert len(said) == (5 if num_ranks == 1 else 3)
    wrong = {name: found for name, found in said.items() if abs(found["estimated"] / found["held"] - 1) > 0.15}
    assert wrong == {}
