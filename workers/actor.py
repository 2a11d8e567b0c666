"""The actor loop: for every step, train micro-batches as they arrive, update once, publish weights, record, save.

next step -> rounds of (batch -> advantages -> micro-batches -> forward_backward) -> step
          -> publish weights -> ack rows -> ledger, metrics -> checkpoint -> next step
"""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import get_default_backend_for_device

from asyncflow.errors import WeightSyncError
from tq.batch import Column, PackedBatch
from tq.client.dataloader import StreamingDataLoader
from weightsync.version import Version
from workers.checkpoint import Checkpointer
from workers.context import WorkerContext
from workers.engines.load import load_train_engine
from workers.gather import gather_json
from workers.ledger import check_staleness, ledger_lines
from workers.model_files import model_fingerprint
from workers.objective import algorithm_of
from workers.packing import sequences_of
from workers.records import StepRecord, StepRecorder
from workers.reference import Reference, saved_reference
from workers.step_totals import StepTotals
from workers.tasks import launched_tasks
from workers.weight_path import open_sender

logger = logging.getLogger(__name__)

STOP_GRACE_S = 15.0
"""How long weights that could not be published wait for the stop that the launcher sends when an agent died (s)."""


def run_actor(context: WorkerContext) -> None:
    """Train until the last step or a stop; save what was completed."""
    backend = get_default_backend_for_device(context.device)
    dist.init_process_group(backend, store=context.group_store(), rank=context.rank, world_size=context.gang.num_ranks)
    actor = Actor(context)
    actor.train()
    actor.close()
    dist.destroy_process_group()


class Actor:
    """One rank of the training gang."""

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        self._context = context
        self._config = config
        self._timeline = context.timeline
        self._engine = load_train_engine(config, device=context.device)
        self._checkpointer = Checkpointer(
            context.run_dir, keep_last=config.checkpoint.keep_last, export_hf=config.checkpoint.export_hf
        )
        if context.job.resume_from:
            self._checkpointer.restore(self._engine, Path(context.job.resume_from))
        self._task = next(task for task in launched_tasks(context.config, context.job) if task.role == "actor")
        self._algorithm = algorithm_of(config)
        self._reference = None
        if "ref_log_probs" in self._task.fused:
            self._reference = Reference(context)
        self._completed = self._saved = context.start_step
        self._recorder = StepRecorder(context) if context.rank == 0 else None
        self._keeps_rows = context.rank == 0 and config.tq.retain_until_checkpoint
        self._sender = open_sender(context, self._engine.shards())
        self._client = context.queue_client()
        self._loader = StreamingDataLoader(
            self._client,
            self._task.name,
            self._task.inputs,
            first_partition=context.start_step + 1,
            last_partition=context.job.last_step,
            rows_per_round=max(config.actor.micro_batch_size, config.schedule.n_samples_per_prompt),
            rank=context.rank,
            num_ranks=context.gang.num_ranks,
            timeout_s=config.tq.request_timeout_s,
        )

    def train(self) -> None:
        """Run every step; a stop abandons the one in progress and saves the last completed one."""
        self._publish(self._completed)
        while step := self._loader.next_partition():
            record = self._train_step(step)
            if record is None:
                break
            held_up_s = self._publish(step)
            record.stopped = held_up_s is None
            record.sync_exposed_s += held_up_s or 0.0
            self._finish_step(record)
            if record.stopped:
                break
            due = self._config.checkpoint.interval and step % self._config.checkpoint.interval == 0
            if due or record.save_wanted:
                self._save()
        self._save()
        if self._context.rank == 0 and self._completed >= self._context.job.last_step:
            self._context.mark_done()
            self._client.stop()

    def close(self) -> None:
        """Leave queue and weight groups."""
        self._loader.close()
        self._sender.close()
        if self._reference is not None:
            self._reference.close()
        self._client.close()
        if self._recorder is not None:
            self._recorder.close()

    def _train_step(self, step: int) -> StepRecord | None:
        record = StepRecord(step)
        self._context.report("waiting for rows", step=step)
        rounds = iter(self._loader)
        while (batch := self._next_round(rounds, step)) is not None:
            record.arrived()
            self._context.report("training", f"step {step}, {record.num_rows + len(batch)} answers", step=step)
            self._train_round(batch, record)
        if self._loader.stopped:
            self._engine.zero_grad()
            return None
        with self._timeline.span("wait for peers", step=step):
            parts = gather_json(vars(record.totals), device=self._context.device)
        record.totals = StepTotals.merged(StepTotals(**part) for part in parts)
        record.scale = self._algorithm.scale(record.totals.counts)
        record.sync_exposed_s = self._sender.before_update()
        with self._timeline.span("optimizer", step=step):
            record.stats = self._engine.step(record.scale)
        self._completed = step
        return record

    def _next_round(self, rounds: Iterator[tuple[PackedBatch, tuple[int, ...]]], step: int) -> PackedBatch | None:
        with self._timeline.span("wait for rows", step=step):
            batch, _ = next(rounds, (None, ()))
        return batch

    def _train_round(self, batch: PackedBatch, record: StepRecord) -> None:
        size = self._config.actor.micro_batch_size
        if len(batch):
            batch = self._with_advantages(batch)
            lines = ledger_lines(
                batch,
                step=record.step,
                admitted_step=self._loader.round_partition,
                lineage=self._context.job.lineage,
                time_s=self._elapsed(),
            )
            check_staleness(lines, bound=self._config.schedule.staleness_bound)
            record.add_rows(len(batch), lines)
        for start in range(0, self._loader.round_rows, size):
            positions = range(start, min(start + size, len(batch)))
            with self._timeline.span("forward_backward", step=record.step, rows=len(positions)):
                self._train_micro_batch(batch.select(positions) if positions else None, record)

    def _train_micro_batch(self, batch: PackedBatch | None, record: StepRecord) -> None:
        if batch is None:
            self._engine.forward_backward(None, _no_loss)
            return
        if self._reference is not None:
            log_probs = self._reference.log_probs(sequences_of(batch), step=record.step).cpu()
            reference = {"ref_log_probs": Column(log_probs, batch["responses"].lengths)}
            batch = PackedBatch(batch.indices, {**batch.columns, **reference}, batch.groups)
        loss = self._algorithm.loss(batch, device=self._context.device)
        self._engine.forward_backward(sequences_of(batch), loss)
        counts, admitted_step = self._algorithm.counts(batch), self._loader.round_partition
        record.totals.add_batch(batch, counts, step=record.step, admitted_step=admitted_step)
        record.totals.add_loss(loss.stats)

    def _with_advantages(self, batch: PackedBatch) -> PackedBatch:
        if "compute_advantages_and_returns" not in self._task.fused:
            return batch
        size = self._config.schedule.n_samples_per_prompt
        advantages = self._algorithm.advantages(batch["rewards"].values, group_size=size)
        columns = {**batch.columns, "advantages": Column.of_scalars(advantages)}
        return PackedBatch(batch.indices, columns, batch.groups)

    def _publish(self, step: int) -> float | None:
        """Send weights of `step` and announce them; returns the seconds held up, or None when a stop came instead."""
        version = Version(self._context.job.lineage, step)
        self._context.report("publishing weights", step=step, version=step)
        try:
            with self._timeline.span("publish weights", step=step):
                held_up_s = self._sender.publish(
                    version,
                    self._engine.shards(),
                    timeout_s=self._config.weightsync.timeout_s,
                    stop=self._context.stopping,
                )
        except WeightSyncError:
            if self._context.stopping.wait(STOP_GRACE_S):
                logger.warning("weights of step %d were not sent: the run is stopping", step)
                return None
            raise
        if self._context.rank == 0:
            self._client.publish_version(step)
        return held_up_s

    def _finish_step(self, record: StepRecord) -> None:
        self._loader.ack_soon()
        record.sync_bytes = self._sender.num_bytes
        record.save_wanted = self._keeps_rows and self._client.checkpoint_wanted()
        record.join(gather_json(record.share(), device=self._context.device))
        if self._recorder is not None:
            self._recorder.write(record)

    def _save(self) -> None:
        if self._saved == self._completed:
            return
        self._context.report("saving", f"step {self._completed}")
        if self._recorder is not None:
            self._recorder.sync()
        meta = {
            "lineage": self._context.job.lineage,
            "model_fingerprint": model_fingerprint(Path(self._config.model.path)),
            "admitted_groups": self._completed * self._config.schedule.rollout_batch_size,
        }
        with self._timeline.span("checkpoint", step=self._completed):
            reference = saved_reference(self._context, self._completed)
            self._checkpointer.save(self._engine, step=self._completed, meta=meta, reference=reference)
        self._saved = self._completed
        self._loader.ack()
        if self._keeps_rows:
            self._client.commit(self._completed - self._config.schedule.lateness)  # later ones may not be trained

    def _elapsed(self) -> float:
        return time.time() - self._context.job.started_at


def _no_loss(log_probs_A: torch.Tensor, entropy_A: torch.Tensor) -> torch.Tensor:
    return log_probs_A.sum() * 0.0
