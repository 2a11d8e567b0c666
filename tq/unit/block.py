"""Blocks: one put's payload as a storage unit keeps it. Columns are views of the payload; nothing is copied.

    block of rows 7 8 9:   | values of `responses` | lengths | values of `rewards` |     rows are positions 0 1 2

A block is immutable and goes as a whole, so one surviving row would hold all of it; to avoid this the survivors move to
their own block (`BlockStore.compact_block`). `BlockAccounting` is used under the unit's lock; `BlockStore` does I/O and
never takes that lock.
"""

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from asyncflow.errors import PeerRefused, TransportError, one_line
from asyncflow.transport.frame import Payload, PayloadPiece
from tq.backends.backend import Backend
from tq.columns import Int64s
from tq.stored_column import StoredColumn
from tq.wire import ColumnHeader, describe_stored, unpack_stored

logger = logging.getLogger(__name__)

Columns = Mapping[str, StoredColumn]
Part = tuple["Block", Sequence[int]]
Place = tuple["Block", int]  # where the value of a row is: the block, and the row's position in it


class PlacedRow(Protocol):
    """What the accounting reads and changes in a row: where its columns are."""

    places: dict[str, Place]
    retained: bool


@dataclass(eq=False)
class Block:
    """What one put brought for its rows, the same columns for each."""

    key: str  # in its backend
    rows: Sequence[int]  # by position
    # `headers`, `num_bytes`: of the payload.
    headers: Sequence[ColumnHeader]
    num_bytes: int
    # `tokens`, `row_bytes`: by position: length in tokens, size of the values.
    tokens: list[int]
    row_bytes: list[int]
    home: Backend  # where the payload is
    columns: Columns | None  # the payload's columns; None: they must be loaded from `home`
    names: frozenset[str] = field(init=False)
    value_bytes: int = field(init=False)  # the sum of `row_bytes`
    spilled: bool = False  # moved to disk, since it only waits for a checkpoint
    # `alive`, `alive_bytes`: rows that need it, and their bytes.
    alive: int = 0
    retained: int = 0  # those of them that only wait for a checkpoint
    alive_bytes: int = 0
    pins: int = 0  # readers that need it besides the rows

    def __post_init__(self) -> None:
        self.names = frozenset(header.name for header in self.headers)
        self.value_bytes = sum(self.row_bytes)


class BlockStore:
    """Makes, opens and deletes blocks. Thread-safe.

    Blocks that only wait for a checkpoint may go to `spill`. `prefix` of all keys is unique to this unit's incarnation;
    lengths of `token_columns` are a row's tokens.
    """

    def __init__(self, backend: Backend, spill: Backend | None, *, prefix: str, token_columns: Sequence[str]) -> None:
        self.backend = backend
        self.spill_home = spill
        self._prefix = prefix
        self._token_columns = token_columns
        self._numbers = itertools.count()

    def add_block(self, rows: Sequence[int], headers: Sequence[ColumnHeader], payload: Tensor) -> Block | None:
        """Keep a put's payload, not accounted for yet; None when it has no columns.

        Raises PeerRefused for a column with another number of rows, TransportError for a bad payload or backend.
        """
        columns = unpack_stored(headers, payload)
        if not columns:
            return None
        for name, column in columns.items():
            if len(column) != len(rows):
                raise PeerRefused(f"column {name}: {len(column)} rows, but the put names {len(rows)}")
        tokens: Int64s | int = 0
        row_bytes: Int64s | int = 0
        for name, column in columns.items():
            lengths = column.lengths()
            row_bytes = row_bytes + lengths * column.values.itemsize
            if name in self._token_columns and column.has_tokens:
                tokens = tokens + lengths
        key = f"{self._prefix}:{next(self._numbers)}"
        if payload.numel():
            with _named(self.backend):
                self.backend.store(key, payload)
        stays = self.backend.in_process or not payload.numel()
        return Block(
            key,
            rows,
            headers,
            payload.numel(),
            _per_row(tokens, len(rows)),
            _per_row(row_bytes, len(rows)),
            self.backend,
            columns if stays else None,
        )

    def open(self, block: Block) -> Columns:
        """Return the columns of a pinned block; raises TransportError when its backend fails."""
        columns = block.columns
        if columns is None:
            columns = unpack_stored(block.headers, _load_payload(block))
        return columns

    def describe_rows(
        self, parts: Mapping[str, Sequence[Part]], *, wide: bool
    ) -> tuple[list[ColumnHeader], list[list[PayloadPiece]]]:
        """Describe rows of pinned blocks: a header and the pieces of each column."""
        opened: dict[Block, Columns] = {}
        headers, pieces = [], []
        for name, places in parts.items():
            described = []
            for block, positions in places:
                if block not in opened:
                    opened[block] = self.open(block)
                described.append((opened[block][name], positions))
            header, column_pieces = describe_stored(name, described, wide=wide)
            headers.append(header)
            pieces.append(column_pieces)
        return headers, pieces

    def compact_block(self, block: Block, positions: Sequence[int]) -> Block | None:
        """Copy some rows of a pinned block into their own one; raises TransportError when a backend fails."""
        parts = {header.name: [(block, positions)] for header in block.headers}
        headers, pieces = self.describe_rows(parts, wide=False)
        payload = Payload([piece for column in pieces for piece in column])
        copied = torch.empty(payload.num_bytes, dtype=torch.uint8)
        payload.write(copied)
        return self.add_block([block.rows[position] for position in positions], headers, copied)

    def spill_block(self, block: Block) -> bool:
        """Write a pinned block to disk; `BlockAccounting` says when it is moved. False: it failed (logged)."""
        assert self.spill_home is not None
        try:
            self.spill_home.store(block.key, _load_payload(block))
        except TransportError as error:
            logger.warning("rows that wait for a checkpoint stay in memory: %s", error)
            return False
        return True

    def delete_blocks(self, blocks: Sequence[Block]) -> None:
        """Forget blocks. A backend that does not answer is only logged: its leftovers go with the next start."""
        by_home: dict[Backend, list[str]] = {}
        for block in blocks:
            if block.num_bytes:
                by_home.setdefault(block.home, []).append(block.key)
        for home, keys in by_home.items():
            try:
                with _named(home):
                    home.delete(keys)
            except TransportError as error:
                logger.warning("%d blocks could not be deleted: %s", len(keys), error)

    def close(self) -> None:
        self.backend.close()
        if self.spill_home is not None:
            self.spill_home.close()


def _per_row(numbers: Int64s | int, num_rows: int) -> list[int]:
    if isinstance(numbers, int):
        return [numbers] * num_rows
    plain: list[int] = numbers.tolist()
    return plain


_THIN_FRACTION = 4
_COMPACT_FROM_BYTES = 2**16  # smaller blocks are not worth a copy: a shared region is held in pages anyway


def _load_payload(block: Block) -> Tensor:
    with _named(block.home):
        return block.home.load(block.key, block.num_bytes)


@contextmanager
def _named(backend: Backend) -> Iterator[None]:
    """Name a backend that raises something else than TransportError: a user's class may raise anything."""
    try:
        yield
    except TransportError:
        raise
    except Exception as error:
        raise TransportError(f"tq.backend: {type(backend).__name__} raised {one_line(error)}") from error


class BlockAccounting:
    """How many bytes a unit's blocks take up, and which of them may go, shrink or move to disk. Pure.

    rows need it, or a reader pins it --> counted in full --none left--> gone (to be deleted)
                                          |--less than a quarter needed--> thin (survivors are copied out)
                                          '--all that need it are retained--> resting (may move to disk)
    """

    def __init__(self) -> None:
        self.num_bytes = 0  # held in memory (or in the backend), counting blocks in full
        self.spilled_bytes = 0  # on disk
        self.retained_bytes = 0  # of rows that only wait for a checkpoint, wherever they are
        self._gone: list[Block] = []
        self._thin: dict[Block, None] = {}
        self._resting: dict[Block, None] = {}

    def add_block(self, block: Block) -> None:
        """Account for a new block, which all its rows need."""
        block.alive = len(block.rows)
        block.alive_bytes = block.value_bytes
        self.num_bytes += block.num_bytes
        self._classify_block(block)

    def retain_places(self, places: Iterable[Place]) -> None:
        """A row only waits for a checkpoint from now on."""
        for block, position in places:
            block.retained += 1
            self.retained_bytes += block.row_bytes[position]
            self._classify_block(block)

    def release_places(self, places: Iterable[Place], *, retained: bool) -> None:
        for block, position in places:
            block.alive -= 1
            block.alive_bytes -= block.row_bytes[position]
            if retained:
                block.retained -= 1
                self.retained_bytes -= block.row_bytes[position]
            self._classify_block(block)

    def pin(self, blocks: Iterable[Block]) -> None:
        """A reader needs these blocks outside the lock."""
        for block in blocks:
            block.pins += 1

    def unpin_blocks(self, blocks: Iterable[Block]) -> None:
        """The reader is done; the blocks may be freed."""
        for block in blocks:
            block.pins -= 1
            self._classify_block(block)

    @property
    def has_gone(self) -> bool:
        return bool(self._gone)

    @property
    def has_thin(self) -> bool:
        return bool(self._thin)

    def can_spill(self, keep_bytes: int) -> bool:
        """Whether more than `keep_bytes` of retained rows are in memory, and some of them may move."""
        return bool(self._resting) and self.retained_bytes - self.spilled_bytes > keep_bytes

    def take_gone(self) -> list[Block]:
        gone, self._gone = self._gone, []
        return gone

    def take_thin(self) -> list[Block]:
        """Return, once and pinned, the blocks whose survivors should move."""
        thin = [block for block in self._thin if block.alive and not block.spilled]
        self._thin.clear()
        self.pin(thin)
        return thin

    def take_resting(self, keep_bytes: int) -> list[Block]:
        """Return, pinned, blocks to move to disk so that at most `keep_bytes` of retained rows stay in memory."""
        excess = self.retained_bytes - self.spilled_bytes - keep_bytes
        chosen: list[Block] = []
        for block in list(self._resting):
            if excess <= 0:
                break
            if not block.pins:
                del self._resting[block]
                chosen.append(block)
                excess -= block.alive_bytes
        self.pin(chosen)
        return chosen

    def mark_spilled(self, block: Block, home: Backend) -> bool:
        """A pinned block was copied to disk. False: another reader needs it now, so it stays where it was."""
        if block.pins > 1 or block.alive == 0:
            return False
        block.home, block.columns, block.spilled = home, None, True
        self.num_bytes -= block.num_bytes
        self.spilled_bytes += block.num_bytes
        return True

    def mark_moved(self, old: Block, new: Block, positions: Sequence[int], rows: Mapping[int, PlacedRow]) -> None:
        """The survivors of `old` (pinned) are in `new` (not accounted for yet); `positions` are theirs in `old`."""
        self.add_block(new)
        for position, number in enumerate(new.rows):
            row = rows.get(number)
            here = row is not None and row.places.get(next(iter(new.names))) == (old, positions[position])
            if row is None or not here:  # the row went while it was copied
                self.release_places([(new, position)], retained=False)
                continue
            for name in new.names:
                row.places[name] = (new, position)
            if row.retained:
                self.retain_places([(new, position)])
            self.release_places([(old, positions[position])], retained=row.retained)

    def _classify_block(self, block: Block) -> None:
        if block.alive == 0:
            self._thin.pop(block, None)
            self._resting.pop(block, None)
            if block.pins == 0:
                self.num_bytes -= 0 if block.spilled else block.num_bytes
                self.spilled_bytes -= block.num_bytes if block.spilled else 0
                self._gone.append(block)
            return
        if block.num_bytes >= _COMPACT_FROM_BYTES and block.alive_bytes * _THIN_FRACTION < block.value_bytes:
            self._thin[block] = None
        if block.retained == block.alive and block.home.in_process:
            self._resting[block] = None
        else:
            self._resting.pop(block, None)
