"""Packed columns: rows of any rank, strings, bytes or JSON values in one run of memory, without padding; and batches.

Clients put and get columns, workers compute on them. Immutable by agreement: selections share memory with their source.
Never padded, never on a device.

    rows 0, 1, 2 of column `responses`:   [5 6 7] [8] [9 9]
    Column.values  = [5 6 7 8 9 9]        one contiguous tensor
    Column.lengths = [3 1 2]              int32

Legend of shapes: N rows, V values (the sum of the lengths), R dimensions of each row.
"""

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncflow.errors import ConfigError, TransportError
from asyncflow.extras import pip_line

# Spans of a values tensor: the runs of values that some rows occupy, and copying them together.
#
# Rows are found by arithmetic on int64 arrays: a lease of 64 rows must not cost 64 tensor objects.

Int64s = NDArray[np.int64]

# Runs of values below this are worth one more copy that makes them one tensor (a tensor object costs as much).
SMALL_BYTES = 1 << 16

# Mean span length under which one indexed read beats copying slices (measured: 8 bytes of index per value).
_GATHER_BELOW = 48


def as_array(values: Tensor) -> NDArray[Any]:
    """View a CPU tensor as an array; bfloat16, which numpy lacks, as int16."""
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()


def as_tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Undo `as_array`."""
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype == torch.bfloat16 else tensor


def offsets_of(lengths: NDArray[Any]) -> Int64s:
    """Return int64 [N + 1]: where each row begins, and the end."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def merge_neighbours(starts: Int64s, stops: Int64s) -> tuple[Int64s, Int64s]:
    """Join spans that touch, so that neighbouring rows become one slice."""
    gaps = starts[1:] != stops[:-1]
    if gaps.all():
        return starts, stops
    return starts[np.concatenate(((True,), gaps))], stops[np.concatenate((gaps, (True,)))]


def take(values: Tensor, starts: Int64s, stops: Int64s) -> Tensor:
    """Return the values of all spans, one after the other: a view if all of them touch, otherwise a copy."""
    starts, stops = merge_neighbours(starts, stops)
    if len(starts) == 0:
        return values[:0]
    if len(starts) == 1:
        return values[int(starts[0]) : int(stops[0])]
    lengths = stops - starts
    total = int(lengths.sum())
    array = as_array(values)
    if total < _GATHER_BELOW * len(starts):
        ends = np.cumsum(lengths)
        index = np.repeat(starts - (ends - lengths), lengths)
        index += np.arange(total)
        return as_tensor(array[index], values.dtype)
    slices = [array[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    return as_tensor(np.concatenate(slices), values.dtype)


def positions_array(positions: Sequence[int]) -> Int64s:
    """Return positions as int64 [P]."""
    if isinstance(positions, range):
        return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
    return np.asarray(positions, dtype=np.int64)


_Row = TypeVar("_Row")


class ColumnKind(StrEnum):
    """What the rows of a column are; all but tensors are uint8 values."""

    TENSOR = "tensor"
    TEXT = "text"
    BYTES = "bytes"
    JSON = "json"


@dataclass(frozen=True)
class Column:
    """One field of N rows, packed.

    Attributes:
        values: [V], any dtype; uint8 unless the rows are tensors.
        lengths: int32 [N], values per row; scalars have length 1.
        kind: what the rows are; strings travel as UTF-8.
        shapes: int32 [N, R], only where rows are not 1-D; R is 0 for scalars.
    """

    values: Tensor
    lengths: Tensor
    kind: ColumnKind = ColumnKind.TENSOR
    shapes: Tensor | None = None

    @staticmethod
    def of_rows(rows: Sequence[Tensor]) -> "Column":
        """Pack tensors of one dtype and rank, one per row (at least one); shapes may differ. Raises ConfigError."""
        if not rows:
            raise ConfigError("a column of no rows has no dtype; pack at least one row")
        rank, dtype = rows[0].ndim, rows[0].dtype
        for i, row in enumerate(rows):
            if row.ndim != rank or row.dtype != dtype:
                raise ConfigError(f"row {i} is {row.dtype} of rank {row.ndim}, but row 0 is {dtype} of rank {rank}")
        lengths = torch.tensor([row.numel() for row in rows], dtype=torch.int32)
        if rank == 1:
            return Column(_plain(torch.cat(list(rows))), lengths)
        shapes = torch.tensor([row.shape for row in rows], dtype=torch.int32).reshape(len(rows), rank)
        return Column(_plain(torch.cat([row.reshape(-1) for row in rows])), lengths, shapes=shapes)

    @staticmethod
    def of_dense(rows_N: Tensor) -> "Column":
        """Pack [N, ...]: rows of one shape; [N] are scalars. Contiguous values are not copied.

        Raises ConfigError for a tensor of rank 0, which holds no rows.
        """
        if rows_N.ndim == 0:
            raise ConfigError("a tensor of rank 0 holds no rows; give [N] or [N, ...]")
        num_rows, shape = rows_N.shape[0], rows_N.shape[1:]
        lengths = torch.full((num_rows,), shape.numel(), dtype=torch.int32)
        values = _plain(rows_N).reshape(-1)
        if len(shape) == 1:
            return Column(values, lengths)
        return Column(values, lengths, shapes=torch.tensor(shape, dtype=torch.int32).expand(num_rows, len(shape)))

    @staticmethod
    def of_scalars(values: Tensor) -> "Column":
        """Pack [N] scalars, one per row."""
        return Column.of_dense(values.reshape(-1))

    @staticmethod
    def of_texts(texts: Sequence[str]) -> "Column":
        """Pack strings, one per row. Raises ConfigError for a row without UTF-8 form (such as a lone surrogate)."""
        return _of_encoded(texts, str.encode, ColumnKind.TEXT)

    @staticmethod
    def of_bytes(rows: Sequence[bytes]) -> "Column":
        """Pack byte strings, one per row. Raises ConfigError for a row that has no bytes."""
        return _of_encoded(rows, _copy_bytes, ColumnKind.BYTES)

    @staticmethod
    def of_values(values: Sequence[Any]) -> "Column":
        """Pack JSON values (dicts with string keys, lists, strings, numbers, booleans, None), one per row.

        Raises:
            ConfigError: a row would come back as something else (a tuple, NaN, a date, a tensor, ...).
        """
        return _of_encoded(values, _encode_json, ColumnKind.JSON)

    @staticmethod
    def concatenate(columns: Sequence["Column"]) -> "Column":
        """Join columns, in order (at least one). Raises ConfigError if they differ in kind, dtype or rank."""
        first = columns[0]
        if len(columns) == 1:
            return first
        for column in columns:
            if column._type != first._type:
                raise ConfigError(f"columns of different types cannot be joined: {first._type} and {column._type}")
        shapes = [column.shapes for column in columns if column.shapes is not None]
        return Column(
            torch.cat([column.values for column in columns]),
            torch.cat([column.lengths for column in columns]),
            first.kind,
            torch.cat(shapes) if shapes else None,
        )

    def __len__(self) -> int:
        return self.lengths.numel()

    def __iter__(self) -> Iterator[Any]:
        """Yield each row as it was put: a tensor of the row's shape, a string, bytes, or a JSON value."""
        match self.kind:
            case ColumnKind.TENSOR:
                return iter(self.rows())
            case ColumnKind.TEXT:
                return iter(self.texts())
            case ColumnKind.BYTES:
                return iter(self.bytes_rows())
            case ColumnKind.JSON:
                return iter(self.objects())

    def __getitem__(self, position: int) -> Any:
        """Return one row as it was put."""
        place = range(len(self))[operator.index(position)]
        return next(iter(self.select(range(place, place + 1))))

    @property
    def rank(self) -> int:
        """Dimensions of each row: 0 for scalars, 1 for token sequences, strings and bytes."""
        return 1 if self.shapes is None else self.shapes.shape[1]

    def rows(self) -> tuple[Tensor, ...]:
        """Return one view per row, of the row's shape."""
        if self.shapes is None:
            return tuple(torch.split(self.values, self.lengths.tolist()))
        if self.rank == 0:
            return self.values.unbind()
        flat = torch.split(self.values, self.lengths.tolist())
        return tuple(row.view(shape) for row, shape in zip(flat, self.shapes.tolist(), strict=True))

    def dense(self) -> Tensor:
        """Return all rows as one view [N, ...]. Raises ConfigError if the rows differ in shape."""
        shapes_NR = self.lengths[:, None] if self.shapes is None else self.shapes
        if len(self) == 0:
            return self.values.view((0,) * (self.rank + 1))
        unequal = (shapes_NR != shapes_NR[0]).any(dim=1)
        if unequal.any():
            i = int(unequal.nonzero()[0])
            raise ConfigError(
                f"row 0 has shape {shapes_NR[0].tolist()}, row {i} has {shapes_NR[i].tolist()}: "
                "no dense tensor holds both; use rows(), or values and lengths"
            )
        return self.values.view(len(self), *shapes_NR[0].tolist())

    def texts(self) -> list[str]:
        """Return one string per row; only for text columns."""
        return self._decode_rows(ColumnKind.TEXT, lambda row: str(row, "utf-8"))

    def bytes_rows(self) -> list[bytes]:
        """Return the bytes of each row; only for columns of bytes, strings or JSON values."""
        return self._decode_rows(self.kind, bytes)

    def objects(self) -> list[Any]:
        """Return one JSON value per row; only for columns of JSON values."""
        return self._decode_rows(ColumnKind.JSON, msgspec.json.decode)

    def extremes(self) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value of each row, [N] each; 0 for an empty row."""
        row_V = torch.arange(len(self)).repeat_interleave(self.lengths)
        low_N, high_N = (
            self.values.new_zeros(len(self)).scatter_reduce(0, row_V, self.values, reduction, include_self=False)
            for reduction in ("amin", "amax")
        )
        return low_N, high_N

    def select(self, positions: Sequence[int]) -> "Column":
        """Return the rows at `positions`, in that order: values are a view for neighbours, otherwise a copy."""
        offsets = offsets_of(self.lengths.numpy())
        if isinstance(positions, range) and positions.step == 1:
            chosen = slice(positions.start, max(positions.start, positions.stop))
            values = self.values[int(offsets[:-1][chosen][:1].sum()) :][: int(self.lengths[chosen].sum())]
            shapes = None if self.shapes is None else self.shapes[chosen]
            return Column(values, self.lengths[chosen], self.kind, shapes)
        index = positions_array(positions)
        values = take(self.values, offsets[index], offsets[index + 1])
        shapes = None if self.shapes is None else self.shapes[torch.from_numpy(index)]
        return Column(values, self.lengths[torch.from_numpy(index)], self.kind, shapes)

    @property
    def _type(self) -> str:
        return f"{self.kind} {self.values.dtype} of rank {self.rank}"

    def _decode_rows(self, kind: ColumnKind, decode: Callable[[memoryview], _Row]) -> list[_Row]:
        assert self.kind is kind and kind is not ColumnKind.TENSOR, f"rows are {self.kind}, not {kind}"
        data = memoryview(as_array(self.values).tobytes())
        bounds = offsets_of(self.lengths.numpy()).tolist()
        decoded = []
        for i in range(len(self)):
            try:
                decoded.append(decode(data[bounds[i] : bounds[i + 1]]))
            except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
                raise TransportError(f"row {i} does not hold {kind}: {error}") from error
        return decoded


@dataclass(frozen=True)
class PackedBatch:
    """N rows of several columns.

    Attributes:
        indices: global row indices, in the order of the rows.
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
        """Return the same rows with these columns added or replaced."""
        return PackedBatch(self.indices, {**self.columns, **columns}, self.groups)

    def to_tensordict(self) -> Any:
        """Return a `tensordict.TensorDict` of N rows without copying values. Puts take such a TensorDict as columns.

        Rows become tensors [N, ...], jagged where 1-D rows differ in length, or lists of strings, bytes or JSON values.

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
        """Join batches (at least one) of the same columns, in order; raises ConfigError if a column's types differ."""
        parts = list(batches)
        if len(parts) == 1:
            return parts[0]
        columns = {name: Column.concatenate([part[name] for part in parts]) for name in parts[0].columns}
        indices = tuple(i for part in parts for i in part.indices)
        return PackedBatch(indices, columns, tuple(group for part in parts for group in part.groups))


def column_of(data: Any) -> Column:
    """Pack a user's tensor or array [N, ...], or list of tensors, arrays, strings, bytes or JSON values.

    From a TensorDict: nested tensors and non-tensor data, too. A list of numbers holds JSON values: they come back as
    Python numbers. Pass a tensor to get a tensor back.

    Raises:
        ConfigError: anything else, or a list of several kinds.
    """
    if isinstance(data, Column):
        return data
    if isinstance(data, Tensor) and data.is_nested:
        return Column.of_rows([_dense(row) for row in data.unbind()])
    tensordict = sys.modules.get("tensordict")  # its data cannot be here unless somebody imported it
    if tensordict is not None and tensordict.is_non_tensor(data):
        data = data.tolist()
    if isinstance(data, (Tensor, np.ndarray)):
        return Column.of_dense(_dense(data))
    if not isinstance(data, (list, tuple)):
        raise ConfigError(f"a column cannot be made of {type(data).__name__}; give a tensor or a list of rows")
    rows = list(data)
    if not rows:
        raise ConfigError("an empty list says nothing about its rows; name a constructor, as in Column.of_texts([])")
    if all(isinstance(row, (Tensor, np.ndarray)) for row in rows):
        return Column.of_rows([_dense(row) for row in rows])
    if all(isinstance(row, str) for row in rows):
        return Column.of_texts(rows)
    if all(isinstance(row, (bytes, bytearray, memoryview)) for row in rows):
        return Column.of_bytes(rows)
    return Column.of_values(rows)


def _of_encoded(rows: Sequence[_Row], encode: Callable[[_Row], bytes], kind: ColumnKind) -> Column:
    encoded = []
    for i, row in enumerate(rows):
        try:
            encoded.append(encode(row))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError(f"row {i} cannot be stored as {kind}: {error}") from error
    lengths = torch.tensor([len(row) for row in encoded], dtype=torch.int32)
    joined = bytearray(b"".join(encoded))
    values = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    return Column(values, lengths, kind)


def _copy_bytes(row: bytes) -> bytes:
    return bytes(memoryview(row))  # bytes(3) would be three zeros


def _encode_json(value: Any) -> bytes:
    data = msgspec.json.encode(value)
    # msgspec also writes tuples, dates, NaN, dataclasses, ...: a JSON value must come back as it was.
    if msgspec.json.decode(data) != value:
        raise ValueError(f"{value!r:.80} would come back as {data[:80]!r}")
    return data


def _dense(data: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(data)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a column cannot be made of this array: {error}") from error
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        sort = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else "sparse"
        raise ConfigError(f"a column cannot be made of a {sort} tensor; give a dense one, as in tensor.to_dense()")
    return tensor


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
