"""A run that is looked at while it goes on: its page, a save that was asked for, and one of its rows."""

import signal
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from asyncflow.errors import TransportError
from asyncflow.process import PAUSE_SIGNAL, RESUME_SIGNAL
from asyncflow.run_files import list_checkpoints
from launcher.run.status import RunStatus
from launcher.timeline.run_timeline import RunTimeline
from launcher.view.row_trace import RowTrace

from . import command

SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=0")


def test_a_run_shows_its_page_saves_when_asked_and_its_rows_can_be_traced(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with command.started(
        "--run-dir", "run", "--steps", "100000", "--view", "--control", *SMALL, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(3)]
        assert said[:2] == ["asyncflow: reading the quickstart\n", f"run directory: {run_dir}\n"]
        line = next(line for line in process.stdout if line.startswith("view: "))
        address = line.split()[1]
        with urllib.request.urlopen(address) as page:
            assert b"uPlot" in page.read()
        command.wait_until(lambda: command.last_step(run_dir) >= 3, "step 3")
        assert not list_checkpoints(run_dir)
        save = urllib.request.Request(f"{address}api/save?run=0", headers={"X-AsyncFlow": "control"}, method="POST")
        urllib.request.urlopen(save).close()
        command.wait_until(lambda: any((run_dir / "checkpoints").glob("*/meta.json")), "a checkpoint")
        saved = command.last_step(run_dir)
        command.wait_until(lambda: command.last_step(run_dir) > saved, "a step after it")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=command.DEADLINE_S)
        assert process.returncode == 75, err
        assert f"model: asyncflow export {run_dir}" in out and f"report: {run_dir / 'report.html'}" in out
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(address)
    assert len(list_checkpoints(run_dir)) == 2, "one that was asked for, and that of the stop"
    last = command.last_step(run_dir)
    trained = [line["indices"] for line in command.lines(run_dir / "ledger.jsonl") if line["step"] == last]
    found = RowTrace.read(run_dir, min(trained)[0])  # of the first group admitted, which is kept
    assert [line["step"] for line in found.trained] == [last] and len(found.samples) == 1
    tasks = [lease["task"] for lease in found.leases]
    assert tasks[0] == "actor_rollout" and tasks[-1] == "actor_train", tasks
    gaps = found.gaps()
    assert len(gaps) == found.samples[0]["response_tokens"]
    assert len(found.samples[0]["tokens"]) == len(gaps)
    assert statistics.fmean(map(abs, gaps)) < 1, "of another version's weights at most"


SYNC = ("--set", "schedule.mode=sync", "--set", "schedule.max_staleness=0")


@pytest.mark.parametrize(
    "roles",
    [
        ("--set", "launcher.deadlock_timeout_s=8"),
        ("--roles", "rollout+actor:1", *SYNC, "--set", "launcher.deadlock_timeout_s=8"),
        ("--roles", "rollout+actor:1", "--set", "schedule.mode=colocate_async"),
        ("--set", "tq.num_controllers=2", "--roles", "rollout:1,actor:1,evaluate:1", "--set", "evaluate.interval=2"),
    ],
    ids=["apart", "colocated", "colocate_async", "evaluated"],
)
def test_a_paused_run_rests_between_two_steps_and_goes_on(tmp_path: Path, roles: tuple[str, ...]) -> None:
    run_dir = tmp_path / "run"
    common = ("--run-dir", "run", "--steps", "100000", *SMALL, *roles)
    with command.started(*common, cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 3, "step 3")
        paused_at = pause(process, run_dir)
        if "launcher.deadlock_timeout_s=8" in roles:
            rests_until = time.monotonic() + 10  # longer than all may wait
            command.wait_until(lambda: time.monotonic() > rests_until, "a while")
        command.kill_gang(process.pid, run_dir, "controller-0")  # admission starts again
        command.wait_until(lambda: RunStatus.read(run_dir).restarts.gangs["controller-0"] == 1, "a new lead")
        command.wait_until(lambda: text_of_pause(run_dir) == f"paused after step {paused_at}", "the same pause")
        assert command.last_step(run_dir) == paused_at
        process.send_signal(RESUME_SIGNAL)
        command.wait_until(lambda: command.last_step(run_dir) >= paused_at + 3, "steps after the pause")
        command.wait_until(lambda: text_of_pause(run_dir) == "", "a status without a pause")
        paused_at = pause(process, run_dir)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=command.DEADLINE_S)
        assert process.returncode == 75, err
    assert "resumed, the run is not paused" in out and command.HUNG not in out
    paused = [line for line in command.lines(run_dir / "metrics.jsonl") if "paused_s" in line]
    assert len(paused) == 1 and paused[0]["paused_s"] > 1 and paused[0]["step_time_s"] < 60, paused
    shares = RunTimeline.read(run_dir).account_by_role()
    assert shares["rollout"]["paused"] > 0.005 and shares["actor"]["paused"] > 0.005, shares
    done = command.run("--resume", "run", "--steps", str(paused_at + 3), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    command.check_ledger(run_dir, groups_per_step=8, last=paused_at + 3)


def pause(process: "subprocess.Popen[str]", run_dir: Path) -> int:
    """Pause a run and return the step after which it rests."""
    process.send_signal(PAUSE_SIGNAL)
    command.wait_until(lambda: text_of_pause(run_dir).startswith("paused after step "), "everything to rest")
    paused_at = int(text_of_pause(run_dir).split()[-1])
    command.wait_until(lambda: command.last_step(run_dir) == paused_at, "the last step's record")
    return paused_at


def text_of_pause(run_dir: Path) -> str:
    try:
        return RunStatus.read(run_dir).pause
    except TransportError:  # it is just starting
        return ""
