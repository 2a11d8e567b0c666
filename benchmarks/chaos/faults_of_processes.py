"""Processes that are stopped, killed, or cannot be started."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.chaos.fault import Fault, Lab, Outcome, Seen, gave_up, is_named, judge_named, recovers, went_on
from benchmarks.chaos.faulty_run import FaultyRun

_SOON = 3
_SICK = """\
import os, pathlib

if pathlib.Path("sick").exists():
    os._exit(7)

def score(prompt, response, ground_truth):
    return 0.5
"""
_BROADCAST = {"weightsync.path": "broadcast", "weightsync.timeout_s": 10, "sim.parameters": 8_000_000}
"""Too much for the buffers of sockets."""
_BROADCAST_STEPS = 80
"""Some more than others have: a rollout may have to be stopped several times."""


def worker_is_told_to_terminate(lab: Lab) -> Seen:
    """SIGTERM of one worker, as a scheduler sends it to all: ignored."""
    with lab.run() as run:
        run.wait_for_step(_SOON)
        run.hurt(run.pid(lab.random.choice(["rollout-0", "actor", "storage-0"])), signal.SIGTERM)
        return went_on(run)


def _stopped(lab: Lab, gang: str, *, roles: str = "rollout:2,actor:1") -> Seen:
    with lab.run(roles=roles) as run:
        run.wait_for_step(_SOON)
        run.hurt(run.pid(gang), signal.SIGSTOP)
        return went_on(run, says="stopped by a signal")


def controller_is_stopped(lab: Lab) -> Seen:
    """SIGSTOP of a controller for good: killed after 3 s, started again."""
    return _stopped(lab, "controller-0")


def storage_unit_is_stopped(lab: Lab) -> Seen:
    """SIGSTOP of a storage unit for good: killed after 3 s, started again."""
    return _stopped(lab, "storage-0")


def weight_agent_is_stopped(lab: Lab) -> Seen:
    """SIGSTOP of the weight agent for good: killed after 3 s, started again."""
    return _stopped(lab, "weights-0")


def actor_rank_is_stopped(lab: Lab) -> Seen:
    """SIGSTOP of one of two actor ranks for good: the trainer goes back to its checkpoint."""
    return _stopped(lab, "actor", roles="rollout:2,actor:2")


def launcher_is_stopped_for_20_s(lab: Lab) -> Seen:
    """SIGSTOP of the launcher, where the job store lives, SIGCONT after 20 s: the run goes on."""
    with lab.run() as run:
        run.wait_for_step(_SOON)
        launcher = run.launcher
        run.hurt(launcher, signal.SIGSTOP)
        threading.Event().wait(20.0)
        run.hurt(launcher, signal.SIGCONT)
        return went_on(run)


def fork_server_is_stopped(lab: Lab) -> Seen:
    """SIGSTOP of the fork server for good, then a rollout dies, which must be forked again."""
    with lab.run() as run:
        run.wait_for_step(_SOON)
        victim = run.pid("rollout-0")
        run.hurt(_parent(victim), signal.SIGSTOP)
        run.hurt(victim)
        run.wait(lambda: run.is_back("rollout-0", victim), "the rollout's return", within_s=30.0)
        return went_on(run)


def fork_server_dies(lab: Lab) -> Seen:
    """SIGKILL of the fork server: all workers die with it, and start again from the last checkpoint."""
    with lab.run() as run:
        run.wait_for_step(_SOON)
        run.hurt(_parent(run.pid("rollout-0")))
        return went_on(run)


def launcher_and_job_store_die(lab: Lab) -> Seen:
    """SIGKILL of the launcher, and with it of the job store: nobody is left, and --resume goes on."""
    with lab.run() as run:
        run.wait_for_step(6)
        run.hurt(run.launcher)
        if not run.gone(within_s=10.0):
            return Seen(Outcome.HUNG, f"{len(run.pids())} processes are left 10 s after the launcher's end")
    with lab.run(resume=True) as run:
        run.hurt()
        return went_on(run)


def rollout_dies_at_every_start(lab: Lab) -> Seen:
    """One that cannot start again: the limits of restarts are reached, the run ends and names it."""
    lab.module("deeds", _SICK)
    with lab.run(settings={"reward.function": "deeds:score"}, steps=10_000) as run:
        run.wait_for_step(_SOON)
        (lab.directory / "sick").touch()
        run.hurt(run.pid("rollout-1"))
        return gave_up(run, "rollout rank", "code 7")


def log_file_cannot_be_opened(lab: Lab) -> Seen:
    """A worker that starts again cannot write its log: it works without."""
    with lab.run() as run:
        run.wait_for_step(_SOON)
        log = lab.run_dir / "logs" / "rollout" / "0.log"
        log.unlink()
        log.mkdir()
        run.hurt(run.pid("rollout-0"))
        return went_on(run)


def second_launcher_on_the_run(lab: Lab) -> Seen:
    """A second command resumes a run that is going on: refused, and the first one does not notice."""
    with lab.run() as run:
        run.wait_for_step(6)
        with lab.run(resume=True) as second:
            refused = judge_named(second.end(within_s=30.0), "still running", code=2)
        first = went_on(run)
        return refused if first.outcome is Outcome.RECOVERED else first


def rollout_dies_in_a_broadcast(lab: Lab) -> Seen:
    """A rollout vanishes in the middle of a broadcast of weights: the others take them from their agent."""
    with _in_a_broadcast(lab) as run:
        run.hurt(run.pid("rollout-0"))
        return went_on(run, steps=_BROADCAST_STEPS)


def actor_rank_dies_in_a_broadcast(lab: Lab) -> Seen:
    """An actor rank vanishes in the middle of a broadcast: the trainer goes back to its checkpoint."""
    with _in_a_broadcast(lab) as run:
        run.hurt(run.pid("actor", 1))
        run.hurt(run.pid("rollout-0"), signal.SIGCONT)
        return went_on(run, steps=_BROADCAST_STEPS)


def rollout_is_stopped_in_a_broadcast(lab: Lab) -> Seen:
    """A rollout is stopped in the middle of a broadcast, for good: killed after 3 s, the others go on."""
    with _in_a_broadcast(lab) as run:
        run.hurt()
        return went_on(run, steps=_BROADCAST_STEPS, says="stopped by a signal")


@contextmanager
def _in_a_broadcast(lab: Lab) -> Iterator[FaultyRun]:
    """Yield a run whose trainer waits in a broadcast for rollout 0, which is stopped.

    If the trainer needs that rollout's responses first, it is killed and started again before the next broadcast; then
    its successor is stopped.
    """
    with lab.run(roles="rollout:2,actor:2", settings=_BROADCAST, steps=_BROADCAST_STEPS) as run:
        run.wait_for_step(_SOON)
        stopped = 0
        while not (stopped and _publishing(run)):
            run.wait(partial(run.is_back, "rollout-0", stopped), "rollout 0")
            stopped = run.pid("rollout-0")
            run.hurt(stopped, signal.SIGSTOP)
            run.wait(partial(_publishing_or_over, run, stopped), "a broadcast")
        yield run


def _publishing_or_over(run: FaultyRun, stopped: int) -> bool:
    return _publishing(run) or run.is_back("rollout-0", stopped)


def _publishing(run: FaultyRun) -> bool:
    status = run.status("actor")
    return bool(status["state"] == "publishing weights" and status["idle_s"] > 0.5)


def _parent(pid: int) -> int:
    from pathlib import Path

    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


FAULTS: tuple[Fault, ...] = (
    recovers(worker_is_told_to_terminate),
    recovers(controller_is_stopped),
    recovers(storage_unit_is_stopped),
    recovers(weight_agent_is_stopped),
    recovers(actor_rank_is_stopped),
    recovers(launcher_is_stopped_for_20_s),
    recovers(fork_server_is_stopped),
    recovers(fork_server_dies),
    recovers(launcher_and_job_store_die),
    is_named(rollout_dies_at_every_start),
    recovers(log_file_cannot_be_opened),
    is_named(second_launcher_on_the_run),
    recovers(rollout_dies_in_a_broadcast),
    recovers(actor_rank_dies_in_a_broadcast),
    recovers(rollout_is_stopped_in_a_broadcast),
)
