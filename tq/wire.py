"""Columns as message parts: a typed description and one contiguous run of bytes, no padding beyond 8-byte alignment."""

import msgspec
import torch
from torch import Tensor

from asyncflow.errors import TransportError
from tq.batch import Column

_ALIGN = 8
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
    )
}  # fmt: skip


class ColumnHeader(msgspec.Struct, frozen=True):
    """Describes one packed column in a payload: `num_values` elements, then `num_rows` int32 lengths."""

    name: str
    dtype: str
    num_rows: int
    num_values: int
    text: bool


def pack(columns: dict[str, Column]) -> tuple[list[ColumnHeader], Tensor]:
    """Return headers and payload uint8 [bytes]; values are copied once."""
    headers = []
    total = 0
    for name, column in columns.items():
        dtype = str(column.values.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise TransportError(f"column {name}: dtype {dtype} cannot travel; use one of {' '.join(_DTYPES)}")
        headers.append(ColumnHeader(name, dtype, len(column), column.values.numel(), column.text))
        total += _aligned(column.values.nbytes) + _aligned(column.lengths.nbytes)
    payload = torch.empty(total, dtype=torch.uint8)
    offset = 0
    for column in columns.values():
        for part in (column.values, column.lengths):
            payload[offset : offset + part.nbytes] = part.contiguous().view(torch.uint8)
            offset += _aligned(part.nbytes)
    return headers, payload


def unpack(headers: list[ColumnHeader], payload: Tensor) -> dict[str, Column]:
    """Return columns that view `payload`.

    Raises:
        TransportError: the headers do not describe this payload.
    """
    columns = {}
    offset = 0
    for header in headers:
        if header.dtype not in _DTYPES or header.num_rows < 0 or header.num_values < 0:
            raise TransportError(f"column {header.name}: malformed header {header}")
        dtype = _DTYPES[header.dtype]
        values, offset = _take(payload, offset, header.num_values * dtype.itemsize)
        lengths, offset = _take(payload, offset, header.num_rows * 4)
        column = Column(values.view(dtype), lengths.view(torch.int32), header.text)
        if header.num_rows and (int(column.lengths.min()) < 0 or int(column.lengths.sum()) != header.num_values):
            raise TransportError(f"column {header.name}: lengths do not add up to {header.num_values} values")
        columns[header.name] = column
    if offset != payload.numel():
        raise TransportError(f"payload: {payload.numel()} bytes, but its headers describe {offset}")
    return columns


def _take(payload: Tensor, offset: int, num_bytes: int) -> tuple[Tensor, int]:
    end = offset + _aligned(num_bytes)
    if end > payload.numel():
        raise TransportError(f"payload: {payload.numel()} bytes, but its headers describe more")
    return payload[offset : offset + num_bytes], end


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
