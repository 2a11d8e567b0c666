"""Loggers in their processes: what becomes of a run's figures, and of a run, when a logger fails, dies or hangs."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from launcher.loggers.feed import RETRY_S, feeding
from tests.support.logged_runs import add_steps, make_run
from tests.support.processes import wait_until
from workers.settings.run import RunConfig

LOGGER = '''
import json, os, sys, time
from pathlib import Path

class Notes:
    """Writes what it is given to a file; `fails` says in which way it does not."""
    def __init__(self, run, fails=None):
        if fails == "made":
            raise OSError("no such server")
        self.id = run.id or "first"
        self._file, self._fails = run.directory / "notes.jsonl", fails
        self.note({"made": run.id, "pid": os.getpid(), "torch": "torch" in sys.modules})
    def note(self, line):
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\\n")
    def log(self, step, metrics):
        if self._fails == "log":
            raise ValueError("no such\\nproject")
        self.note({"step": step})
    def show(self, step, rows, histograms):
        self.note({"rows": len(rows)})
    def rewind(self, step):
        return False
    def close(self):
        if self._fails == "close":
            while True:
                time.sleep(60)
        self.note({"closed": True})
'''


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_logger.py").write_text(LOGGER)
    monkeypatch.setenv("ASYNCFLOW_CODE_DIRECTORY", str(tmp_path))


def made_run(tmp_path: Path, options: str = "{}") -> tuple[Path, RunConfig]:
    run_dir = make_run(tmp_path / "run", f"[{{name: 'my_logger:Notes', options: {options}}}]")
    return run_dir, RunConfig.load(run_dir)


def notes(run_dir: Path, key: str) -> list[object]:
    path = run_dir / "notes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line[key] for line in lines if key in line]


def test_a_logger_gets_every_step_and_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path, said: list[str]) -> None:
    run_dir, config = made_run(tmp_path)
    for first in (1, 3):
        with feeding(config.loggers, run_dir, said.append):
            add_steps(run_dir, first, first + 1)
    assert notes(run_dir, "step") == [1, 2, 3, 4]
    assert notes(run_dir, "made") == ["", "first"]
    assert notes(run_dir, "closed") == [True, True]
    assert notes(run_dir, "torch") == [False, False]
    assert said == []


def test_a_logger_that_raises_costs_one_warning(tmp_path: Path, said: list[str]) -> None:
    run_dir, config = made_run(tmp_path, "{fails: log}")
    add_steps(run_dir, 1, 1)
    with feeding(config.loggers, run_dir, said.append) as look:
        wait_until(lambda: len(notes(run_dir, "pid")) == 1 and not alive(run_dir), "it fails")
        add_steps(run_dir, 2, 2)
        look(time.monotonic())
        look(time.monotonic() + RETRY_S)
        wait_until(lambda: len(notes(run_dir, "pid")) == 2, "it starts again")
    assert said == [
        f"warning: logger my_logger:Notes: ValueError: no such project; the run continues, see "
        f"{run_dir}/logs/logger-my_logger.Notes.log"
    ]


def test_a_logger_whose_log_was_removed_costs_one_warning_when_it_fails(tmp_path: Path, said: list[str]) -> None:
    run_dir, config = made_run(tmp_path, "{fails: log}")
    with feeding(config.loggers, run_dir, said.append) as look:
        (run_dir / "logs" / "logger-my_logger.Notes.log").unlink()
        add_steps(run_dir, 1, 1)
        wait_until(lambda: len(notes(run_dir, "pid")) == 1 and not alive(run_dir), "it fails")
        look(time.monotonic())
    assert len(said) == 1 and "ended with code 1; the run continues" in said[0]


def test_a_logger_that_was_killed_starts_again_and_misses_nothing(tmp_path: Path, said: list[str]) -> None:
    run_dir, config = made_run(tmp_path)
    add_steps(run_dir, 1, 2)
    with feeding(config.loggers, run_dir, said.append) as look:
        wait_until(lambda: notes(run_dir, "step") == [1, 2], "two steps are logged")
        (pid,) = notes(run_dir, "pid")
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(run_dir), "the logger dies")
        add_steps(run_dir, 3, 3)
        now = time.monotonic()
        look(now)
        look(now + RETRY_S)
        wait_until(lambda: len(notes(run_dir, "pid")) == 2, "the logger starts again")
    assert notes(run_dir, "step") == [1, 2, 3]
    assert len(said) == 1 and "ended with SIGKILL; the run continues" in said[0]


def test_a_logger_that_does_not_end_is_killed(tmp_path: Path, said: list[str]) -> None:
    run_dir, config = made_run(tmp_path, "{fails: close}")
    with feeding(config.loggers, run_dir, said.append, end_s=0.5):
        add_steps(run_dir, 1, 1)
        wait_until(lambda: notes(run_dir, "step") == [1], "the step is logged")
    assert not alive(run_dir)
    assert len(said) == 1 and "did not end" in said[0]


def test_a_logger_that_cannot_be_made_costs_one_warning(tmp_path: Path, said: list[str]) -> None:
    run_dir, config = made_run(tmp_path, "{fails: made}")
    with feeding(config.loggers, run_dir, said.append):
        add_steps(run_dir, 1, 1)
    assert len(said) == 1 and "no such server; the run continues" in said[0]


def test_a_disk_without_room_for_loggers_costs_one_warning(tmp_path: Path, said: list[str]) -> None:
    run_dir, config = made_run(tmp_path)
    (run_dir / "loggers").write_text("in the way")
    with feeding(config.loggers, run_dir, said.append) as look:
        look(time.monotonic() + RETRY_S)
    assert len(said) == 1 and "cannot start" in said[0]


def alive(run_dir: Path) -> bool:
    """Whether the newest process of the logger lives."""
    pid = notes(run_dir, "pid")[-1]
    assert isinstance(pid, int)
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
