"""Rows that outside processes feed to a run (`data.source: feed`): `feed.jsonl`, one row per line. Torch-free.

    {"feeder": "math", "sequence": 0, "owner": "5b1f..."}                            a process owns the name from now
    {"feeder": "math", "sequence": 1, "row": {"question": "...", "answer": "4"}}     row 0: the prompt of group 0
    {"feeder": "code", "sequence": 1, "row": {"question": "...", "answer": "7"}}     row 1
    {"feeder": "math", "sequence": 1, "end": true}                                   nothing follows

A feeder numbers its rows from 1. `put` returns once the rows are durable. A row that is put again because the reply was
lost is recognized by its number, compared, and skipped. Ownership of a name is durable too, so a process that lost it
cannot put after a restart either. Only the lead controller's process appends; on restart it cuts off a line that was
incomplete when it died. The file is never cut back to a checkpoint: group g is row g forever.
"""

import os
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.decoding import json_decoder
from asyncflow.errors import ConfigError, QueueFull
from asyncflow.json_lines import sync


@dataclass(frozen=True)
class Fed:
    """The extent of a feed; once it has ended, no rows follow."""

    num_rows: int
    ended: bool


class FeedLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the file."""

    feeder: str
    sequence: int  # the row's number among the feeder's, from 1; on a line without a row, that of its last one
    row: msgspec.Raw = msgspec.Raw()  # a JSON object; empty on end and owner lines
    end: bool = False  # no rows follow, from any feeder
    owner: str = ""  # the process that feeds under this name from here on


class FeedFile:
    """Rows by number. Thread-safe; only one process at a time may append.

    `appends`: create the file if needed, cut off an incomplete last line, and enable `put`, `take_ownership` and `end`.
    These raise QueueFull, and store nothing, if the file system refuses.
    """

    def __init__(self, path: Path, *, appends: bool = False) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._offsets = array("q")  # byte offset at which each row's line begins
        self._rows: dict[str, array[int]] = {}  # row numbers per feeder
        self._owners: dict[str, str] = {}
        self._ended = False
        self._listener: Callable[[Fed], None] = lambda fed: None
        try:
            if appends:
                path.touch()
            self._size = self._read_lines()
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND if appends else os.O_RDONLY)
            if appends:
                os.ftruncate(self._descriptor, self._size)
                os.fsync(self._descriptor)
                sync(path.parent)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be opened: {error.strerror}; make it accessible") from error

    @property
    def fed(self) -> Fed:
        return Fed(len(self._offsets), self._ended)

    def last_sequence(self, feeder: str) -> int:
        """Return the number of the last row, or 0."""
        return len(self._rows.get(feeder, ()))

    def owner(self, feeder: str) -> str:
        """Return the process that owns a name, or ""."""
        return self._owners.get(feeder, "")

    def read_row(self, number: int) -> dict[str, Any]:
        with self._lock:
            begin = self._offsets[number]
            end = self._offsets[number + 1] if number + 1 < len(self._offsets) else self._size
        line = os.pread(self._descriptor, end - begin, begin).partition(b"\n")[0]
        fields: dict[str, Any] = msgspec.json.decode(json_decoder(FeedLine).decode(line).row)
        return fields

    def num_known(self, feeder: str, first: int, rows: Sequence[dict[str, Any]]) -> int:
        """Return how many rows at the front of a put are already stored. Raises ConfigError if numbers were skipped, a
        row differs from the stored one, or the feed has ended."""
        last = self.last_sequence(feeder)
        if not 1 <= first <= last + 1:
            raise ConfigError(f"feeder {feeder}: row {first} does not follow row {last}; continue with row {last + 1}")
        known = min(len(rows), last + 1 - first)
        for sequence, row in enumerate(rows[:known], first):
            if self.read_row(self._rows[feeder][sequence - 1]) != row:
                raise ConfigError(
                    f"feeder {feeder}: row {sequence} was already put with other content; continue with row {last + 1}"
                )
        if self._ended and known < len(rows):
            raise ConfigError(
                f"feeder {feeder}: {len(rows) - known} rows after the feed's end; start a new run for them"
            )
        return known

    def take_ownership(self, feeder: str, owner: str) -> None:
        """Make a process the owner of a name, durably."""
        with self._lock:
            if self.owner(feeder) != owner:
                self._append_bytes(
                    msgspec.json.encode(FeedLine(feeder, self.last_sequence(feeder), owner=owner)) + b"\n"
                )
                self._owners[feeder] = owner

    def put(self, feeder: str, rows: Sequence[dict[str, Any]]) -> int:
        """Append a feeder's next rows durably; return the number of the last one."""
        with self._lock:
            last, offset, encode = self.last_sequence(feeder), self._size, msgspec.json.encode
            lines = [
                encode(FeedLine(feeder, last + k, msgspec.Raw(encode(row)))) + b"\n" for k, row in enumerate(rows, 1)
            ]
            self._append_bytes(b"".join(lines))
            for line in lines:
                self._index_row(feeder, offset)
                offset += len(line)
            self._listener(self.fed)
            return self.last_sequence(feeder)

    def end(self, feeder: str) -> None:
        """Declare that no feeder will put more rows; idempotent."""
        with self._lock:
            if not self._ended:
                self._append_bytes(msgspec.json.encode(FeedLine(feeder, self.last_sequence(feeder), end=True)) + b"\n")
                self._ended = True
                self._listener(self.fed)

    def watch(self, listener: Callable[[Fed], None]) -> None:
        """Report the extent now and after each change. The listener runs under the lock: it must return soon and not
        call back."""
        with self._lock:
            self._listener = listener
            listener(self.fed)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _index_row(self, feeder: str, offset: int) -> None:
        self._rows.setdefault(feeder, array("q")).append(len(self._offsets))
        self._offsets.append(offset)

    def _append_bytes(self, data: bytes) -> None:
        try:
            os.ftruncate(self._descriptor, self._size)  # remains of a failed write
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise QueueFull(f"{self._path}: {error.strerror}; no row of this put is stored; free some space") from error
        self._size += len(data)

    def _read_lines(self) -> int:
        """Read all lines; return the offset after the last complete one."""
        offset, decoder = 0, json_decoder(FeedLine)
        with self._path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                # Torn by a crash; the appending process cuts it off.
                if not text.endswith(b"\n"):
                    break
                try:
                    line = decoder.decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise ConfigError(f"{self._path}:{number}: not a line of a feed ({error}); restore it") from error
                if line.owner:
                    self._owners[line.feeder] = line.owner
                elif not line.end:
                    self._index_row(line.feeder, offset)
                self._ended |= line.end
                offset += len(text)
        return offset
