"""Files of JSON objects, one per line, that a run appends to: ledger, metrics, evaluations, timelines, samples."""

#     JsonLines       appends what must not be lost: on a full disk, lines wait in memory
#     open_spare      opens what a run can do without: on a full disk, it goes nowhere
#     read_lines      reads a whole file into typed objects, and names the lines that are wrong
#     readable_lines  reads a whole file leniently
#     LineTail        reads what was appended since its last read; VersionTail: each step or evaluation once
#
# Files may be read while they are being written, and after a crash, which leaves at most a truncated last line.
# Torch-free.

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
        data = "".join(json.dumps(_finite(line), allow_nan=False) + "\n" for line in lines).encode()
        with self._lock:
            # Warn once per full disk, not for every line.
            late = bool(self._waiting)
            self._waiting += data
            try:
                self._write()
            except OSError as error:
                if not late:
                    logger.warning("%s cannot be written (%s): its lines wait", self._path, error)

    def sync(self) -> None:
        """Make everything written durable. Raises OSError if the file system refuses, perhaps earlier lines."""
        with self._lock:
            self._write()
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Make durable and close; idempotent. Raises like `sync`."""
        if self._descriptor >= 0:
            self.sync()
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self) -> None:
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
    """What `read_lines` found in a file."""

    path: Path
    lines: tuple[tuple[int, T], ...] = ()  # (line number from 1, object) of every valid line
    wrong: tuple[tuple[int, str], ...] = ()  # (line number from 1, what is wrong) of the others
    torn: bool = False  # the last line is incomplete: its writer died, or is just writing it. It is in neither list

    def where(self, number: int) -> str:
        return f"{self.path}:{number}"

    def only(self, keep: Callable[[T], bool]) -> "Lines[T]":
        return replace(self, lines=tuple(one for one in self.lines if keep(one[1])))


def read_lines(path: Path, kind_of: Callable[[bytes], type[T]]) -> Lines[T]:
    """Read a file that may still be written; a missing file holds nothing.

    Args:
        kind_of: line -> its type; fields that the type lacks are ignored.

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
    """Returns every line once, when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the lines completed since the last call; all lines if the file was truncated or replaced."""
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
        # The last line may still be being written.
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


class VersionTail:
    """The lines of a file that name a version (lineage and step): each one of this lineage or a later one, once."""

    def __init__(self, path: Path, *, lineage: int) -> None:
        self._lines = LineTail(path)
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


def _finite(line: dict[str, Any]) -> dict[str, Any]:
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
