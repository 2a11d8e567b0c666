"""Starts and watches the processes that feed a run's loggers, one each: no logger can harm another, or the run.

A logger that fails costs a warning. Its process is started again and goes on where it was.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from asyncflow.run_files import LOGGERS, LOGS
from workers.settings.run import LoggerConfig

RETRY_S = 60.0
"""Between the end of a logger that failed and its next start."""
END_S = 60.0
"""How long a run that has ended waits for what its loggers still send."""


@contextlib.contextmanager
def feeding(
    loggers: Sequence[LoggerConfig], run_dir: Path, say: Callable[[str], None], *, end_s: float = END_S
) -> Iterator[Callable[[float], None]]:
    """Have the loggers of a run fed inside; on leaving they get what is left. They die with the calling thread.

    Yields:
        A function to call twice a second with the monotonic time (s); tells the user of loggers that failed.
    """
    processes = [LoggerProcess(logger.name, run_dir, say) for logger in loggers]

    def look(now: float) -> None:
        for process in processes:
            process.look(now)

    look(0.0)
    try:
        yield look
    finally:
        deadline = time.monotonic() + end_s
        for process in processes:
            process.finish()
        for process in processes:
            process.wait(deadline)


class LoggerProcess:
    """One logger's process, and those that it starts."""

    def __init__(self, name: str, run_dir: Path, say: Callable[[str], None]) -> None:
        self._name, self._run_dir, self._say = name, run_dir, say
        self._log_file = run_dir / LOGS / f"logger-{name.replace(':', '.')}.log"
        self._told = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0

    def look(self, now: float) -> None:
        """Start the process if it is time; if it failed, say so, at its first failure and where others follow."""
        if self._process is None and now >= self._start_at:
            self._start_at = now + RETRY_S
            try:
                self._start()
            except OSError as error:  # a full disk, or no more processes
                self._warn(f"cannot start: {error}")
        elif self._process is not None and self._process.poll() is not None:
            self._start_at = now + RETRY_S
            self._ended(self._process)

    def finish(self) -> None:
        """Let it know that the run has ended."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def wait(self, deadline: float) -> None:
        """Wait until it has ended; past the deadline (monotonic s) it is killed."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
            self._ended(self._process)

    def _start(self) -> None:
        (self._run_dir / LOGGERS).mkdir(exist_ok=True)
        module = [sys.executable, "-P", "-m", "launcher.loggers.feed"]
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*module, self._name, str(self._run_dir), str(os.getpid())],
                stdin=subprocess.PIPE, stdout=log, stderr=log,
                start_new_session=True,  # Ctrl-C is for the launcher
            )  # fmt: skip

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        """Say why it ended, or that it does not; end whatever is left of it and its own children."""
        self.finish()
        code, self._process = process.poll(), None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if code is None:
            self._warn("does not end, and was killed")
        elif code < 0:
            self._warn(f"ended with {signal.Signals(-code).name}")
        elif code:
            lines = []
            with contextlib.suppress(OSError):  # somebody may have removed it
                lines = self._log_file.read_text(errors="replace").splitlines()
            self._warn(lines[-1] if lines else f"ended with code {code}")

    def _warn(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._say(f"warning: logger {self._name}: {text}; the run goes on, see {self._log_file}")
