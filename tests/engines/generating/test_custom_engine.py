"""An engine outside of the package passes the suite as a user runs it: `examples/custom_engine.py`."""

import sys
from pathlib import Path

import pytest

from asyncflow.testing.generating import *  # noqa: F403
from asyncflow.testing.generating import Adapter

EXAMPLES = Path(__file__).parents[3] / "examples"


class Plain(Adapter):
    engine = "custom_engine:PlainEngine"
    options = {"tokens_per_step": 3}  # noqa: RUF012


ADAPTERS = [Plain()]


@pytest.fixture(autouse=True, scope="module")
def examples() -> Iterator[None]:  # noqa: F405
    """Where the example is."""
    sys.path.append(str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))
