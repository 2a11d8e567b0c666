"""A run that is looked at while it goes on: its page, a save that was asked for, and one of its rows."""

import signal
import statistics
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from asyncflow.process import SAVE_SIGNAL
from asyncflow.run_files import list_checkpoints
from launcher.view.row_trace import RowTrace

from . import command

SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=0")


def test_a_run_shows_its_page_saves_when_asked_and_its_rows_can_be_traced(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    run_dir = tmp_path / "run"
    with command.started("--run-dir", "run", "--steps", "100000", "--view", *SMALL, cwd=tmp_path) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(3)]
        assert said[:2] == ["asyncflow: reading the quickstart\n", f"run directory: {run_dir}\n"]
        line = next(line for line in process.stdout if line.startswith("view: "))
        address = line.split()[1]
        with urllib.request.urlopen(address) as page:
            assert b"uPlot" in page.read()
        command.wait_until(lambda: command.last_step(run_dir) >= 3, "step 3")
        assert not list_checkpoints(run_dir)
        process.send_signal(SAVE_SIGNAL)
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
    trained = [line for line in command.lines(run_dir / "ledger.jsonl") if line["step"] == last]
    found = RowTrace.read(run_dir, trained[0]["indices"][0])
    assert [line["step"] for line in found.trained] == [last] and len(found.samples) == 1
    tasks = [lease["task"] for lease in found.leases]
    assert tasks[0] == "actor_rollout" and tasks[-1] == "actor_train", tasks
    gaps = found.gaps()
    assert len(gaps) == found.samples[0]["response_tokens"]
    assert len(found.samples[0]["tokens"]) == len(gaps)
    assert statistics.fmean(map(abs, gaps)) < 1, "of another version's weights at most"
