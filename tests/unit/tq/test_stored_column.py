"""Columns as a unit holds them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tq import Column
from tq.stored_column import StoredColumn
from tq.wire import describe, unpack_stored


def stored(column: Column, *, narrow: bool = True) -> StoredColumn:
    headers, payload = describe({"a": column}, narrow=narrow)
    out = torch.empty(payload.num_bytes, dtype=torch.uint8)
    payload.write(out)
    return unpack_stored(headers, out)["a"]


def test_sizes_count_what_is_held() -> None:
    column = stored(
        Column.of_rows([torch.tensor([1, 2, 3]), torch.tensor([70_000]), torch.tensor([], dtype=torch.int64)])
    )
    assert column.values.dtype == torch.int32
    lengths = column.lengths()
    assert not isinstance(lengths, int)
    assert lengths.tolist() == [3, 1, 0]


def test_only_sequences_have_tokens() -> None:
    assert stored(Column.of_dense(torch.rand(2, 3))).has_tokens
    assert not stored(Column.of_scalars(torch.rand(2))).has_tokens
    assert not stored(Column.of_texts(["abc"])).has_tokens
    assert not stored(Column.of_dense(torch.rand(2, 3, 3))).has_tokens
    assert stored(Column.of_dense(torch.rand(2, 3, 3))).lengths() == 9


@given(rows=st.lists(st.lists(st.integers(0, 300), max_size=3), min_size=1, max_size=4))
def test_rows_are_equal_however_they_were_narrowed(rows: list[list[int]]) -> None:
    column = Column.of_rows([torch.tensor(row, dtype=torch.int64) for row in rows])
    positions = range(len(rows))
    assert stored(column).equals_rows(positions, stored(column, narrow=False), list(positions))
    longer = Column.concatenate([column, Column.of_rows([torch.tensor([2**40])])])
    assert stored(column).equals_rows(positions, stored(longer), positions)


def test_rows_differ_by_bits_shape_kind_or_dtype() -> None:
    nan = stored(Column.of_rows([torch.tensor([float("nan"), 0.0])]))
    assert nan.equals_rows([0], stored(Column.of_rows([torch.tensor([float("nan"), 0.0])])), [0])
    assert not nan.equals_rows([0], stored(Column.of_rows([torch.tensor([float("nan"), -0.0])])), [0])
    assert not nan.equals_rows([0], stored(Column.of_rows([torch.tensor([0.0, 1.0]).half()])), [0])
    assert not stored(Column.of_texts(["x"])).equals_rows([0], stored(Column.of_bytes([b"x"])), [0])
    six = torch.arange(6)
    assert not stored(Column.of_rows([six.view(2, 3)])).equals_rows([0], stored(Column.of_rows([six.view(3, 2)])), [0])
    assert not stored(Column.of_rows([six])).equals_rows([0], stored(Column.of_rows([six + 1])), [0])
    assert not stored(Column.of_rows([six])).equals_rows([0], stored(Column.of_rows([six + 1000])), [0])
