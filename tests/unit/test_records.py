"""What the ranks tell each other about a published step."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncflow.errors import TrainingDiverged
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tq.refill import Refill, RemovalCause
from workers.algorithms.parts import LossCounts
from workers.engines.base import StepStats
from workers.records.log_prob_gap import GapWatch, LogProbGap
from workers.records.step_record import LengthMean, StepRecord, StepRecorder, check_reference
from workers.records.step_totals import StepTotals


def test_all_ranks_hold_the_same_after_joining_and_stop_together() -> None:
    """A dead receiver may be seen by one sender a step earlier than by the other; none may go on alone."""
    records = [StepRecord(3, ledger=[{"group": rank}], sync_bytes=10 + rank, stopped=rank == 1) for rank in range(3)]
    for rank, record in enumerate(records):
        record.totals = StepTotals({"samples": 1.0}, staleness_max=rank)
    parts = [record.make_part() for record in records]
    for record in records:
        record.merge_parts(parts)
    assert [record.stopped for record in records] == [True] * 3
    assert [record.sync_bytes for record in records] == [33] * 3
    assert records[2].totals == StepTotals({"samples": 3.0}, staleness_max=2)
    assert records[0].ledger == [{"group": 0}, {"group": 1}, {"group": 2}]


def test_without_a_stop_all_go_on() -> None:
    record = StepRecord(1)
    record.merge_parts([record.make_part(), StepRecord(1).make_part()])
    assert not record.stopped


def test_figures_of_several_updates_are_means_over_them() -> None:
    record = StepRecord(1)
    for loss_sum, scale, norm, lr in ((4.0, 0.5, 1.0, 1e-3), (2.0, 0.25, 3.0, 2e-3)):
        record.policy.next_update.add_micro_batch(LossCounts(8, 3, 4), loss_sum)
        record.policy.add_update(record.policy.next_update, scale=scale, stats=StepStats(norm, lr, clipped=norm > 2))
    assert record.policy.next_update.counts == LossCounts(0, 0, 0)
    metrics = record.training_metrics()
    assert metrics["num_updates"] == 2 and metrics["grad_clip_fraction"] == 0.5
    assert metrics["loss"] == pytest.approx((2.0 + 0.5) / 2)
    assert math.isclose(metrics["grad_norm"], 2.0) and metrics["lr"] == 2e-3
    assert metrics["masked_fraction"] == pytest.approx(2 / 8)


def test_an_update_without_a_response_that_counts_is_counted_but_is_no_part_of_the_means() -> None:
    record = StepRecord(1)
    for counts, loss_sum, norm in ((LossCounts(8, 3, 4), 4.0, 1.0), (LossCounts(0, 0, 0), 0.0, 0.0)):
        record.policy.next_update.add_micro_batch(counts, loss_sum)
        record.policy.add_update(record.policy.next_update, scale=0.5, stats=StepStats(norm, 1e-3))
    metrics = record.training_metrics()
    assert (metrics["num_updates"], metrics["loss"], metrics["grad_norm"]) == (2, 2.0, 1.0)


def test_length_bias_is_the_step_s_mean_against_all_so_far() -> None:
    lengths = LengthMean()
    assert [lengths.add_step(10.0, 4), lengths.add_step(40.0, 4), lengths.add_step(25.0, 8)] == [0.0, 15.0, 0.0]


def test_length_bias_goes_on_where_a_resumed_run_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert LengthMean.so_far(path) == LengthMean()
    path.write_text("".join(json.dumps({"response_tokens_mean": mean, "samples": 4}) + "\n" for mean in (10.0, 40.0)))
    assert LengthMean.so_far(path).add_step(55.0, 4) == pytest.approx(20.0)


ASYNC = ("schedule.mode=async", "schedule.max_staleness=1")


def gap_watch(*settings: str) -> GapWatch:
    return GapWatch(load_config(find_recipe("quickstart"), overrides=[*ASYNC, *settings]))


def recorder(run_dir: Path, *, lineage: int = 1, warn: Callable[[str], None] = print) -> StepRecorder:
    context: Any = SimpleNamespace(
        run_dir=run_dir,
        config=load_config(find_recipe("quickstart"), overrides=ASYNC),
        elapsed_s=0.0,
        job=SimpleNamespace(lineage=lineage, gangs=[SimpleNamespace(role="actor", devices=("cpu",))]),
        waiting_seconds=dict,
        paused_s=0.0,
        sealed_store=lambda: SimpleNamespace(check=lambda keys: False),
        warn_user=warn,
    )
    return StepRecorder(context)


def test_more_than_a_tenth_of_rewards_that_failed_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    steps = recorder(tmp_path, warn=told.append)
    for step, failed in ((1, 10.0), (2, 92.0), (3, 500.0)):
        record = finished_step(step)
        record.totals = StepTotals(defaultdict(float, samples=512.0, failed_rewards=failed))
        steps.write(record)
        assert [text for text in told if "could not be scored" in text] == told, told
        assert len(told) == (step == 3), "102 of the last 1,024 are not too many"
    assert told[0].startswith("step 3: ") and "592 of the last 1,024 responses could not be scored" in told[0]


def finished_step(step: int) -> StepRecord:
    record = StepRecord(step, ledger=[{"step": step, "group": step - 1}])
    record.totals = StepTotals(defaultdict(float, samples=2.0))
    record.policy.next_update.add_micro_batch(LossCounts(8, 2, 2), 1.0)
    record.policy.add_update(record.policy.next_update, scale=1.0, stats=StepStats(1.0, 1e-3))
    return record


def test_groups_among_dead_letters_are_named_once_in_the_step_that_is_finished_next(tmp_path: Path) -> None:
    records = recorder(tmp_path)
    refill = Refill(6, 4, 3, RemovalCause("judge", 5))
    records.add_refills([])
    records.write(finished_step(1))
    records.add_refills([refill])
    assert records.num_refills == 1
    records.write(finished_step(2))
    records.write(finished_step(3))
    records.close()
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [(line["step"], line["group"]) for line in lines] == [(1, 0), (2, 3), (2, 1), (3, 2)]
    named = {name: lines[1][name] for name in ("lineage", "admitted_step", "dead_letter", "replaced_by", "task")}
    assert named == {"lineage": 1, "admitted_step": 4, "dead_letter": True, "replaced_by": 6, "task": "judge"}


def gap_of(total: float, age: int = 0, move: float | None = None) -> LogProbGap:
    """The gap of 1,000 tokens whose entropy is a nat."""
    sums = dict.fromkeys(("k3", "signed", "surprise"), 0.0) | {"tokens": 1000.0, "entropy": 1000.0, "total": total}
    sums |= dict.fromkeys(("ratio", "ratio_squared", "surprise_squared"), 1000.0) | {"largest": 1.0}
    sums["squared"] = total**2 / 1000  # every difference is the same
    return LogProbGap({str(age): sums}, {} if move is None else {"tokens": 10.0, "total": 10 * move})


def test_user_is_told_once_when_the_engines_disagree(tmp_path: Path) -> None:
    told: list[str] = []
    records, watch = recorder(tmp_path, warn=told.append), gap_watch()
    for step, total in ((1, 0.3), (2, 390.0), (3, 390.0)):
        record = finished_step(step)
        record.gap_complaint = watch.judge_gap(gap_of(total))
        records.write(record)
    records.close()
    assert len(told) == 1 and told[0].startswith("step 2: the generating engine's log-probabilities are 0.39 nats from")


def test_tokens_of_older_weights_are_judged_by_how_far_the_trainer_moved_since(tmp_path: Path) -> None:
    told: list[str] = []
    records, watch = recorder(tmp_path, warn=told.append), gap_watch()
    for step, total, move in ((1, 100.0, None), (2, 100.0, 0.04), (3, 100.0, 0.03)):
        assert not told
        record = finished_step(step)
        record.gap = gap_of(total, age=1, move=move)
        record.gap_complaint = watch.judge_gap(record.gap)
        records.write(record)
    records.close()
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [one["policy_move"] for one in metrics] == [None, 0.04, 0.03]
    assert [one["mismatch/age_1_mean"] for one in metrics] == [0.1, 0.1, 0.1]
    assert told[0].startswith("step 3: the generating engine's log-probabilities are 0.1 nats from the trainer's on av")
    assert "for tokens of weights 1 versions older, where at most 0.094 is expected" in told[0]


def test_engines_that_disagree_in_two_steps_in_a_row_end_the_run() -> None:
    wrong, right = gap_of(390.0), gap_of(0.3)
    watch = gap_watch()
    for step, gap in enumerate((right, wrong, right, wrong), start=1):
        watch.check(step, watch.judge_gap(gap))
    complaint = watch.judge_gap(wrong)
    expected = (
        r"^step 5: the generating engine's .* 0.39 nats .*, as in the step before; .* algorithm.engine_gap: warn$"
    )
    with pytest.raises(TrainingDiverged, match=expected):
        watch.check(5, complaint)
    assert TrainingDiverged.final  # not started again: it would do the same


def test_a_run_with_a_rougher_engine_on_purpose_is_only_warned() -> None:
    watch = gap_watch("algorithm.engine_gap=warn")
    for step in range(1, 5):
        complaint = watch.judge_gap(gap_of(390.0))
        assert complaint.startswith("the generating engine's log-probabilities")
        watch.check(step, complaint)


def test_a_policy_far_from_its_reference_is_told_once_and_ends_the_run_beyond_the_limit(tmp_path: Path) -> None:
    told: list[str] = []
    records = recorder(tmp_path, warn=told.append)
    for step, kl in ((1, 0.9), (2, 1.5), (3, 2.0)):
        record = finished_step(step)
        record.totals.sums |= {"loss/kl": 10 * kl, "loss/tokens": 10.0}
        records.write(record)
        check_reference(step, record.totals.kl, 5.0)
    records.close()
    assert len(told) == 1 and told[0].startswith(
        "step 2: kl 1.5: the policy is this many nats per token away from the ref"
    )
    for kl in (4.6e8, math.nan):
        with pytest.raises(
            TrainingDiverged, match=r"^step 4: kl .*, more nats .* than algorithm.max_kl 5, so the polic"
        ):
            check_reference(4, kl, 5.0)
        check_reference(4, kl, None)


def test_update_is_written_down_before_anybody_knows_whether_its_step_will_be_finished(tmp_path: Path) -> None:
    records = recorder(tmp_path)
    records.update_made(7, 1, 13)
    line = json.loads((tmp_path / "updates.jsonl").read_text())
    assert {name: line[name] for name in ("lineage", "step", "update", "optimizer_updates", "pid")} == {
        "lineage": 1, "step": 7, "update": 1, "optimizer_updates": 13, "pid": os.getpid(),
    }  # fmt: skip
    records.close()


def test_a_pause_is_no_part_of_a_steps_time_nor_of_idle_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("workers.records.step_record.time.monotonic", lambda: now[0])
    steps = recorder(tmp_path)
    context: Any = steps._context
    for step, (took_s, paused_s, waited_s) in enumerate(((10.0, 0.0, 4.0), (70.0, 60.0, 65.0), (10.0, 0.0, 5.0)), 1):
        record = finished_step(step)
        record.started_at, record.first_batch_at = now[0], now[0] + waited_s
        now[0] += took_s
        context.paused_s += paused_s
        waits = waited_s if step == 1 else waited_s + context.waiting_seconds()["actor"][0][1]
        context.waiting_seconds = lambda waits=waits: {"actor": [(now[0], waits)]}
        steps.write(record)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step_time_s"] for line in lines] == [10.0, 10.0, 10.0]
    assert [line["first_micro_batch_wait_s"] for line in lines] == [4.0, 5.0, 5.0]
    assert [line.get("paused_s") for line in lines] == [None, 60.0, None]
    assert [line["idle_fraction"].get("actor") for line in lines] == [None, 0.5, 0.5]
