"""How rows are cut into micro-batches."""

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from tq.columns import Column, PackedBatch
from workers.rows.packed_rows import drawn_per_row, micro_batches, sample_columns, samples_of, sequences_of
from workers.settings.engines import ActorConfig


def rows_of(groups: Sequence[tuple[int, Sequence[int]]]) -> PackedBatch:
    """(prompt tokens, tokens of its responses) -> their rows; prompts differ."""
    prompts = [torch.full((p,), number) for number, (p, responses) in enumerate(groups) for _ in responses]
    responses = [torch.zeros(length, dtype=torch.int64) for _, responses in groups for length in responses]
    return samples_of(PackedBatch(tuple(range(len(prompts))), sample_columns(prompts, responses)))


def tokens_of(batch: PackedBatch, positions: Sequence[int], *, shared: bool) -> int:
    """What a forward pass computes."""
    chosen = batch.select(list(positions))
    before = sequences_of(chosen).prompt_lengths.tolist()
    prompts = [tuple(row[:size].tolist()) for row, size in zip(chosen["tokens"].rows(), before, strict=True)]
    counted = set(prompts) if shared else prompts
    return sum(map(len, counted)) + int(chosen["tokens"].lengths.sum()) - sum(before)


def test_without_a_budget_rows_are_cut_by_number() -> None:
    batch = rows_of([(3, [1, 2, 3]), (2, [1, 1])])
    assert micro_batches(batch, ActorConfig(micro_batch_size=2)) == [range(2), range(2, 4), range(4, 5)]


def test_a_group_that_fits_stays_whole_and_one_that_does_not_is_cut() -> None:
    batch = rows_of([(8, [2, 9, 4, 3]), (4, [1, 1, 1])])
    cuts = micro_batches(batch, ActorConfig(max_tokens_per_micro_batch=20))
    assert cuts == [[0, 2], [1, 3], [4, 5, 6]]
    assert [tokens_of(batch, cut, shared=True) for cut in cuts] == [14, 20, 7]


def test_a_response_beyond_the_budget_is_alone() -> None:
    batch = rows_of([(8, [30, 2]), (40, [3, 5])])
    assert micro_batches(batch, ActorConfig(max_tokens_per_micro_batch=20)) == [[0], [1], [2], [3]]


def rollouts() -> PackedBatch:
    """Three rows of 1, 3 and 2 samples, of 2, 9, 4, 3, 5 and 6 tokens; all but the first begin with the same two."""
    lengths = ([2], [9, 4, 3], [5, 6])
    begins = [
        torch.tensor([1, 1, 0])[:size] if size == 2 else torch.full((size,), 3) for row in lengths for size in row
    ]
    tokens = torch.cat(begins)
    masks = torch.cat(
        [torch.tensor([0, 1] if size == 2 else [0, 0, *[1] * (size - 2)]) for row in lengths for size in row]
    )
    per_row = torch.tensor([sum(row) for row in lengths], dtype=torch.int32)
    columns = {
        "tokens": Column(tokens, per_row),
        "sample_lengths": Column.of_rows([torch.tensor(row, dtype=torch.int32) for row in lengths]),
        "response_mask": Column(masks.to(torch.uint8), per_row),
    }
    return samples_of(PackedBatch((0, 1, 2), columns))


def test_rows_are_cut_at_the_borders_of_samples_by_tokens_alone() -> None:
    assert micro_batches(rollouts(), ActorConfig(micro_batch_size=2)) == [range(4), range(4, 6)]
    cuts = micro_batches(rollouts(), ActorConfig(max_tokens_per_micro_batch=10, shared_prompt=False))
    assert sorted(position for cut in cuts for position in cut) == list(range(6))
    assert all(tokens_of(rollouts(), cut, shared=False) <= 10 for cut in cuts) and len(cuts) == 3
    shared = micro_batches(rollouts(), ActorConfig(max_tokens_per_micro_batch=19))
    assert shared == [[0], [1, 2, 3, 4, 5]]  # 2 that they share, and 7 + 2 + 1 + 3 + 4


def test_no_rows_need_no_micro_batch() -> None:
    empty = PackedBatch((), {})
    assert micro_batches(empty, ActorConfig()) == micro_batches(empty, ActorConfig(max_tokens_per_micro_batch=9)) == []


@given(
    groups=st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(0, 20), min_size=1, max_size=6)), min_size=1),
    budget=st.integers(1, 60),
    shared=st.booleans(),
)
def test_every_row_is_in_one_micro_batch_and_those_of_several_rows_fit(
    groups: list[tuple[int, list[int]]], budget: int, shared: bool
) -> None:
    batch = rows_of(groups)
    cuts = micro_batches(batch, ActorConfig(max_tokens_per_micro_batch=budget, shared_prompt=shared))
    assert sorted(row for cut in cuts for row in cut) == list(range(len(batch)))
    for cut in cuts:
        responses = [length for length in drawn_per_row(batch.select(list(cut))).tolist() if length]
        assert len(responses) <= 1 or tokens_of(batch, cut, shared=shared) <= budget
