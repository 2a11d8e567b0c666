"""Reads the files that `workers.json_lines` writes, also while they are written or after a crash. Torch-free."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from asyncflow.decoding import json_decoder
from asyncflow.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct, covariant=True)


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
