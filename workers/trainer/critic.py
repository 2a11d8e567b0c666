"""The loop of a critic in a role of its own: for every step, what its responses are worth, then the update.

    round of step s arrives -> values -> advantages, returns -> put advantages -> forward_backward
    the last one is there   -> the actor committed to step s -> update ... -> report

All values of a step come from the weights that the critic had when it began the step, since it updates only after the
step's last row; the actor gets advantages as rows arrive.
`workers.rank.actor_critic_channel` says how the two keep step.
`CriticSaver` writes the critic's part of a checkpoint.
"""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from asyncflow.errors import AsyncFlowError, CheckpointError, one_line
from asyncflow.run_files import CRITIC, checkpoint_path, describe
from tq.columns import PackedBatch
from workers.checkpoint.directory import beside
from workers.checkpoint.saved_shards import HostCopy, load_shards, own_shards, save_shards
from workers.engines.base import ValueEngine
from workers.engines.load import load_value_engine
from workers.rank.actor_critic_channel import ActorCriticChannel, Kind
from workers.rank.context import WorkerContext
from workers.rank.peers import gather, meet_peers, sum_over_ranks
from workers.records.step_record import StepRecord
from workers.tasks.chain import TaskChain
from workers.tasks.graph import task_of
from workers.trainer.trainer import Trainer, critic_learner, open_loader

logger = logging.getLogger(__name__)


def run_critic(context: WorkerContext) -> None:
    """Train until the actor says that it is over."""
    meet_peers(context)
    critic = Critic(context)
    critic.train()
    critic.close()
    dist.destroy_process_group()


class Critic:
    """One rank of the critic's gang; a `TrainingRole`."""

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        self._context = context
        task = task_of("critic", config, context.job)
        engine = load_value_engine(config, device=context.device)
        self._outputs = task.outputs
        self._channel = self._open_channel()
        self._saver = CriticSaver(
            engine, self._open_channel, context.run_dir, device=context.device, timeout_s=config.checkpoint.timeout_s
        )
        if context.job.resume_from:
            self._saver.restore(Path(context.job.resume_from))
        self._columns = TaskChain(task.fused, context, critic=engine)
        self._client = context.queue_client()
        self._loader = open_loader(
            context, self._client, task, config.critic, rank=context.rank, num_ranks=context.gang.num_ranks
        )
        self._trainer = Trainer(
            context,
            (critic_learner(config, engine),),
            self._loader,
            columns=self._columns,
            training=config.critic.training(config.actor),
            role=self,
        )
        self._over = False

    def train(self) -> None:
        """Train every step that the actor finishes, and save what it saves."""
        self._context.report("waiting for rows", version=self._context.start_step)
        while step := self._loader.next_partition():
            if self._trainer.train(step) is None:
                break
        while not self._over:
            self._receive()
        self._saver.wait()

    def close(self) -> None:
        """Leave the queue."""
        self._saver.close()
        self._loader.close()
        self._columns.close()
        self._client.close()

    def take(self, batch: PackedBatch, _: StepRecord) -> None:
        """Pass on what other roles read."""
        self._loader.put({name: batch[name] for name in self._outputs} if len(batch) else {})

    def commit(self, record: StepRecord, stopped: bool) -> bool:
        """Wait until the actor trains this step, or will not; a save that comes first is of the step before."""
        stopped = sum_over_ranks(int(stopped)) > 0
        while not self._over:
            if (committed := self._receive()) is not None:
                at = record.step
                assert committed == at and not stopped, f"the actor is at step {committed}, the critic at {at}"
                return True
        return False

    def before_update(self) -> float:
        """Wait until a save has copied the weights."""
        return self._saver.before_update()

    def after_update(self, step: int, number: int, optimizer_updates: int) -> None:
        """No policy is trained here."""

    def publish(self, record: StepRecord) -> None:
        """Nothing follows a critic's weights."""

    def record(self, record: StepRecord) -> None:
        """Report the step's figures to the actor, which writes them down."""
        self._context.report("reporting", step=record.step, version=record.step)
        record.merge(gather(record.part()))
        if self._context.rank == 0:
            self._channel.send_report(record.step, record.critic_metrics())

    def _receive(self) -> int | None:
        """Act on the actor's next message; returns the step that it committed to."""
        self._context.report("waiting for the actor")
        with self._context.timeline.span("wait for the actor"):
            message = self._channel.recv()
        match message.kind:
            case Kind.COMMIT:
                return message.step
            case Kind.SAVE:
                self._saver.begin(message.step)
            case Kind.END:
                self._over = True
        return None

    def _open_channel(self) -> ActorCriticChannel:
        return ActorCriticChannel(self._context.sealed_store(), lineage=self._context.job.lineage)


class CriticSaver:
    """A critic's part of a checkpoint; the actor's saver waits for it. All ranks construct and call it together.

        training thread   save s received -> begin(s): the copy begins -> before_update() -> update of step s + 1
        saving thread     s has begun -> shards, checksums -> files of s

    The actor is told of a failure, and then drops the whole save.
    """

    def __init__(
        self,
        engine: ValueEngine,
        open_channel: Callable[[], ActorCriticChannel],
        run_dir: Path,
        *,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Args:
        engine: that is saved.
        open_channel: for the saving thread.
        device: that holds the state.
        timeout_s: deadline of one save (s).
        """
        self._engine = engine
        self._channel = open_channel()
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._copy = HostCopy(device)
        self._thread: threading.Thread | None = None
        self._step = 0
        """That is saved, or was last."""

    def restore(self, source: Path) -> None:
        """Load the critic's part of a checkpoint, also one that the actor saved.

        Raises:
            CheckpointError: it cannot be read.
        """
        load_shards(self._engine, source / CRITIC, group=self._group)

    def begin(self, step: int) -> None:
        """Begin to save the state as it is now: after `step`.

        Raises:
            CheckpointError: an earlier save does not end.
        """
        self.wait()
        state = self._copy.begin(self._engine.state_dict())
        self._step = step
        self._thread = threading.Thread(target=self._write, args=(step, state), name="checkpoint", daemon=True)
        self._thread.start()

    def before_update(self) -> float:
        """Wait until the state may change."""
        self._copy.wait()
        return 0.0

    def wait(self) -> None:
        """Wait until the last save is written, or has failed.

        Raises:
            CheckpointError: it does not end; its thread may still read the copy, so another save cannot begin.
        """
        if self._thread is None:
            return
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"the critic's part of the checkpoint of step {self._step} is not written after {self._timeout_s:g} s "
                f"(checkpoint.timeout_s); look whether the file system answers"
            )
        self._thread = None

    def close(self) -> None:
        """End the copy's thread; idempotent."""
        self._copy.close()

    def _write(self, step: int, state: dict[str, Any]) -> None:
        try:
            self._save(step, state)
        except Exception:  # the boundary of a thread: a rank is gone, or the actor; both are noticed elsewhere
            logger.exception("the critic's part of step %d is not saved", step)

    def _save(self, step: int, state: dict[str, Any]) -> None:
        files: dict[str, tuple[int, str]] = {}
        error = ""
        try:
            files = self._shards(step, state)
        except (Exception, dcp.CheckpointException) as failure:  # the boundary of a thread; the second is no Exception
            expected = isinstance(failure, (AsyncFlowError, OSError))
            logger.warning("the critic's part of step %d", step, exc_info=None if expected else failure)
            error = f"rank {dist.get_rank()}: {one_line(failure)}"
        parts = gather([files, error], group=self._group)
        if dist.get_rank() == 0:
            merged = {name: tuple(entry) for found, _ in parts for name, entry in found.items()}
            self._channel.send_files(step, merged, next((why for _, why in parts if why), ""))

    def _shards(self, step: int, state: dict[str, Any]) -> dict[str, tuple[int, str]]:
        self._copy.wait()
        if not self._channel.recv_begun(step, timeout_s=self._timeout_s):
            return {}
        work = beside(checkpoint_path(self._run_dir, step))
        save_shards(state, work / CRITIC, group=self._group)
        own = describe(work, own_shards(work, CRITIC, dist.get_rank()))
        return {name: (entry.num_bytes, entry.xxh3) for name, entry in own.items()}
