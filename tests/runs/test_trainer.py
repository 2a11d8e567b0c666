"""`asyncflow.Trainer` runs what the command runs: to the end, until a stop, and on from there."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import asyncflow

from . import command

SMALL = {"schedule.rollout_batch_size": 8, "checkpoint.interval": 0}
ROLES = {"rollout": 1, "actor": 1, "ref": 1}
SCRIPT = """
import signal
import asyncflow
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background without it
asyncflow.Trainer("quickstart", roles={roles!r}, overrides={small!r}, steps=100000, run_dir="run").fit()
"""


def lives(process: psutil.Process) -> bool:
    """Whether it has not ended; one whose parent died may wait for ever to be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_run_is_stopped_from_another_thread_and_goes_on_to_its_end(tmp_path: Path) -> None:
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        if line.startswith("step 2/"):
            trainer.stop()

    run_dir = tmp_path / "run"
    trainer = asyncflow.Trainer("quickstart", roles=ROLES, overrides=SMALL, steps=100_000, run_dir=run_dir)
    stopped = trainer.fit(show=show)
    last = len(stopped.steps)
    assert not stopped.finished
    assert last >= 2
    assert any(line.startswith("stopped") for line in shown)
    again = asyncflow.Trainer("quickstart", roles=ROLES, overrides=SMALL, steps=last + 2, run_dir=run_dir)
    results = again.fit(resume=True, show=shown.append)
    assert results.finished
    assert shown[-1].startswith("done")
    assert [line["step"] for line in results.steps] == list(range(1, last + 3))
    command.check_ledger(run_dir, groups_per_step=8, last=last + 2)


@pytest.mark.parametrize(("number", "ended"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupt_or_the_end_of_the_process_saves_the_last_step(
    tmp_path: Path, number: signal.Signals, ended: int
) -> None:
    run_dir, code = tmp_path / "run", SCRIPT.format(roles=ROLES, small=SMALL)
    script = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    family: list[psutil.Process] = []
    try:
        command.wait_until(lambda: command.last_step(run_dir) >= 2, "step 2")
        family = command.descendants(script.pid)
        script.send_signal(number)
        assert script.wait(command.DEADLINE_S) == ended
        command.wait_until(lambda: not any(map(lives, family)), "the end of all processes")
    finally:
        script.kill()
        script.wait()
        for one in family:
            command.kill(one)
    last = command.last_step(run_dir)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step_{last:06d}"]
