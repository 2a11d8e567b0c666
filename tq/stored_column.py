"""One column of one put as a storage unit holds it: still narrow, still inside the payload that it came in.

Rows are named by their position in the put. Pure: no sockets, no locks; never changed once made.

Legend of shapes: N rows, V values, R dimensions of each row, P positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tq.columns import SMALL_BYTES, ColumnKind, Int64s, as_array, merge_neighbours, positions_array, take


@dataclass(frozen=True, eq=False)
class StoredColumn:
    """One field of N rows."""

    values: Tensor  # [V], narrowed integers or the column's own dtype; a view of the put's payload
    num_rows: int
    dtype: torch.dtype  # what readers get
    kind: ColumnKind
    rank: int
    shape: tuple[int, ...] | None  # of every row, where all rows have the same and it is not empty; otherwise None
    shapes: NDArray[np.int32] | None  # int32 [N, R], only where `shape` is None
    offsets: Int64s | None  # int64 [N + 1], where rows begin; only where `shape` is None

    def __len__(self) -> int:
        return self.num_rows

    def lengths(self) -> Int64s | int:
        """Return values per row: int64 [N], or one number that holds for all rows."""
        if self.offsets is not None:
            return self.offsets[1:] - self.offsets[:-1]
        assert self.shape is not None
        return math.prod(self.shape)

    @property
    def has_tokens(self) -> bool:
        """Whether the rows' lengths may be numbers of tokens."""
        return self.kind is ColumnKind.TENSOR and self.rank == 1

    def equals_rows(self, positions: Sequence[int], other: "StoredColumn", other_positions: Sequence[int]) -> bool:
        """Whether a reader sees the same rows here and there, however they were narrowed."""
        if (self.kind, self.dtype, self.rank) != (other.kind, other.dtype, other.rank):
            return False
        if not np.array_equal(self.shapes_of(positions), other.shapes_of(other_positions)):
            return False
        mine, theirs = torch.cat(self.read(positions)), torch.cat(other.read(other_positions))
        # Compare bits, so that NaN equals NaN.
        if mine.dtype == theirs.dtype:
            return torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        return bool(np.array_equal(as_array(mine), as_array(theirs)))  # integers: different widths, same numbers

    def read(self, positions: Sequence[int]) -> list[Tensor]:
        """Return the rows' values in order, in few tensors: views of neighbours and long rows, copies of short ones."""
        if isinstance(positions, range) and positions.step == 1:
            return [self.values[self._row_start(positions.start) : self._row_start(positions.stop)]]
        starts, stops = merge_neighbours(*self._row_spans(positions))
        if int((stops - starts).sum()) * self.values.itemsize < SMALL_BYTES * len(starts):
            return [take(self.values, starts, stops)]
        return [self.values[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]

    def shapes_of(self, positions: Sequence[int]) -> NDArray[np.int32]:
        """Return the rows' shapes, int32 [P, R]."""
        if self.shapes is None:
            return np.broadcast_to(np.array(self.shape, dtype=np.int32), (len(positions), self.rank))
        if isinstance(positions, range) and positions.step == 1:
            return self.shapes[positions.start : positions.stop]
        return self.shapes.take(positions_array(positions), axis=0)

    def _row_spans(self, positions: Sequence[int]) -> tuple[Int64s, Int64s]:
        index = positions_array(positions)
        if self.offsets is not None:
            return self.offsets[index], self.offsets[index + 1]
        assert self.shape is not None
        length = math.prod(self.shape)
        return index * length, (index + 1) * length

    def _row_start(self, position: int) -> int:
        if self.offsets is not None:
            return int(self.offsets[position])
        assert self.shape is not None
        return position * math.prod(self.shape)
