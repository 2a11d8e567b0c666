"""What the processes of a run read about it."""

from pathlib import Path

from asyncflow.clock import HostClock
from asyncflow.job import GangSpec, Job, Node


def test_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    gangs = (GangSpec("rollout-0", "rollout", 0, 2, ("cpu", "cpu")),)
    job = Job("127.0.0.1", 1, "00", 2, gangs, 0, "", 3, 4.5, HostClock("host", 1.7e9))
    job.save(tmp_path)
    assert Job.load(tmp_path) == job


def test_job_of_several_nodes_is_read_as_it_was_written(tmp_path: Path) -> None:
    gangs = (GangSpec("actor", "actor", 0, 3, ("npu:0", "npu:1", "npu:0"), (0, 0, 1)),)
    nodes = tuple(Node(k, f"host-{k}", f"10.0.0.{k}", HostClock(f"boot-{k}", 1.5 * k)) for k in range(2))
    job = Job("10.0.0.0", 1, "00", 2, gangs, 0, "", 3, 4.5, HostClock("host", 1.7e9))
    whole = job.with_changes(nodes=nodes)
    assert (job.revision, whole.revision) == (0, 1)
    whole.save(tmp_path)
    assert Job.load(tmp_path) == whole


def test_timelines_use_the_clock_of_their_own_host() -> None:
    own = HostClock.from_wall_clock()
    nodes = (Node(0, "a", "10.0.0.1", HostClock("boot a", 1.0)), Node(1, "b", "10.0.0.2", own))
    job = Job("10.0.0.1", 1, "00", 2, (), 0, "", 3, 4.5, nodes[0].clock, nodes)
    assert job.local_clock() == own
