"""A run whose rollouts call a tool, and whose processes are killed meanwhile."""

import contextlib
import itertools
import signal
from pathlib import Path

import psutil
import pytest

from . import command

GROUPS = 8
SMALL = (
    f"schedule.rollout_batch_size={GROUPS}", "schedule.n_samples_per_prompt=4", "actor.micro_batch_size=16",
    "rollout.max_attempts=100", "launcher.max_restarts=100", "launcher.max_global_restarts=100",
    "checkpoint.interval=0",
)  # fmt: skip
VICTIMS = ("workers.agents.worker", "workers.agents.service", "rollout")
"""A user worker, the session service, the rollout process that has both."""


@pytest.mark.parametrize("kills", [3, 15])
def test_every_group_is_trained_once_though_workers_service_and_rollout_are_killed(tmp_path: Path, kills: int) -> None:
    settings = [part for setting in SMALL for part in ("--set", setting)]
    run_dir = tmp_path / "run"
    with command.started(
        "quickstart-tools", "--run-dir", "run", "--steps", "100000", *settings, cwd=tmp_path
    ) as process:
        for victim in itertools.islice(itertools.cycle(VICTIMS), kills):
            trained = command.last_step(run_dir)
            command.wait_until(lambda: command.last_step(run_dir) > trained, "a step")  # noqa: B023
            killed = find(process.pid, victim)
            killed.kill()
            command.wait_until(lambda: not killed.is_running(), "its end")  # noqa: B023
        trained = command.last_step(run_dir)
        command.wait_until(lambda: command.last_step(run_dir) > trained + 2, "steps after the last kill")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=command.DEADLINE_S)
    assert command.HUNG not in err
    command.check_ledger(run_dir, groups_per_step=GROUPS, last=command.last_step(run_dir))


def find(launcher: int, victim: str) -> psutil.Process:
    """Return the newest such process of a run, which may just be starting again."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            if victim == "rollout":
                parents = [one.parent() for one in command.descendants(launcher) if runs(one, "workers.agents.service")]
                found[:] = [one for one in parents if one is not None]
            else:
                found[:] = [one for one in command.descendants(launcher) if runs(one, victim)]
        return bool(found)

    command.wait_until(is_there, victim)
    return found[0]


def runs(process: psutil.Process, module: str) -> bool:
    """Whether a process was started with a module; one that it forked, with the same line, does not count."""
    line, parent = process.cmdline(), process.parent()
    return module in line and (parent is None or parent.cmdline() != line)
