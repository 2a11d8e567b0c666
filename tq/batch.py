"""Packed batches: rows of variable-length columns without padding. What clients put and get, and workers compute on.

Immutable by agreement: selections share memory with what they were taken from. Never padded, never on a device.

    rows 0, 1, 2 of column `responses`:   [5 6 7] [8] [9 9]
    Column.values  = [5 6 7 8 9 9]        one contiguous tensor
    Column.lengths = [3 1 2]              int32

Legend of shapes: N rows, V values (the sum of the lengths).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Column:
    """One field of N rows, packed.

    Attributes:
        values: [V], any dtype; uint8 UTF-8 bytes when `text`.
        lengths: int32 [N], values per row; scalars have length 1.
        text: rows are strings.
    """

    values: Tensor
    lengths: Tensor
    text: bool = False

    @staticmethod
    def of_rows(rows: Sequence[Tensor]) -> "Column":
        """Pack 1-D tensors of one dtype, one per row (at least one row)."""
        lengths = torch.tensor([row.numel() for row in rows], dtype=torch.int32)
        return Column(torch.cat([row.reshape(-1) for row in rows]), lengths)

    @staticmethod
    def of_scalars(values: Tensor) -> "Column":
        """Pack [N] scalars, one per row."""
        return Column(values, torch.ones(values.numel(), dtype=torch.int32))

    @staticmethod
    def of_texts(texts: Sequence[str]) -> "Column":
        """Pack strings, one per row."""
        rows = [text.encode() for text in texts]
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        joined = bytearray(b"".join(rows))
        values = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        return Column(values, lengths, text=True)

    def __len__(self) -> int:
        return self.lengths.numel()

    def rows(self) -> tuple[Tensor, ...]:
        """Return one view [length] per row."""
        return tuple(torch.split(self.values, self.lengths.tolist()))

    def extremes(self) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value of each row, [N] each; 0 for an empty row."""
        row_V = torch.arange(len(self)).repeat_interleave(self.lengths)
        low_N, high_N = (
            self.values.new_zeros(len(self)).scatter_reduce(0, row_V, self.values, reduction, include_self=False)
            for reduction in ("amin", "amax")
        )
        return low_N, high_N

    def texts(self) -> list[str]:
        """Return one string per row; only for text columns."""
        assert self.text, "texts() of a column that holds no text"
        return [bytes(row.numpy()).decode() for row in self.rows()]

    def select(self, positions: Sequence[int]) -> "Column":
        """Return the rows at `positions`, in that order: a view for a range of neighbours, else a copy."""
        if not positions:
            return Column(self.values[:0], self.lengths[:0], self.text)
        if isinstance(positions, range) and positions.step == 1:
            lengths = self.lengths[positions.start : positions.stop]
            start = int(self.lengths[: positions.start].sum())
            return Column(self.values[start : start + int(lengths.sum())], lengths, self.text)
        rows = self.rows()
        return Column(torch.cat([rows[i] for i in positions]), self.lengths[torch.tensor(positions)], self.text)


@dataclass(frozen=True)
class PackedBatch:
    """N rows of several columns.

    Attributes:
        indices: global row indices, in the order of the rows.
        columns: every column has N rows.
        groups: the rows' group ids; empty where the rows were not leased from a queue.
    """

    indices: tuple[int, ...]
    columns: Mapping[str, Column]
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            assert len(column) == len(self.indices), f"column {name}: {len(column)} rows, not {len(self.indices)}"

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def select(self, positions: Sequence[int]) -> "PackedBatch":
        """Return the rows at `positions`, in that order."""
        return PackedBatch(
            tuple(self.indices[i] for i in positions),
            {name: column.select(positions) for name, column in self.columns.items()},
            tuple(self.groups[i] for i in positions) if self.groups else (),
        )

    @staticmethod
    def concatenate(batches: Iterable["PackedBatch"]) -> "PackedBatch":
        """Join batches of the same columns without padding, in order (at least one batch)."""
        parts = list(batches)
        first = parts[0]
        if len(parts) == 1:
            return first
        columns = {
            name: Column(
                torch.cat([part[name].values for part in parts]),
                torch.cat([part[name].lengths for part in parts]),
                column.text,
            )
            for name, column in first.columns.items()
        }
        indices = tuple(i for part in parts for i in part.indices)
        return PackedBatch(indices, columns, tuple(group for part in parts for group in part.groups))
