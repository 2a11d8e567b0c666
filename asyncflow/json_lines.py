"""Files of JSON objects, one per line, that a run appends to: ledger, metrics, evaluations, timelines, samples."""

#     JsonLines    appends what must not be lost: on a full disk, lines wait in memory
#     open_spare   opens what a run can do without: on a full disk, it goes nowhere
#     LineReader   reads each complete line once, from a cursor; VersionTail: each step or evaluation once
#
# Files may be read while they are being written, and after a crash, which leaves at most a truncated last line.
# Torch-free.

import errno
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, overload

import msgspec

from asyncflow.decoding import UNREADABLE, json_object
from asyncflow.errors import AsyncFlowError, ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T", covariant=True)


class JsonLines:
    """Appends to one file. One thread writes; another may call `sync`.

    A full disk does not stop the run: lines that cannot be written wait in memory, in order, and are written before the
    next ones. A partly written line is completed later, so the file stays well-formed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._waiting = b""

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append the lines with one write to the operating system; if it refuses, later."""
        data = "".join(json.dumps(finite_fields(line), allow_nan=False) + "\n" for line in lines).encode()
        with self._lock:
            # Warn once per full disk, not for every line.
            late = bool(self._waiting)
            self._waiting += data
            try:
                self._write_waiting()
            except OSError as error:
                if not late:
                    logger.warning("%s cannot be written (%s): its lines wait", self._path, error)

    def sync(self) -> None:
        """Make everything written durable. Raises OSError if the file system refuses, perhaps earlier lines."""
        with self._lock:
            self._write_waiting()
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Make durable and close; idempotent. Raises like `sync`."""
        if self._descriptor >= 0:
            self.sync()
            os.close(self._descriptor)
            self._descriptor = -1

    def _write_waiting(self) -> None:
        while self._waiting:
            size = os.write(self._descriptor, self._waiting)
            self._waiting = self._waiting[size:]


def open_spare(path: Path, *, what: str, loss: str) -> BinaryIO:
    """Open a file for appending, creating its directory. If that fails, what is written goes nowhere.

    Args:
        path: its directory's parent must exist.
        what: the file holds, for the warning.
        loss: what this process does without the file, for the warning.
    """
    try:
        # A user may have removed the directory to make room.
        path.parent.mkdir(exist_ok=True)
        return path.open("ab")
    except OSError as error:
        logger.warning("%s: %s; this process %s", what, error, loss)
        return Path(os.devnull).open("ab")


@dataclass(frozen=True)
class Lines(Generic[T]):
    """What `LineReader.read_lines` found."""

    path: Path
    lines: tuple[tuple[int, T], ...] = ()  # (line number from 1, object) of every valid line
    wrong: tuple[tuple[int, str], ...] = ()  # (line number from 1, what is wrong) of the others
    torn: bool = False  # the last line is incomplete: its writer died, or is just writing it. It is in neither list

    def describe_place(self, number: int) -> str:
        return f"{self.path}:{number}"

    @property
    def problems(self) -> list[str]:
        """What is wrong, each with its place."""
        return [f"{self.describe_place(number)}: {what}" for number, what in self.wrong]

    def filter_lines(self, keep: Callable[[T], bool]) -> "Lines[T]":
        return replace(self, lines=tuple(one for one in self.lines if keep(one[1])))


class LineReader(Generic[T]):
    """Reads a file that may be missing, and may still be written: each line once, when it is complete.

    `decode` makes an object of a line, e.g. `json_decoder(StepLine).decode`.
    """

    @overload
    def __init__(self: "LineReader[dict[str, Any]]", path: Path) -> None: ...
    @overload
    def __init__(self, path: Path, decode: Callable[[bytes], T]) -> None: ...
    def __init__(self, path: Path, decode: Callable[[bytes], Any] = json_object) -> None:
        self._path = path
        self._decode = decode
        self._identity: tuple[int, int] | None = None
        self._offset, self._number = 0, 1

    def read(self) -> list[T]:
        """Return the objects of new lines; raises ConfigError, which names the line, if one is wrong."""
        found = self.read_lines()
        for problem in found.problems:
            raise ConfigError(f"{problem}; repair the line, or restore the file")
        return [line for _, line in found.lines]

    def read_lines(self) -> Lines[T]:
        """Return the lines completed since the last call; all lines if the file was truncated or replaced.

        Raises:
            ConfigError: it is no file, or no file for this user.
            AsyncFlowError: the machine cannot read it now.
        """
        lines: list[tuple[int, T]] = []
        wrong: list[tuple[int, str]] = []
        torn = False
        try:
            with self._path.open("rb") as file:
                facts = os.fstat(file.fileno())
                identity = (facts.st_dev, facts.st_ino)
                replaced = identity != self._identity or facts.st_size < self._offset
                offset, number = (0, 1) if replaced else (self._offset, self._number)
                file.seek(offset)
                for line in file:
                    try:
                        # What follows a whole line without a newline is that newline.
                        if line.strip():
                            lines.append((number, self._decode(line)))
                    except msgspec.ValidationError as error:
                        wrong.append((number, str(error)))
                    except UNREADABLE as error:
                        if torn := not line.endswith(b"\n"):
                            break
                        wrong.append((number, f"not JSON ({error})"))
                    offset += len(line)
                    number += line.endswith(b"\n")
            self._identity, self._offset, self._number = identity, offset, number
        except FileNotFoundError:
            pass
        except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
            raise ConfigError(f"{self._path}: cannot be read: {error.strerror}; make it readable") from error
        except OSError as error:  # a limit of the machine, a disk: nothing that the user wrote
            raise AsyncFlowError(f"{self._path}: cannot be read: {error.strerror}") from error
        return Lines(self._path, tuple(lines), tuple(wrong), torn)


class VersionTail:
    """The lines of a file that name a version (lineage and step): each one of this lineage or a later one, once."""

    def __init__(self, path: Path, *, lineage: int) -> None:
        self._lines = LineReader(path)
        self._lineage = lineage
        self._seen: set[tuple[int, int]] = set()

    def read(self) -> list[dict[str, Any]]:
        news = []
        for line in self._lines.read():
            version = (line.get("lineage", self._lineage), line["step"])
            if version[0] >= self._lineage and version not in self._seen:
                self._seen.add(version)
                news.append(line)
        return news


def finite_fields(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with None for NaN and infinity, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()
    }


# Surviving a crash, of a process or of the machine.

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk and of an exhausted quota


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: a reader finds the old or the new text, even after a crash of this process."""
    beside = path.with_suffix(".tmp")
    beside.write_text(text)
    beside.replace(path)
