"""What a step adds up, against its definitions."""

import statistics

import pytest
import torch

from tq.batch import Column, PackedBatch
from workers.algorithms.losses import LossCounts
from workers.step_totals import StepTotals

LOSS_TERMS = ("tokens", "loss", "kl", "drift", "ratio", "ratio_squared", "clipped", "corrected", "entropy")
REWARDS, LENGTHS = (1.0, 0.25, 0.5), (3, 1, 2)


def make_batch(rows: list[int]) -> PackedBatch:
    versions = [torch.tensor([3, 4, 4], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)]
    columns = {
        "prompts": Column.of_rows([torch.zeros(2, dtype=torch.int64)] * 3),
        "responses": Column.of_rows([torch.zeros(length, dtype=torch.int64) for length in LENGTHS]),
        "versions": Column.of_rows([*versions, torch.tensor([4, 4], dtype=torch.int32)]),
        "rewards": Column.of_scalars(torch.tensor(REWARDS)),
        "correct": Column.of_scalars(torch.tensor([True, False, False])),
        "truncated": Column.of_scalars(torch.tensor([False, False, True])),
    }
    return PackedBatch((0, 1, 2), columns).select(rows)


def totals_of(rows: list[int], tokens: int) -> StepTotals:
    totals = StepTotals()
    totals.add_batch(make_batch(rows), LossCounts(tokens, len(rows), len(rows)), step=5, admitted_step=6)
    totals.add_loss({name: torch.tensor(float(tokens)) for name in LOSS_TERMS})
    return totals


def test_metrics_of_several_ranks_follow_their_definitions() -> None:
    totals = StepTotals.merged([totals_of([0, 2], 5), totals_of([1], 1), StepTotals()])
    assert totals.counts == LossCounts(tokens=6, sequences=3, answers=3)
    metrics = totals.metrics(scale=1 / 6)
    assert metrics["reward_mean"] == pytest.approx(statistics.fmean(REWARDS))
    assert metrics["reward_std"] == pytest.approx(statistics.pstdev(REWARDS))
    assert metrics["response_tokens_std"] == pytest.approx(statistics.pstdev(LENGTHS))
    assert (metrics["samples"], metrics["train_tokens"]) == (3, 12)
    assert metrics["accuracy"] == metrics["truncated_fraction"] == pytest.approx(1 / 3)
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (pytest.approx(1 / 3), 1)
    assert metrics["loss"] == metrics["kl"] == metrics["entropy"] == metrics["ratio_mean"] == pytest.approx(1.0)


def test_samples_of_later_and_earlier_steps_are_counted() -> None:
    totals = StepTotals()
    for rows, admitted_step in (([0], 4), ([1], 5), ([2], 6), ([0], 6)):
        totals.add_batch(make_batch(rows), LossCounts(1, 1, 1), step=5, admitted_step=admitted_step)
    totals.add_loss({name: torch.tensor(1.0) for name in LOSS_TERMS})
    metrics = totals.metrics(scale=1.0)
    assert (metrics["late_fraction"], metrics["early_fraction"]) == (0.25, 0.5)


def test_effective_sample_size_is_the_share_of_tokens_that_count() -> None:
    totals = totals_of([0], 4)
    assert totals.metrics(scale=1.0)["effective_sample_size"] == 1.0
    totals.sums |= {"loss/ratio": 2.0 + 1.0 + 1.0 + 0.0, "loss/ratio_squared": 4.0 + 1.0 + 1.0}
    assert totals.metrics(scale=1.0)["effective_sample_size"] == pytest.approx(16 / (4 * 6))
