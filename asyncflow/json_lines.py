"""Files of JSON objects, a line each, that a run appends to: ledger, metrics, evaluations, timelines, samples.

    JsonLines       appends what must not be lost: on a full disk, lines wait in memory
    open_spare      opens what a run can do without: on a full disk, it goes nowhere
    read_lines      reads a whole file into typed objects, and names the lines that are wrong
    readable_lines  reads a whole file that is only looked at
    LineTail        reads what was appended since its last look; VersionTail: each step or evaluation once

Readers may read while the file is written, and after a crash, which leaves at most a cut last line. Torch-free.
"""

import contextlib
import errno
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from asyncflow.decoding import json_decoder
from asyncflow.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct, covariant=True)


class JsonLines:
    """Appends to one file. One thread writes; another may call `sync`.

    A disk without room holds the run up as little as it can: lines that cannot be written wait in memory, in their
    order, and are written before the next ones. What was written of a torn line is continued, so the file stays whole.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, made when new."""
        self._path = path
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._waiting = b""

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append the lines with one write, and hand them to the operating system; if it refuses, later."""
        data = "".join(json.dumps(_finite(line), allow_nan=False) + "\n" for line in lines).encode()
        with self._lock:
            late = bool(self._waiting)
            self._waiting += data
            try:
                self._write()
            except OSError as error:
                if not late:
                    logger.warning("%s cannot be written (%s): its lines wait", self._path, error)

    def sync(self) -> None:
        """Make everything written durable.

        Raises:
            OSError: the file system refuses, also what it refused before.
        """
        with self._lock:
            self._write()
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Make durable and close; idempotent.

        Raises:
            OSError: see `sync`.
        """
        if self._descriptor >= 0:
            self.sync()
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self) -> None:
        while self._waiting:
            size = os.write(self._descriptor, self._waiting)
            self._waiting = self._waiting[size:]


def open_spare(path: Path, *, what: str, loss: str) -> BinaryIO:
    """Open a file to append to, and make its directory, which may have been removed to make room.

    If that fails, what is written goes nowhere.

    Args:
        path: whose directory's directory exists.
        what: is in it, for the warning.
        loss: what this process does without it.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        return path.open("ab")
    except OSError as error:
        logger.warning("%s: %s; this process %s", what, error, loss)
        return Path(os.devnull).open("ab")


@dataclass(frozen=True)
class Lines(Generic[T]):
    """What a file holds.

    Attributes:
        path: of the file.
        lines: (line number, object) of every line that is what it should be; numbers count from 1.
        wrong: (line number, what is wrong) of the others.
        torn: the last line is cut: its writer died, or is just writing it. It is in neither list.
    """

    path: Path
    lines: tuple[tuple[int, T], ...] = ()
    wrong: tuple[tuple[int, str], ...] = ()
    torn: bool = False

    def where(self, number: int) -> str:
        """Return `file:line`, as errors name it."""
        return f"{self.path}:{number}"

    def only(self, keep: Callable[[T], bool]) -> "Lines[T]":
        """Return the same without lines that are not kept."""
        return replace(self, lines=tuple(one for one in self.lines if keep(one[1])))


def read_lines(path: Path, kind_of: Callable[[bytes], type[T]]) -> Lines[T]:
    """Read a file that may still be written; a missing one holds nothing.

    Args:
        path: of the file.
        kind_of: line -> what it should be; fields that the kind does not have are passed over.

    Raises:
        ConfigError: the file cannot be read.
    """
    lines: list[tuple[int, T]] = []
    wrong: list[tuple[int, str]] = []
    torn = False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    lines.append((number, json_decoder(kind_of(line)).decode(line)))
                except msgspec.ValidationError as error:
                    wrong.append((number, str(error)))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    torn = not line.endswith(b"\n")
                    wrong += [] if torn else [(number, f"not JSON ({error})")]
    except FileNotFoundError:
        return Lines(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; make it readable") from error
    return Lines(path, tuple(lines), tuple(wrong), torn)


def readable_lines(path: Path) -> list[dict[str, Any]]:
    """Read leniently: skip malformed and incomplete lines."""
    found = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            if isinstance(values, dict):
                found.append(values)
    return found


class LineTail:
    """Returns every line once, when it is finished."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that were finished since the last call; all of them when the file was cut or replaced."""
        try:
            facts = self._path.stat()
        except FileNotFoundError:
            return []
        identity = (facts.st_dev, facts.st_ino)
        if identity != self._identity or facts.st_size < self._offset:
            self._identity, self._offset = identity, 0
        if facts.st_size == self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


class VersionTail:
    """The lines of a file that name a version (lineage and step): each of this lineage and of later ones once."""

    def __init__(self, path: Path, *, lineage: int) -> None:
        self._lines = LineTail(path)
        self._lineage = lineage
        self._seen: set[tuple[int, int]] = set()

    def read(self) -> list[dict[str, Any]]:
        """Return those that were finished since the last call, in the file's order."""
        news = []
        for line in self._lines.read():
            version = (line.get("lineage", self._lineage), line["step"])
            if version[0] >= self._lineage and version not in self._seen:
                self._seen.add(version)
                news.append(line)
        return news


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    """Turn infinities and NaN, which JSON does not have, into null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()
    }


# What must outlive a crash: of a process, of the machine.

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, and of a full quota."""


def sync(path: Path) -> None:
    """Make a file's content, or a directory's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a file at once: who reads it, also after a crash of this process, finds the text before or this one."""
    beside = path.with_suffix(".tmp")
    beside.write_text(text)
    beside.replace(path)
