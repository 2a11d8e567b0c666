"""Keys and values of running responses, in lanes: responses of about the same length, aligned at their ends.

Legend of shapes: L layers, N rows, J key heads, K columns, P tokens that enter, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Every step appends one token to every response, so responses keep their distances: a lane that wastes little when a
# response joins wastes less and less. All newest tokens are in one column, so a step writes one slice and reads one.
#
#     columns   0 1 2 3 4 5 6 7 8        rows are dense: the last row moves into the place of one that leaves
#     row 0     . . a a a a a *          a: token of the prompt or the response, *: this step's, .: not seen (masked)
#     row 1     a a a a a a a *
#     row 2     . a a a a a a *          a mask is needed only if lengths differ

# Responses share a lane if their lengths differ by at most this many tokens, or this share of the longest: reading
# unused columns costs less than one more attention call per layer.
SPREAD_TOKENS, SPREAD_SHARE = 16, 0.25
_ROOM_TOKENS = 512  # most free columns of a new lane; a full lane is copied to a larger one


@dataclass(frozen=True)
class KeyShape:
    """The dimensions, element type and device of a model's keys and values."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class Lane:
    """Responses that read and write their keys and values together.

    Args:
        num_rows: initial room; the lane grows when more join.
        length: of the longest of its first responses (tokens).
        max_new_tokens: most that a response generates.
    """

    def __init__(self, shape: KeyShape, *, num_rows: int, length: int, max_new_tokens: int) -> None:
        self._shape = shape
        self._room = min(max_new_tokens, _ROOM_TOKENS)
        self.column = length  # where the next tokens go, after all others
        self.slots: list[int] = []  # the engine's slot of each row's response
        self._starts: list[int] = []
        self._store = self._allocate_store(num_rows, length + self._room)

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    def response_fits(self, length: int) -> bool:
        """Return whether a response of `length` tokens may join."""
        longest = self.column - min(self._starts, default=self.column)
        return alike(longest, length)

    def open_column(self) -> None:
        """Open a column for the next token of every row."""
        if self.column == self._store.shape[4]:
            self._move_memory(self._store.shape[2], self.column - min(self._starts))
        self.column += 1

    def join(self, slots: Sequence[int], length: int) -> int:
        """Add rows for responses of `length` tokens, whose keys are written later; return the first row."""
        rows = self.num_rows + len(slots)
        if rows > self._store.shape[2] or length > self.column:
            self._move_memory(max(rows, min(2 * rows, 2 * self._store.shape[2])), max(length, self.column))
        first = self.num_rows
        self.slots += slots
        self._starts += [self.column - length] * len(slots)
        return first

    def remove_rows(self, slots: Sequence[int]) -> None:
        gone = {self.slots.index(slot) for slot in slots}
        left = self.num_rows - len(gone)
        movers = [row for row in range(left, self.num_rows) if row not in gone]
        for row, mover in zip(sorted(row for row in gone if row < left), movers, strict=True):
            begin = self._starts[mover]
            self._store[:, :, row, :, begin : self.column] = self._store[:, :, mover, :, begin : self.column]
            self.slots[row], self._starts[row] = self.slots[mover], begin
        del self.slots[left:], self._starts[left:]

    def write_tokens(self, layer: int, rows: slice, key_JPD: Tensor, value_JPD: Tensor) -> None:
        """Write the keys and values of P tokens to rows that joined with as many."""
        begin = self.column - key_JPD.shape[1]
        self._store[layer, 0, rows, :, begin : self.column] = key_JPD
        self._store[layer, 1, rows, :, begin : self.column] = value_JPD

    def append(self, layer: int, key_NJD: Tensor, value_NJD: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Write the newest token of the first N rows; return all keys and values they see, views [N, J, K, D].

        `window` limits how many tokens each sees; None: all.
        """
        num_rows = len(key_NJD)
        begin = self.seen_from(num_rows, window)
        keys, values = self._store[layer, 0, :num_rows], self._store[layer, 1, :num_rows]
        keys[:, :, self.column - 1] = key_NJD
        values[:, :, self.column - 1] = value_NJD
        return keys[:, :, begin : self.column], values[:, :, begin : self.column]

    def seen_from(self, num_rows: int, window: int | None) -> int:
        """Return the first column that any of the first rows sees."""
        begin = min(self._starts[:num_rows])
        return begin if window is None else max(begin, self.column - window)

    def attention_mask(self, num_rows: int) -> Tensor | None:
        """Return what to add to the scores of the first rows, [N, 1, 1, K]: 0 or minus infinity; None: nothing."""
        begin = min(self._starts[:num_rows])
        if max(self._starts[:num_rows]) == begin:
            return None
        starts_N = torch.tensor(self._starts[:num_rows])
        hidden_NK = torch.arange(begin, self.column) < starts_N[:, None]
        mask_NK = torch.zeros(hidden_NK.shape, dtype=self._shape.dtype).masked_fill_(hidden_NK, float("-inf"))
        return mask_NK[:, None, None, :].to(self._shape.device)

    def copy_of(self, slot: int) -> Tensor:
        """Return a copy of a response's keys and values, [L, 2, J, P, D]."""
        row = self.slots.index(slot)
        return self._store[:, :, row, :, self._starts[row] : self.column].clone()

    def paste_rows(self, rows: slice, copied: Tensor) -> None:
        """Write a result of `copy_of` to rows that joined with as many tokens."""
        self._store[:, :, rows, :, self.column - copied.shape[3] : self.column] = copied[:, :, None]

    def _move_memory(self, num_rows: int, column: int) -> None:
        """Move to new memory, where all tokens end before `column`."""
        begin = min(self._starts, default=self.column)
        column = max(column, self.column - begin)
        store = self._allocate_store(num_rows, column + self._room)
        old = self._store[:, :, : self.num_rows, :, begin : self.column]
        store[:, :, : self.num_rows, :, column - (self.column - begin) : column] = old
        self._starts = [start + column - self.column for start in self._starts]
        self.column, self._store = column, store

    def _allocate_store(self, num_rows: int, columns: int) -> Tensor:
        s = self._shape
        size = s.num_layers, 2, num_rows, s.num_heads, columns, s.head_dim
        # Zeros: masked columns are multiplied by 0, so they must not hold NaN.
        return torch.zeros(size, dtype=s.dtype, device=s.device)


def alike(length: int, other: int) -> bool:
    """Return whether responses of these lengths (tokens) may share a lane."""
    return abs(length - other) <= max(SPREAD_TOKENS, SPREAD_SHARE * max(length, other))
