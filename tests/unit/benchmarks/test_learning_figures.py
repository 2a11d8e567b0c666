"""The statistics of `benchmarks/learning.py`."""

import learning
import pytest


def runs_of(accuracies: list[float]) -> list[list[dict[str, float]]]:
    return [[{"accuracy": value, "staleness_mean": 0.5}] * learning.LAST_STEPS for value in accuracies]


def test_differences_are_points_with_welchs_interval() -> None:
    figures = learning.figures_of({"sync": runs_of([0.98, 0.99, 1.0]), "async1": runs_of([0.96, 0.98, 0.97])})
    assert figures["points_vs_sync_async1"] == pytest.approx(-2.0)
    # t(4 degrees of freedom, 97.5 %) = 2.776; both variances are 1e-4
    assert figures["points_interval_async1"] == pytest.approx(100 * 2.776 * (2e-4 / 3) ** 0.5, rel=0.01)
    assert figures["worst_points_vs_sync"] == figures["points_vs_sync_async1"]


def test_one_seed_says_nothing_about_chance() -> None:
    figures = learning.figures_of({"sync": runs_of([0.9]), "async1": runs_of([0.9])})
    assert figures["points_interval_async1"] == float("inf")
