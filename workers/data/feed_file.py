"""The rows that processes outside feed to a run (`data.source: feed`): `feed.jsonl`, a line a row. Torch-free.

    {"feeder": "math", "sequence": 0, "owner": "5b1f..."}                            a process has the name from here on
    {"feeder": "math", "sequence": 1, "row": {"question": "...", "answer": "4"}}     row 0: the prompt of group 0
    {"feeder": "code", "sequence": 1, "row": {"question": "...", "answer": "7"}}     row 1
    {"feeder": "math", "sequence": 1, "end": true}                                   nothing follows

A feeder counts its rows from 1. `put` returns when the rows are durable. A row put twice because its reply was lost is
recognised by its number, compared, and skipped. Ownership of a name is durable, too: a process that lost it cannot put
after a restart, either. The lead controller's process alone appends; a line that it was just writing when
it died is cut when it starts again. The file is never cut back to a checkpoint: group g is row g for ever.
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
    """How much there is of a feed.

    Attributes:
        num_rows: so far.
        ended: no others follow.
    """

    num_rows: int
    ended: bool


class FeedLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the file.

    Attributes:
        feeder: name.
        sequence: of the row among the feeder's, from 1; on a line without a row, of its last one.
        row: a JSON object; empty at the end, and with an owner.
        end: no rows follow.
        owner: the process that feeds under the name from here on.
    """

    feeder: str
    sequence: int
    row: msgspec.Raw = msgspec.Raw()
    end: bool = False
    owner: str = ""


class FeedFile:
    """The rows by number. Thread-safe; one process at a time appends."""

    def __init__(self, path: Path, *, appends: bool = False) -> None:
        """Read what is there.

        Args:
            path: of the file.
            appends: make the file if it is new, cut a torn last line, and let `put` and `end` write.

        Raises:
            ConfigError: the file is damaged, or cannot be opened.
        """
        self._path = path
        self._lock = threading.Lock()
        self._offsets = array("q")
        """Where each row's line begins, and where the last one ends."""
        self._rows: dict[str, array[int]] = {}
        """The numbers of each feeder's rows."""
        self._owners: dict[str, str] = {}
        self._ended = False
        self._listener: Callable[[Fed], None] = lambda fed: None
        try:
            if appends:
                path.touch()
            self._size = self._read()
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND if appends else os.O_RDONLY)
            if appends:
                os.ftruncate(self._descriptor, self._size)
                os.fsync(self._descriptor)
                sync(path.parent)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be opened: {error.strerror}; make it accessible") from error

    @property
    def fed(self) -> Fed:
        """How much there is."""
        return Fed(len(self._offsets), self._ended)

    def last_sequence(self, feeder: str) -> int:
        """Return the number of a feeder's last row; 0: there is none."""
        return len(self._rows.get(feeder, ()))

    def owner(self, feeder: str) -> str:
        """Return the process that has a name; "": none."""
        return self._owners.get(feeder, "")

    def row(self, number: int) -> dict[str, Any]:
        """Return a row."""
        with self._lock:
            begin = self._offsets[number]
            end = self._offsets[number + 1] if number + 1 < len(self._offsets) else self._size
        line = os.pread(self._descriptor, end - begin, begin).partition(b"\n")[0]
        fields: dict[str, Any] = msgspec.json.decode(json_decoder(FeedLine).decode(line).row)
        return fields

    def num_known(self, feeder: str, first: int, rows: Sequence[dict[str, Any]]) -> int:
        """Return how many rows at the front of a put are here already.

        Raises:
            ConfigError: numbers were left out, a row differs from the one of its number, or the feed has ended.
        """
        last = self.last_sequence(feeder)
        if not 1 <= first <= last + 1:
            raise ConfigError(f"feeder {feeder}: row {first} follows row {last}; go on with row {last + 1}")
        known = min(len(rows), last + 1 - first)
        for sequence, row in enumerate(rows[:known], first):
            if self.row(self._rows[feeder][sequence - 1]) != row:
                raise ConfigError(f"feeder {feeder}: row {sequence} is another one already; go on with row {last + 1}")
        if self._ended and known < len(rows):
            raise ConfigError(
                f"feeder {feeder}: {len(rows) - known} rows after the feed's end; start a new run for them"
            )
        return known

    def take(self, feeder: str, owner: str) -> None:
        """A process has a name from now on, durably.

        Raises:
            QueueFull: the file system refuses.
        """
        with self._lock:
            if self.owner(feeder) != owner:
                self._write(msgspec.json.encode(FeedLine(feeder, self.last_sequence(feeder), owner=owner)) + b"\n")
                self._owners[feeder] = owner

    def put(self, feeder: str, rows: Sequence[dict[str, Any]]) -> int:
        """Append a feeder's next rows, durably; returns the number of the last one.

        Raises:
            QueueFull: the file system refuses; nothing is stored.
        """
        with self._lock:
            last, offset, encode = self.last_sequence(feeder), self._size, msgspec.json.encode
            lines = [
                encode(FeedLine(feeder, last + k, msgspec.Raw(encode(row)))) + b"\n" for k, row in enumerate(rows, 1)
            ]
            self._write(b"".join(lines))
            for line in lines:
                self._add(feeder, offset)
                offset += len(line)
            self._listener(self.fed)
            return self.last_sequence(feeder)

    def end(self, feeder: str) -> None:
        """No rows follow, of any feeder; idempotent.

        Raises:
            QueueFull: the file system refuses.
        """
        with self._lock:
            if not self._ended:
                self._write(msgspec.json.encode(FeedLine(feeder, self.last_sequence(feeder), end=True)) + b"\n")
                self._ended = True
                self._listener(self.fed)

    def watch(self, listener: Callable[[Fed], None]) -> None:
        """Tell how much there is, now and whenever it is more; must return soon, and not call back."""
        with self._lock:
            self._listener = listener
            listener(self.fed)

    def close(self) -> None:
        """Close the file; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _add(self, feeder: str, offset: int) -> None:
        self._rows.setdefault(feeder, array("q")).append(len(self._offsets))
        self._offsets.append(offset)

    def _write(self, data: bytes) -> None:
        try:
            os.ftruncate(self._descriptor, self._size)  # what is left of a write that failed
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise QueueFull(f"{self._path}: {error.strerror}; nothing of the put is stored, make room") from error
        self._size += len(data)

    def _read(self) -> int:
        """Take in all lines; returns where the last whole one ends."""
        offset, decoder = 0, json_decoder(FeedLine)
        with self._path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    break
                try:
                    line = decoder.decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise ConfigError(f"{self._path}:{number}: no line of a feed ({error}); restore it") from error
                if line.owner:
                    self._owners[line.feeder] = line.owner
                elif not line.end:
                    self._add(line.feeder, offset)
                self._ended |= line.end
                offset += len(text)
        return offset
