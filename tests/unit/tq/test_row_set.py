"""Rows as bits against a set of Python's."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tq.control.row_table import RowSet

ROWS = st.sets(st.integers(0, 1200) | st.integers(10**9, 10**9 + 600))


@given(ROWS, ROWS)
def test_equals_a_set(first: set[int], second: set[int]) -> None:
    rows = RowSet(first)
    rows.merge_rows(RowSet(second))
    assert list(rows) == sorted(first | second)
    assert len(rows) == len(first | second)
    assert bool(rows) == bool(first | second)
    assert all((row in rows) == (row in first or row in second) for row in range(1300))


@given(ROWS, ROWS)
def test_lets_go_of_rows(first: set[int], second: set[int]) -> None:
    rows = RowSet(first)
    for row in second:
        rows.discard(row)
    assert list(rows) == sorted(first - second)
    assert bool(rows) == bool(first - second)


@given(st.sets(st.integers(0, 2**63 - 1), min_size=1))
def test_parts_are_the_whole_and_a_row_is_always_in_the_same(rows: set[int]) -> None:
    parts = RowSet(rows).split_parts()
    assert sorted(row for part in parts.values() for row in part) == sorted(rows)
    assert all(list(RowSet([row]).split_parts()) == [number] for number, part in parts.items() for row in part)


def test_parts_are_few_and_neighbours_are_together() -> None:
    assert len(RowSet(range(0, 2**40, 2**28 + 1)).split_parts()) <= 256
    assert list(RowSet(range(2**16, 2**17)).split_parts()) == [1]


@given(ROWS)
def test_spans_are_the_rows_in_runs(rows: set[int]) -> None:
    spans = RowSet(rows).list_spans()
    assert [row for first, end in spans for row in range(first, end)] == sorted(rows)
    assert all(first < end for first, end in spans)
    assert all(end < first for (_, end), (first, _) in pairwise(spans))
    assert list(RowSet.of_spans(spans)) == sorted(rows)


def test_neighbours_over_many_chunks_are_one_run() -> None:
    assert RowSet(range(100, 100_000)).list_spans() == [(100, 100_000)]
