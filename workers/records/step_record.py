"""The records of training; actor rank 0 writes them.

updates.jsonl    a line per optimizer update, written at once: an independent count
ledger.jsonl     lines of a finished step: replaced groups, then trained ones
metrics.jsonl    a line per finished step, after its ledger lines
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from asyncflow.errors import TrainingDiverged
from asyncflow.json_lines import JsonLines, LineReader
from asyncflow.run_files import LEDGER_FILE, METRICS_FILE, UPDATES_FILE
from tq.columns import PackedBatch
from tq.refill import Refill
from workers.algorithms.parts import LossCounts
from workers.engines.base import StepStats
from workers.rank.context import WorkerContext
from workers.records.ledger import refill_lines
from workers.records.log_prob_gap import LogProbGap
from workers.records.outside_metrics import OutsideMetrics
from workers.records.samples import TrainedRows
from workers.records.step_totals import StepTotals, UpdateTotals, numbers
from workers.rewards.base import FailedShare
from workers.settings.dataflow import OBSERVERS, SERVICES, roles_on_device

# A larger share of responses without a reward is more than chance, such as an occasional timeout.
_UNFAIR_SHARE = 0.1
# Beyond this the policy is far from its reference (nats per token).
FAR_KL = 1.0


def far_from_reference(kl: float) -> str:
    """Return a warning about a policy that is far from its reference; "" if it is not."""
    if kl <= FAR_KL:
        return ""
    return (
        f"kl {kl:.3g}: the policy is this many nats per token away from the reference; beyond {FAR_KL:g} it may be "
        f"useless; look at samples/, and try a smaller actor.lr or a larger algorithm.kl_coef"
    )


def check_reference(step: int, kl: float, most: float | None) -> None:
    """Raise TrainingDiverged if `kl` (nats per token) exceeds `algorithm.max_kl` or is not a number; None: no limit."""
    # `not kl <= most` also holds for NaN.
    if most is not None and not kl <= most:
        raise TrainingDiverged(
            f"step {step}: kl {kl:.3g}, more nats per token away from the reference than algorithm.max_kl {most:g}, so "
            f"the policy is useless; resume from an earlier checkpoint with a smaller actor.lr or a "
            f"larger algorithm.kl_coef, or raise algorithm.max_kl"
        )


class TrainedModel(StrEnum):
    POLICY = "policy"
    CRITIC = "critic"


@dataclass(frozen=True)
class Update:
    """One optimizer update, the same on all ranks."""

    totals: UpdateTotals  # Sums over all ranks
    loss: float  # After scaling
    stats: StepStats


@dataclass
class UpdateLog:
    next_update: UpdateTotals = field(default_factory=UpdateTotals)  # This rank's sums for the next update
    made: list[Update] = field(default_factory=list)  # Updates so far

    def add_update(self, totals: UpdateTotals, *, scale: float, stats: StepStats) -> None:
        self.made.append(Update(totals, totals.loss * scale, stats))
        self.next_update = UpdateTotals()

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics of the updates; all 0 if there were none."""
        made = self.made
        # An update in which no response had a weight counts, but stays out of the means: its loss and gradient are 0
        # whatever the policy does.
        counting = [update for update in made if update.totals.sequences]
        return {
            "num_updates": len(made),
            "loss": fmean(update.loss for update in counting) if counting else 0.0,
            "grad_norm": fmean(update.stats.grad_norm for update in counting) if counting else 0.0,
            "grad_clip_fraction": fmean(update.stats.clipped for update in counting) if counting else 0.0,
            "lr": made[-1].stats.lr if made else 0.0,
        }


@dataclass
class StepRecord:
    """One step in training. "Rank, then all": this rank's value until `merge_parts`, that of all ranks after it."""

    step: int
    # `started_at`, `first_batch_at`: monotonic seconds; the second is None before the first round
    started_at: float = field(default_factory=time.monotonic)
    first_batch_at: float | None = None
    num_rows: int = 0  # Rows that this rank got
    ledger: list[dict[str, Any]] = field(default_factory=list)  # Lines of this rank's groups, then all
    totals: StepTotals = field(default_factory=StepTotals)  # Sums; rank, then all
    # Between the generating engine's log-probabilities and ours; rank, then all
    gap: LogProbGap = field(default_factory=LogProbGap)
    gap_complaint: str = ""  # What is wrong with the gap of all ranks; "": nothing
    # `policy`, `critic`: their updates; the critic's only if it is trained here
    policy: UpdateLog = field(default_factory=UpdateLog)
    critic: UpdateLog = field(default_factory=UpdateLog)
    sync_exposed_s: float = 0.0  # Seconds that publishing held up this rank, including the wait before the update
    sync_bytes: int = 0  # Bytes of one version to each receiver; rank, then all
    checkpoint_stall_s: float = 0.0  # Seconds that saving held up this rank since the previous step
    checkpoint_failures: int = 0  # Failed saves since this rank started
    stopped: bool = False  # A stop came instead of publishing; rank, then any
    save_wanted: bool = False  # The queue is full of trained rows that wait for a checkpoint; rank, then any
    critic_report: Mapping[str, float] = field(default_factory=dict)  # Metrics of a critic in a role of its own
    kept: list[TrainedRows] = field(default_factory=list)  # Rows of this rank that are written down
    # Results of losses that are still on the device; see `fetch`
    on_device: list[tuple[TrainedModel, LossCounts, Mapping[str, Tensor], Mapping[str, Tensor]]] = field(
        default_factory=list
    )

    def note_arrival(self) -> None:
        if self.first_batch_at is None:
            self.first_batch_at = time.monotonic()

    def add_rows(
        self, batch: PackedBatch, lines: list[dict[str, Any]], *, admitted_step: int, rewarded: bool = True
    ) -> None:
        """Count rows that this rank got, all admitted for one step, and keep their ledger lines; `rewarded`: one
        without a reward is a failure."""
        self.num_rows += len(batch)
        self.ledger += lines
        self.totals.add_batch(batch, step=self.step, admitted_step=admitted_step, rewarded=rewarded)

    def add_loss(
        self, model: TrainedModel, counts: LossCounts, stats: Mapping[str, Tensor], gap: Mapping[str, Tensor]
    ) -> None:
        """Count a trained micro-batch, in any pass, without waiting for the device. `gap`, of the comparison with the
        generating engine, may be empty."""
        self.on_device.append((model, counts, stats, gap))

    def fetch(self) -> None:
        """Wait for the losses of all micro-batches so far and count their results: one transfer per update."""
        waiting, self.on_device = self.on_device, []
        found = numbers([each for _, _, stats, gap in waiting for each in (stats, gap)])
        for (model, counts, _, _), sums, gap in zip(waiting, found[::2], found[1::2], strict=True):
            self.log_of_model(model).next_update.add_micro_batch(counts, sums["loss"])
            self.totals.add_loss(sums, "loss" if model is TrainedModel.POLICY else "critic")
            self.gap.add_gap(LogProbGap.from_stats(gap))

    def log_of_model(self, model: TrainedModel) -> UpdateLog:
        return self.policy if model is TrainedModel.POLICY else self.critic

    @property
    def num_scored(self) -> int:
        """Rows of this rank that have a reward."""
        return int(self.totals.sums.get("scored", 0))

    @property
    def num_failed(self) -> tuple[int, int]:
        """Among this rank's rows: failed rollouts, and responses that could not be scored."""
        sums = self.totals.sums
        return int(sums.get("failed_rollouts", 0)), int(sums.get("failed_rewards", 0))

    @property
    def num_updates(self) -> int:
        return max(len(self.policy.made), len(self.critic.made))

    def make_part(self) -> dict[str, Any]:
        """Return what the other ranks need of a published step; see `merge_parts`."""
        return {
            "ledger": self.ledger,
            "totals": vars(self.totals),
            "gap": vars(self.gap),
            "sync_bytes": self.sync_bytes,
            "stopped": self.stopped,
            "save_wanted": self.save_wanted,
        }

    def training_metrics(self) -> dict[str, float]:
        """Return the metrics of the updates, with the critic's under names of their own."""
        responses = sum(update.totals.responses for update in self.policy.made)
        masked = responses - sum(update.totals.sequences for update in self.policy.made)
        critic = self.critic_metrics() if self.critic.made else self.critic_report
        return {**self.policy.to_metrics(), "masked_fraction": masked / max(1, responses), **critic}

    def critic_metrics(self) -> dict[str, float]:
        updates = {f"critic_{name}": value for name, value in self.critic.to_metrics().items()}
        return {**updates, **self.totals.critic_metrics()}

    def merge_parts(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Merge the parts of all ranks. All then hold the same record, so they continue or stop together."""
        self.ledger = [line for part in parts for line in part["ledger"]]
        self.totals = StepTotals.merge_parts(StepTotals(**part["totals"]) for part in parts)
        self.gap = LogProbGap.merge_parts(LogProbGap(**part["gap"]) for part in parts)
        self.sync_bytes = sum(part["sync_bytes"] for part in parts)
        self.stopped = any(part["stopped"] for part in parts)
        self.save_wanted = any(part["save_wanted"] for part in parts)


@dataclass
class LengthMean:
    """Mean length of all responses trained so far, over all starts of the run."""

    # `samples`, `tokens`: their number and total length
    samples: float = 0
    tokens: float = 0.0

    @staticmethod
    def so_far(metrics: Path) -> "LengthMean":
        """Return the mean over the steps in `metrics.jsonl`, which may be missing."""
        mean = LengthMean()
        for step in LineReader(metrics).read():
            mean.add_step(step["response_tokens_mean"], step["samples"])
        return mean

    def add_step(self, step_mean: float, samples: float) -> float:
        """Count a step's responses; returns the step's mean minus the mean so far, this step included (tokens)."""
        self.samples += samples
        self.tokens += step_mean * samples
        # A schedule that trains short responses earlier is biased towards them at first, and against them once the long
        # ones arrive. Nothing is discarded and lateness is bounded, so this averages to about 0 over a run.
        return step_mean - self.tokens / self.samples


class StepRecorder:
    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._lengths = LengthMean.so_far(context.run_dir / METRICS_FILE)
        self._metrics = JsonLines(context.run_dir / METRICS_FILE)
        self._ledger = JsonLines(context.run_dir / LEDGER_FILE)
        self._updates = JsonLines(context.run_dir / UPDATES_FILE)
        self._outside = OutsideMetrics(context.sealed_store())
        self._unwritten_refills: list[Refill] = []
        self._complained: set[str] = set()
        self._follows_reference = context.config.algorithm.follows_reference
        self._failed_rewards = FailedShare(_UNFAIR_SHARE)
        # Replaced groups reported to this recorder.
        self.num_refills = 0
        self._last_at = time.monotonic()
        self._paused_s = context.paused_s  # until then
        self._waiting: dict[str, list[tuple[float, float]]] = {}
        self._idle: dict[str, float] = {}

    def update_made(self, step: int, number: int, optimizer_updates: int) -> None:
        """Write an optimizer update down, whatever becomes of its step: its number in the step, from 1, and the
        engine's total."""
        line = {
            "lineage": self._context.job.lineage,
            "step": step,
            "update": number,
            "optimizer_updates": optimizer_updates,
            "pid": os.getpid(),
            "time_s": self._time_s(),
        }
        self._updates.write([line])

    def add_refills(self, refills: Sequence[Refill]) -> None:
        """Add groups that were replaced and not reported before; the next step's ledger lines name them."""
        self.num_refills += len(refills)
        self._unwritten_refills += refills

    def write(self, record: StepRecord) -> None:
        now, paused_s = time.monotonic(), self._context.paused_s - self._paused_s
        self._paused_s += paused_s
        # A pause lies inside the wait for the first rows, since everything before it was trained.
        step_time_s, self._last_at = now - self._last_at - paused_s, now
        waited_s = max(0.0, (record.first_batch_at or now) - record.started_at - paused_s)
        totals = record.totals.to_metrics()
        tokens_per_s = totals["train_tokens"] / step_time_s
        metrics = {
            "step": record.step,
            "lineage": self._context.job.lineage,
            "time_s": self._time_s(),
            "step_time_s": round(step_time_s, 4),
            **totals,
            **record.training_metrics(),
            **record.gap.to_metrics(),
            "staleness_bound": self._context.config.schedule.staleness_bound,
            "length_bias": self._lengths.add_step(totals["response_tokens_mean"], totals["samples"]),
            "train_tokens_per_s": round(tokens_per_s, 1),
            "train_tokens_per_s_per_device": round(tokens_per_s / self._num_devices(), 1),
            "sync_exposed_s": round(record.sync_exposed_s, 4),
            "sync_bytes": record.sync_bytes,
            "checkpoint_stall_s": round(record.checkpoint_stall_s, 4),
            "checkpoint_failures": record.checkpoint_failures,
            "first_micro_batch_wait_s": round(waited_s, 4),
            "idle_fraction": self._idle_fractions(paused_s),
            "histograms": record.totals.to_histograms(),
            **self._outside.read_new(),
            **({"paused_s": round(paused_s, 4)} if paused_s else {}),
        }
        lineage = self._context.job.lineage
        refills, self._unwritten_refills = self._unwritten_refills, []
        filtered = sum(refill.cause.filtered for refill in refills)
        metrics |= {"filtered_groups": filtered, "dead_letter_groups": len(refills) - filtered}
        replaced = refill_lines(refills, step=record.step, lineage=lineage, time_s=self._time_s())
        # The ledger first: a step in metrics.jsonl always has its ledger lines.
        self._ledger.write(replaced + record.ledger)
        self._metrics.write([metrics])
        failed = self._failed_rewards.add_step(int(totals.get("reward_failures", 0)), int(totals["samples"]))
        complaints = {
            "responses": record.totals.find_complaint(),
            "rewards": failed and f"{failed} responses could not be scored; what is left may be no fair sample",
            "gap": record.gap_complaint,
            "kl": "" if self._follows_reference else far_from_reference(record.totals.kl),
        }
        new = {kind: text for kind, text in complaints.items() if text and kind not in self._complained}
        if new:  # warn of each kind of trouble once only
            self._complained |= new.keys()
            self._context.warn_user(f"step {record.step}: {'; '.join(new.values())}")

    def sync_files(self) -> None:
        for file in (self._updates, self._ledger, self._metrics):
            file.sync()

    def close(self) -> None:
        for file in (self._updates, self._ledger, self._metrics):
            file.close()

    def _time_s(self) -> float:
        return round(self._context.elapsed_s, 3)

    def _num_devices(self) -> int:
        with_model = self._context.config.reward.model is not None
        roles = set(roles_on_device(reward_model=with_model)) - OBSERVERS
        roles -= {*self._context.config.guests}  # they have the actor's devices
        return sum(len(gang.devices) for gang in self._context.job.gangs if gang.role in roles)

    def _idle_fractions(self, paused_s: float) -> dict[str, float]:
        """Return, per role, the share of time that its ranks waited since the last step in which they reported, without
        the `paused_s` seconds of a pause, in which all waited."""
        for role, ranks in self._context.waiting_seconds().items():
            before = self._waiting.get(role)
            if role in SERVICES:
                continue
            # Without earlier reports of the same ranks there is no interval yet.
            if before is None or len(before) != len(ranks):
                self._waiting[role] = ranks
                continue
            elapsed = sum(new[0] - old[0] - paused_s for new, old in zip(ranks, before, strict=True))
            if elapsed > 0:  # else no rank of the role has reported since the last step
                waited = sum(new[1] - old[1] - paused_s for new, old in zip(ranks, before, strict=True))
                self._idle[role] = round(min(1.0, max(0.0, waited / elapsed)), 4)
                self._waiting[role] = ranks
        return dict(self._idle)
