"""Packed columns: rows of every kind and rank come back as they were given."""

import datetime
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import ConfigError, TransportError
from tq.columns import Column, ColumnKind, column_of

ROWS = st.lists(st.lists(st.integers(-100, 100), max_size=5), min_size=1, max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def tensors(rows: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.int64) for row in rows]


@given(rows=ROWS)
def test_rows_come_back_as_they_were_packed(rows: list[list[int]]) -> None:
    column = Column.of_rows(tensors(rows))
    assert [row.tolist() for row in column.rows()] == rows
    assert column.lengths.dtype == torch.int32
    assert column.values.numel() == sum(map(len, rows))


@given(shapes=st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=5))
def test_rows_of_any_shape_come_back(shapes: list[tuple[int, ...]]) -> None:
    rows = [torch.rand(shape) for shape in shapes]
    column = Column.of_rows(rows)
    assert column.rank == 3
    assert column.lengths.tolist() == [math.prod(shape) for shape in shapes]
    assert all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(column.rows(), rows, strict=True))


@given(rows=ROWS, data=st.data())
def test_select_takes_rows_in_the_order_asked(rows: list[list[int]], data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    selected = Column.of_rows(tensors(rows)).select(positions)
    assert [row.tolist() for row in selected.rows()] == [rows[i] for i in positions]
    assert selected.values.dtype == torch.int64


@pytest.mark.parametrize("length", [0, 1, 7, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool, torch.uint8])
def test_select_copies_short_and_long_rows_of_every_width(length: int, dtype: torch.dtype) -> None:
    rows = [torch.randint(0, 2, (length + i % 2,)).to(dtype) for i in range(6)]
    selected = Column.of_rows(rows).select([5, 0, 1, 3, 3])
    assert all(torch.equal(a, rows[i]) for a, i in zip(selected.rows(), (5, 0, 1, 3, 3), strict=True))
    assert selected.values.dtype == dtype


@given(rows=ROWS, data=st.data(), listed=st.booleans())
def test_neighbours_are_a_view(rows: list[list[int]], data: st.DataObject, listed: bool) -> None:
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    column = Column.of_rows(tensors(rows))
    selected = column.select(list(range(start, stop)) if listed else range(start, stop))
    assert [row.tolist() for row in selected.rows()] == rows[start:stop]
    if selected.values.numel():
        assert selected.values.untyped_storage().data_ptr() == column.values.untyped_storage().data_ptr()


@pytest.mark.parametrize("positions", [[2, 0], range(1, 3), range(2, 0, -1), [], range(2, 2)])
def test_selected_rows_keep_their_shapes(positions: Any) -> None:
    images = [torch.rand(2, 3), torch.rand(1, 4), torch.rand(0, 2)]
    selected = Column.of_rows(images).select(positions)
    assert selected.rank == 2
    assert all(torch.equal(a, images[i]) for a, i in zip(selected.rows(), positions, strict=True))
    assert Column.of_scalars(torch.arange(3)).select(positions).values.tolist() == list(positions)


@given(rows=ROWS)
def test_extremes_are_those_of_each_row(rows: list[list[int]]) -> None:
    low, high = Column.of_rows(tensors(rows)).extremes()
    assert low.tolist() == [min(row, default=0) for row in rows]
    assert high.tolist() == [max(row, default=0) for row in rows]


@given(texts=st.lists(st.text(), min_size=1, max_size=6))
def test_texts_come_back(texts: list[str]) -> None:
    assert Column.of_texts(texts).texts() == texts
    assert Column.of_texts(texts).select([0]).texts() == texts[:1]


@given(rows=st.lists(st.binary(), max_size=6))
def test_bytes_come_back(rows: list[bytes]) -> None:
    assert Column.of_bytes(rows).bytes_rows() == rows


@given(values=st.lists(JSON, max_size=4))
def test_json_values_come_back(values: list[Any]) -> None:
    assert Column.of_values(values).objects() == values


@pytest.mark.parametrize(
    "value", [float("nan"), [math.inf], (1, 2), {1: 2}, b"x", {1}, datetime.date(2026, 1, 1), torch.zeros(1), object()]
)
def test_value_that_json_cannot_hold_is_refused_by_row(value: Any) -> None:
    with pytest.raises(ConfigError, match="row 1 cannot be stored as json"):
        Column.of_values([{"a": 1}, value])


def test_value_nested_without_end_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ConfigError, match="row 0"):
        Column.of_values([value])


def test_rows_of_the_wrong_type_are_refused_by_row() -> None:
    with pytest.raises(ConfigError, match="row 1 cannot be stored as text"):
        Column.of_texts(["a", 5])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="row 0 cannot be stored as text"):
        Column.of_texts(["\ud800"])
    with pytest.raises(ConfigError, match="row 0 cannot be stored as bytes"):
        Column.of_bytes([3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="row 1 is torch.int64 of rank 1, but row 0 is torch.float32 of rank 1"):
        Column.of_rows([torch.zeros(1), torch.zeros(1, dtype=torch.int64)])
    with pytest.raises(ConfigError, match="row 1 is torch.float32 of rank 2"):
        Column.of_rows([torch.zeros(1), torch.zeros(1, 1)])
    with pytest.raises(ConfigError, match="no rows"):
        Column.of_rows([])


def test_text_that_is_no_utf8_names_its_row() -> None:
    column = Column.of_bytes([b"ok", b"\xff"])
    with pytest.raises(TransportError, match="row 1 does not hold text"):
        Column(column.values, column.lengths, ColumnKind.TEXT).texts()
    with pytest.raises(TransportError, match="row 0 does not hold json"):
        Column(column.values, column.lengths, ColumnKind.JSON).objects()


def test_scalars_have_length_one_and_no_dimensions() -> None:
    column = Column.of_scalars(torch.tensor([1.0, 2.0]))
    assert column.lengths.tolist() == [1, 1]
    assert [row.shape for row in column.rows()] == [(), ()]
    assert column.dense().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 2, 2), (0,), (0, 4), (3, 0)])
def test_dense_rows_come_back_dense(shape: tuple[int, ...]) -> None:
    dense = torch.rand(shape)
    column = Column.of_dense(dense)
    assert (len(column), column.rank) == (shape[0], len(shape) - 1)
    assert torch.equal(column.dense(), dense) or shape[0] == 0
    assert column.values.data_ptr() == dense.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(column.rows(), dense, strict=True))


def test_rows_of_different_shapes_are_not_dense() -> None:
    with pytest.raises(ConfigError, match=r"row 0 has shape \[2\], row 1 has \[1\]"):
        Column.of_rows([torch.zeros(2), torch.zeros(1)]).dense()
    with pytest.raises(ConfigError, match="rank 0"):
        Column.of_dense(torch.tensor(1))


def test_columns_of_one_type_are_joined() -> None:
    images = [torch.rand(2, 3), torch.rand(1, 1)]
    joined = Column.concatenate([Column.of_rows(images[:1]), Column.of_rows(images[1:])])
    assert all(torch.equal(a, b) for a, b in zip(joined.rows(), images, strict=True))
    with pytest.raises(ConfigError, match="text torch.uint8 of rank 1 and bytes"):
        Column.concatenate([Column.of_texts(["x"]), Column.of_bytes([b"x"])])


def test_columns_are_guessed_from_what_users_have() -> None:
    column = Column.of_texts(["a"])
    assert column_of(column) is column
    assert column_of(torch.zeros(2, 3)).rank == 1
    assert column_of(np.arange(3)).dense().tolist() == [0, 1, 2]
    assert column_of([torch.zeros(2), torch.zeros(1)]).lengths.tolist() == [2, 1]
    assert column_of([np.zeros(2, dtype=np.float32)]).values.dtype == torch.float32
    assert column_of(["a", "b"]).kind is ColumnKind.TEXT
    assert column_of([b"a", bytearray(b"b")]).bytes_rows() == [b"a", b"b"]
    assert column_of([{"answer": 3}, [1], None]).objects() == [{"answer": 3}, [1], None]
    assert column_of([1.5, 2]).objects() == [1.5, 2]
    for data in (3, "text", {"a": 1}, []):
        with pytest.raises(ConfigError):
            column_of(data)
    with pytest.raises(ConfigError, match="row 1"):
        column_of(["a", torch.zeros(1)])


@pytest.mark.parametrize("rows", [1, 2])
def test_sparse_tensor_makes_no_column(rows: int) -> None:
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(ConfigError, match="sparse tensor; give a dense one"):
        column_of(sparse if rows == 1 else [sparse, sparse])
