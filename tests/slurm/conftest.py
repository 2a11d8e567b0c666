"""A real Slurm of three nodes on this host for all tests here."""

from collections.abc import Iterator

import pytest

from tests.support.local_slurm import LocalSlurm, local_slurm, slurm_obstacle


@pytest.fixture(scope="session", name="cluster")
def _cluster() -> Iterator[LocalSlurm]:
    """Nodes n1, n2, n3; partitions main and spot."""
    if reason := slurm_obstacle():
        pytest.skip(reason)
    with local_slurm(nodes=3) as running:
        yield running


@pytest.fixture
def slurm(cluster: LocalSlurm) -> Iterator[LocalSlurm]:
    """The cluster; no job of a test is left to the next one."""
    yield cluster
    cluster.cancel_all()
