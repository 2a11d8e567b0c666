"""Snapshots of a storage unit: hold, cut, write. The hold makes the cuts of all units one moment.

client -> every unit HoldPuts --> all Done --> every unit CutSnapshot --> puts continue --> every unit WriteSnapshot
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from asyncflow.errors import AsyncFlowError, TransportError, one_line
from asyncflow.transport.frame import PayloadPiece
from asyncflow.transport.server import Call
from tq.messages import CutSnapshot, Done, HoldPuts, SnapshotWritten, WriteSnapshot
from tq.snapshot import METADATA_KEY, ChunkRecord, checksum
from tq.timers import Timers
from tq.unit.block import Block, BlockStore
from tq.unit.unit_puts import Holds
from tq.unit.unit_state import Cut, CutRow, UnitState

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0


class UnitSnapshots:
    """Takes the snapshots of a `StorageUnit`.

    `lock` guards the other arguments; `poke` is called without it when blocks may have gone. `chunk_bytes` bounds the
    rows that are restored with one message.
    """

    def __init__(
        self,
        name: str,
        state: UnitState,
        blocks: BlockStore,
        holds: Holds,
        timers: Timers,
        *,
        lock: threading.Lock,
        poke: Callable[[], None],
        chunk_bytes: int,
    ) -> None:
        self._name = name
        self._state = state
        self._blocks = blocks
        self._holds = holds
        self._timers = timers
        self._lock = lock
        self._poke = poke
        self._chunk_bytes = chunk_bytes
        self._closing = threading.Event()
        self._writers: list[threading.Thread] = []

    def hold(self, message: HoldPuts, call: Call) -> None:
        """Let puts wait; once this is answered, no put changes anything."""
        with self._lock:  # otherwise the deadline could pass before the hold begins
            deadline = self._timers.call_later(message.timeout_s, partial(self._end_overdue_hold, message.hold))
            self._holds.begin(message.hold, deadline)
        call.send_reply(Done())

    def cut_snapshot(self, message: CutSnapshot, call: Call) -> None:
        """Note the rows that are here, and let puts continue; raises PeerRefused when the hold has ended."""
        with self._lock:
            self._holds.check(message.hold)
            cut = self._state.cut_rows(after_partition=message.after_partition, forget_acks_of=message.forget_acks_of)
            self._holds.keep(message.hold, call.session.number, cut)
        call.send_reply(Done())
        self._end_hold(message.hold)

    def write(self, message: WriteSnapshot, call: Call) -> None:
        """Write a cut in a separate thread; raises PeerRefused if there is no such cut."""
        with self._lock:
            cut = self._holds.take_cut(message.hold)
            self._writers = [thread for thread in self._writers if thread.is_alive()]
            # The client continues to put on this channel.
            writer = threading.Thread(
                target=self._write_cut, args=(cut, message.directory, call), name=f"snapshot-{self._name}", daemon=True
            )
            self._writers.append(writer)
        writer.start()

    def drop_cuts(self, session: int) -> None:
        """A client left: drop its cuts."""
        with self._lock:
            for cut in self._holds.take_abandoned(session):
                self._state.accounting.unpin_blocks(cut.blocks)
        self._poke()

    def close(self) -> None:
        self._closing.set()
        for writer in self._writers:
            writer.join(timeout=_CLOSE_TIMEOUT_S)

    def _end_overdue_hold(self, hold: str) -> None:
        logger.warning("%s: hold %s was not cut in time; puts continue", self._name, hold)
        self._end_hold(hold)

    def _end_hold(self, hold: str) -> None:
        with self._lock:
            parked = self._holds.end(hold)
        # Without the lock, which a resumed put takes.
        for resume in parked:
            resume()

    def _write_cut(self, cut: Cut, directory: str, call: Call) -> None:
        try:
            writer = SnapshotWriter(Path(directory), self._name, self._blocks, chunk_bytes=self._chunk_bytes)
            files, num_bytes = writer.write(cut.rows, self._closing)
            call.send_reply(SnapshotWritten(files, len(cut.rows), num_bytes))
        except AsyncFlowError as error:
            call.send_refusal(error)
        except Exception as error:  # a thread's boundary: the client waits for an answer
            expected = isinstance(error, OSError | SafetensorError)
            logger.warning("%s: a snapshot could not be written", self._name, exc_info=None if expected else error)
            call.send_refusal(TransportError(f"{self._name}: {directory} cannot be written: {one_line(error)}"))
        finally:
            with self._lock:
                self._state.accounting.unpin_blocks(cut.blocks)
            self._poke()


CHUNK_BYTES = 2**26
FILE_BYTES = 2**28
_CHUNK_ROWS = 2**14

_Key = tuple[int, int, tuple[str, ...]]


class SnapshotWriter:
    """Writes one unit's part of one snapshot in a few hundred MB of memory, however much there is.

    `directory` exists and is shared by all units. A chunk takes `chunk_bytes`, unless a single row is larger.
    """

    def __init__(self, directory: Path, unit: str, blocks: BlockStore, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._directory = directory
        self._unit = unit
        self._blocks = blocks
        self._chunk_bytes = min(chunk_bytes, CHUNK_BYTES)

    def write(self, rows: Sequence[CutRow], stop: threading.Event) -> tuple[list[str], int]:
        """Write rows whose blocks are pinned; returns (file names, bytes).

        Raises:
            TransportError: a block could not be read, or `stop` was set.
            OSError, SafetensorError: the disk is full, or the like.
        """
        names: list[str] = []
        total = 0
        tensors: dict[str, Tensor] = {}
        records: list[ChunkRecord] = []
        for chunk in _chunks(rows, self._chunk_bytes):
            if stop.is_set():
                raise TransportError(f"{self._unit}: closed while it wrote a snapshot")
            record, chunk_tensors = self._make_chunk(chunk, len(records))
            size = sum(tensor.nbytes for tensor in (*tensors.values(), *chunk_tensors.values()))
            if records and size > FILE_BYTES:
                total += self._save_file(tensors, records, names)
                tensors, records = {}, []
                record, chunk_tensors = self._make_chunk(chunk, 0)
            tensors.update(chunk_tensors)
            records.append(record)
        if records:
            total += self._save_file(tensors, records, names)
        return names, total

    def _make_chunk(self, chunk: "Sequence[CutRow]", number: int) -> tuple[ChunkRecord, dict[str, Tensor]]:
        parts: dict[str, list[tuple[Block, list[int]]]] = {name: [] for name in sorted(chunk[0].places)}
        for row in chunk:
            for name, places in parts.items():
                block, position = row.places[name]
                if not places or places[-1][0] is not block:
                    places.append((block, []))
                places[-1][1].append(position)
        headers, pieces = self._blocks.describe_rows(parts, wide=False)
        tensors: dict[str, Tensor] = {}
        for header, column in zip(headers, pieces, strict=True):
            tensors[f"{number}/values/{header.name}"] = _joined(column[0])
            if len(column) > 1:
                tensors[f"{number}/shapes/{header.name}"] = _joined(column[1])
        commits: dict[str, list[int]] = {}
        for k, row in enumerate(chunk):
            for task in row.commits:
                commits.setdefault(task, []).append(k)
        first = chunk[0]
        numbers, groups = [row.number for row in chunk], [row.group for row in chunk]
        return ChunkRecord(first.partition, first.group_size, numbers, groups, headers, commits), tensors

    def _save_file(self, tensors: dict[str, Tensor], records: list[ChunkRecord], names: list[str]) -> int:
        """Write a file and append its name, which contains its checksum; returns its size."""
        path = self._directory / f"{self._unit}-{len(names):04d}.part"
        save_file(tensors, path, {METADATA_KEY: msgspec.json.encode(records).decode()})
        with path.open("rb") as file:
            os.fsync(file.fileno())
        num_bytes = path.stat().st_size
        name = f"{self._unit}-{len(names):04d}-{checksum(path)}.safetensors"
        path.rename(self._directory / name)
        names.append(name)
        return num_bytes


def _chunks(rows: Sequence[CutRow], chunk_bytes: int) -> "Iterator[Sequence[CutRow]]":
    """Split rows into lists of similar rows of at most `chunk_bytes` (but at least one row)."""
    alike: dict[tuple[object, ...], list[CutRow]] = {}
    for row in sorted(rows, key=lambda row: (row.partition, row.number)):
        alike.setdefault((row.partition, row.group_size, _signature(row)), []).append(row)
    for same in alike.values():
        chunk: list[CutRow] = []
        size = 0
        for row in same:
            num_bytes = sum(block.row_bytes[position] for block, position in set(row.places.values()))
            if chunk and (size + num_bytes > chunk_bytes or len(chunk) >= _CHUNK_ROWS):
                yield chunk
                chunk, size = [], 0
            chunk.append(row)
            size += num_bytes
        yield chunk


def _signature(row: CutRow) -> tuple[object, ...]:
    """Return what rows of one chunk have in common: the columns and their types."""
    types = []
    for name, (block, _) in sorted(row.places.items()):
        header = next(header for header in block.headers if header.name == name)
        types.append((name, header.kind, header.dtype, header.rank))
    return tuple(types)


def _joined(piece: PayloadPiece) -> Tensor:
    out = torch.empty(piece.num_bytes, dtype=torch.uint8)
    piece.write(out)
    return out.view(piece.dtype)
