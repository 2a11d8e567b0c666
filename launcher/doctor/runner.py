"""`asyncflow doctor`: runs the checks in a child process, each with a deadline, and prints what they find.

    runner                         child 1                          child 2
      |-- order: a b c d ----------->|
      |<-- needs, found a -----------|
      |   (b does not answer in time)|
      |-- SIGTERM, SIGKILL --------->X
      |-- order: c d, needs known ------------------------------------>|
      |<-- found c, found d -------------------------------------------|

All checks share the child's imports, and a check that hangs in a driver or a file system costs only its deadline.
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

import click

from asyncflow.errors import ConfigError
from launcher.doctor.doctor_child import CHECKS, Check
from launcher.doctor.findings import (
    RESOLVE,
    Answer,
    Finding,
    Level,
    Needs,
    Order,
    as_json,
    decode_answer,
    encode,
    failed,
    summary,
)
from launcher.process.fork_server import environment

START_S = 60.0
"""Deadline of what precedes the first check: Python starts, CONFIG is read (s)."""
_LEAVE_S = 2.0
_LOOK_S = 0.02
_COLOURS = {Level.OK: None, Level.WARNING: "yellow", Level.ERROR: "red"}


def print_report(order: Order, checks: Sequence[Check] = CHECKS, *, json: bool) -> bool:
    """Run the checks of `order.registry` and print each finding as it comes, or one JSON object at the end.

    Returns whether a run would fail.

    Raises:
        ConfigError: the user's input cannot be used.
    """
    began = time.monotonic()
    findings: list[Finding] = []
    for finding in examine(order, checks):
        findings.append(finding)
        if not json:
            click.secho(finding.as_text(), fg=_COLOURS[finding.level])
    seconds = time.monotonic() - began
    click.echo(as_json(findings, seconds) if json else summary(findings, seconds))
    return failed(findings)


def examine(order: Order, checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """Run the checks of `order.registry` and yield findings as they come; fills in `checks` and `needs` of the order.

    Raises:
        ConfigError: CONFIG or an option cannot be used.
    """
    todo = list(checks)
    while todo:
        with _Child(replace(order, checks=tuple(check.name for check in todo))) as child:
            known = order.needs is not None
            try:
                first = child.answer(START_S)
            except _NoAnswer as what:
                yield Finding.error(RESOLVE, str(what), _start_remedy(what))
                if known:
                    return
                # CONFIG cannot be read, but checks of the machine itself may show why.
                order = replace(order, needs=Needs.of_machine(order.run_dir, num_nodes=order.num_nodes))
                continue
            if first.refused:
                raise ConfigError(first.refused)
            if not known:
                yield from first.findings
                order = replace(order, needs=first.needs)
            yield from _ask(child, todo)


def _ask(child: "_Child", todo: list[Check]) -> Iterator[Finding]:
    """Take checks off `todo` until all are done or one does not answer."""
    while todo:
        check = todo.pop(0)
        try:
            answer = child.answer(check.deadline_s)
        except _NoAnswer as what:
            yield Finding.error(check.name, str(what), check.if_hanging)
            return
        yield from answer.findings


def _start_remedy(what: "_NoAnswer") -> str:
    if what.died:
        python = Path(sys.executable).name
        return f"see what it says: {python} -X faulthandler -m launcher.doctor.doctor_child 1 $$ < /dev/null"
    return "does ls answer in the directories of CONFIG, model and data? Is one on a file system that hangs?"


class _NoAnswer(Exception):
    """What happened instead of an answer: the process died, or its deadline passed."""

    def __init__(self, text: str, *, died: bool) -> None:
        super().__init__(text)
        self.died = died


class _Child:
    """The child process and the pipe of its answers."""

    def __init__(self, order: Order) -> None:
        self._pipe, write = os.pipe()
        command = [sys.executable, "-P", "-m", "launcher.doctor.doctor_child", str(write), str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write,),
            start_new_session=True,  # Ctrl-C reaches this command only; `__exit__` kills the whole session
            env=_environment(os.environ),
        )
        os.close(write)
        self._unread = b""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(encode(order))

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        """End the child and all that it started."""
        os.close(self._pipe)
        # SIGTERM lets the child clean up. It is reaped last, so that nobody else gets its process id before that.
        with contextlib.suppress(ProcessLookupError):  # where SIGCHLD is ignored, the kernel reaps
            os.kill(self._process.pid, signal.SIGTERM)
            self._ended(_LEAVE_S)
            os.killpg(self._process.pid, signal.SIGKILL)
        # A process that hangs in the kernel, e.g. in a network file system, ends when the kernel lets it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)

    def answer(self, timeout_s: float) -> Answer:
        """Wait for the next answer, or raise `_NoAnswer` if none comes in time."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _NoAnswer(f"timed out after {timeout_s:g} s", died=False)
            piece = os.read(self._pipe, 2**16)
            if not piece:
                self._ended(_LEAVE_S)
                raise _NoAnswer(f"the checking process {_ending(self._code())}", died=True)
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return decode_answer(line)

    def _ended(self, timeout_s: float) -> bool:
        """Wait for the child's end without reaping it."""
        deadline = time.monotonic() + timeout_s
        while self._code() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def _code(self) -> int | None:
        """Return its exit status like `Popen.returncode`; None: it runs."""
        try:
            end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return 0
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment, with the user's own choice of interfaces: that is checked, too."""
    return {**env, **environment(threads=1)}
