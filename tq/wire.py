"""Columns as message parts: a typed description, and pieces of bytes that are copied only when they leave.

A column consists of its values, then int32 [N, R] shapes (for 1-D rows: their lengths) unless the description gives one
shape for all rows. Pieces start at multiples of 8 bytes; there is no other padding. Integers may travel narrower than
they are; floats never change.

Legend of shapes: N rows, V values, R dimensions of each row.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncflow.decoding import UNREADABLE, msgpack_decoder
from asyncflow.errors import PeerRefused, TransportError
from asyncflow.transport.frame import ALIGN, Payload, PayloadPiece, aligned
from tq.columns import SMALL_BYTES, Column, ColumnKind, Int64s, offsets_of
from tq.stored_column import StoredColumn

_NARROW = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32)  # narrowest first
_NARROWER = {
    wide: [
        (dtype, torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in _NARROW if dtype.itemsize < wide.itemsize
    ]
    for wide in (torch.int64, torch.int32)
}
_FEW_VALUES = 1 << 16  # below this, two passes with numpy are faster than one with torch
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()} | {torch.uint16: "uint16"}
_WIRE_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MAX_RANK = 32
_MAX_NUMEL = 2**62


class ColumnHeader(msgspec.Struct, frozen=True):
    """Describes one packed column in a payload."""

    name: str
    dtype: str
    wire_dtype: str  # of the values as they travel: `dtype`, or a narrower integer
    kind: ColumnKind
    # `num_rows`, `num_values`: N and V.
    num_rows: int
    num_values: int
    rank: int = 1  # R; 1 unless `kind` is a tensor
    # Of every row, if all rows have the same and it holds values; otherwise None, and int32 [N, R] follow the values.
    shape: list[int] | None = None


class _Enclosed(msgspec.Struct, array_like=True):
    headers: Sequence[ColumnHeader]
    data: bytes


_ENCLOSED = msgpack_decoder(_Enclosed)


def describe(
    columns: Mapping[str, Column], *, narrow: bool, lengths_first: bool = False
) -> tuple[list[ColumnHeader], Payload]:
    """Return headers and the payload that they describe, without copying anything yet.

    `narrow` lets int64 and int32 values travel as the narrowest integers that hold their extremes. The payload has each
    column's values and then its shapes or, with `lengths_first`, all columns' shapes and then their values.

    Raises:
        TransportError: a column's dtype, rank or device cannot travel.
    """
    headers, pieces = [], []
    lengths: list[PayloadPiece] = []
    for name, column in columns.items():
        values = column.values
        # Check the stride itself: torch calls a single value contiguous, whatever its stride.
        if values.requires_grad or values.stride() != (1,):
            values = values.detach().clone(memory_format=torch.contiguous_format)
        if values.dtype not in _NAMES or values.dtype is torch.uint16:
            dtype = str(values.dtype).removeprefix("torch.")
            raise TransportError(f"column {name}: dtype {dtype} cannot travel; use one of {' '.join(_DTYPES)}")
        if not values.is_cpu or column.rank > _MAX_RANK:
            raise TransportError(
                f"column {name}: rank {column.rank} on {values.device}; only ranks up to {_MAX_RANK} on the CPU travel"
            )
        lengths_N = column.lengths.numpy()
        if (int(lengths_N[0]) if len(lengths_N) == 1 else int(lengths_N.sum(dtype=np.int64))) != values.numel():
            raise TransportError(f"column {name}: lengths do not add up to {values.numel()} values")
        wire_dtype = _narrowest(values) if narrow else values.dtype
        shapes = lengths_N[:, None] if column.shapes is None else column.shapes.numpy()
        header, shape_pieces = _header(name, values.dtype, wire_dtype, column.kind, values.numel(), shapes)
        headers.append(header)
        pieces.append(PayloadPiece((values,), wire_dtype))
        (lengths if lengths_first else pieces).extend(shape_pieces)
    return headers, Payload([*lengths, *pieces])


def describe_stored(
    name: str, parts: Sequence[tuple[StoredColumn, Sequence[int]]], *, wide: bool
) -> tuple[ColumnHeader, list[PayloadPiece]]:
    """Describe rows of a unit: `parts` (at least one) are puts and row positions in them, ranges for neighbours.

    `wide` lets the values travel in the readers' dtype (in shared memory that saves their cast); otherwise as held.

    Raises:
        PeerRefused: the parts differ in kind, dtype or rank.
    """
    first = parts[0][0]
    for stored, _ in parts:
        if (stored.kind, stored.dtype, stored.rank) != (first.kind, first.dtype, first.rank):
            found = " and ".join(f"{one.kind} {one.dtype} of rank {one.rank}" for one in (first, stored))
            raise PeerRefused(f"column {name}: {found} do not make one column; read these rows apart")
    # A piece has one dtype: puts that were narrowed differently are brought to the narrowest common one, at the price
    # of one more copy of those.
    held = _common({stored.values.dtype for stored, _ in parts}, first.dtype)
    # Short rows that are not neighbours are gathered first; long ones are copied once, straight to their destination.
    tensors = [part for stored, positions in parts for part in stored.read(positions)]
    tensors = _joined([part if part.dtype is held else part.to(held) for part in tensors])
    wire_dtype = first.dtype if wide else held
    num_values = sum(tensor.numel() for tensor in tensors)
    shape = first.shape
    if shape is not None and num_values and all(stored.shape == shape for stored, _ in parts):  # needs no array
        names = _NAMES[first.dtype], _NAMES[wire_dtype]
        num_rows = sum(len(positions) for _, positions in parts)
        header = ColumnHeader(name, *names, first.kind, num_rows, num_values, first.rank, list(shape))
        return header, [PayloadPiece(tensors, wire_dtype)]
    shapes = [stored.shapes_of(positions) for stored, positions in parts]
    all_shapes = shapes[0] if len(shapes) == 1 else np.concatenate(shapes)
    header, shape_pieces = _header(name, first.dtype, wire_dtype, first.kind, num_values, all_shapes)
    return header, [PayloadPiece(tensors, wire_dtype), *shape_pieces]


def unpack(headers: Sequence[ColumnHeader], payload: Tensor, *, lengths_first: bool = False) -> dict[str, Column]:
    """Return columns of a contiguous uint8 payload of `describe`; those that did not travel narrow are views of it.

    Raises:
        TransportError: the headers (one per column, in order) do not describe this payload.
    """
    columns = {}
    for header, dtype, values, sizes_NR, lengths_N in _parts(headers, payload, lengths_first=lengths_first):
        shapes = None
        if sizes_NR is None:
            assert header.shape is not None
            lengths = torch.full((header.num_rows,), math.prod(header.shape), dtype=torch.int32)
            if header.rank != 1:
                shapes = torch.tensor(header.shape, dtype=torch.int32).expand(header.num_rows, header.rank)
        elif header.rank == 1:
            lengths = torch.from_numpy(sizes_NR[:, 0])
        else:
            assert lengths_N is not None
            lengths, shapes = torch.from_numpy(lengths_N.astype(np.int32)), torch.from_numpy(sizes_NR)
        columns[header.name] = Column(values.to(dtype), lengths, header.kind, shapes)
    return columns


def enclose(headers: Sequence[ColumnHeader], payload: Tensor) -> bytes:
    """Return a small put's columns in a form that fits into a message; see `disclose`."""
    return msgspec.msgpack.encode(_Enclosed(headers, payload.numpy().tobytes()))


def disclose(enclosed: bytes) -> dict[str, Column]:
    """Undo `enclose`; b"" holds no columns. Raises TransportError for anything else."""
    if not enclosed:
        return {}
    try:
        found = _ENCLOSED.decode(enclosed)
    except UNREADABLE as error:
        raise TransportError(f"values that came with a message cannot be read ({error})") from error
    return unpack(found.headers, torch.frombuffer(bytearray(found.data), dtype=torch.uint8))


def unpack_stored(headers: Sequence[ColumnHeader], payload: Tensor) -> dict[str, StoredColumn]:
    """As `unpack`, for a storage unit: every column is a view of `payload` and stays as narrow as it came."""
    columns = {}
    for header, dtype, values, sizes_NR, lengths_N in _parts(headers, payload):
        shape = None if header.shape is None else tuple(header.shape)
        offsets = None if lengths_N is None else offsets_of(lengths_N)
        columns[header.name] = StoredColumn(
            values, header.num_rows, dtype, header.kind, header.rank, shape, sizes_NR, offsets
        )
    return columns


def _parts(
    headers: Sequence[ColumnHeader], payload: Tensor, *, lengths_first: bool = False
) -> list[tuple[ColumnHeader, torch.dtype, Tensor, NDArray[np.int32] | None, Int64s | None]]:
    """Return (header, dtype, values as they travelled, shapes [N, R], lengths [N]) of each column.

    Shapes and lengths are None where the header gives one shape for all rows.
    """
    if payload.data_ptr() % ALIGN or payload.storage_offset() % ALIGN:
        payload = payload.clone()
    found = []
    offset = lengths_offset = 0
    if lengths_first:  # the values begin behind them
        sizes_of = (header.num_rows * header.rank * 4 for header in headers if header.shape is None)
        offset = sum(map(aligned, sizes_of))
    for header in headers:
        dtype, wire_dtype = _checked(header)
        start, end, offset = _take(payload, offset, header.num_values * wire_dtype.itemsize)
        values = payload[start:end].view(wire_dtype)
        sizes, lengths = None, None
        if header.shape is None:
            begins = lengths_offset if lengths_first else offset
            start, end, begins = _take(payload, begins, header.num_rows * header.rank * 4)
            offset, lengths_offset = (offset, begins) if lengths_first else (begins, 0)
            sizes = payload.numpy()[start:end].view(np.int32).reshape(header.num_rows, header.rank)
            lengths = _checked_lengths(header, sizes)
        found.append((header, dtype, values, sizes, lengths))
    if offset != payload.numel():
        raise TransportError(f"payload: {payload.numel()} bytes, but its headers describe {offset}")
    if len({header.name for header in headers}) != len(headers):
        raise TransportError(f"a column is described twice: {' '.join(header.name for header in headers)}")
    return found


def _narrowest(values: Tensor) -> torch.dtype:
    narrower = _NARROWER.get(values.dtype)
    if narrower is None or values.numel() == 0:
        return values.dtype
    if values.numel() < _FEW_VALUES:
        array = values.numpy()
        low, high = int(array.min()), int(array.max())
    else:
        low, high = (int(extreme) for extreme in values.aminmax())
    for dtype, least, most in narrower:
        if least <= low and high <= most:
            return dtype
    return values.dtype


def _common(held: set[torch.dtype], dtype: torch.dtype) -> torch.dtype:
    if len(held) == 1:
        return held.pop()
    low = min(torch.iinfo(one).min for one in held)
    high = max(torch.iinfo(one).max for one in held)
    fits = (one for one in _NARROW if torch.iinfo(one).min <= low and high <= torch.iinfo(one).max)
    return next(fits, dtype)


def _joined(tensors: list[Tensor]) -> list[Tensor]:
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    return [torch.cat(tensors)] if 0 < num_bytes < SMALL_BYTES * (len(tensors) - 1) else tensors


def _header(
    name: str, dtype: torch.dtype, wire_dtype: torch.dtype, kind: ColumnKind, num_values: int, shapes_NR: NDArray[Any]
) -> tuple[ColumnHeader, list[PayloadPiece]]:
    num_rows, rank = shapes_NR.shape
    names = _NAMES[dtype], _NAMES[wire_dtype]
    # Rows without values are spelled out, so that what a receiver allocates is bounded by the bytes it was sent.
    if num_values and _all_equal(shapes_NR):
        return ColumnHeader(name, *names, kind, num_rows, num_values, rank, shapes_NR[0].tolist()), []
    flat = torch.from_numpy(np.ascontiguousarray(shapes_NR, dtype=np.int32).reshape(-1))
    return ColumnHeader(name, *names, kind, num_rows, num_values, rank), [PayloadPiece((flat,), torch.int32)]


def _all_equal(shapes_NR: NDArray[Any]) -> bool:
    if len(shapes_NR) == 1:
        return True
    if shapes_NR.shape[1] and shapes_NR[0, 0] != shapes_NR[-1, 0]:
        return False  # the usual case: one comparison instead of all
    return bool((shapes_NR == shapes_NR[0]).all())


def _checked(header: ColumnHeader) -> tuple[torch.dtype, torch.dtype]:
    dtype, wire_dtype = _DTYPES.get(header.dtype), _WIRE_DTYPES.get(header.wire_dtype)
    if dtype is None or wire_dtype is None or not (dtype is wire_dtype or _narrows(dtype, wire_dtype)):
        raise TransportError(f"column {header.name}: malformed header {header}: dtypes")
    packed = header.kind is ColumnKind.TENSOR or (dtype is wire_dtype is torch.uint8 and header.rank == 1)
    if not packed or not isinstance(header.kind, ColumnKind) or not 0 <= header.rank <= _MAX_RANK:
        raise TransportError(f"column {header.name}: malformed header {header}: kind or rank")
    if header.num_rows < 0 or header.num_values < 0:
        raise TransportError(f"column {header.name}: malformed header {header}: negative counts")
    if header.shape is None:
        if header.rank == 0 and header.num_rows:
            raise TransportError(f"column {header.name}: malformed header {header}: scalars without a shape")
    elif (
        not header.num_rows
        or len(header.shape) != header.rank
        or any(not 0 < size < 2**31 for size in header.shape)
        or math.prod(header.shape) >= 2**31
        or header.num_rows * math.prod(header.shape) != header.num_values
    ):
        raise TransportError(f"column {header.name}: {header.num_rows} rows of {header.shape} do not add up: {header}")
    return dtype, wire_dtype


def _narrows(dtype: torch.dtype, wire_dtype: torch.dtype) -> bool:
    return any(wire_dtype is narrow for narrow, _, _ in _NARROWER.get(dtype, ()))


def _checked_lengths(header: ColumnHeader, shapes_NR: NDArray[np.int32]) -> Int64s:
    if header.rank == 1:
        row_lengths: Int64s = shapes_NR[:, 0].astype(np.int64)
        if int(row_lengths.sum()) != header.num_values or (header.num_rows and row_lengths.min() < 0):
            raise TransportError(f"column {header.name}: lengths do not add up to {header.num_values} values")
        return row_lengths
    # In float64 because a product of hostile sizes overflows int64; it is exact for all sizes that can be right.
    sizes = shapes_NR.astype(np.float64)
    lengths = sizes.prod(axis=1)
    negative = bool((sizes < 0).any())
    too_large = bool((lengths >= 2**31).any() or (np.maximum(sizes, 1).prod(axis=1) >= _MAX_NUMEL).any())
    if negative or too_large or int(lengths.sum()) != header.num_values:
        raise TransportError(f"column {header.name}: lengths do not add up to {header.num_values} values")
    whole: Int64s = lengths.astype(np.int64)
    return whole


def _take(payload: Tensor, offset: int, num_bytes: int) -> tuple[int, int, int]:
    """Return (start, end, where the next piece starts)."""
    following = offset + aligned(num_bytes)
    if following > payload.numel():
        raise TransportError(f"payload: {payload.numel()} bytes, but its headers describe more")
    return offset, offset + num_bytes, following
