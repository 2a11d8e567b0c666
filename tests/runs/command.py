"""Starts the installed command as a user does, and looks at what it leaves."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from launcher.verify.verify_report import verify_run
from tests.support.processes import kill as kill
from tests.support.processes import wait_until as wait_until
from tests.support.run_files import last_step as last_step
from tests.support.run_files import lines as lines
from workers.records.ledger_file import read_ledger

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


def kill_gang(launcher: int, run_dir: Path, gang: str) -> None:
    """Kill the one process of a gang that has one, once it is there: it may just have been killed."""

    def find() -> list[psutil.Process]:
        return [one for one in descendants(launcher) if gang_of(one.pid, run_dir) == gang]

    wait_until(lambda: bool(find()), f"a process of {gang}")
    (victim,) = find()
    kill(victim)


def gang_of(pid: int, run_dir: Path) -> str:
    """Return the gang that holds this process's own timeline file open; "" when it is not a worker."""
    try:
        targets = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return ""
    for target in targets:
        if target.startswith(str(run_dir / "timeline")):
            return Path(target).stem.rpartition("-")[0]
    return ""


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
