"""Columns as bytes: everything survives, little is added, malformed descriptions are refused."""

import contextlib
import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from asyncflow.errors import PeerRefused, TransportError
from asyncflow.transport.frame import Payload
from tq import Column
from tq.columns import ColumnKind
from tq.messages import CONTROLLER_REQUESTS, UNIT_REQUESTS, RemovalReason
from tq.wire import ColumnHeader, describe, describe_stored, disclose, enclose, unpack, unpack_stored

DTYPES = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
)  # fmt: skip
Described = tuple[list[ColumnHeader], torch.Tensor]


def written(payload: Payload) -> torch.Tensor:
    out = torch.full((payload.num_bytes,), 0xA5, dtype=torch.uint8)
    payload.write(out)
    return out


def pack(columns: dict[str, Column], *, narrow: bool = False) -> Described:
    headers, payload = describe(columns, narrow=narrow)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(headers), type=list[ColumnHeader]), written(payload)


def same(a: Column, b: Column) -> bool:
    """Equal to the bit: NaN payloads, signs of zero, shapes."""
    bits = torch.equal(torch.cat([a.values]).view(torch.uint8), torch.cat([b.values]).view(torch.uint8))
    shapes = a.shapes is b.shapes is None or (
        a.shapes is not None and b.shapes is not None and a.shapes.tolist() == b.shapes.tolist()
    )
    return (
        bits and shapes and (a.kind, a.values.dtype) == (b.kind, b.values.dtype) and torch.equal(a.lengths, b.lengths)
    )


@st.composite
def columns_of(draw: st.DrawFn, num_rows: int) -> Column:
    """A column of random kind, dtype, rank, shapes and bits."""
    kind = draw(st.sampled_from(ColumnKind))
    if kind is ColumnKind.TEXT:
        return Column.of_texts(draw(st.lists(st.text(max_size=5), min_size=num_rows, max_size=num_rows)))
    if kind is ColumnKind.BYTES:
        return Column.of_bytes(draw(st.lists(st.binary(max_size=9), min_size=num_rows, max_size=num_rows)))
    if kind is ColumnKind.JSON:
        return Column.of_values([{"row": i} for i in range(num_rows)])
    dtype, rank = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 3))
    shape = st.tuples(*[st.integers(0, 4)] * rank)
    shapes = [draw(shape)] * num_rows if draw(st.booleans()) else [draw(shape) for _ in range(num_rows)]
    num_values = sum(math.prod(shape) for shape in shapes)
    if dtype is torch.bool:
        values = torch.arange(num_values) % 3 == 0
    elif dtype is torch.int64 and draw(st.booleans()):
        bound = 2 ** draw(st.integers(1, 62))
        values = torch.tensor(draw(st.lists(st.integers(-bound, bound), min_size=num_values, max_size=num_values)))
    else:
        size = num_values * dtype.itemsize
        bits = draw(st.binary(min_size=size, max_size=size))
        values = torch.frombuffer(bytearray(bits), dtype=dtype) if bits else torch.empty(0, dtype=dtype)
    lengths = torch.tensor([math.prod(shape) for shape in shapes], dtype=torch.int32)
    table = None if rank == 1 else torch.tensor(shapes, dtype=torch.int32).reshape(num_rows, rank)
    return Column(values.to(dtype), lengths, shapes=table)


COLUMNS = st.integers(0, 6).flatmap(lambda n: st.dictionaries(st.text(max_size=3), columns_of(n), max_size=3))


@given(columns=COLUMNS, narrow=st.booleans())
def test_columns_survive_the_round_trip(columns: dict[str, Column], narrow: bool) -> None:
    again = unpack(*pack(columns, narrow=narrow))
    assert list(again) == list(columns)
    assert all(same(again[name], column) for name, column in columns.items())


@given(columns=COLUMNS, narrow=st.booleans(), wide=st.booleans(), data=st.data())
def test_stored_rows_are_read_in_any_order_from_several_puts(
    columns: dict[str, Column], narrow: bool, wide: bool, data: st.DataObject
) -> None:
    puts = [unpack_stored(*pack(columns, narrow=n)) for n in (narrow, True)]
    for name, column in columns.items():
        position = st.integers(0, len(column) - 1)
        rows = st.lists(position, max_size=5) | st.builds(lambda a, b: range(a, b), position, position)
        reads = [(k, data.draw(rows) if len(column) else []) for k in (0, 1, 0)]
        header, pieces = describe_stored(name, [(puts[k][name], positions) for k, positions in reads], wide=wide)
        assert not wide or header.wire_dtype == header.dtype
        read = unpack([header], written(Payload(pieces)))[name]
        assert same(read, column.select([i for _, positions in reads for i in positions]))


@given(columns=COLUMNS)
def test_lengths_may_come_first(columns: dict[str, Column]) -> None:
    headers, payload = describe(columns, narrow=True, lengths_first=True)
    again = unpack(headers, written(payload), lengths_first=True)
    assert all(same(again[name], column) for name, column in columns.items())


def test_with_lengths_first_no_values_lie_between_them() -> None:
    columns = {name: Column.of_rows([torch.tensor([7]), torch.tensor([8, 9])]) for name in "ab"}
    _, payload = describe(columns, narrow=True, lengths_first=True)
    whole = written(payload)
    assert whole[:16].view(torch.int32).tolist() == [1, 2, 1, 2]
    assert [whole[16:19].tolist(), whole[24:27].tolist()] == [[7, 8, 9]] * 2


def test_no_columns_are_no_bytes() -> None:
    headers, payload = pack({})
    assert (headers, payload.numel()) == ([], 0)
    assert unpack(headers, payload) == {}


def test_values_that_are_not_contiguous_travel_in_their_order() -> None:
    assert unpack(*pack({"a": Column.of_scalars(torch.arange(10)[::2])}))["a"].values.tolist() == [0, 2, 4, 6, 8]


def test_one_expanded_value_travels() -> None:
    column = Column.of_dense(torch.ones(()).expand(1))  # contiguous by torch's word, with stride 0
    headers, payload = pack({"x": column})
    assert unpack(headers, payload)["x"].values.tolist() == [1.0]


def test_values_that_did_not_travel_narrow_view_the_payload() -> None:
    headers, payload = pack({"a": Column.of_scalars(torch.tensor([1.0, 2.0]))})
    assert unpack(headers, payload)["a"].values.data_ptr() == payload.data_ptr()


@pytest.mark.parametrize("skipped", [1, 8])
def test_payload_may_be_part_of_a_larger_buffer(skipped: int) -> None:
    headers, payload = pack({"a": Column.of_scalars(torch.arange(5))})
    buffer = torch.cat([torch.zeros(skipped, dtype=torch.uint8), payload])
    assert unpack(headers, buffer[skipped:])["a"].values.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("low", "high", "wire"),
    [
        (0, 255, "uint8"),
        (-128, 127, "int8"),
        (-1, 128, "int16"),
        (0, 2**16 - 1, "uint16"),
        (-1, 2**15, "int32"),
        (0, 151_936, "int32"),
        (0, 2**31, "int64"),
        (-(2**63), 0, "int64"),
    ],
)
def test_integers_travel_as_narrow_as_they_fit(low: int, high: int, wire: str) -> None:
    column = Column.of_rows([torch.tensor([low, high])])
    headers, payload = pack({"a": column}, narrow=True)
    assert (headers[0].dtype, headers[0].wire_dtype) == ("int64", wire)
    assert same(unpack(headers, payload)["a"], column)
    assert pack({"a": column})[0][0].wire_dtype == "int64"


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in (torch.int64, torch.int32)])
def test_other_dtypes_never_change(dtype: torch.dtype) -> None:
    assert pack({"a": Column.of_scalars(torch.ones(4, dtype=dtype))}, narrow=True)[0][0].wire_dtype in str(dtype)


@pytest.mark.parametrize("narrow", [False, True])
def test_description_adds_less_than_a_hundredth(narrow: bool) -> None:
    random = torch.Generator().manual_seed(7)
    prompts = torch.randint(32, 256, (64,), generator=random)
    normal = torch.randn(64, generator=random) * 0.8
    responses = (512 * torch.exp(normal - 0.32)).long().clamp(min=1)  # log-normal of mean 512
    columns = {
        "prompts": Column.of_rows([torch.randint(0, 151_936, (n,), generator=random) for n in prompts.tolist()]),
        "responses": Column.of_rows([torch.randint(0, 151_936, (n,), generator=random) for n in responses.tolist()]),
        "rollout_log_probs": Column.of_rows([torch.randn(n, generator=random) for n in responses.tolist()]),
    }
    headers, payload = describe(columns, narrow=narrow)
    sent = payload.num_bytes + len(msgspec.msgpack.encode(headers))
    assert sent <= (0.7 if narrow else 1.01) * sum(column.values.nbytes for column in columns.values())


def test_rows_of_one_shape_say_so_once() -> None:
    headers, payload = pack(
        {"score": Column.of_scalars(torch.rand(64)), "image": Column.of_dense(torch.rand(64, 4, 4))}
    )
    assert payload.numel() == 64 * 4 + 64 * 64
    assert [header.shape for header in headers] == [[], [4, 4]]


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(TransportError, match="complex64"):
        describe({"a": Column.of_scalars(torch.zeros(2, dtype=torch.complex64))}, narrow=False)
    with pytest.raises(TransportError, match="rank 33"):
        describe({"a": Column.of_dense(torch.zeros([1] * 34))}, narrow=False)
    with pytest.raises(TransportError, match="on meta"):
        describe({"a": Column(torch.zeros(2, device="meta"), torch.ones(2, dtype=torch.int32))}, narrow=False)
    with pytest.raises(TransportError, match="do not add up to 2 values"):
        describe({"a": Column(torch.zeros(2), torch.ones(3, dtype=torch.int32))}, narrow=False)


def test_rows_of_different_types_are_not_read_together() -> None:
    stored = [unpack_stored(*pack({"a": c}))["a"] for c in (Column.of_texts(["x"]), Column.of_bytes([b"x"]))]
    with pytest.raises(PeerRefused, match="column a: text torch.uint8 of rank 1 and bytes"):
        describe_stored("a", [(one, [0]) for one in stored], wide=False)


def test_long_rows_are_not_copied_before_they_leave() -> None:
    rows = [torch.full((20_000 + i,), float(i)) for i in range(4)]
    stored = unpack_stored(*pack({"a": Column.of_rows(rows)}))["a"]
    _, pieces = describe_stored("a", [(stored, [3, 0, 1])], wide=False)
    storage = stored.values.untyped_storage().data_ptr()
    assert [part.numel() for part in pieces[0].parts] == [20_003, 40_001]
    assert all(part.untyped_storage().data_ptr() == storage for part in pieces[0].parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "object"}, "malformed"),
        ({"wire_dtype": "int8"}, "do not add up"),
        ({"wire_dtype": "float32"}, "malformed"),
        ({"dtype": "uint16", "wire_dtype": "uint16"}, "malformed"),
        ({"kind": ColumnKind.TEXT}, "malformed"),
        ({"num_rows": -1}, "malformed"),
        ({"num_values": -1}, "malformed"),
        ({"rank": -1}, "malformed"),
        ({"rank": 0}, "malformed"),
        ({"rank": 33}, "malformed"),
        ({"shape": [0]}, "do not add up"),
        ({"shape": [1, 2]}, "do not add up"),
        ({"shape": [2**62]}, "do not add up"),
        ({"rank": 2, "shape": [2**62, 2**62]}, "do not add up"),
        ({"num_rows": 2**62, "shape": [1]}, "do not add up"),
        ({"num_values": 2**60}, "describe more"),
        ({"num_rows": 2**40}, "describe more"),
        ({"num_values": 3, "dtype": "int32", "wire_dtype": "int32"}, "describe 24"),
        ({"dtype": "int32", "wire_dtype": "int32"}, "describe 24"),
        ({"dtype": "uint8", "wire_dtype": "uint8", "num_rows": 0, "num_values": 0}, "describe"),
    ],
)
def test_header_that_does_not_describe_the_payload_is_refused(changes: dict[str, Any], message: str) -> None:
    headers, payload = pack({"a": Column.of_rows([torch.tensor([1, 2]), torch.tensor([3])])})
    with pytest.raises(TransportError, match=message):
        unpack([msgspec.structs.replace(headers[0], **changes)], payload)


def test_payload_with_bytes_that_nobody_described_is_refused() -> None:
    headers, payload = pack({"a": Column.of_texts(["x"])})
    with pytest.raises(TransportError, match="describe 8"):
        unpack(headers, torch.cat([payload, payload]))
    with pytest.raises(TransportError, match="described twice"):
        unpack([*headers, *headers], torch.cat([payload, payload]))


@pytest.mark.parametrize(
    ("sizes", "rank"),
    [([3, -1], 1), ([-1, -2], 2), ([2**31 - 1] * 3 + [0], 4), ([2**31 - 1, 2**31 - 1], 2), ([2**16, 2**16], 2)],
)
def test_hostile_sizes_are_refused(sizes: list[int], rank: int) -> None:
    flat = torch.tensor(sizes, dtype=torch.int32)
    payload = torch.cat([torch.zeros(8, dtype=torch.uint8), flat.view(torch.uint8)])
    header = ColumnHeader("a", "float32", "float32", ColumnKind.TENSOR, len(sizes) // rank, 2, rank)
    with pytest.raises(TransportError, match="do not add up"):
        unpack([header], payload)


COUNTS = st.integers(0, 8) | st.integers(-(2**63), 2**63)
HEADERS = st.builds(
    ColumnHeader,
    name=st.sampled_from("ab"),
    dtype=st.sampled_from(("int64", "int32", "uint8", "float32", "bfloat16", "bool", "uint16", "object", "")),
    wire_dtype=st.sampled_from(("int64", "int32", "uint8", "float32", "bfloat16", "bool", "uint16", "int8", "x")),
    kind=st.sampled_from(ColumnKind),
    num_rows=COUNTS,
    num_values=COUNTS,
    rank=st.integers(-1, 3) | COUNTS,
    shape=st.none() | st.lists(COUNTS, max_size=3),
)


def read_everything(headers: list[ColumnHeader], payload: torch.Tensor) -> None:
    """Either a TransportError, or columns that can be read to the end."""
    try:
        columns, stored = unpack(headers, payload), unpack_stored(headers, payload)
    except TransportError:
        return
    for name, column in columns.items():
        assert len(column.rows()) == len(column) == len(stored[name])
        describe_stored(name, [(stored[name], range(len(column)))], wide=True)


@given(headers=st.lists(HEADERS, max_size=2), payload=st.binary(max_size=64))
def test_any_headers_with_any_payload_are_read_or_refused(headers: list[ColumnHeader], payload: bytes) -> None:
    read_everything(headers, torch.tensor(list(payload), dtype=torch.uint8))


@given(columns=COLUMNS.filter(bool), narrow=st.booleans(), data=st.data())
def test_damaged_payloads_and_headers_are_read_or_refused(
    columns: dict[str, Column], narrow: bool, data: st.DataObject
) -> None:
    headers, payload = pack(columns, narrow=narrow)
    for _ in range(data.draw(st.integers(0, 3))):
        if payload.numel():
            payload[data.draw(st.integers(0, payload.numel() - 1))] = data.draw(st.sampled_from((0, 1, 127, 128, 255)))
    if data.draw(st.booleans()):
        k, other = data.draw(st.integers(0, len(headers) - 1)), data.draw(HEADERS)
        field = data.draw(st.sampled_from(ColumnHeader.__struct_fields__))
        headers[k] = msgspec.structs.replace(headers[k], **{field: getattr(other, field)})
    cut = data.draw(st.integers(0, 8))
    read_everything(headers, payload[: payload.numel() - cut])


def decode(data: bytes) -> None:
    """What a server does with a request; msgspec reports bad UTF-8 in its own way."""
    for requests in (UNIT_REQUESTS, CONTROLLER_REQUESTS):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            msgspec.msgpack.decode(data, type=requests)


def requests_of_each_sort() -> list[Any]:
    """One small request of each type."""
    values: dict[Any, Any] = {int: 1, str: "x", float: 1.0, bool: True, RemovalReason: RemovalReason.CLEARED}
    found = []
    for requests in (UNIT_REQUESTS, CONTROLLER_REQUESTS):
        for kind in requests.__args__:
            fields = msgspec.structs.fields(kind)
            found.append(kind(**{f.name: values.get(f.type, {} if "dict" in str(f.type) else []) for f in fields}))
    return found


@given(data=st.binary(max_size=64))
@example(data=b"\x81\xa4type\xabGetUnitStats")
@example(data=b"\x81\xa4type\xa7PutRows")
def test_any_bytes_are_a_request_or_a_decode_error(data: bytes) -> None:
    decode(data)


@given(request=st.sampled_from(requests_of_each_sort()), data=st.data())
def test_damaged_requests_are_requests_or_decode_errors(request: Any, data: st.DataObject) -> None:
    encoded = bytearray(msgspec.msgpack.encode(request))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    decode(bytes(encoded))


@given(st.data())
def test_enclosed_columns_come_back_as_they_were(data: st.DataObject) -> None:
    columns = {"a": data.draw(columns_of(3)), "b": data.draw(columns_of(3))}
    back = disclose(enclose(*pack(columns, narrow=True)))
    assert all(same(back[name], columns[name]) for name in columns)


@pytest.mark.parametrize("enclosed", [b"\xc1", b"\x93", enclose(*pack({"x": Column.of_texts(["ab"])}))[:-1]])
def test_enclosed_bytes_that_are_none_are_refused(enclosed: bytes) -> None:
    with pytest.raises(TransportError, match="cannot be read"):
        disclose(enclosed)
