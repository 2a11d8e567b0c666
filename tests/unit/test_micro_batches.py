"""How rows are cut into micro-batches."""

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from tq.batch import PackedBatch
from workers.config import ActorConfig
from workers.tasks.column_tasks import sequences_of
from workers.tasks.rollouts import drawn_per_row, sample_columns, samples_of
from workers.trainer.batching import micro_batches


def rows_of(groups: Sequence[tuple[int, Sequence[int]]]) -> PackedBatch:
    """(prompt tokens, tokens of its answers) -> their rows; prompts differ."""
    prompts = [torch.full((p,), number) for number, (p, answers) in enumerate(groups) for _ in answers]
    responses = [torch.zeros(length, dtype=torch.int64) for _, answers in groups for length in answers]
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


def test_an_answer_beyond_the_budget_is_alone() -> None:
    batch = rows_of([(8, [30, 2]), (40, [3, 5])])
    assert micro_batches(batch, ActorConfig(max_tokens_per_micro_batch=20)) == [[0], [1], [2], [3]]


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
        answers = [length for length in drawn_per_row(batch.select(list(cut))).tolist() if length]
        assert len(answers) <= 1 or tokens_of(batch, cut, shared=shared) <= budget
