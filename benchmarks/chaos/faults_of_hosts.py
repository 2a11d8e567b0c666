"""What a host may do to a run: clocks that jump, limits that are low, ports that are taken."""

import os
import resource
import socket

from benchmarks.chaos.fault import Fault, Lab, Seen, gave_up, is_named, recovers, went_on
from benchmarks.chaos.faulty_run import START_DEADLINE_S

_SOON = 3
_CLOCK = """\
import os
import time

_real = time.time
_here = os.environ["FAULT_CLOCK"]

def _jumping():
    try:
        with open(_here) as file:
            return _real() + float(file.read() or 0)
    except OSError:
        return _real()

time.time = _jumping
"""
"""A `sitecustomize` that every process of the run imports: its wall clock is off by what a file says."""


def _clock_jumps(lab: Lab, seconds: float) -> Seen:
    lab.module("sitecustomize", _CLOCK)
    here = lab.directory / "clock"
    path = os.pathsep.join(filter(None, [str(lab.directory), os.environ.get("PYTHONPATH", "")]))
    with lab.run(environment={"PYTHONPATH": path, "FAULT_CLOCK": str(here)}) as run:
        run.wait_for_step(_SOON)
        victim = run.pid("rollout-0")
        run.hurt()
        here.write_text(str(seconds))
        run.hurt(victim)
        run.wait(lambda: run.is_back("rollout-0", victim), "the rollout's return", within_s=30.0)
        return went_on(run)


def clock_jumps_back(lab: Lab) -> Seen:
    """The wall clock of every process is set back by an hour, then a rollout dies: it starts again as ever."""
    return _clock_jumps(lab, -3600.0)


def clock_jumps_ahead(lab: Lab) -> Seen:
    """The wall clock of every process is set ahead by a day, then a rollout dies: it starts again as ever."""
    return _clock_jumps(lab, 86_400.0)


def too_few_file_handles_from_the_start(lab: Lab) -> Seen:
    """The limit of open files is far too low: the command ends and says so."""
    with lab.run(prefix=["prlimit", "--nofile=32:32"]) as run:
        run.hurt()
        return gave_up(run, "open files", within_s=START_DEADLINE_S)  # the command has to start first


def rollout_runs_out_of_file_handles(lab: Lab) -> Seen:
    """A rollout may open no file any more, then a storage unit dies: what needs it starts again."""
    with lab.run(settings={"tq.num_storage_units": 2, "tq.request_timeout_s": 10}) as run:
        run.wait_for_step(_SOON)
        rollout = run.pid("rollout-0")
        _, hard = resource.prlimit(rollout, resource.RLIMIT_NOFILE)
        resource.prlimit(rollout, resource.RLIMIT_NOFILE, (3, hard))
        run.hurt(run.pid("storage-0"))
        return went_on(run)


def port_is_taken(lab: Lab) -> Seen:
    """Somebody else listens where the head of a run on two nodes should: the command ends and says so."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with lab.run(arguments=["--nnodes", "2", "--node-rank", "0", "--head", f"127.0.0.1:{port}"]) as run:
            run.hurt()
            return gave_up(run, "--head", str(port), code=2)


FAULTS: tuple[Fault, ...] = (
    recovers(clock_jumps_back),
    recovers(clock_jumps_ahead),
    is_named(too_few_file_handles_from_the_start),
    recovers(rollout_runs_out_of_file_handles),
    is_named(port_is_taken),
)
