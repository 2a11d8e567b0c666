"""A run of the real command, as a user's outer loop drives it: started, looked at, killed, started with `--resume`.

Its processes are the launcher's descendants; who is who says the log that a worker writes to. Nothing of the run is
asked but its files.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import kill
from tests.support.run_files import lines

COMMAND = Path(sys.executable).parent / "asyncflow-launch"
_OTHER_COMMANDS = Path(sys.executable).parent / "asyncflow"
LAUNCHER, FORK_SERVER = "launcher", "fork server"
STARTING = "a starting worker"
_POLL_S = 0.02
_TAIL_BYTES = 1 << 14
_STAMP = len("2026-01-31 12:00:00,000")


@dataclass(frozen=True)
class Member:
    """A process of a run.

    Attributes:
        name: `rollout-1` (role and rank), `launcher`, `fork server`, ...
        pid: its process id.
    """

    name: str
    pid: int


class LaunchedRun:
    """One run directory and the command that works on it; a context manager that leaves no process behind."""

    def __init__(self, run_dir: Path) -> None:
        """Args:
        run_dir: where; its parent exists.
        """
        self.run_dir = run_dir
        self.starts = 0
        self._output = run_dir.with_name(f"{run_dir.name}.out")
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []

    def __enter__(self) -> "LaunchedRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def resume(self, *arguments: str) -> None:
        """Start the command to go on with the run; what is left of an earlier start ends by itself."""
        self.start("--resume", "latest", *arguments)

    def start(self, *arguments: str) -> None:
        """Start the command.

        Args:
            arguments: all but `--run-dir`.
        """
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [COMMAND, *arguments, "--run-dir", str(self.run_dir)],
                cwd=self.run_dir.parent, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self.starts += 1

    def end(self) -> None:
        """Kill what is left, by process id."""
        if self._process is not None and self._process.poll() is None:
            self._remember_family()
            self._process.kill()
            self._process.wait()
        for process in self._family:  # psutil knows a reused process id from the one it saw
            kill(process)

    @property
    def pid(self) -> int:
        """Of the launcher."""
        assert self._process is not None
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return what the command ended with; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def output(self) -> str:
        """Return what all starts printed."""
        return self._output.read_text(errors="replace")

    def members(self) -> list[Member]:
        """Return all processes of the run that live."""
        self._remember_family()
        found = [Member(LAUNCHER, self.pid)] if self.exit_code() is None else []
        return found + [Member(self._name(process), process.pid) for process in self._family]

    def pid_of(self, name: str) -> int:
        """Return the process id of the only member of that name; 0: there is none now."""
        return next((member.pid for member in self.members() if member.name == name), 0)

    def send(self, pid: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to one process of the run; returns when (monotonic s).

        Raises:
            RuntimeError: the process id is of no process: `pid_of` did not find one.
        """
        if pid == 0:  # the kernel would take it for the whole group of the caller
            raise RuntimeError(f"nobody to send {number.name} to: {self.last_words()}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        now = time.monotonic()
        if pid == self.pid and number == signal.SIGKILL:
            assert self._process is not None
            self._process.wait()
        return now

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the complete lines of one of the run's JSONL files."""
        return lines(self.run_dir / name)

    def last_step(self) -> tuple[int, int]:
        """Return (lineage, step) of the newest line of the metrics; (0, 0): there is none."""
        try:
            with (self.run_dir / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                whole = file.read().rpartition(b"\n")[0].splitlines()
        except FileNotFoundError:
            return 0, 0
        if not whole:
            return 0, 0
        line = json.loads(whole[-1])
        return int(line["lineage"]), int(line["step"])

    def wait_for_step(self, step: int, *, deadline_s: float) -> float:
        """Wait until a step is finished; returns the seconds that it took.

        Raises:
            RuntimeError: the command ended, or the time is up.
        """
        return self.wait_until(lambda: self.last_step()[1] >= step, f"step {step}", deadline_s=deadline_s)

    def wait_until(self, condition: Callable[[], bool], what: str, *, deadline_s: float) -> float:
        """Wait for what the run brings about; returns the seconds that it took.

        Raises:
            RuntimeError: the command ended, or the time is up.
        """
        began = time.monotonic()
        while not condition():
            waited = time.monotonic() - began
            if self.exit_code() is not None and not condition():
                raise RuntimeError(f"{what}: the command ended with {self.exit_code()}: {self.last_words()}")
            if waited > deadline_s:
                raise RuntimeError(f"{what}: not within {deadline_s:g} s; last: {self.last_words()}")
            pause(_POLL_S)
        return time.monotonic() - began

    def wait_for_end(self, *, deadline_s: float) -> int:
        """Wait for the command to end; returns its exit code.

        Raises:
            RuntimeError: the time is up.
        """
        assert self._process is not None
        self._remember_family()
        try:
            return self._process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the command did not end within {deadline_s:g} s: {self.last_words()}") from error

    def end_with(self, code: int, *, deadline_s: float) -> None:
        """Wait for the command to end.

        Raises:
            RuntimeError: it ended with another exit code, or the time is up.
        """
        ended = self.wait_for_end(deadline_s=deadline_s)
        if ended != code:
            raise RuntimeError(f"{self.run_dir.name}: the command ended with {ended}, not {code}: {self.last_words()}")

    def log_size(self) -> int:
        """Return the size of the launcher's log, for `logged_at`."""
        path = self.run_dir / "logs" / "launcher.log"
        return path.stat().st_size if path.exists() else 0

    def logged_at(self, text: str, since: int) -> float | None:
        """Return when the launcher first logged a line with `text`, after its log's first `since` bytes.

        Returns:
            Unix time (s), to a millisecond; None: it has not.
        """
        with (self.run_dir / "logs" / "launcher.log").open("rb") as file:
            file.seek(since)
            lines = file.read().decode(errors="replace").splitlines()
        stamp = next((line[:_STAMP] for line in lines if text in line), None)
        return None if stamp is None else datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp()

    def verify(self) -> list[str]:
        """Return what `asyncflow verify` finds wrong."""
        done = subprocess.run(
            [_OTHER_COMMANDS, "verify", str(self.run_dir)], capture_output=True, text=True, check=False
        )
        return [] if done.returncode == 0 else (done.stdout + done.stderr).splitlines()

    def last_words(self) -> str:
        """Return the end of what it printed."""
        lines = self.output().splitlines()
        return " | ".join(lines[-3:])

    def _remember_family(self) -> None:
        try:
            new = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            new = []
        self._family = [*{process: None for process in [*self._family, *new] if _lives(process)}]

    def _name(self, process: psutil.Process) -> str:
        try:
            output = Path(f"/proc/{process.pid}/fd/1").readlink()
            if output.parent.parent == self.run_dir / "logs":
                return f"{output.parent.name}-{output.stem}"
            if process.ppid() != self.pid:
                return STARTING
            return FORK_SERVER
        except (OSError, psutil.Error):
            return STARTING


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def overrides(**values: object) -> list[str]:
    """Return `--set` options; two underscores in a name stand for the dot: `checkpoint__interval=5`."""
    return [part for name, value in values.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]


def pause(seconds: float) -> None:
    """Let other processes go on."""
    threading.Event().wait(seconds)
