"""Starts the installed command as a user does, and looks at what it leaves."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from launcher.verify import verify_run
from workers.ledger_file import read_ledger

COMMAND = Path(sys.executable).parent / "asyncflow-launch"
DEADLINE_S = 150
HUNG = "after the stop (launcher.stop_timeout_s); killed"
"""What the command says of a process that does not end with the run."""


def run(*arguments: str, cwd: Path, deadline_s: float = DEADLINE_S) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end."""
    with started(*arguments, cwd=cwd) as process:
        out, err = process.communicate(timeout=deadline_s)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@contextmanager
def started(*arguments: str, cwd: Path) -> "Iterator[subprocess.Popen[str]]":
    """Start the command; whatever happens, it and all its descendants are gone afterwards, by pid."""
    process = subprocess.Popen(
        [COMMAND, *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    seen: list[psutil.Process] = []
    try:
        yield process
        seen = descendants(process.pid)
    finally:
        if process.poll() is None:
            seen += descendants(process.pid)
            process.kill()
            process.wait()
        for one in seen:
            kill(one)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()


def descendants(pid: int) -> list[psutil.Process]:
    """Return all living descendants of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(process: psutil.Process) -> None:
    """Send SIGKILL if it still lives."""
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return


def wait_until(condition: Callable[[], bool], what: str, *, deadline_s: float = DEADLINE_S) -> float:
    """Wait for a condition that another process makes true; returns the seconds it took."""
    began = time.monotonic()
    never = threading.Event()  # unrelated processes share no event to wait on
    while not condition():
        waited = time.monotonic() - began
        assert waited < deadline_s, f"{what}: not within {deadline_s} s"
        never.wait(0.02)
    return time.monotonic() - began


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete JSON lines of a file; none when it does not exist."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def last_step(run_dir: Path) -> int:
    """Return the last finished step of a run."""
    metrics = lines(run_dir / "metrics.jsonl")
    return metrics[-1]["step"] if metrics else 0


def check_ledger(run_dir: Path, *, groups_per_step: int, last: int) -> None:
    """Every admitted group of steps 1..last was trained exactly once, in its step; `asyncflow verify` says so, too.

    A trainer that is killed may have written the ledger of one more step, and not its metrics.
    """
    trained = [(line.step, line.group) for _, line in read_ledger(run_dir).trained if line.step <= last]
    expected = [(group // groups_per_step + 1, group) for group in range(groups_per_step * last)]
    assert sorted(trained) == expected
    check_verified(run_dir, last=last)


def check_verified(run_dir: Path, *, last: int) -> None:
    """`asyncflow verify` finds nothing wrong with steps 1..last."""
    report = verify_run(run_dir)
    assert (report.ok, report.last_step) == (True, last), report.as_text()
