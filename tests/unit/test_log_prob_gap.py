"""The gap between the log-probabilities of the generating and the training engine."""

import math

import pytest
import torch

from tq.columns import Column, PackedBatch
from workers.records.step_totals import numbers
from workers.trainer.log_prob_gap import Comparison, LogProbGap


def batch(versions: list[list[int]], log_probs: list[list[float]]) -> PackedBatch:
    columns = {
        "versions": Column.of_rows([torch.tensor(row, dtype=torch.int32) for row in versions]),
        "rollout_log_probs": Column.of_rows([torch.tensor(row) for row in log_probs]),
    }
    return PackedBatch(tuple(range(len(versions))), columns)


def gap_of(comparison: Comparison) -> LogProbGap:
    return LogProbGap.of(*numbers([comparison.stats]))


def ignore_entropy(log_probs_A: torch.Tensor, entropy_A: torch.Tensor) -> torch.Tensor:
    return log_probs_A.sum()


def test_only_tokens_of_the_weights_that_the_step_found_are_compared() -> None:
    rows = batch([[3, 4], [4, 4]], [[-1.0, -2.0], [-3.0, -4.0]])
    comparison = Comparison.of(rows, step=5)
    trained = torch.tensor([-9.0, -2.5, -3.0, -4.25], requires_grad=True)
    total = comparison.before(ignore_entropy)(trained, torch.zeros(4))
    assert total.item() == trained.sum().item() and total.requires_grad
    metrics = gap_of(comparison).metrics()
    assert metrics["rollout_log_prob_diff_mean"] == pytest.approx(0.25)
    assert metrics["rollout_log_prob_diff_max"] == pytest.approx(0.5)


def test_tokens_of_older_weights_alone_give_no_figure() -> None:
    comparison = Comparison.of(batch([[3, 3]], [[-1.0, -2.0]]), step=5)
    comparison.before(ignore_entropy)(torch.tensor([-1.5, -2.0]), torch.zeros(2))
    metrics = gap_of(comparison).metrics()
    assert metrics["rollout_log_prob_diff_mean"] is None and metrics["rollout_log_prob_diff_max"] is None
    assert LogProbGap().metrics() == {"rollout_log_prob_diff_mean": None, "rollout_log_prob_diff_max": None}


def test_every_age_has_its_mismatch() -> None:
    rows = batch([[4, 2], [2, 2]], [[-1.0, -2.0], [-3.0, -0.5]])
    trained = torch.tensor([-1.25, -1.0, -3.5, -0.5])
    comparisons = [Comparison.of(rows.select(part), step=5) for part in ([0], [1])]
    for comparison, part in zip(comparisons, trained.split(2), strict=True):
        comparison.before(ignore_entropy)(part, torch.zeros(2))
    metrics = LogProbGap.merged(gap_of(comparison) for comparison in comparisons).metrics()
    ratios = [math.exp(1.0), math.exp(-0.5), 1.0]
    assert {name: value for name, value in metrics.items() if name.startswith("mismatch/")} == {
        "mismatch/age_0_k3": pytest.approx(math.exp(-0.25) - 1 + 0.25),
        "mismatch/age_0_max": pytest.approx(0.25),
        "mismatch/age_0_ess": pytest.approx(1.0),
        "mismatch/age_2_k3": pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 3),
        "mismatch/age_2_max": pytest.approx(1.0),
        "mismatch/age_2_ess": pytest.approx(sum(ratios) ** 2 / (3 * sum(ratio**2 for ratio in ratios))),
    }


def test_ranks_are_added_up() -> None:
    one, other = ({"0": {"tokens": 2, "total": total, "largest": total / 2}} for total in (0.2, 0.6))
    whole = LogProbGap.merged([LogProbGap(one), LogProbGap(), LogProbGap(other)])
    assert whole.mean == pytest.approx(0.2) and whole.ages["0"]["largest"] == 0.3
