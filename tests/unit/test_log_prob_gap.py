"""The gap between the log-probabilities of the generating and the training engine."""

import pytest
import torch

from tq.batch import Column, PackedBatch
from workers.trainer.log_prob_gap import Comparison, LogProbGap


def batch(versions: list[list[int]], log_probs: list[list[float]]) -> PackedBatch:
    columns = {
        "versions": Column.of_rows([torch.tensor(row, dtype=torch.int32) for row in versions]),
        "rollout_log_probs": Column.of_rows([torch.tensor(row) for row in log_probs]),
    }
    return PackedBatch(tuple(range(len(versions))), columns)


def ignore_entropy(log_probs_A: torch.Tensor, entropy_A: torch.Tensor) -> torch.Tensor:
    return log_probs_A.sum()


def test_only_tokens_of_the_weights_that_the_step_found_are_compared() -> None:
    rows = batch([[3, 4], [4, 4]], [[-1.0, -2.0], [-3.0, -4.0]])
    comparison = Comparison.of(rows, step=5)
    assert comparison is not None
    trained = torch.tensor([-9.0, -2.5, -3.0, -4.25], requires_grad=True)
    total = comparison.before(ignore_entropy)(trained, torch.zeros(4))
    assert total.item() == trained.sum().item() and total.requires_grad
    assert comparison.gap().metrics() == {
        "rollout_log_prob_diff_mean": pytest.approx(0.25),
        "rollout_log_prob_diff_max": pytest.approx(0.5),
    }


def test_tokens_of_older_weights_alone_give_no_figure() -> None:
    assert Comparison.of(batch([[3, 3]], [[-1.0, -2.0]]), step=5) is None
    assert LogProbGap().metrics() == {"rollout_log_prob_diff_mean": None, "rollout_log_prob_diff_max": None}


def test_ranks_are_added_up() -> None:
    whole = LogProbGap.merged([LogProbGap(2, 0.2, 0.15), LogProbGap(), LogProbGap(2, 0.6, 0.5)])
    assert whole.metrics()["rollout_log_prob_diff_mean"] == pytest.approx(0.2)
    assert whole.largest == 0.5
