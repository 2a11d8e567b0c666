"""Packed batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tq import Column, PackedBatch

ROWS = st.lists(st.lists(st.integers(-100, 100), max_size=5), min_size=1, max_size=8)


def tensors(rows: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.int64) for row in rows]


@given(rows=ROWS)
def test_rows_come_back_as_they_were_packed(rows: list[list[int]]) -> None:
    column = Column.of_rows(tensors(rows))
    assert [row.tolist() for row in column.rows()] == rows
    assert column.lengths.dtype == torch.int32
    assert column.values.numel() == sum(map(len, rows))


@given(rows=ROWS, data=st.data())
def test_select_takes_rows_in_the_order_asked(rows: list[list[int]], data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    selected = Column.of_rows(tensors(rows)).select(positions)
    assert [row.tolist() for row in selected.rows()] == [rows[i] for i in positions]
    assert selected.values.dtype == torch.int64


@given(rows=ROWS, data=st.data())
def test_range_of_neighbours_is_a_view(rows: list[list[int]], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    column = Column.of_rows(tensors(rows))
    selected = column.select(range(start, stop))
    assert [row.tolist() for row in selected.rows()] == rows[start:stop]
    if selected.values.numel():
        assert selected.values.untyped_storage().data_ptr() == column.values.untyped_storage().data_ptr()


@given(rows=ROWS)
def test_extremes_are_those_of_each_row(rows: list[list[int]]) -> None:
    low, high = Column.of_rows(tensors(rows)).extremes()
    assert low.tolist() == [min(row, default=0) for row in rows]
    assert high.tolist() == [max(row, default=0) for row in rows]


@given(texts=st.lists(st.text(), min_size=1, max_size=6))
def test_texts_come_back(texts: list[str]) -> None:
    assert Column.of_texts(texts).texts() == texts
    assert Column.of_texts(texts).select([0]).texts() == texts[:1]


def test_scalars_have_length_one() -> None:
    column = Column.of_scalars(torch.tensor([1.0, 2.0]))
    assert column.lengths.tolist() == [1, 1]


def test_column_of_another_number_of_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="column a: 1 rows, not 2"):
        PackedBatch((0, 1), {"a": Column.of_texts(["x"])})


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_concatenate_joins_in_order_and_select_undoes_it(sizes: list[int]) -> None:
    parts, start = [], 0
    for size in sizes:
        indices = tuple(range(start, start + size))
        column = Column.of_rows([torch.arange(i % 3) for i in indices])
        parts.append(PackedBatch(indices, {"a": column}, tuple(i // 2 for i in indices)))
        start += size
    joined = PackedBatch.concatenate(parts)
    assert joined.indices == tuple(range(start))
    assert joined.groups == tuple(i // 2 for i in range(start))
    last = joined.select(range(start - sizes[-1], start))
    assert last.indices == parts[-1].indices
    assert torch.equal(last["a"].values, parts[-1]["a"].values)
