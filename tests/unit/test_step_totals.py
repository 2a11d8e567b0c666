"""What a step adds up, against its definitions."""

import math
import statistics

import pytest
import torch

from tq.columns import Column, PackedBatch
from workers.algorithms.parts import LossCounts
from workers.records.step_totals import StepTotals, UpdateTotals, numbers

REWARDS, LENGTHS = (1.0, 0.25, 0.5), (3, 1, 2)


def make_batch(rows: list[int]) -> PackedBatch:
    versions = [torch.tensor([3, 4, 4], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)]
    columns = {
        "tokens": Column.of_rows([torch.zeros(2 + length, dtype=torch.int64) for length in LENGTHS]),
        "versions": Column.of_rows([*versions, torch.tensor([4, 4], dtype=torch.int32)]),
        "rewards": Column.of_scalars(torch.tensor(REWARDS)),
        "correct": Column.of_scalars(torch.tensor([True, False, False])),
        "truncated": Column.of_scalars(torch.tensor([False, False, True])),
    }
    return PackedBatch((0, 1, 2), columns).select(rows)


def loss_stats(tokens: int) -> dict[str, torch.Tensor]:
    names = (
        "loss",
        "kl",
        "kl_clamped_fraction",
        "behaviour_kl",
        "old_policy_kl",
        "ratio_mean",
        "ratio_squared",
        "clip_fraction",
        "corrected_fraction",
        "entropy",
    )
    return {"tokens": torch.tensor(tokens)} | {name: torch.tensor(float(tokens)) for name in names}


def totals_of(rows: list[int], tokens: int, passes: int = 1) -> StepTotals:
    totals = StepTotals()
    totals.add_batch(make_batch(rows), step=5, admitted_step=6)
    for _ in range(passes):
        totals.add_loss(*numbers([loss_stats(tokens)]))
    return totals


def test_metrics_of_several_ranks_follow_their_definitions() -> None:
    totals = StepTotals.merge_parts([totals_of([0, 2], 5), totals_of([1], 1), StepTotals()])
    metrics = totals.to_metrics()
    assert metrics["reward_mean"] == pytest.approx(statistics.fmean(REWARDS))
    assert metrics["reward_std"] == pytest.approx(statistics.pstdev(REWARDS))
    assert metrics["response_tokens_std"] == pytest.approx(statistics.pstdev(LENGTHS))
    assert (metrics["samples"], metrics["train_tokens"]) == (3, 12)
    assert metrics["accuracy"] == metrics["truncated_fraction"] == pytest.approx(1 / 3)
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (pytest.approx(1 / 3), 1)
    assert metrics["kl_clamped_fraction"] == pytest.approx(1.0)
    assert metrics["kl"] == metrics["entropy"] == metrics["ratio_mean"] == pytest.approx(1.0)


def test_a_step_of_which_nothing_was_scored_has_no_reward_and_where_nothing_is_scored_no_failure() -> None:
    batch = make_batch([0, 1, 2])
    unscored = PackedBatch((0, 1, 2), {**batch.columns, "rewards": Column.of_scalars(torch.full((3,), math.nan))})
    for rewarded, failures in ((True, 3), (False, 0)):
        totals = StepTotals()
        totals.add_batch(unscored, step=5, admitted_step=5, rewarded=rewarded)
        metrics = totals.to_metrics()
        assert [metrics[name] for name in ("reward_mean", "reward_std", "accuracy")] == [None] * 3
        assert metrics["reward_failures"] == failures


def test_histograms_of_several_ranks_add_up() -> None:
    totals = StepTotals.merge_parts([totals_of([0, 2], 5), totals_of([1], 1), totals_of([1], 1), StepTotals()])
    assert totals.to_histograms() == {
        "reward": {"1": 1, "0.5": 1, "0.25": 2},
        "response_tokens": {"3": 1, "2": 1, "1": 2},
        "staleness": {"1": 1, "0": 3},
    }


def test_histograms_round_to_two_digits_and_know_one_zero() -> None:
    totals, batch = StepTotals(), make_batch([0, 1, 2])
    rewards = Column.of_scalars(torch.tensor([-0.0, 0.0, -1234.5]))
    totals.add_batch(PackedBatch((0, 1, 2), {**batch.columns, "rewards": rewards}), step=5, admitted_step=5)
    assert totals.to_histograms()["reward"] == {"0": 2, "-1200": 1}


def test_samples_of_later_and_earlier_steps_are_counted() -> None:
    totals = StepTotals()
    for rows, admitted_step in (([0], 4), ([1], 5), ([2], 6), ([0], 6)):
        totals.add_batch(make_batch(rows), step=5, admitted_step=admitted_step)
    totals.add_loss(*numbers([loss_stats(1)]))
    metrics = totals.to_metrics()
    assert (metrics["late_fraction"], metrics["early_fraction"]) == (0.25, 0.5)


def test_effective_sample_size_is_the_share_of_tokens_that_count() -> None:
    totals = totals_of([0], 4)
    assert totals.to_metrics()["effective_sample_size"] == 1.0
    totals.sums |= {"loss/ratio_mean": 2.0 + 1.0 + 1.0 + 0.0, "loss/ratio_squared": 4.0 + 1.0 + 1.0}
    assert totals.to_metrics()["effective_sample_size"] == pytest.approx(16 / (4 * 6))


def test_what_a_loss_reports_is_a_metric_under_its_own_name_per_token() -> None:
    totals = totals_of([0, 2], 5)
    totals.add_loss({"tokens": 5.0, "my_margin": 20.0})
    metrics = totals.to_metrics()
    assert metrics["my_margin"] == pytest.approx(20.0 / 10)
    assert not {"loss", "tokens", "ratio_squared"} & metrics.keys()
    totals.add_loss({"samples": 900.0})
    assert totals.to_metrics()["samples"] == 2, "a name of the step's own stays what it is"


def test_samples_count_once_and_tokens_in_every_pass() -> None:
    once, twice = totals_of([0, 2], 5).to_metrics(), totals_of([0, 2], 5, passes=2).to_metrics()
    assert once == twice, "means over tokens of both passes, which are the same ones"
    assert twice["samples"] == 2 and twice["train_tokens"] == 9


def test_an_update_counts_what_all_ranks_trained_for_it() -> None:
    ranks = [UpdateTotals(), UpdateTotals(), UpdateTotals()]
    ranks[0].add_micro_batch(LossCounts(5, 2, 2), 1.5)
    ranks[0].add_micro_batch(LossCounts(1, 1, 2), 0.5)
    ranks[1].add_micro_batch(LossCounts(3, 1, 1), -1.0)
    whole = UpdateTotals.merge_parts(ranks)
    assert whole.counts == LossCounts(tokens=9, sequences=4, responses=5)
    assert whole.loss == pytest.approx(1.0)


def test_responses_without_a_reward_are_counted_and_left_out_of_rewards() -> None:
    totals = StepTotals()
    columns = {
        "rewards": Column.of_scalars(torch.tensor([1.0, math.nan, 0.5])),
        "correct": Column.of_scalars(torch.tensor([True, False, False])),
        "reward_parts": Column.of_values([{"format": 1.0}, {}, {"format": 0.0, "length": 2.0}]),
    }
    totals.add_batch(make_batch([0, 1, 2]).with_columns(columns), step=5, admitted_step=5)
    metrics = StepTotals.merge_parts([totals, StepTotals()]).to_metrics()
    assert (metrics["reward_mean"], metrics["reward_std"], metrics["accuracy"]) == (0.75, 0.25, 0.5)
    assert (metrics["reward_failures"], metrics["samples"]) == (1, 3)
    assert (metrics["reward/format_mean"], metrics["reward/length_mean"]) == (0.5, 2.0)
    assert not [name for name in metrics if name.startswith("source/")]


def test_rollouts_without_a_drawn_token_failed_and_are_no_failures_of_the_reward() -> None:
    totals = StepTotals()
    columns = {
        "rewards": Column.of_scalars(torch.tensor([math.nan, math.nan, 0.0])),
        "correct": Column.of_scalars(torch.zeros(3, dtype=torch.bool)),
        "versions": Column.of_rows([torch.tensor([4] * number, dtype=torch.int32) for number in (2, 0, 0)]),
    }
    totals.add_batch(make_batch([0, 1, 2]).with_columns(columns), step=5, admitted_step=5)
    assert (totals.to_metrics()["reward_failures"], totals.to_metrics()["rollout_failures"]) == (1, 2)


def test_each_source_of_a_mixture_has_means_of_its_own_over_all_ranks() -> None:
    ranks = [StepTotals(), StepTotals()]
    for rank, (rewards, sources) in enumerate([([1.0, math.nan], ["math", "code"]), ([0.0, 0.5], ["math", "code"])]):
        columns = {
            "rewards": Column.of_scalars(torch.tensor(rewards)),
            "correct": Column.of_scalars(torch.tensor([reward == 1 for reward in rewards])),
            "reward_parts": Column.of_values([{"format": 1.0}, {"turns": 2.0 + rank}]),
            "sources": Column.of_texts(sources),
        }
        ranks[rank].add_batch(make_batch([0, 1]).with_columns(columns), step=5, admitted_step=5)
    metrics = StepTotals.merge_parts(ranks).to_metrics()
    found = {name.removeprefix("source/"): value for name, value in metrics.items() if name.startswith("source/")}
    assert found == {
        "math/samples": 2, "math/reward_mean": 0.5, "math/accuracy": 0.5, "math/reward/format_mean": 1.0,
        "code/samples": 2, "code/reward_mean": 0.5, "code/accuracy": 0.0, "code/reward/turns_mean": 2.5,
    }  # fmt: skip


def responses(*drawn: list[int], cut: bool = False) -> StepTotals:
    """What a rank adds up of single turns behind a prompt of two tokens."""
    rows = [torch.tensor([7, 7, *tokens]) for tokens in drawn]
    masks = [torch.tensor([False, False, *[True] * len(tokens)]) for tokens in drawn]
    columns = {
        "tokens": Column.of_rows(rows),
        "response_mask": Column.of_rows(masks),
        "sample_lengths": Column.of_rows([torch.tensor([len(row)]) for row in rows]),
        "versions": Column.of_rows([torch.tensor([4] * len(tokens), dtype=torch.int32) for tokens in drawn]),
        "rewards": Column.of_scalars(torch.ones(len(drawn))),
        "correct": Column.of_scalars(torch.tensor([True] * len(drawn))),
        "truncated": Column.of_scalars(torch.tensor([cut] * len(drawn))),
    }
    totals = StepTotals()
    totals.add_batch(PackedBatch(tuple(range(len(drawn))), columns), step=5, admitted_step=5)
    return totals


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        ([responses([3, 1], [4, 1]), responses([5, 1])], ""),
        ([responses([3, 4], [4, 4], cut=True), responses([5, 4], cut=True)], "all 3 responses are truncated"),
        ([responses([3, 4], [4, 4], cut=True), responses([5, 1])], ""),
        ([responses([1], [1]), responses([1])], "all 3 responses are empty"),
        ([responses([1], [1]), responses([3, 1])], ""),
        ([responses([3, 1], [3, 1]), responses([3, 1])], "all 3 responses are the same"),
        ([responses([3, 1], [3, 1]), responses([4, 1], [4, 1])], ""),
        ([responses([3, 1])], ""),
        ([StepTotals()], ""),
    ],
)
def test_responses_that_are_all_alike_are_told(ranks: list[StepTotals], complaint: str) -> None:
    whole = StepTotals.merge_parts(ranks)
    found = whole.find_complaint()
    assert (found[: len(complaint)], bool(found)) == (complaint, bool(complaint))
    if whole.sums:
        assert not [name for name in whole.to_metrics() if "different" in name]
