"""What the processes of a run read about it."""

from pathlib import Path

from asyncflow.clock import HostClock
from asyncflow.job import GangSpec, Job


def test_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    gangs = (GangSpec("rollout-0", "rollout", 0, 2, ("cpu", "cpu")),)
    job = Job("127.0.0.1", 1, "00", 2, gangs, 0, "", 3, 4.5, HostClock("host", 1.7e9))
    job.save(tmp_path)
    assert Job.load(tmp_path) == job
