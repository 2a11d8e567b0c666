"""Runs the checks in a process of their own, with a deadline for each, and tells their findings as they come.

    Runner                         child 1                          child 2
      |-- order: a b c d ----------->|
      |<-- Resolved, Found(a) -------|
      |   (b does not answer in time)|
      |-- SIGTERM, SIGKILL --------->X
      |-- order: c d, needs known ------------------------------------>|
      |<-- Found(c), Found(d) -----------------------------------------|

So imports are shared by all checks, and one that hangs in a driver or in a file system costs its deadline alone.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from asyncflow.errors import ConfigError
from launcher.doctor.checks import CHECKS, Check
from launcher.doctor.finding import Finding
from launcher.doctor.messages import RESOLVE, Answer, Found, Order, Refused, Resolved, decode_answer, encode
from launcher.doctor.needs import needs_of_machine
from launcher.fork_server import environment

START_S = 60.0
"""Deadline of what comes before the first check: Python starts, CONFIG is read."""
_LEAVE_S = 2.0
_LOOK_S = 0.02


def examine(order: Order, checks: Sequence[Check] = CHECKS, *, start_s: float = START_S) -> Iterator[Finding]:
    """Run checks; yields findings as they come.

    Args:
        order: what the user gave; its `checks` and `needs` are filled in here.
        checks: those of `order.registry`, in order.
        start_s: deadline of the start (s).

    Raises:
        ConfigError: CONFIG or an option cannot be used.
    """
    todo = list(checks)
    while todo:
        with _Child(replace(order, checks=tuple(check.name for check in todo))) as child:
            first = child.answer(start_s)
            if isinstance(first, Refused):
                raise ConfigError(first.text)
            known = order.needs is not None
            if not isinstance(first, Resolved):
                yield _no_start(first)
                if known:
                    return
                # The machine itself may show why.
                order = replace(order, needs=needs_of_machine(order.run_dir, num_nodes=order.num_nodes))
                continue
            if not known:
                yield first.finding
                order = replace(order, needs=first.needs)
            yield from _ask(child, todo)


def _ask(child: "_Child", todo: list[Check]) -> Iterator[Finding]:
    """Take checks off `todo` until all are done, or one does not answer."""
    while todo:
        check = todo.pop(0)
        answer = child.answer(check.deadline_s)
        if not isinstance(answer, Found):
            yield Finding.error(check.name, _what_happened(answer), check.if_hanging)
            return
        yield from answer.findings


def _no_start(answer: "Answer | _Silence | _Death") -> Finding:
    remedy = "does ls answer in the directories of CONFIG, model and data? Is one on a file system that hangs?"
    if isinstance(answer, _Death):
        remedy = (
            f"see what it says: {Path(sys.executable).name} -X faulthandler -m launcher.doctor.child 1 $$ < /dev/null"
        )
    return Finding.error(RESOLVE, _what_happened(answer), remedy)


def _what_happened(answer: "Answer | _Silence | _Death") -> str:
    if isinstance(answer, _Silence):
        return f"timed out after {answer.after_s:g} s"
    return f"the process that looks {answer}"


class _Silence:
    """No answer came within the deadline."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s


class _Death:
    """The process ended in the middle of it."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def __str__(self) -> str:
        if self.code is None:
            return "closed its pipe"
        return f"was ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with code {self.code}"


class _Child:
    """The checking process and the pipe of its answers."""

    def __init__(self, order: Order) -> None:
        self._pipe, write = os.pipe()
        command = [sys.executable, "-P", "-m", "launcher.doctor.child", str(write), str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write,),
            start_new_session=True,  # Ctrl-C reaches the command alone, and its helpers end with it
            env=_environment(os.environ),
        )
        os.close(write)
        self._unread = b""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(encode(order))

    def __enter__(self) -> "_Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it and all that it started: gently, so that it may clean up, then at once.

        It is reaped last, so that its number stays its own. One that the kernel does not let go (a network file system
        that hangs) ends when the kernel does.
        """
        os.close(self._pipe)
        with contextlib.suppress(ProcessLookupError):  # where SIGCHLD is ignored, the kernel reaps
            os.kill(self._process.pid, signal.SIGTERM)
            self._ended(_LEAVE_S)
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)

    def answer(self, timeout_s: float) -> "Answer | _Silence | _Death":
        """Wait for the next answer."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return _Silence(timeout_s)
            piece = os.read(self._pipe, 2**16)
            if not piece:
                self._ended(_LEAVE_S)
                return _Death(self._code())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return decode_answer(line)

    def _ended(self, timeout_s: float) -> bool:
        """Wait for its end without reaping it."""
        deadline = time.monotonic() + timeout_s
        while self._code() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def _code(self) -> int | None:
        """Return how it ended, as `Popen.returncode`; None: it lives."""
        try:
            end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return 0
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return what workers of a run have; the user's own choice of interfaces is among what is checked."""
    return {**env, **environment(threads=1)}
