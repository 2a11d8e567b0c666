"""Blocks: one put's payload as a storage unit keeps it. Columns are views of the payload; nothing is copied.

    block of rows 7 8 9:   | values of `responses` | lengths | values of `rewards` |     rows are positions 0 1 2

A block is immutable and goes as a whole, so one surviving row would hold all of it; then the survivors move to a block
of their own (`BlockStore.compact`). Books about a block are kept by `BlockBooks`, under the unit's lock; what is here
does I/O and never takes that lock.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from asyncflow.errors import PeerRefused, TransportError
from asyncflow.transport.payload import Payload, Piece
from tq.backends.backend import Backend
from tq.stored_column import StoredColumn
from tq.wire import ColumnHeader, describe_stored, unpack_stored

logger = logging.getLogger(__name__)

Columns = Mapping[str, StoredColumn]
Part = tuple["Block", Sequence[int]]


@dataclass(eq=False)
class Block:
    """What one put brought for its rows, the same columns for each.

    Attributes:
        key: in its backend.
        rows: by position.
        headers: describe the payload.
        num_bytes: of the payload.
        tokens, row_bytes: by position: length in tokens, size of the values.
        home: where the payload is.
        columns: the payload's columns, unless they must be loaded from `home`.
        names: of the columns.
        value_bytes: the sum of `row_bytes`.
        spilled: moved to disk, since it only waits for a checkpoint.
        alive, retained: rows that need it; of those, rows that only wait for a checkpoint.
        alive_bytes: of the rows that need it.
        pins: readers that need it beside the rows.
    """

    key: str
    rows: Sequence[int]
    headers: Sequence[ColumnHeader]
    num_bytes: int
    tokens: list[int]
    row_bytes: list[int]
    home: Backend
    columns: Columns | None
    names: frozenset[str] = field(init=False)
    value_bytes: int = field(init=False)
    spilled: bool = False
    alive: int = 0
    retained: int = 0
    alive_bytes: int = 0
    pins: int = 0

    def __post_init__(self) -> None:
        self.names = frozenset(header.name for header in self.headers)
        self.value_bytes = sum(self.row_bytes)


class BlockStore:
    """Makes, opens and deletes blocks. Thread-safe."""

    def __init__(self, backend: Backend, spill: Backend | None, *, prefix: str, token_columns: Sequence[str]) -> None:
        """Args:
        backend: where new blocks go.
        spill: where blocks that only wait for a checkpoint may go.
        prefix: of all keys; unique to this unit's incarnation.
        token_columns: columns whose lengths are a row's tokens.
        """
        self.backend = backend
        self.spill_home = spill
        self._prefix = prefix
        self._token_columns = token_columns
        self._numbers = itertools.count()

    def add(self, rows: Sequence[int], headers: Sequence[ColumnHeader], payload: Tensor) -> Block | None:
        """Keep a put's payload; None when it has no columns. Not yet in anybody's books.

        Raises:
            PeerRefused: a column has another number of rows.
            TransportError: the headers do not describe the payload, or the backend failed.
        """
        columns = unpack_stored(headers, payload)
        if not columns:
            return None
        for name, column in columns.items():
            if len(column) != len(rows):
                raise PeerRefused(f"column {name}: {len(column)} rows, but the put names {len(rows)}")
        tokens = np.zeros(len(rows), dtype=np.int64)
        row_bytes = np.zeros(len(rows), dtype=np.int64)
        for name, column in columns.items():
            lengths = column.lengths()
            row_bytes += lengths * column.values.itemsize
            if name in self._token_columns and column.has_tokens:
                tokens += lengths
        key = f"{self._prefix}:{next(self._numbers)}"
        if payload.numel():
            self.backend.store(key, payload)
        stays = self.backend.in_process or not payload.numel()
        return Block(
            key,
            rows,
            headers,
            payload.numel(),
            tokens.tolist(),
            row_bytes.tolist(),
            self.backend,
            columns if stays else None,
        )

    def open(self, block: Block) -> Columns:
        """Return a block's columns; the caller has pinned it.

        Raises:
            TransportError: its backend failed.
        """
        columns = block.columns
        if columns is None:
            columns = unpack_stored(block.headers, block.home.load(block.key, block.num_bytes))
        return columns

    def describe(
        self, parts: Mapping[str, Sequence[Part]], *, wide: bool
    ) -> tuple[list[ColumnHeader], list[list[Piece]]]:
        """Describe rows of pinned blocks: a header and the pieces of each column.

        Raises:
            PeerRefused: parts of one column do not go together.
            TransportError: a backend failed.
        """
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

    def compact(self, block: Block, positions: Sequence[int]) -> Block | None:
        """Copy some rows of a pinned block into one of their own.

        Raises:
            TransportError: a backend failed.
        """
        parts = {header.name: [(block, positions)] for header in block.headers}
        headers, pieces = self.describe(parts, wide=False)
        payload = Payload([piece for column in pieces for piece in column])
        copied = torch.empty(payload.num_bytes, dtype=torch.uint8)
        payload.write(copied)
        return self.add([block.rows[position] for position in positions], headers, copied)

    def spill(self, block: Block) -> bool:
        """Write a pinned block to disk; it is moved only when the books say so. False: that failed (logged)."""
        assert self.spill_home is not None
        try:
            self.spill_home.store(block.key, block.home.load(block.key, block.num_bytes))
        except TransportError as error:
            logger.warning("rows that wait for a checkpoint stay in memory: %s", error)
            return False
        return True

    def delete(self, blocks: Sequence[Block]) -> None:
        """Forget blocks; a backend that does not answer is only logged: its leftovers go with the next start."""
        by_home: dict[Backend, list[str]] = {}
        for block in blocks:
            if block.num_bytes:
                by_home.setdefault(block.home, []).append(block.key)
        for home, keys in by_home.items():
            try:
                home.delete(keys)
            except TransportError as error:
                logger.warning("%d blocks stay behind: %s", len(keys), error)

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        self.backend.close()
        if self.spill_home is not None:
            self.spill_home.close()
