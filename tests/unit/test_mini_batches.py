"""Which rounds of a step make which update."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.columns import PackedBatch
from workers.rows.micro_batches import MiniBatchAssigner
from workers.settings.engines import ActorConfig
from workers.trainer.batching import RankRound, StepRounds


def make_rounds(totals: list[int]) -> list[RankRound]:
    return [RankRound(PackedBatch((number,), {}), [range(1)], total) for number, total in enumerate(totals)]


def updates(config: ActorConfig, totals: list[int], step: int = 1, *, streams: bool = True) -> list[list[int]]:
    """Return the rounds of each update of a step, in order, as a trainer sees them."""
    rounds = StepRounds(config, step_rows=sum(totals), seed=f"0/{step}", streams=streams)
    first = [one for one in make_rounds(totals) if rounds.add_round(one)]
    rest, *later = rounds.mini_batches(lambda batches: batches)
    made = [[*first, *rest], *later]
    return [[one.batch.indices[0] for one in update] for update in made]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 9), st.data())
def test_mini_batches_hold_every_round_once_and_differ_by_less_than_a_round(
    count: int, size: int, seed: int, data: st.DataObject
) -> None:
    totals: list[int] = []
    while sum(totals) < count * size:
        totals.append(data.draw(st.integers(1, min(size, count * size - sum(totals)))))
    assigner = MiniBatchAssigner(num_mini_batches=count, size=size, seed=str(seed))
    rows = [0] * count
    for total in totals:
        rows[assigner.assign_round(total)] += total
    assert all(rows) and all(abs(mine - size) < max(totals) for mine in rows)


@pytest.mark.parametrize("streams", [True, False])
def test_mini_batches_do_not_follow_arrival(streams: bool) -> None:
    """Short responses arrive first: each of 8 rounds must be in the first update about every second step."""
    config = ActorConfig(num_mini_batches=2)
    made = [updates(config, [4] * 8, step, streams=streams) for step in range(200)]
    assert all(len(update) == 4 for step in made for update in step)
    assert all(60 < sum(position in first for first, _ in made) < 140 for position in range(8))


def test_one_update_trains_every_round_as_it_comes() -> None:
    assert updates(ActorConfig(), [2, 3, 1]) == [[0, 1, 2]]


def test_the_first_mini_batch_is_trained_as_it_comes_and_the_others_after_the_last_round() -> None:
    config = ActorConfig(num_mini_batches=3)
    rounds = StepRounds(config, step_rows=24, seed="0/1")
    at_once = [one.batch.indices[0] for one in make_rounds([4] * 6) if rounds.add_round(one)]
    rest, *others = rounds.mini_batches(lambda batches: batches)
    later = [[one.batch.indices[0] for one in update] for update in others]
    assert not rest
    assert [len(update) for update in (at_once, *later)] == [2, 2, 2]
    assert [at_once, *later] == updates(config, [4] * 6) == updates(config, [4] * 6, streams=False)


def test_every_pass_and_every_step_is_assigned_anew() -> None:
    config = ActorConfig(num_mini_batches=2, ppo_epochs=3)
    made = updates(config, [4] * 8)
    passes = [made[k : k + 2] for k in (0, 2, 4)]
    assert all(sorted(one + other) == list(range(8)) for one, other in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert made == updates(config, [4] * 8) != updates(config, [4] * 8, step=2)


@pytest.mark.parametrize("passes", [2, 3])
def test_passes_without_mini_batches_update_once_each(passes: int) -> None:
    made = updates(ActorConfig(ppo_epochs=passes), [4] * 4)
    assert [sorted(each) for each in made] == [[0, 1, 2, 3]] * passes
