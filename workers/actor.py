"""The actor loop: for every step, train it, publish weights, record, begin to save.

next step -> train (`workers.step_trainer`) -> publish weights -> ack rows -> ledger, metrics -> checkpoint -> next step
                                                                                                  '-- written beside it
"""

import logging
from pathlib import Path

import torch.distributed as dist

from asyncflow.errors import LastSaveFailed, WeightSyncError
from tq.batch import PackedBatch
from tq.client.dataloader import StreamingDataLoader
from tq.client.queue_client import QueueClient
from weightsync.version import Version
from workers.checkpoint import Checkpointer
from workers.checkpoint_writer import Contents, RunFacts
from workers.columns.chain import TaskChain
from workers.context import WorkerContext
from workers.dataflow import CRITIC_TRAIN, PlacedTask
from workers.engines.load import load_train_engine, load_value_engine
from workers.gang_peers import meet_peers
from workers.gather import gather, sum_over_ranks
from workers.learner import critic_learner, policy_learner
from workers.ledger import check_staleness, ledger_lines
from workers.model_files import model_fingerprint
from workers.records import StepRecord, StepRecorder
from workers.reference import saved_reference
from workers.replicas import ReplicaPeers, ReplicaPlace, open_replica
from workers.rewards.scorer import no_rewards
from workers.run_data import first_data_hash
from workers.step_trainer import StepTrainer
from workers.tasks import task_of
from workers.trainer_words import Kind, TrainerWords, Word
from workers.tri_model import TriModel
from workers.weight_path import open_sender

logger = logging.getLogger(__name__)

STOP_GRACE_S = 15.0
"""How long weights that could not be published wait for the stop that the launcher sends when an agent died (s)."""


def run_actor(context: WorkerContext) -> None:
    """Train until the last step or a stop; save what was completed."""
    meet_peers(context)
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
        self._task = task = task_of("actor", config, context.job)
        self._engine = load_train_engine(config, device=context.device)
        self._critic = load_value_engine(config, device=context.device) if CRITIC_TRAIN in task.fused else None
        self._checkpointer = _open_checkpointer(context)
        if context.job.resume_from:
            source = Path(context.job.resume_from)
            self._checkpointer.restore(self._engine, source, seed=config.seed, critic=self._critic)
        if context.rank == 0:
            context.warn("")  # what an earlier start of this gang could not save is past
        self._completed = context.start_step
        self._recorder = StepRecorder(context) if context.rank == 0 else None
        self._keeps_rows = context.rank == 0 and config.tq.retain_until_checkpoint
        self._words = self._new_words() if context.rank == 0 and context.job.of_role("critic") else None
        self._save_words = None if self._words is None else self._new_words()
        place = ReplicaPlace.of(config.actor, context.rank, context.gang.num_ranks)
        peers = ReplicaPeers(place, context.device) if len(place.ranks) > 1 else None
        self._columns = TaskChain(task.fused, context, self._engine, critic=self._critic, peers=peers)
        self._sender = open_sender(context, self._engine.shards())
        self._client = context.queue_client()
        self._loader = _open_loader(context, self._client, task, place)
        policy = policy_learner(config, self._engine)
        self._trainer = StepTrainer(
            context,
            (policy,) if self._critic is None else (policy, critic_learner(config, self._critic)),
            self._loader,
            columns=self._columns,
            training=config.actor,
            tri_model=TriModel(config, self._engine) if config.actor.tri_model else None,
            commit=self._commits,
            taken=self._count_rows if place.leads else _pass_over,
            before_update=self._before_update,
            after_update=_ignore if self._recorder is None else self._recorder.update_made,
            counts=place.leads,
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
                self._begin_save()
        self._save_last()
        if self._context.rank == 0 and self._completed >= self._context.job.last_step:
            self._context.mark_done()
            self._client.stop()
        self._say(Word(Kind.END))

    def _new_words(self) -> TrainerWords:
        return TrainerWords(self._context.sealed_store(), lineage=self._context.job.lineage)

    def close(self) -> None:
        """Leave queue and weight groups."""
        self._checkpointer.close()
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

    def _commits(self, record: StepRecord, stopped: bool) -> bool:
        """Whether this step is finished; a critic in a role of its own is told, once all ranks have all their rows.

        Raises:
            UserCodeFailed: no answer of the step has a reward, on all ranks, before anything was updated.
        """
        if stopped:
            return False
        if not sum_over_ranks(record.num_scored, device=self._context.device):
            why = self._context.last_reward_failure() or "see the logs of the ranks that score"
            raise no_rewards(f"step {record.step}", why)
        if self._context.job.of_role("critic"):
            self._say(Word(Kind.COMMIT, record.step))
        return True

    def _say(self, word: Word) -> None:
        if self._words is not None:
            self._words.say(word)

    def _count_rows(self, batch: PackedBatch, record: StepRecord) -> None:
        """Take down what is trained, once."""
        if not len(batch):
            return
        lines = ledger_lines(
            batch,
            step=record.step,
            admitted_step=self._loader.round_partition,
            lineage=self._context.job.lineage,
            time_s=self._context.elapsed_s,
        )
        check_staleness(lines, bound=self._config.schedule.staleness_bound)
        record.add_rows(batch, lines, admitted_step=self._loader.round_partition)

    def _before_update(self) -> float:
        self._checkpointer.before_update()
        return self._sender.before_update()

    def _finish_step(self, record: StepRecord) -> None:
        self._loader.ack_soon()
        record.sync_bytes = self._sender.num_bytes
        record.checkpoint_stall_s = self._checkpointer.take_stalled_s()
        record.checkpoint_failures = self._checkpointer.num_failures
        if self._keeps_rows and not self._checkpointer.busy:
            record.save_wanted = self._client.checkpoint_wanted()
        record.join(gather(record.share(), device=self._context.device))
        if self._words is not None:
            self._context.report("waiting for the critic", step=record.step)
            record.critic_report = self._words.reported(record.step)
        if self._recorder is not None:
            self._recorder.write(record)

    def _begin_save(self) -> None:
        """Save the last completed step while training goes on."""
        step = self._completed
        self._context.report("saving", f"step {step}")
        contents = _NOTHING if self._recorder is None else self._contents(step, self._recorder)
        self._say(Word(Kind.SAVE, step))
        self._checkpointer.begin(self._engine, step, contents, critic=self._critic)

    def _save_last(self) -> None:
        """Save what was completed, and see that it is saved.

        Raises:
            LastSaveFailed: it is not.
        """
        self._checkpointer.wait()
        saved = self._checkpointer.saved_step
        if saved == self._completed:
            return
        self._begin_save()
        self._checkpointer.wait()
        if self._checkpointer.saved_step != self._completed:
            error = self._checkpointer.failure
            raise LastSaveFailed(f"{error}; steps {saved + 1} to {self._completed} are lost; correct that and resume")

    def _contents(self, step: int, recorder: StepRecorder) -> Contents:
        """Return what rank 0 adds to a checkpoint."""
        config, client = self._config, self._client
        trained = step - config.schedule.lateness  # rows of later steps may not be trained

        def snapshot(target: Path) -> None:
            client.snapshot(target, after_partition=trained, forget_acks_of=[self._task.name])

        def saved() -> None:
            if self._keeps_rows:
                client.release_checkpointed(trained)

        words, timeout_s = self._save_words, config.checkpoint.timeout_s
        return Contents(
            make_durable=recorder.sync,
            export_hf=self._engine.export_hf if config.checkpoint.export_hf else None,
            snapshot=None if config.deterministic else snapshot,
            reference=saved_reference(self._context, step),
            critic_begins=lambda: words.tell_begun(step, begun=True) if words is not None else None,
            critic_files=lambda: words.files(step, timeout_s=timeout_s) if words is not None else {},
            failed=lambda: words.tell_begun(step, begun=False) if words is not None else None,
            saved=saved,
        )


_NOTHING = Contents(make_durable=lambda: None)
"""What the other ranks add."""


def _open_checkpointer(context: WorkerContext) -> Checkpointer:
    config, resume_from = context.config, context.job.resume_from
    facts = RunFacts(
        lineage=context.job.lineage,
        model_fingerprint=model_fingerprint(Path(config.model.path)),
        data_hash=first_data_hash(context),
        config=context.run_dir / "config.yaml",
    )
    return Checkpointer(
        context.run_dir,
        config.checkpoint,
        facts=facts,
        device=context.device,
        restored_from=Path(resume_from) if resume_from else None,
        timeline=context.timeline,
        waits=lambda: context.report("saving"),
        warn=context.warn if context.rank == 0 else lambda _: None,
    )


def _pass_over(batch: PackedBatch, record: StepRecord) -> None:
    """The lead of the replica counts these rows."""


def _ignore(step: int, number: int, optimizer_updates: int) -> None:
    """Rank 0 writes updates down."""


def _open_loader(
    context: WorkerContext, client: QueueClient, task: PlacedTask, place: ReplicaPlace
) -> StreamingDataLoader:
    config = context.config
    return StreamingDataLoader(
        client,
        task.name,
        task.inputs,
        first_partition=context.start_step + 1,
        last_partition=context.job.last_step,
        rows_per_round=max(config.actor.micro_batch_size, config.schedule.n_samples_per_prompt),
        token_budget=config.round_tokens(config.actor),
        rank=place.index,
        num_ranks=place.count,
        replica=open_replica(context, place),
        timeout_s=config.tq.request_timeout_s,
        # A generating engine may load for as long as any worker; until then nobody is connected who writes.
        producers_timeout_s=config.launcher.start_timeout_s,
    )
