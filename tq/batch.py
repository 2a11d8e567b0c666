"""Packed batches: rows of several columns without padding. What clients put and get, and workers compute on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncflow.errors import ConfigError
from asyncflow.extras import pip_line
from tq.columns import Column, ColumnKind, column_of

__all__ = ["Column", "ColumnKind", "PackedBatch", "column_of"]


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

    def with_columns(self, columns: Mapping[str, Column]) -> "PackedBatch":
        """Return the same rows with more columns, or other ones under the same names."""
        return PackedBatch(self.indices, {**self.columns, **columns}, self.groups)

    def to_tensordict(self) -> Any:
        """Return a `tensordict.TensorDict` of N rows: tensors [N, ...], jagged where rows have several lengths, and
        lists of strings, bytes or JSON values. No value is copied. Puts take such a TensorDict as columns.

        Raises:
            ConfigError: tensordict is not installed, or rows of two and more dimensions differ in shape.
        """
        try:
            from tensordict import NonTensorStack, TensorDict
        except ImportError as error:
            raise ConfigError(f"tensordict is not installed; {pip_line('tensordict')}") from error
        columns: dict[str, Any] = {}
        for name, column in self.columns.items():
            if column.kind is not ColumnKind.TENSOR:
                columns[name] = NonTensorStack(*column)
            elif column.rank == 1 and len(set(column.lengths.tolist())) > 1:
                offsets = torch.nn.functional.pad(column.lengths.cumsum(0), (1, 0))
                columns[name] = torch.nested.nested_tensor_from_jagged(column.values, offsets)
            else:
                columns[name] = column.dense()
        return TensorDict(columns, batch_size=[len(self)])

    @staticmethod
    def concatenate(batches: Iterable["PackedBatch"]) -> "PackedBatch":
        """Join batches of the same columns without padding, in order (at least one batch).

        Raises:
            ConfigError: a column has another kind, dtype or rank in one of them.
        """
        parts = list(batches)
        if len(parts) == 1:
            return parts[0]
        columns = {name: Column.concatenate([part[name] for part in parts]) for name in parts[0].columns}
        indices = tuple(i for part in parts for i in part.indices)
        return PackedBatch(indices, columns, tuple(group for part in parts for group in part.groups))
