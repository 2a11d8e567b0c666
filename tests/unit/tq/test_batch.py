"""Packed batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import ConfigError
from tq import Column, PackedBatch


def test_column_of_another_number_of_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="column a: 1 rows, not 2"):
        PackedBatch((0, 1), {"a": Column.of_texts(["x"])})


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_concatenate_joins_in_order_and_select_undoes_it(sizes: list[int]) -> None:
    parts, start = [], 0
    for size in sizes:
        indices = tuple(range(start, start + size))
        columns = {
            "a": Column.of_rows([torch.arange(i % 3) for i in indices]),
            "image": Column.of_rows([torch.full((i % 3, 2), i) for i in indices]),
            "note": Column.of_values([{"i": i} for i in indices]),
        }
        parts.append(PackedBatch(indices, columns, tuple(i // 2 for i in indices)))
        start += size
    joined = PackedBatch.concatenate(parts)
    assert joined.indices == tuple(range(start))
    assert joined.groups == tuple(i // 2 for i in range(start))
    last = joined.select(range(start - sizes[-1], start))
    assert last.indices == parts[-1].indices
    assert torch.equal(last["a"].values, parts[-1]["a"].values)
    assert [row.shape for row in joined["image"].rows()] == [(i % 3, 2) for i in range(start)]
    assert last["note"].objects() == [{"i": i} for i in last.indices]


def test_batches_whose_columns_differ_in_type_are_not_joined() -> None:
    whole, real = (
        PackedBatch((0,), {"a": Column.of_rows([torch.zeros(1, dtype=d)])}) for d in (torch.int64, torch.half)
    )
    with pytest.raises(ConfigError, match="float16"):
        PackedBatch.concatenate([whole, real])
