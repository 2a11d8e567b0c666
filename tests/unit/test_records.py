"""What the ranks tell each other about a published step."""

import json
import math
from pathlib import Path

import pytest

from workers.algorithms.losses import LossCounts
from workers.engines.base import StepStats
from workers.records import LengthMean, StepRecord
from workers.step_totals import StepTotals


def test_all_ranks_hold_the_same_after_joining_and_stop_together() -> None:
    """A dead receiver may be seen by one sender a step earlier than by the other; none may go on alone."""
    records = [StepRecord(3, ledger=[{"group": rank}], sync_bytes=10 + rank, stopped=rank == 1) for rank in range(3)]
    for rank, record in enumerate(records):
        record.totals = StepTotals({"samples": 1.0}, staleness_max=rank)
    shares = [record.share() for record in records]
    for record in records:
        record.join(shares)
    assert [record.stopped for record in records] == [True] * 3
    assert [record.sync_bytes for record in records] == [33] * 3
    assert records[2].totals == StepTotals({"samples": 3.0}, staleness_max=2)
    assert records[0].ledger == [{"group": 0}, {"group": 1}, {"group": 2}]


def test_without_a_stop_all_go_on() -> None:
    record = StepRecord(1)
    record.join([record.share(), StepRecord(1).share()])
    assert not record.stopped


def test_figures_of_several_updates_are_means_over_them() -> None:
    record = StepRecord(1)
    for loss_sum, scale, norm, lr in ((4.0, 0.5, 1.0, 1e-3), (2.0, 0.25, 3.0, 2e-3)):
        record.next_update.add(LossCounts(8, 3, 4), loss_sum)
        record.add_update(record.next_update, scale=scale, stats=StepStats(norm, lr))
    assert record.next_update.counts == LossCounts(0, 0, 0)
    metrics = record.training_metrics()
    assert metrics["num_updates"] == 2
    assert metrics["loss"] == pytest.approx((2.0 + 0.5) / 2)
    assert math.isclose(metrics["grad_norm"], 2.0) and metrics["lr"] == 2e-3
    assert metrics["masked_fraction"] == pytest.approx(2 / 8)


def test_length_bias_is_the_step_s_mean_against_all_so_far() -> None:
    lengths = LengthMean()
    assert [lengths.add(10.0, 4), lengths.add(40.0, 4), lengths.add(25.0, 8)] == [0.0, 15.0, 0.0]


def test_length_bias_goes_on_where_a_resumed_run_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert LengthMean.so_far(path) == LengthMean()
    path.write_text("".join(json.dumps({"response_tokens_mean": mean, "samples": 4}) + "\n" for mean in (10.0, 40.0)))
    assert LengthMean.so_far(path).add(55.0, 4) == pytest.approx(20.0)
