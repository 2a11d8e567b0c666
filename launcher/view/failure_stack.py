"""The newest stack at the end of a process' log: a Python traceback, or what faulthandler writes. Torch-free.

A log is read from its end, up to a size. It is text that anything may have written into, so a stack is what stands
between a line that begins one and the next line of a logger (`asyncflow.log_format`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncflow.decoding import UNREADABLE, json_object

_TAIL_BYTES = 256 * 1024
_MOST_CHARS, _FIRST_CHARS = 12_000, 3000
_LOGGED = re.compile(r'(?:\{"time": ")?(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)')
_TRACEBACK = re.compile(r"(?:  \+ Exception Group )?Traceback \(most recent call last\):")
_DUMP = re.compile(r"Fatal Python error: |(?:Current thread|Thread) 0x\w+.*\(most recent call first\):")
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


@dataclass(frozen=True)
class FailureStack:
    """One stack.

    Attributes:
        what: its error in a line, e.g. `ValueError: no row`.
        after: the time of the log line before it, as it stands there; "": there is none.
        at_end: nothing was logged after it.
    """

    text: str
    what: str
    after: str
    at_end: bool

    @staticmethod
    def newest(log: Path) -> "FailureStack | None":
        """Return the last stack in a log's end; None: it has none, or cannot be read."""
        try:
            with log.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
                data = file.read(_TAIL_BYTES)
        except OSError:
            return None
        if b"(most recent call " not in data and b"Fatal Python error: " not in data:
            return None
        return _newest_in(data.decode(errors="replace").split("\n"))


def _newest_in(lines: Sequence[str]) -> FailureStack | None:
    found: list[str] = []
    after = newest_time = ""
    inside = False
    for line in lines:
        if logged := _LOGGED.match(line):
            inside, newest_time = False, logged[1]
            if error := _error_of(line):
                found, after = error.split("\n"), newest_time
        elif inside and (_is_same_stack(found, line) or not _begins(line)):
            found.append(line)
        elif _begins(line):
            found, after, inside = [line], newest_time, True
    text = "\n".join(found).rstrip()
    if not text:
        return None
    if len(text) > _MOST_CHARS:
        text = f"{text[:_FIRST_CHARS]}\n...\n{text[_FIRST_CHARS - _MOST_CHARS :]}"
    return FailureStack(text, _error_line(found), after, inside)


def _begins(line: str) -> bool:
    return bool(_TRACEBACK.match(line) or _DUMP.match(line))


def _is_same_stack(before: Sequence[str], line: str) -> bool:
    """Return whether a line that begins a stack goes on with the one before: its consequence, or another thread."""
    if _TRACEBACK.match(line):
        return len(before) > 1 and before[-2] in _CHAINED
    return bool(_DUMP.match(line) and _DUMP.match(before[0]))


def _error_of(line: str) -> str:
    """Return the traceback in a line that was logged as JSON."""
    if not line.startswith("{") or "(most recent call last)" not in line:
        return ""
    try:
        error = json_object(line.encode()).get("error", "")
    except UNREADABLE:
        return ""
    return error if isinstance(error, str) else ""


def _error_line(stack: Sequence[str]) -> str:
    if _DUMP.match(stack[0]):
        return stack[0] if stack[0].startswith("Fatal") else "stacks of its threads"
    last = max(place for place, line in enumerate(stack) if _TRACEBACK.match(line))
    # The frames are indented, and so is all of an exception group.
    lines = (line.lstrip(" |") for line in stack[last + 1 :] if re.match(r"\S|  \| \S", line))
    return next(lines, "")[:300]
