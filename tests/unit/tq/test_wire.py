"""Columns as bytes: every dtype survives, malformed descriptions are refused."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import TransportError
from tq import Column
from tq.wire import ColumnHeader, pack, unpack

DTYPES = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
)  # fmt: skip


@given(lengths=st.lists(st.integers(0, 5), max_size=6), dtypes=st.lists(st.sampled_from(DTYPES), max_size=4))
def test_columns_of_every_dtype_survive_the_round_trip(lengths: list[int], dtypes: list[torch.dtype]) -> None:
    columns = {}
    for k, dtype in enumerate(dtypes):
        values = (torch.arange(sum(lengths)) % 2).to(dtype)
        columns[f"c{k}"] = Column(values, torch.tensor(lengths, dtype=torch.int32), text=k % 2 == 0)
    headers, payload = pack(columns)
    again = unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(headers), type=list[ColumnHeader]), payload)
    assert list(again) == list(columns)
    for name, column in columns.items():
        assert again[name].values.dtype == column.values.dtype
        assert torch.equal(again[name].values, column.values)
        assert again[name].lengths.tolist() == lengths
        assert again[name].text == column.text


def test_no_columns_are_no_bytes() -> None:
    headers, payload = pack({})
    assert (headers, payload.numel()) == ([], 0)
    assert unpack(headers, payload) == {}


def test_values_that_are_not_contiguous_travel_in_their_order() -> None:
    values = torch.arange(10)[::2]
    headers, payload = pack({"a": Column.of_scalars(values)})
    assert unpack(headers, payload)["a"].values.tolist() == [0, 2, 4, 6, 8]


def test_dtype_that_cannot_travel_is_refused() -> None:
    with pytest.raises(TransportError, match="complex64"):
        pack({"a": Column.of_scalars(torch.zeros(2, dtype=torch.complex64))})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "object"}, "malformed"),
        ({"num_rows": -1}, "malformed"),
        ({"num_values": -1}, "malformed"),
        ({"num_values": 2**60}, "describe more"),
        ({"num_rows": 2**40}, "describe more"),
        ({"num_values": 3}, "do not add up"),
        ({"dtype": "int32"}, "do not add up"),
        ({"dtype": "uint8", "num_rows": 0}, "describe"),
    ],
)
def test_header_that_does_not_describe_the_payload_is_refused(changes: dict[str, int | str], message: str) -> None:
    headers, payload = pack({"a": Column.of_rows([torch.tensor([1, 2]), torch.tensor([3, 4])])})
    with pytest.raises(TransportError, match=message):
        unpack([msgspec.structs.replace(headers[0], **changes)], payload)


def test_payload_with_bytes_that_nobody_described_is_refused() -> None:
    headers, payload = pack({"a": Column.of_texts(["x"])})
    with pytest.raises(TransportError, match="describe 16"):
        unpack(headers, torch.cat([payload, payload]))


def test_negative_lengths_are_refused() -> None:
    headers, payload = pack({"a": Column(torch.zeros(2), torch.tensor([3, -1], dtype=torch.int32))})
    with pytest.raises(TransportError, match="do not add up"):
        unpack(headers, payload)
