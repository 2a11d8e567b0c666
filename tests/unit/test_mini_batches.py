"""Which rounds of a step make which update."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.batch import PackedBatch
from workers.config import ActorConfig
from workers.mini_batches import Round, StepRounds, mini_batches


def make_rounds(totals: list[int]) -> list[Round]:
    return [Round(PackedBatch((number,), {}), [range(1)], total) for number, total in enumerate(totals)]


def updates(config: ActorConfig, totals: list[int], seed: int = 0) -> list[list[int]]:
    """Return the rounds of each update of a step, in order, as a trainer sees them."""
    rounds = StepRounds(config, step_rows=sum(totals))
    first = [one for one in make_rounds(totals) if rounds.add(one)]
    made = [first, *rounds.later_mini_batches(seed=seed, step=3)]
    return [[one.batch.indices[0] for one in update] for update in made]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.data())
def test_mini_batches_hold_every_round_once_and_differ_by_less_than_a_round(
    count: int, size: int, data: st.DataObject
) -> None:
    totals: list[int] = []
    while sum(totals) < count * size:
        totals.append(data.draw(st.integers(1, min(size, count * size - sum(totals)))))
    cuts = mini_batches(totals, size=size)
    assert len(cuts) == count
    assert [position for cut in cuts for position in cut] == list(range(len(totals)))
    assert all(cut for cut in cuts)
    for cut in cuts:
        assert abs(sum(totals[k] for k in cut) - size) < size


def test_rounds_of_equal_size_make_equal_mini_batches() -> None:
    assert [list(cut) for cut in mini_batches([4] * 6, size=8)] == [[0, 1], [2, 3], [4, 5]]


def test_rows_that_never_came_cost_their_mini_batch_alone() -> None:
    assert [list(cut) for cut in mini_batches([4, 4, 4], size=8)] == [[0, 1], [2]]
    assert mini_batches([], size=8) == []


def test_one_update_trains_every_round_as_it_comes() -> None:
    assert updates(ActorConfig(), [2, 3, 1]) == [[0, 1, 2]]


def test_the_first_mini_batch_is_trained_as_it_comes_and_the_others_after_the_last_round() -> None:
    assert updates(ActorConfig(num_updates_per_step=3), [4] * 6) == [[0, 1], [2, 3], [4, 5]]


def test_later_passes_go_in_an_order_of_their_own() -> None:
    config = ActorConfig(num_updates_per_step=2, ppo_epochs=3)
    made = updates(config, [4] * 8)
    passes = [made[k] + made[k + 1] for k in (0, 2, 4)]
    assert passes[0] == list(range(8))
    assert all(sorted(each) == passes[0] for each in passes)
    assert all(one != other for one, other in pairwise(passes))
    assert made == updates(config, [4] * 8) != updates(config, [4] * 8, seed=1)


@pytest.mark.parametrize("passes", [2, 3])
def test_passes_without_mini_batches_update_once_each(passes: int) -> None:
    made = updates(ActorConfig(ppo_epochs=passes), [4] * 4)
    assert [sorted(each) for each in made] == [[0, 1, 2, 3]] * passes
