"""The loops of the actor and of a critic in a role of its own.

The actor trains, publishes and records every step, and starts its checkpoint:

    next step -> train, publish weights, record (`workers.trainer.step_trainer`) -> checkpoint -> next step
                                                                       '-- written in the background

The critic estimates the values of every step's responses, then updates:

    round of step s arrives -> values -> advantages, returns -> put advantages -> forward_backward
    last round has arrived  -> the actor committed to step s -> update ... -> report

With a role `advantages`, the first line of that is in two:

    round of step s arrives -> values -> put values   (all rounds)
    the returns have come   -> all rounds are there -> tell the actor -> forward_backward

It updates only after the step's last row, so all values of a step come from the same weights, while the actor still
gets advantages as rows arrive. `workers.rank.actor_critic_channel` describes how the two stay in step. `CriticSaver`
writes the critic's part of a checkpoint.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash

from asyncflow.checkpoint_files import CRITIC, describe
from asyncflow.errors import (
    AsyncFlowError,
    CheckpointError,
    ConfigError,
    LastSaveFailed,
    TransportError,
    UserCodeFailed,
    WeightSyncError,
    one_line,
)
from asyncflow.run_files import CONFIG_FILE, checkpoint_path
from tq.client.dataloader import StreamingDataLoader
from tq.columns import PackedBatch
from weightsync.version import Version
from workers.checkpoint.checkpoint_directory import beside
from workers.checkpoint.saved_shards import ExportShare, HostCopy, load_shards, own_shards, save_shards
from workers.checkpoint.writer import Checkpointer, Contents, Export, RunFacts
from workers.data.model_files import model_fingerprint, weights_fingerprint
from workers.engines.base import RankedExportEngine, Sleeper, TrainEngine, ValueEngine
from workers.engines.delivery import DeliveryProver
from workers.engines.load_engine import load_train_engine, load_value_engine, row_groups
from workers.engines.weight_path import open_sender
from workers.rank.actor_critic_channel import ActorCriticChannel, ActorMessage, Kind
from workers.rank.context import LOADING, REWARD, ROLLOUT, SAVING, STARTING, WorkerContext
from workers.rank.device_turn import TurnHolder, YieldRule, open_turn, wait_for_devices
from workers.rank.peers import ReplicaPeers, ReplicaPlace, all_ranks, gather, meet_peers, open_replica, sum_over_ranks
from workers.records.ledger import check_staleness, ledger_lines
from workers.records.log_prob_gap import GapWatch
from workers.records.samples import TrainedLog, kept_groups
from workers.records.step_record import StepRecord, StepRecorder, check_reference
from workers.rewards.base import FailedShare
from workers.rewards.scorer import no_rewards
from workers.settings.dataflow import CRITIC_TRAIN, PlacedTask
from workers.settings.run import RunConfig
from workers.tasks.chain import TaskChain
from workers.tasks.graph import task_of, tasks_of
from workers.tasks.reference import saved_reference
from workers.trainer.step_trainer import RoundSource, StepTrainer, critic_learner, open_loader, policy_learner
from workers.trainer.tri_model import TriModel

logger = logging.getLogger(__name__)

# After a failed publication, how long to wait for the stop that the launcher sends when an agent died (s).
STOP_GRACE_S = 15.0
_LOOK_S = 0.5


def run_actor(context: WorkerContext) -> None:
    """Train until the last step or a stop, then save the last completed step."""
    meet_peers(context)
    news = threading.Event()
    turn = open_turn(context, news, meet=partial(all_ranks, True))
    # Before any device memory is allocated. Together: one rank may learn of a stop just before the devices come.
    if turn is not None and not all_ranks(wait_for_devices(context, turn, stop=context.stopping)):
        return
    actor = Actor(context, turn, news)
    actor.train()
    actor.close()
    dist.destroy_process_group()


class Actor:
    """One rank of the training gang; a `TrainingRole`.

    Args:
        turn: for devices that it shares with the rollouts, and has at the moment; None: it has devices of its own.
        news: set whenever something happens to the turn.
    """

    def __init__(
        self, context: WorkerContext, turn: TurnHolder | None = None, news: threading.Event | None = None
    ) -> None:
        config = context.config
        self._context = context
        self._config = config
        self._turn = turn
        self._task = task = task_of("actor", config, context.job)
        context.check_weights(*task.fused)
        context.report_state(STARTING, LOADING)
        self._engine = load_train_engine(config, device=context.device)
        self._critic = load_value_engine(config, device=context.device) if CRITIC_TRAIN in task.fused else None
        self._checkpointer = _open_checkpointer(context, self._engine)
        if context.rank == 0:
            context.warn_user("")  # clear the warning about a failed save that an earlier start of this gang left
        if context.job.resume_from:
            source = Path(context.job.resume_from)
            self._checkpointer.restore_checkpoint(self._engine, source, seed=config.seed, critic=self._critic)
        self._completed = context.start_step
        self._recorder = StepRecorder(context) if context.rank == 0 else None
        self._gap_watch = GapWatch(config)
        self._num_saves_asked = 0  # answered by a save; a trainer that starts again may save once more
        self._failed_rollouts = FailedShare(config.rollout.max_failed_share)
        self._failed_rewards = FailedShare(config.reward.max_failed_share)
        self._keeps_rows = context.rank == 0 and config.tq.retain_until_checkpoint
        self._channel = _open_channel(context) if context.rank == 0 and context.job.of_role("critic") else None
        self._critic_says_rows = len(tasks_of("critic", config, context.job)) > 1
        # The saving thread needs a store client of its own.
        self._save_channel = None if self._channel is None else _open_channel(context)
        place = ReplicaPlace.of_rank(config.actor, context.rank, context.gang.num_ranks)
        peers = ReplicaPeers(place) if len(place.ranks) > 1 else None
        self._columns = TaskChain(task.fused, context, self._engine, critic=self._critic, peers=peers)
        self._sender = open_sender(context, self._engine.shards())
        self._prover = DeliveryProver(context, self._engine, self._sender, place)
        self._client = context.queue_client()
        self._loader = open_loader(
            context,
            self._client,
            task,
            config.actor,
            rank=place.index,
            num_ranks=place.count,
            replica=open_replica(context, place, config.tq.replica_fetch, partial(row_groups, config.actor.engine)),
            arrived=(lambda: None) if news is None else news.set,
        )
        policy = policy_learner(config, self._engine)
        self._counts = place.leads
        rounds: RoundSource = self._loader
        if peers is not None and place.reads_several_times(config.tq.replica_fetch):
            rounds = EqualRounds(self._loader, peers.have_equal)
        self._trained_log = None
        if self._counts and config.rollout.samples_per_step:
            self._trained_log = TrainedLog(context.run_dir, context.rank, kept=kept_groups(config))
        if turn is not None and news is not None:
            rounds = RoundsInTurns(context, rounds, self._loader, turn, news, sleep=self._sleep, wake=self._wake)
        self._sleepers = sleepers(config, [self._engine, self._critic, *self._columns.models]) if turn else ()
        self._trainer = StepTrainer(
            context,
            (policy,) if self._critic is None else (policy, critic_learner(config, self._critic)),
            rounds,
            columns=self._columns,
            training=config.actor,
            role=self,
            tri_model=TriModel(config, self._engine) if config.actor.tri_model else None,
            counts=self._counts,
            trained_log=self._trained_log,
        )

    def train(self) -> None:
        """Run every step. A stop abandons a step that still lacks rows; the last completed step is saved."""
        # Generators wait for this version instead of reading the model directory, so a fresh start and a resume take
        # the same path, and both sides hold equal weights.
        self._publish_weights(self._completed)
        while step := self._loader.next_partition():
            record = self._trainer.train(step)
            if record is None or record.stopped:
                break
            due = self._config.checkpoint.interval and step % self._config.checkpoint.interval == 0
            if due or record.save_wanted:
                self._begin_save()
        self._save_last()
        if self._context.rank == 0 and self._completed >= self._context.last_step:
            self._context.mark_done()
            self._client.stop()
        self._send_message(ActorMessage(Kind.END))

    def close(self) -> None:
        self._checkpointer.close()
        self._loader.close()
        self._sender.close()
        self._columns.close()
        self._client.close()
        if self._trained_log is not None:
            self._trained_log.close()
        if self._recorder is not None:
            self._recorder.close()

    def take_round(self, batch: PackedBatch, record: StepRecord) -> None:
        """Check the staleness of a round and count its rows, once per replica."""
        if not (self._counts and len(batch)):
            return
        if not self._config.algorithm.is_supervised:
            check_staleness(batch, step=record.step, allowed=self._config.schedule.staleness)
        lines = ledger_lines(
            batch,
            step=record.step,
            admitted_step=self._loader.round_partition,
            lineage=self._context.job.lineage,
            time_s=self._context.elapsed_s,
            with_rewards=self._config.data.sampler is not None,
        )
        rewarded = self._config.has_rewards
        record.add_rows(batch, lines, admitted_step=self._loader.round_partition, rewarded=rewarded)

    def commit_step(self, record: StepRecord, stopped: bool) -> bool:
        """Finish every step whose rows all arrived, and notify a critic in a role of its own. Raises UserCodeFailed, on
        all ranks and before any update, if too many rollouts failed or responses lack a reward; the last completed step
        is saved."""
        if stopped:
            return False
        if (error := self._too_many_failures(record)) is not None:
            if not self._context.job.of_role("critic"):  # a separate critic is still waiting for this step
                with contextlib.suppress(LastSaveFailed):  # already logged; report the failed user code instead
                    self._save_last()
            raise error
        if self._context.job.of_role("critic"):
            if self._critic_says_rows and not self._critic_has_rows(record.step):
                return False
            self._send_message(ActorMessage(Kind.COMMIT, record.step))
        return True

    def _critic_has_rows(self, step: int) -> bool:
        """Wait until the critic has the step's rows or has learned of a stop; collective."""
        self._context.report_state("waiting for the critic", step=step)
        return sum_over_ranks(int(self._channel is not None and self._channel.recv_rows(step))) > 0

    def _too_many_failures(self, record: StepRecord) -> UserCodeFailed | None:
        """Return why the step must not be trained, identical on all ranks; collective."""
        if self._config.algorithm.is_supervised:
            return None
        rows, scored = sum_over_ranks(record.num_rows), sum_over_ranks(record.num_scored)
        rollouts, rewards = (sum_over_ranks(number) for number in record.num_failed)
        where, advice = f"step {record.step}", "correct that and resume"
        if too_many := self._failed_rollouts.add_step(rollouts, rows):
            why = self._context.last_failure(ROLLOUT) or "see the logs of the rollouts"
            setting = f"rollout.max_failed_share {self._config.rollout.max_failed_share:g}"
            return UserCodeFailed(f"{where}: {too_many} rollouts failed ({setting}), the last one: {why}; {advice}")
        if not self._config.has_rewards:
            return None
        why = self._context.last_failure(REWARD) or "see the logs of the ranks that score"
        if not scored:
            return no_rewards(where, why if rewards else self._context.last_failure(ROLLOUT) or why)
        if too_many := self._failed_rewards.add_step(rewards, rows - rollouts):
            setting = f"reward.max_failed_share {self._config.reward.max_failed_share:g}"
            return UserCodeFailed(
                f"{where}: {too_many} responses could not be scored ({setting}), so that what is left is not a fair "
                f"sample; the last one: {why}; {advice}, or raise the setting"
            )
        return None

    def before_update(self) -> float:
        """Wait until neither a save nor the sender reads the weights."""
        self._checkpointer.before_update()
        return self._sender.before_update()

    def _sleep(self) -> Version:
        """Free device memory, once nothing reads it; returns the version that the rollouts should load. Collective."""
        self.before_update()
        with self._context.timeline.span("sleep"):
            for each in self._sleepers:
                each.sleep()
        return Version(self._context.job.lineage, self._completed)

    def _wake(self) -> None:
        with self._context.timeline.span("wake up"):
            for each in self._sleepers:
                each.wake()

    def after_update(self, step: int, number: int, optimizer_updates: int) -> None:
        """Write the update down immediately: it counts even if the step is never finished."""
        if self._recorder is not None:
            self._recorder.update_made(step, number, optimizer_updates)

    def publish(self, record: StepRecord) -> None:
        """Send the step's weights, unless a stop comes first."""
        self._completed = record.step
        held_up_s = self._publish_weights(record.step)
        record.stopped = held_up_s is None
        record.sync_exposed_s += held_up_s or 0.0

    def record_step(self, record: StepRecord) -> None:
        """Acknowledge the step's rows, merge and write all ranks' metrics, and end a run that exceeds its limits."""
        self._loader.ack_soon()
        record.sync_bytes = self._sender.num_bytes
        record.checkpoint_stall_s = self._checkpointer.take_stalled_s()
        record.checkpoint_failures = self._checkpointer.num_failures
        if self._keeps_rows and not self._checkpointer.busy:
            record.save_wanted = self._client.checkpoint_wanted()
        if self._context.rank == 0 and not self._checkpointer.busy:
            asked = self._context.num_saves_asked
            record.save_wanted |= asked > self._num_saves_asked
            self._num_saves_asked = asked
        record.merge_parts(gather(record.make_part()))
        record.gap_complaint = self._gap_watch.judge_gap(record.gap)
        if self._channel is not None:
            self._context.report_state("waiting for the critic", step=record.step)
            record.critic_report = self._channel.recv_report(record.step)
        if self._recorder is not None:
            self._recorder.write(record)
        if self._trained_log is not None:
            context = self._context
            self._trained_log.write(
                record.kept, step=record.step, lineage=context.job.lineage, time_s=context.elapsed_s
            )
        check_reference(record.step, record.totals.kl, self._config.algorithm.max_kl)
        self._gap_watch.check(record.step, record.gap_complaint)

    def _publish_weights(self, step: int) -> float | None:
        """Send the weights of `step` and announce them; returns seconds held up, or None if a stop came first."""
        # Rollouts may be reading the last version on this device until they have given the turn away.
        assert self._turn is None or self._turn.held, "weights are published in the trainer's turn"
        version = Version(self._context.job.lineage, step)
        self._context.report_state("publishing weights", step=step, version=step)
        # Before they are published: whoever has the version finds its record.
        proving_s = self._prover.record_version(version, self._engine.shards())
        try:
            with self._context.timeline.span("publish weights", step=step):
                held_up_s = self._sender.publish(
                    version,
                    self._engine.shards(),
                    timeout_s=self._config.weightsync.timeout_s,
                    stop=self._context.stopping,
                )
        except WeightSyncError:
            # Probably an agent died: then the launcher sends a stop, and this is no error of its own.
            if self._context.stopping.wait(STOP_GRACE_S):
                logger.warning("weights of step %d were not sent: the run is stopping", step)
                return None
            raise
        if self._recorder is not None:
            known = self._recorder.num_refills
            self._recorder.add_refills(self._client.publish_version(step, refills_known=known))
        return proving_s + held_up_s

    def _begin_save(self) -> None:
        step = self._completed
        self._context.report_state(SAVING, f"step {step}")
        contents = _NOTHING if self._recorder is None else self._checkpoint_contents(step, self._recorder)
        self._send_message(ActorMessage(Kind.SAVE, step))
        self._checkpointer.begin(self._engine, step, contents, critic=self._critic)

    def _save_last(self) -> None:
        self._checkpointer.wait()
        saved = self._checkpointer.saved_step
        if saved == self._completed:
            return
        self._begin_save()
        self._checkpointer.wait()
        if self._checkpointer.saved_step != self._completed:
            error = self._checkpointer.failure
            raise LastSaveFailed(f"{error}; steps {saved + 1} to {self._completed} are lost; correct that and resume")

    def _checkpoint_contents(self, step: int, recorder: StepRecorder) -> Contents:
        config, client = self._config, self._client
        trained = step - config.schedule.lateness  # rows of later steps may still be untrained

        def snapshot(target: Path) -> None:
            client.snapshot(target, after_partition=trained, forget_acks_of=[self._task.name])

        def saved() -> None:
            if self._keeps_rows:
                client.release_checkpointed(trained)

        return Contents(
            make_durable=recorder.sync_files,
            # Reused samples would change which responses share a batch.
            snapshot=None if config.deterministic else snapshot,
            reference=saved_reference(self._context, step),
            critic=self._save_channel,
            saved=saved,
        )

    def _send_message(self, message: ActorMessage) -> None:
        if self._channel is not None:
            self._channel.send(message)


# What ranks other than 0 add to a checkpoint.
_NOTHING = Contents(make_durable=lambda: None)


def _open_checkpointer(context: WorkerContext, engine: TrainEngine) -> Checkpointer:
    config, resume_from = context.config, context.job.resume_from
    facts = RunFacts(
        lineage=context.job.lineage,
        model_fingerprint=model_fingerprint(Path(config.model.path)),
        data_hash=context.first_data_hash(),
        tokenizer_files=context.first_tokenizer_files(),
        weights_fingerprint="" if config.lora is None else weights_fingerprint(Path(config.model.path)),
        scoring_weights=context.first_weights() if context.rank == 0 else {},
        config=context.run_dir / CONFIG_FILE,
    )
    return Checkpointer(
        context.run_dir,
        config.checkpoint,
        facts=facts,
        device=context.device,
        restored_from=Path(resume_from) if resume_from else None,
        timeline=context.timeline,
        waits=lambda: context.report_state(SAVING),
        warn=context.warn_user if context.rank == 0 else lambda _: None,
        export=_open_export(engine) if config.checkpoint.export_hf else None,
        stopping=context.stopping.is_set,
    )


def _open_export(engine: TrainEngine) -> Export:
    """Return how this rank takes part in exports. An engine that has not declared how to divide them writes the whole
    on rank 0, in a thread that a stop leaves behind: its half-written directory never counts."""
    if isinstance(engine, RankedExportEngine):
        return engine.export_share

    def write_whole(target: Path, saved: Path, share: ExportShare) -> bool:
        if share.rank != 0:
            return True
        written: Future[None] = Future()

        def write() -> None:
            try:
                engine.export_hf(target, saved)
            except (Exception, dcp.CheckpointException) as error:  # thread boundary; the latter is a BaseException
                logger.warning("the export to %s failed", target, exc_info=error)
                written.set_exception(error)
            else:
                written.set_result(None)

        threading.Thread(target=write, name="export", daemon=True).start()
        while not wait([written], _LOOK_S).done:
            if share.stop():
                return False
        written.result()
        return True

    return write_whole


def run_critic(context: WorkerContext) -> None:
    """Train until the actor says that the run is over."""
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
        *ahead, task = tasks_of("critic", config, context.job)
        engine = load_value_engine(config, device=context.device)
        self._outputs = task.outputs
        self._channel = _open_channel(context)
        self._saver = CriticSaver(
            engine,
            partial(_open_channel, context),
            context.run_dir,
            device=context.device,
            timeout_s=config.checkpoint.timeout_s,
        )
        if context.job.resume_from:
            self._saver.restore_checkpoint(Path(context.job.resume_from))
        self._columns = TaskChain(task.fused, context, critic=engine)
        self._client = context.queue_client()
        # Now, since the first put may come later than a consumer waits for a producer.
        self._client.declare_outputs([name for one in (*ahead, task) for name in one.outputs])

        def open_rounds(one: PlacedTask) -> StreamingDataLoader:
            return open_loader(
                context, self._client, one, config.critic, rank=context.rank, num_ranks=context.gang.num_ranks
            )

        self._loader = open_rounds(task)
        self._ahead = [AheadOfTraining(context, one, open_rounds(one), engine) for one in ahead]
        self._trainer = StepTrainer(
            context,
            (critic_learner(config, engine),),
            WholeSteps(self._loader, self._agree_on_rows) if ahead else self._loader,
            columns=self._columns,
            training=config.critic.training(config.actor),
            role=self,
        )
        self._over = False

    def train(self) -> None:
        """Train every step that the actor finishes, and save whenever the actor saves."""
        self._context.report_state("waiting for rows", version=self._context.start_step)
        while step := self._loader.next_partition():
            for one in self._ahead:
                one.put_columns(step)
            if self._trainer.train(step) is None:
                break
        # The actor may still save after its last step.
        while not self._over:
            self._receive_message()
        self._saver.wait()

    def close(self) -> None:
        self._saver.close()
        for one in self._ahead:
            one.close()
        self._loader.close()
        self._columns.close()
        self._client.close()

    def take_round(self, batch: PackedBatch, _: StepRecord) -> None:
        """Put the columns that other roles read; a put acknowledges the rows, too."""
        if self._outputs:
            self._loader.put({name: batch[name] for name in self._outputs} if len(batch) else {})

    def commit_step(self, record: StepRecord, stopped: bool) -> bool:
        """Wait until the actor commits to this step or ends the run. A save that comes first is of the step before."""
        stopped = sum_over_ranks(int(stopped)) > 0
        while not self._over:
            if (committed := self._receive_message()) is not None:
                at = record.step
                assert committed == at and not stopped, f"the actor is at step {committed}, the critic at {at}"
                return True
        return False

    def before_update(self) -> float:
        return self._saver.before_update()

    def after_update(self, step: int, number: int, optimizer_updates: int) -> None:
        """Do nothing: this role trains no policy."""

    def publish(self, record: StepRecord) -> None:
        """Do nothing: no role receives the critic's weights."""

    def record_step(self, record: StepRecord) -> None:
        """Acknowledge rows without outputs; report the step's metrics to the actor, which writes them."""
        self._loader.ack_soon()
        self._context.report_state("reporting", step=record.step, version=record.step)
        record.merge_parts(gather(record.make_part()))
        if self._context.rank == 0:
            self._channel.send_report(record.step, record.critic_metrics())

    def _agree_on_rows(self, step: int, stopped: bool) -> bool:
        """Tell the actor whether all rows of a step arrived; returns it, the same on all ranks."""
        complete = sum_over_ranks(int(stopped)) == 0
        if self._context.rank == 0:
            self._channel.send_rows(step, complete=complete)
        return complete

    def _receive_message(self) -> int | None:
        """Act on the actor's next message; returns the step that the actor committed to, if that was the message."""
        self._context.report_state("waiting for the actor")
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


class AheadOfTraining:
    """A task of a training gang that goes ahead of its training: computes and puts a step's columns, round by round."""

    def __init__(
        self, context: WorkerContext, task: PlacedTask, loader: StreamingDataLoader, critic: ValueEngine
    ) -> None:
        self._context = context
        self._task = task
        self._loader = loader
        self._columns = TaskChain((*task.fused, task.name), context, critic=critic)

    def put_columns(self, step: int) -> None:
        """Compute and put the columns of all rows of `step`, or of those that come before a stop; collective."""
        context, name = self._context, self._task.name
        if not self._loader.next_partition():
            return
        assert self._loader.partition == step, f"{name} is at step {self._loader.partition}, training at {step}"
        rounds = iter(self._loader)
        while True:
            context.report_state("waiting for rows", step=step)
            with context.timeline.span(f"wait for rows of {name}", step=step):
                batch = next(rounds, None)
            if batch is None:
                return
            context.report_state(name, f"{len(batch)} rows", step=step)
            batch = self._columns.add_columns(batch, step=step, largest_slice=self._loader.largest_slice)
            with context.timeline.span("put", step=step, rows=len(batch)):
                self._loader.put({column: batch[column] for column in self._task.outputs} if len(batch) else {})

    def close(self) -> None:
        self._loader.close()
        self._columns.close()


class WholeSteps:
    """A loader whose rounds are given out once all of a step's have arrived, on all ranks of the gang, or not at all.

    `agree(step, stopped)` returns whether they have; collective.
    """

    def __init__(self, loader: StreamingDataLoader, agree: Callable[[int, bool], bool]) -> None:
        self._loader = loader
        self._agree = agree
        self.stopped = False

    @property
    def largest_slice(self) -> int:
        return self._loader.largest_slice

    def __iter__(self) -> Iterator[PackedBatch]:
        passes = self._loader.passes(2)
        for _ in next(passes):
            pass  # the loader keeps it for the second pass
        self.stopped = not self._agree(self._loader.partition, self._loader.stopped)
        if not self.stopped:
            yield from next(passes)


class EqualRounds:
    """A loader of a rank whose replica's rows several ranks read: its rounds, proven to be the same rows everywhere.

    The queue grants all of them the same leases. But a storage unit may die after some have read a round: its rows are
    then put again under the same indices, with newly drawn responses, and the others would train on those.

    `have_equal(value)` returns whether the ranks of the replica have the same value; collective.
    """

    def __init__(self, loader: RoundSource, have_equal: Callable[[str], bool]) -> None:
        self._loader = loader
        self._have_equal = have_equal

    @property
    def largest_slice(self) -> int:
        return self._loader.largest_slice

    @property
    def stopped(self) -> bool:
        return self._loader.stopped

    def __iter__(self) -> Iterator[PackedBatch]:
        """Yield the rounds. Raises TransportError on all ranks of the replica if they have read different rows."""
        for batch in self._loader:
            if not self._have_equal(_fingerprint(batch)):
                raise TransportError(
                    "ranks of a replica have read different rows of the same round: a storage unit died between their "
                    "reads, and the rows were put again; training goes on from the last checkpoint"
                )
            yield batch


class RoundsInTurns:
    """The rounds of a trainer that shares its devices. While it waits for one, the other side may have them; so what it
    waits for may be generated. It has them again when the next round is here.

        round -> train -> round ...... none is ready, the devices are wanted -> sleep, give | a round comes -> ask, wake

    All ranks of the gang iterate together.

    Args:
        rounds: of `loader`.
        sleep: frees device memory; returns the newest published version. `wake`: takes it back. Both collective.
    """

    def __init__(
        self,
        context: WorkerContext,
        rounds: RoundSource,
        loader: StreamingDataLoader,
        turn: TurnHolder,
        news: threading.Event,
        *,
        sleep: Callable[[], Version],
        wake: Callable[[], None],
    ) -> None:
        self._context = context
        self._rounds = rounds
        self._loader = loader
        self._turn = turn
        self._news = news
        self._sleep = sleep
        self._wake = wake

    @property
    def largest_slice(self) -> int:
        return self._rounds.largest_slice

    @property
    def stopped(self) -> bool:
        return self._rounds.stopped

    def __iter__(self) -> Iterator[PackedBatch]:
        rounds = iter(self._rounds)
        while True:
            if not self._wait_awake():
                self._turn.give(self._sleep())
                self._wait_asleep()
                # Even if the run stops: the last step may still have to be saved.
                wait_for_devices(self._context, self._turn, span="asleep")
                self._wake()
            batch = next(rounds, None)
            if batch is None:
                return
            yield batch

    def _wait_awake(self) -> bool:
        """Wait for the next round, or the end; False: there is none, and the devices are wanted."""
        wanted = False
        while True:
            rule = self._look(YieldRule.PARKED_S if wanted else _LOOK_S, give_way=not wanted)
            if rule.all_have_rounds or rule.should_yield:
                return rule.all_have_rounds
            wanted = rule.is_wanted

    def _wait_asleep(self) -> None:
        with self._context.timeline.span("asleep"):
            while not self._look(_LOOK_S, give_way=False).all_have_rounds:
                pass

    def _look(self, wait_s: float, *, give_way: bool) -> YieldRule:
        """Wait up to `wait_s` for a round or, with `give_way`, until the devices are wanted; collective."""
        self._news.clear()
        if not self._loader.has_round and not (give_way and self._turn.wanted):
            self._news.wait(wait_s)
        return YieldRule(gather([self._loader.has_round, self._loader.asking_s, self._turn.wanted]))


def sleepers(config: RunConfig, models: Sequence[object]) -> tuple[Sleeper, ...]:
    """Return the models that a process has on devices that another role uses in turn; None stands for none. Raises
    ConfigError if one cannot sleep."""
    there = [model for model in models if model is not None]
    for model in there:
        if not isinstance(model, Sleeper):
            raise ConfigError(
                f"roles: {config.roles_text} needs models that can free their device memory and take it back, and "
                f"{type(model).__name__} cannot; give rollout and actor devices of their own (--roles "
                f"rollout:N,actor:N)"
            )
    return tuple(model for model in there if isinstance(model, Sleeper))


def _fingerprint(batch: PackedBatch) -> str:
    """Return the xxh3-64 of a batch's rows and columns."""
    digest = xxhash.xxh3_64(repr(batch.indices).encode())
    for name, column in sorted(batch.columns.items()):
        digest.update(name.encode())
        for part in (column.lengths, column.values):
            digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class CriticSaver:
    """Writes the critic's part of a checkpoint; the actor's saver waits for it. All ranks construct and call it
    together.

        training thread   save s received -> begin(s): the copy begins -> before_update() -> update of step s + 1
        saving thread     s has begun -> shards, checksums -> files of s

    A failure is reported to the actor, which then drops the whole checkpoint.

    Args:
        open_channel: opens a second channel, used by the saving thread only.
        timeout_s: deadline of one save (s).
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
        self._engine = engine
        self._channel = open_channel()
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._copy = HostCopy(device)
        self._thread: threading.Thread | None = None
        self._step = 0

    def restore_checkpoint(self, source: Path) -> None:
        """Load the critic's part of a checkpoint, whether a critic or the actor saved it. Raises CheckpointError if it
        cannot be read."""
        load_shards(self._engine, source / CRITIC, group=self._group)

    def begin(self, step: int) -> None:
        """Begin to save the current state: the one after `step`. Raises CheckpointError if an earlier save is still not
        written after `timeout_s`."""
        self.wait()
        state = self._copy.begin(self._engine.state_dict())
        self._step = step
        self._thread = threading.Thread(target=self._save_or_log, args=(step, state), name="checkpoint", daemon=True)
        self._thread.start()

    def before_update(self) -> float:
        """Wait until the state is copied and may change."""
        self._copy.wait()
        return 0.0

    def wait(self) -> None:
        """Wait until the last save is written or has failed. Raises CheckpointError if it is not written in time. Its
        thread may still read the copy, so no other save can begin."""
        if self._thread is None:
            return
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"the critic's part of the checkpoint of step {self._step} is not written after {self._timeout_s:g} s "
                f"(checkpoint.timeout_s); check whether the file system responds"
            )
        self._thread = None

    def close(self) -> None:
        self._copy.close()

    def _save_or_log(self, step: int, state: dict[str, Any]) -> None:
        try:
            self._save_part(step, state)
        except Exception:  # thread boundary: a rank or the actor is gone, which others detect
            logger.exception("the critic's part of step %d is not saved", step)

    def _save_part(self, step: int, state: dict[str, Any]) -> None:
        files: dict[str, tuple[int, str]] = {}
        error = ""
        try:
            files = self._write_shards(step, state)
        except (Exception, dcp.CheckpointException) as failure:  # dcp.CheckpointException is a BaseException
            expected = isinstance(failure, (AsyncFlowError, OSError))
            logger.warning(
                "the critic's part of step %d cannot be written", step, exc_info=None if expected else failure
            )
            error = f"rank {dist.get_rank()}: {one_line(failure)}"
        parts = gather([files, error], group=self._group)
        if dist.get_rank() == 0:
            merged = {name: tuple(entry) for found, _ in parts for name, entry in found.items()}
            self._channel.send_files(step, merged, next((why for _, why in parts if why), ""))

    def _write_shards(self, step: int, state: dict[str, Any]) -> dict[str, tuple[int, str]]:
        self._copy.wait()
        if not self._channel.recv_begun(step, timeout_s=self._timeout_s):
            return {}
        work = beside(checkpoint_path(self._run_dir, step))
        save_shards(state, work / CRITIC, group=self._group)
        own = describe(work, own_shards(work, CRITIC, dist.get_rank()))
        return {name: (entry.num_bytes, entry.xxh3) for name, entry in own.items()}


def _open_channel(context: WorkerContext) -> ActorCriticChannel:
    return ActorCriticChannel(context.sealed_store(), lineage=context.job.lineage)
