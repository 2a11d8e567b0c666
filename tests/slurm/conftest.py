"""A real Slurm of three nodes on this host for all tests here."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # first, because `weightsync` is the package, not the benchmark
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from chaos_parts.local_slurm import LocalSlurm, local_slurm, missing_programs


@pytest.fixture(scope="session", name="cluster")
def _cluster() -> Iterator[LocalSlurm]:
    """Nodes n1, n2, n3; partitions main and spot."""
    missing = missing_programs()
    if missing:
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge")
    with local_slurm(nodes=3) as running:
        yield running


@pytest.fixture
def slurm(cluster: LocalSlurm) -> Iterator[LocalSlurm]:
    """The cluster; no job of a test is left to the next one."""
    yield cluster
    cluster.cancel_all()
