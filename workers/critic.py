"""The loop of a critic in a role of its own: for every step, what its answers are worth, then the update.

    round of step s arrives -> values -> advantages, returns -> put advantages -> forward_backward
    the last one is there   -> the actor committed to step s -> update ... -> report

All values of a step come from the weights that the critic had when it began the step, since it updates only after the
step's last row; the actor gets advantages as rows arrive. See `workers.trainer_words` for how the two keep step.
"""

import logging
from pathlib import Path

import torch.distributed as dist

from tq.batch import PackedBatch
from tq.client.dataloader import StreamingDataLoader
from workers.columns.chain import TaskChain
from workers.context import WorkerContext
from workers.critic_saver import CriticSaver
from workers.engines.load import load_value_engine
from workers.gang_peers import meet_peers
from workers.gather import gather, sum_over_ranks
from workers.learner import critic_learner
from workers.records import StepRecord
from workers.step_trainer import StepTrainer
from workers.tasks import task_of
from workers.trainer_words import Kind, TrainerWords

logger = logging.getLogger(__name__)


def run_critic(context: WorkerContext) -> None:
    """Train until the actor says that it is over."""
    meet_peers(context)
    critic = Critic(context)
    critic.train()
    critic.close()
    dist.destroy_process_group()


class Critic:
    """One rank of the critic's gang."""

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        self._context = context
        task = task_of("critic", config, context.job)
        engine = load_value_engine(config, device=context.device)
        self._outputs = task.outputs
        self._words = self._new_words()
        self._saver = CriticSaver(
            engine, self._new_words, context.run_dir, device=context.device, timeout_s=config.checkpoint.timeout_s
        )
        if context.job.resume_from:
            self._saver.restore(Path(context.job.resume_from))
        self._columns = TaskChain(task.fused, context, critic=engine)
        self._client = context.queue_client()
        self._loader = StreamingDataLoader(
            self._client,
            task.name,
            task.inputs,
            first_partition=context.start_step + 1,
            last_partition=context.job.last_step,
            rows_per_round=max(config.critic.micro_batch_size, config.schedule.n_samples_per_prompt),
            token_budget=config.round_tokens(config.critic),
            rank=context.rank,
            num_ranks=context.gang.num_ranks,
            timeout_s=config.tq.request_timeout_s,
        )
        self._trainer = StepTrainer(
            context,
            (critic_learner(config, engine),),
            self._loader,
            columns=self._columns,
            training=config.critic.training(config.actor),
            commit=self._committed,
            taken=self._put,
            before_update=self._saver.before_update,
            after_update=lambda *_: None,
        )
        self._over = False

    def train(self) -> None:
        """Train every step that the actor finishes, and save what it saves."""
        self._context.report("waiting for rows", version=self._context.start_step)
        while step := self._loader.next_partition():
            record = self._trainer.train(step)
            if record is None:
                break
            self._report(record)
        while not self._over:
            self._hear()
        self._saver.wait()

    def close(self) -> None:
        """Leave the queue."""
        self._saver.close()
        self._loader.close()
        self._columns.close()
        self._client.close()

    def _put(self, batch: PackedBatch, _: StepRecord) -> None:
        """Pass on what others read."""
        self._loader.put({name: batch[name] for name in self._outputs} if len(batch) else {})

    def _committed(self, record: StepRecord, stopped: bool) -> bool:
        """Wait until the actor trains this step, or will not; what it wants saved is of the step before."""
        stopped = sum_over_ranks(int(stopped), device=self._context.device) > 0
        while not self._over:
            if (committed := self._hear()) is not None:
                at = record.step
                assert committed == at and not stopped, f"the actor is at step {committed}, the critic at {at}"
                return True
        return False

    def _hear(self) -> int | None:
        """Take in the actor's next word; returns the step that it committed to."""
        self._context.report("waiting for the actor")
        with self._context.timeline.span("wait for the actor"):
            word = self._words.hear()
        match word.kind:
            case Kind.COMMIT:
                return word.step
            case Kind.SAVE:
                self._saver.begin(word.step)
            case Kind.END:
                self._over = True
        return None

    def _report(self, record: StepRecord) -> None:
        self._context.report("reporting", step=record.step, version=record.step)
        record.join(gather(record.share(), device=self._context.device))
        if self._context.rank == 0:
            self._words.report(record.step, record.critic_metrics())

    def _new_words(self) -> TrainerWords:
        return TrainerWords(self._context.sealed_store(), lineage=self._context.job.lineage)
