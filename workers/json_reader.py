"""Reads the files that `workers.json_lines` writes, also while they are written or after a crash. Torch-free."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from asyncflow.errors import ConfigError

Fields = dict[str, Any]
T = TypeVar("T", bound=msgspec.Struct)


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
    objects: tuple[tuple[int, Fields], ...] = ()
    broken: tuple[int, ...] = ()
    torn: bool = False

    def where(self, number: int) -> str:
        """Return `file:line`, as errors name it."""
        return f"{self.path}:{number}"


@dataclass(frozen=True)
class TypedLines(Generic[T]):
    """Lines of one kind.

    Attributes:
        lines: (line number, line).
        malformed: (line number, what is wrong) of JSON objects that are no such line.
    """

    lines: tuple[tuple[int, T], ...] = ()
    malformed: tuple[tuple[int, str], ...] = ()


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


def typed_lines(objects: Iterable[tuple[int, Fields]], kind: type[T]) -> TypedLines[T]:
    """Return lines as objects of a struct; fields that it does not have are passed over."""
    lines, malformed = [], []
    for number, fields in objects:
        try:
            lines.append((number, msgspec.convert(fields, kind)))
        except msgspec.ValidationError as error:
            malformed.append((number, str(error)))
    return TypedLines(tuple(lines), tuple(malformed))


def _object(line: bytes) -> Fields | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
