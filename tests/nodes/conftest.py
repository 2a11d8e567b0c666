"""Hosts for a test."""

import os
import sys
from collections.abc import Iterator

import pytest

from .hosts import HERE, Host, obstacle, some_hosts

# PyTorch looks up the name of every peer of a TCPStore; a resolver that does not answer would cost 5 s each time.
sys.path.insert(0, str(HERE.parent / "multiproc"))  # what the parties do is shared with those tests
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(scope="session", name="permitted")
def _permitted() -> None:
    """Skip where hosts cannot be made."""
    reason = obstacle()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def two_hosts(permitted: None) -> Iterator[list[Host]]:
    """Two hosts that reach each other, and nobody else."""
    with some_hosts(2) as hosts:
        yield hosts


@pytest.fixture
def three_hosts(permitted: None) -> Iterator[list[Host]]:
    """Three hosts that reach each other, and nobody else."""
    with some_hosts(3) as hosts:
        yield hosts
