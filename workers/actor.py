"""The actor loop: for every step, train it, publish weights, record, save.

next step -> train (`workers.step_trainer`) -> publish weights -> ack rows -> ledger, metrics -> checkpoint -> next step
"""

import logging
from pathlib import Path

import torch.distributed as dist
from torch.distributed import get_default_backend_for_device

from asyncflow.errors import WeightSyncError
from tq.client.dataloader import StreamingDataLoader
from tq.client.queue_client import QueueClient
from weightsync.version import Version
from workers.checkpoint import Checkpointer
from workers.columns.chain import TaskChain
from workers.context import WorkerContext
from workers.dataflow import PlacedTask
from workers.engines.load import load_train_engine
from workers.gather import gather
from workers.model_files import model_fingerprint
from workers.records import StepRecord, StepRecorder
from workers.reference import saved_reference
from workers.step_trainer import StepTrainer
from workers.tasks import task_of
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
        self._engine = load_train_engine(config, device=context.device)
        self._checkpointer = Checkpointer(
            context.run_dir, keep_last=config.checkpoint.keep_last, export_hf=config.checkpoint.export_hf
        )
        if context.job.resume_from:
            self._checkpointer.restore(self._engine, Path(context.job.resume_from))
        self._completed = self._saved = context.start_step
        self._recorder = StepRecorder(context) if context.rank == 0 else None
        self._keeps_rows = context.rank == 0 and config.tq.retain_until_checkpoint
        task = task_of("actor", config, context.job)
        self._columns = TaskChain(task.fused, context, self._engine)
        self._sender = open_sender(context, self._engine.shards())
        self._client = context.queue_client()
        self._loader = _open_loader(context, self._client, task)
        self._trainer = StepTrainer(
            context,
            self._engine,
            self._loader,
            columns=self._columns,
            before_update=self._sender.before_update,
            after_update=_ignore if self._recorder is None else self._recorder.update_made,
        )

    def train(self) -> None:
        """Run every step; a stop abandons the one whose rows are not all there, and saves the last completed one."""
        self._publish(self._completed)
        while step := self._loader.next_partition():
            record = self._trainer.train(step)
            if record is None:
                break
            self._completed = step
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
        self._columns.close()
        self._client.close()
        if self._recorder is not None:
            self._recorder.close()

    def _publish(self, step: int) -> float | None:
        """Send weights of `step` and announce them; returns the seconds held up, or None when a stop came instead."""
        version = Version(self._context.job.lineage, step)
        self._context.report("publishing weights", step=step, version=step)
        try:
            with self._context.timeline.span("publish weights", step=step):
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
        if self._recorder is not None:
            known = self._recorder.num_refills
            self._recorder.refilled(self._client.publish_version(step, refills_known=known))
        return held_up_s

    def _finish_step(self, record: StepRecord) -> None:
        self._loader.ack_soon()
        record.sync_bytes = self._sender.num_bytes
        record.save_wanted = self._keeps_rows and self._client.checkpoint_wanted()
        record.join(gather(record.share(), device=self._context.device))
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
            "optimizer_updates": self._engine.optimizer_updates,
            "admitted_groups": self._completed * self._config.schedule.rollout_batch_size,
        }
        with self._context.timeline.span("checkpoint", step=self._completed):
            reference = saved_reference(self._context, self._completed)
            self._checkpointer.save(self._engine, step=self._completed, meta=meta, reference=reference)
        self._saved = self._completed
        self._loader.ack()
        if self._keeps_rows:
            self._client.commit(self._completed - self._config.schedule.lateness)  # later ones may not be trained


def _ignore(step: int, number: int, optimizer_updates: int) -> None:
    """Rank 0 writes updates down."""


def _open_loader(context: WorkerContext, client: QueueClient, task: PlacedTask) -> StreamingDataLoader:
    config = context.config
    return StreamingDataLoader(
        client,
        task.name,
        task.inputs,
        first_partition=context.start_step + 1,
        last_partition=context.job.last_step,
        rows_per_round=max(config.actor.micro_batch_size, config.schedule.n_samples_per_prompt),
        rank=context.rank,
        num_ranks=context.gang.num_ranks,
        timeout_s=config.tq.request_timeout_s,
    )
