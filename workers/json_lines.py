"""JSONL files of a run: one JSON object a line, appended by one process, read by any. Torch-free."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncflow.errors import ConfigError


class JsonLines:
    """Appends JSON objects to a file, a line each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append the lines with one write, and hand them to the operating system."""
        self._file.write("".join(json.dumps(_finite(line), allow_nan=False) + "\n" for line in lines))
        self._file.flush()

    def sync(self) -> None:
        """Make everything written durable."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Make durable and close; idempotent."""
        if not self._file.closed:
            self.sync()
            self._file.close()


@dataclass(frozen=True)
class ReadLines:
    """What a JSONL file holds.

    Attributes:
        path: of the file.
        objects: (line number, JSON object) of every line that is one; numbers count from 1.
        broken: numbers of the other lines.
        torn: the last line is cut: its writer died, or is just writing it. It is in neither list.
    """

    path: Path
    objects: tuple[tuple[int, dict[str, Any]], ...] = ()
    broken: tuple[int, ...] = ()
    torn: bool = False

    def where(self, number: int) -> str:
        """Return `file:line`, as errors name it."""
        return f"{self.path}:{number}"


def read_json_lines(path: Path) -> ReadLines:
    """Read a file that may still be written; a missing one holds nothing.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; make it readable") from error
    *lines, rest = content.split(b"\n")
    objects, broken = [], []
    for number, line in enumerate(lines, start=1):
        value = _object(line)
        if value is None:
            broken.append(number)
        else:
            objects.append((number, value))
    last = _object(rest)
    if last is not None:
        objects.append((len(lines) + 1, last))
    return ReadLines(path, tuple(objects), tuple(broken), torn=bool(rest) and last is None)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    """Turn infinities and NaN, which JSON does not have, into null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()
    }
