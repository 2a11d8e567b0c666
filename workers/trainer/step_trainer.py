"""One step of training on one rank: get rows, add columns, compute the loss, update, publish, record.

    a round arrives     -> columns -> samples -> forward_backward if it is in the first mini-batch; others are kept
                           (an algorithm that normalizes over the step keeps all: `Algorithm.whole_step`)
    the last has come   -> update | forward_backward ... update | ...       as many as the configuration says
    all updates made    -> publish the weights, record the step

A stop before the step's last round abandons the step and changes nothing; after it the step is finished. The actor and
a critic in a role of its own share this code; `TrainingRole` holds what they do differently.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from asyncflow.errors import TrainingDiverged
from asyncflow.run_files import list_checkpoints
from tq.client.dataloader import Replica, StreamingDataLoader
from tq.client.queue_client import QueueClient
from tq.columns import PackedBatch
from workers.algorithms.algorithm import PPO, Moments
from workers.algorithms.load_algorithm import load_algorithm
from workers.algorithms.parts import MicroLoss
from workers.engines.base import PipelinedEngine, TrainedEngine, TrainEngine, ValueEngine
from workers.rank.context import WorkerContext
from workers.rank.peers import gather, max_over_ranks, sum_over_ranks
from workers.records.log_prob_gap import Comparison, MoveProbe
from workers.records.samples import TrainedLog
from workers.records.step_record import StepRecord, TrainedModel
from workers.records.step_totals import UpdateTotals
from workers.rows.packed_rows import micro_batches, samples_of, sequences_of
from workers.settings.dataflow import PlacedTask
from workers.settings.engines import ActorConfig, TrainingConfig
from workers.settings.run import RunConfig
from workers.tasks.chain import TaskChain
from workers.trainer.batching import RankRound, StepRounds
from workers.trainer.tri_model import LossOfMicroStep, MicroStep, TriModel


class TrainingRole(Protocol):
    """What the actor and a critic in a role of its own do differently; all ranks of a gang make the same calls."""

    def take_round(self, batch: PackedBatch, record: StepRecord) -> None:
        """Take a round with its columns, once. It holds rows of whole groups and may be empty."""

    def commit_step(self, record: StepRecord, stopped: bool) -> bool:
        """Decide, identically on all ranks, whether to finish a step whose rows were all requested. `stopped`: a stop
        came before all of them arrived."""

    def before_update(self) -> float:
        """Wait until nothing reads the weights; returns the seconds waited."""

    def after_update(self, step: int, number: int, optimizer_updates: int) -> None:
        """Note an update of the policy: its number within the step, and the engine's total."""

    def publish(self, record: StepRecord) -> None:
        """Send the weights to their receivers, after all updates of the step."""

    def record_step(self, record: StepRecord) -> None:
        """Acknowledge the step's rows and record its results."""


class RoundSource(Protocol):
    """What gives a step's rounds: the loader itself, or one that waits for all of them."""

    @property
    def largest_slice(self) -> int:
        """Most rows of any rank in the current round."""

    @property
    def stopped(self) -> bool:
        """A stop came before the step's last round."""

    def __iter__(self) -> Iterator[PackedBatch]: ...


class StepTrainer:
    """One rank's part of every step; `train` is collective over the gang.

    Args:
        learners: the trained models; every micro-batch trains them one after the other.
        columns: the tasks that this process computes before training.
        counts: False if another rank of the replica counts the same rows.
        trained_log: says which rows' log-probabilities the record keeps.
    """

    def __init__(
        self,
        context: WorkerContext,
        learners: Sequence["Learner"],
        loader: RoundSource,
        *,
        columns: TaskChain,
        training: ActorConfig,
        role: TrainingRole,
        tri_model: TriModel | None = None,
        counts: bool = True,
        trained_log: TrainedLog | None = None,
    ) -> None:
        config = context.config
        self._context = context
        self._config = config
        self._learners = learners
        self._loader = loader
        self._columns = columns
        self._training = training
        self._role = role
        self._tri_model = tri_model
        self._counts = counts
        self._trained_log = trained_log
        self._compiles = training.compile  # in the first micro-batches
        self._algorithm = load_algorithm(config.algorithm, config.rollout)
        self._move_probe = self._open_move_probe()
        # What to note of micro-batches whose losses an engine has not called yet.
        self._unnoted: list[Callable[[], None]] = []
        self._whole_step = self._algorithm.whole_step and any(one.model is TrainedModel.POLICY for one in learners)

    def train(self, step: int) -> StepRecord | None:
        """Train the loader's current step; None if a stop came before all its rows arrived. Raises TrainingDiverged if
        a loss or a gradient is not finite; on all ranks, with the weights of before the update."""
        record, rounds = StepRecord(step), self._step_rounds(step)
        if self._move_probe is not None:
            move = self._move_probe.measure_move()
            record.gap.move = move if self._counts else {}
        for batch in self._arriving_batches(record):
            arrived = self._with_columns(batch, record)
            if rounds.add_round(arrived):
                self._accumulate_round(arrived, record)
        if not self._role.commit_step(record, self._loader.stopped):
            self._forget_gradients()  # of rounds trained on arrival: nothing else has changed yet
            return None
        for mini_batch in rounds.mini_batches(self._normalize_advantages):
            self._report_progress(record)
            for kept in mini_batch:
                self._accumulate_round(kept, record)
            self._update_models(record)
        self._role.publish(record)
        self._role.record_step(record)
        return record

    def _open_move_probe(self) -> MoveProbe | None:
        schedule, engine = self._config.schedule, self._config.actor.engine
        policies = [one.engine for one in self._learners if one.model is TrainedModel.POLICY]
        # Without staleness all tokens have age 0, which needs no measured move; nor do tokens that nobody drew.
        supervised = self._config.algorithm.is_supervised
        if not policies or not schedule.staleness_bound or engine == "sim" or supervised:
            return None
        return MoveProbe(cast(TrainEngine, policies[0]))

    def _step_rounds(self, step: int) -> StepRounds:
        return StepRounds(
            self._training,
            step_rows=self._config.schedule.step_rows,
            seed=f"{self._config.seed}/{step}",
            streams=not self._whole_step,
        )

    def _arriving_batches(self, record: StepRecord) -> Iterator[PackedBatch]:
        rounds = iter(self._loader)
        while True:
            self._context.report_state("waiting for rows", step=record.step)
            with self._context.timeline.span("wait for rows", step=record.step):
                batch = next(rounds, None)
            if batch is None:
                return
            record.note_arrival()
            self._report_progress(record, num_arrived=len(batch))
            yield batch

    def _with_columns(self, batch: PackedBatch, record: StepRecord) -> RankRound:
        largest_slice = self._loader.largest_slice
        batch = self._columns.add_columns(batch, step=record.step, largest_slice=largest_slice)
        self._role.take_round(batch, record)
        # Only the assignment to several mini-batches needs the total over all ranks.
        several = self._training.num_updates > 1 or self._whole_step
        total_rows = sum_over_ranks(len(batch) * self._counts) if several else len(batch)
        samples = samples_of(batch)
        return RankRound(samples, self._micro_batches(samples, largest_slice), total_rows, self._drawn_by(batch))

    def _drawn_by(self, batch: PackedBatch) -> Sequence[int]:
        if self._tri_model is None:
            return ()
        # Scoring with a copy is collective, so all ranks must use the same versions.
        parts = gather(self._tri_model.versions_of(batch))
        return sorted({version for part in parts for version in part})

    def _micro_batches(self, batch: PackedBatch, largest_slice: int) -> list[Sequence[int]]:
        training = self._training
        cuts = micro_batches(batch, training)
        if training.max_tokens_per_micro_batch:
            most = max_over_ranks(len(cuts))
        else:
            # By rows, the largest slice gives the number: no need to ask the other ranks.
            most = -(-largest_slice // training.micro_batch_size)
        # Passes are collective, so ranks with fewer micro-batches add empty ones.
        return [*cuts, *([range(0)] * (most - len(cuts)))]

    def _normalize_advantages(self, batches: list[PackedBatch]) -> list[PackedBatch]:
        """Normalize the advantages of this rank's rounds with the moments of all ranks; collective."""
        algorithm = self._algorithm
        own = Moments.merged(algorithm.moments(batch) for batch in batches if len(batch) and self._counts)
        parts = gather(vars(own))
        moments = Moments.merged(Moments(**part) for part in parts)
        return [algorithm.normalized(batch, moments) if len(batch) else batch for batch in batches]

    def _accumulate_round(self, one: RankRound, record: StepRecord) -> None:
        for positions in one.micro_batches:
            self._context.report_progress()
            with self._context.timeline.span("forward_backward", step=record.step, rows=len(positions)):
                whole = len(positions) == len(one.batch)
                batch = one.batch if whole else one.batch.select(positions)
                self._train_micro_batch(batch if len(positions) else None, one, record)

    def _train_micro_batch(self, batch: PackedBatch | None, one: RankRound, record: StepRecord) -> None:
        for learner in self._active_learners(record):
            scored, comparison = None, None
            if learner.model is TrainedModel.POLICY:
                updated = bool(record.policy.made)
                if self._tri_model is not None:
                    scored = self._tri_model.micro_step(
                        batch, one.drawn_by, step=record.step, updated=updated, device=self._context.device
                    )
                # After an update the policy is not the version that the tokens' ages are counted from; SFT has none.
                if batch is not None and not updated and "rollout_log_probs" in batch.columns:
                    held = None if scored is None else scored.drew
                    comparison = Comparison.from_batch(batch, step=record.step, held=held)
            loss = learner.train(batch, self._context.device, scored, comparison)
            if batch is None or loss is None:
                continue
            note = partial(self._note_loss, record, learner, batch, loss, comparison)
            if isinstance(learner.engine, PipelinedEngine):
                self._unnoted.append(note)
            else:
                note()

    def _note_loss(
        self, record: StepRecord, learner: "Learner", batch: PackedBatch, loss: MicroLoss, compared: Comparison | None
    ) -> None:
        """Note the figures of a micro-batch, once its loss was called."""
        if compared is not None:
            assert compared.log_probs_A is not None, "the loss was called"
            if self._move_probe is not None:
                self._move_probe.keep(batch, compared.log_probs_A)
            if self._counts and self._trained_log is not None:
                record.kept += self._trained_log.find_rows(batch, compared.log_probs_A)
        if self._counts:
            gap = {} if compared is None else compared.stats
            record.add_loss(learner.model, self._algorithm.counts(batch), loss.stats, gap)

    def _finish_micro_batches(self, record: StepRecord) -> None:
        """Complete what is under way in a pipeline."""
        for learner in self._active_learners(record):
            if isinstance(learner.engine, PipelinedEngine):
                with self._context.timeline.span("forward_backward", step=record.step, rows=0):
                    learner.engine.finish_micro_batches()
        unnoted, self._unnoted = self._unnoted, []
        for note in unnoted:
            note()

    def _update_models(self, record: StepRecord) -> None:
        """Scale the gradient by what all ranks trained since the last update, then update."""
        self._finish_micro_batches(record)
        self._compiles = False
        with self._context.timeline.span("wait for the device", step=record.step):
            record.fetch()
        for learner in self._active_learners(record):
            log = record.log_of_model(learner.model)
            with self._context.timeline.span("wait for peers", step=record.step):
                parts = gather(vars(log.next_update))
            totals = UpdateTotals.merge_parts(UpdateTotals(**part) for part in parts)
            scale = self._algorithm.scale(totals.counts)
            self._check_finite("loss", totals.loss * scale, learner, record)
            # From here on the weights change: a save, the sender and the old policy's copy must have read them.
            record.sync_exposed_s += self._role.before_update()
            if learner.model is TrainedModel.POLICY and self._tri_model is not None:
                self._tri_model.before_update(record.step)
            with self._context.timeline.span("optimizer", step=record.step):
                stats = learner.engine.step(scale)
            self._check_finite("gradient norm", stats.grad_norm, learner, record)
            if learner.model is TrainedModel.POLICY:
                self._role.after_update(record.step, len(log.made) + 1, learner.engine.optimizer_updates)
                if self._move_probe is not None:
                    self._move_probe.note_update()
            log.add_update(totals, scale=scale, stats=stats)

    def _active_learners(self, record: StepRecord) -> list["Learner"]:
        return [learner for learner in self._learners if learner.first_step <= record.step]

    def _forget_gradients(self) -> None:
        self._unnoted.clear()
        for learner in self._learners:
            learner.engine.zero_grad()

    def _check_finite(self, what: str, value: float, learner: "Learner", record: StepRecord) -> None:
        if math.isfinite(value):
            return
        # End the run instead of skipping the update: the next ones would come from the same rows, rewards and learning
        # rate.
        saved = next(reversed(list_checkpoints(self._context.run_dir).values()), None)
        source = f"go back to checkpoint {saved.name}" if saved else "start again (there is no checkpoint yet)"
        whose, section = ("", "actor") if learner.model is TrainedModel.POLICY else ("critic's ", "critic")
        raise TrainingDiverged(
            f"step {record.step}, update {len(record.log_of_model(learner.model).made) + 1}: the {whose}{what} is "
            f"{value}, so the weights were not changed; {source} with a smaller {section}.lr, and look at the "
            "rewards in samples/"
        )

    def _report_progress(self, record: StepRecord, *, num_arrived: int = 0) -> None:
        number, every = record.num_updates + 1, self._training.num_updates
        update = f", update {number} of {every}" if every > 1 else ""
        responses = record.num_rows + num_arrived
        compiles = ", compiling" if self._compiles else ""
        what = f"step {record.step}{update}, {responses} responses{compiles}"
        self._context.report_state("training", what, step=record.step)


@dataclass(frozen=True)
class Learner:
    """A model in training. The actor holds the policy, and the critic unless that has a role of its own."""

    model: TrainedModel
    engine: TrainedEngine
    loss: Callable[[PackedBatch, torch.device], MicroLoss]
    first_step: int = 1  # The first step that trains the model
    other_tokens: str | None = None  # `Algorithm.other_tokens`

    def train(
        self,
        batch: PackedBatch | None,
        device: torch.device,
        scored: MicroStep | None = None,
        comparison: Comparison | None = None,
    ) -> MicroLoss | None:
        """Accumulate the gradient of a micro-batch; collective. Returns its loss, whose `stats` are set once the engine
        has called it; None: there are no rows.

        Args:
            batch: None if this rank has no rows.
            scored: with `actor.tri_model`, the micro-batch scored by older policies and the reference.
        """
        if batch is None:
            self.engine.forward_backward(None, _no_loss)
            return None
        if scored is None:
            loss: MicroLoss = self.loss(batch, device)
            sequences = sequences_of(batch, others=self.other_tokens)
        else:
            loss = LossOfMicroStep(scored, lambda whole: self.loss(whole, device))
            sequences = scored.sequences
        self.engine.forward_backward(sequences, loss if comparison is None else comparison.wrap_loss(loss))
        return loss


def policy_learner(config: RunConfig, engine: TrainEngine) -> Learner:
    """Return the policy in training: from the first step on, or from the end of the critic-only steps."""
    algorithm = load_algorithm(config.algorithm, config.rollout)
    return Learner(
        TrainedModel.POLICY,
        engine,
        lambda batch, device: algorithm.loss(batch, device=device),
        first_step=1 + config.critic_only_steps,
        other_tokens=algorithm.other_tokens,
    )


def critic_learner(config: RunConfig, engine: ValueEngine) -> Learner:
    algorithm = load_algorithm(config.algorithm, config.rollout)
    assert isinstance(algorithm, PPO), f"{config.algorithm.name} has no critic"
    return Learner(TrainedModel.CRITIC, engine, lambda batch, device: algorithm.value_loss(batch, device=device))


def _no_loss(*_: Tensor) -> Tensor:
    raise AssertionError("a rank without rows has no loss")


def open_loader(
    context: WorkerContext,
    client: QueueClient,
    task: PlacedTask,
    training: TrainingConfig,
    *,
    rank: int,
    num_ranks: int,
    replica: Replica | None = None,
    arrived: Callable[[], None] = lambda: None,
) -> StreamingDataLoader:
    """Return the loader of a training task's rows, from the step after the weights that the run starts from.

    Args:
        rank, num_ranks: this rank's share of the rows; all ranks of a replica have the same share.
        replica: distributes the rows among the replica's ranks.
        arrived: see `StreamingDataLoader`.
    """
    config = context.config
    # No writer is connected before the generating engine has loaded. The launcher judges that by its progress; this
    # deadline is for what the launcher does not notice.
    operation = config.launcher.operation_timeout_s, "launcher.operation_timeout_s"
    producers_timeout_s, setting = max((config.start_timeout_s, config.start_timeout_key), operation)
    return StreamingDataLoader(
        client,
        task.name,
        task.inputs,
        first_partition=context.start_step + 1,
        last_partition=context.job.last_step,
        rows_per_round=max(training.micro_batch_size, config.schedule.n_samples_per_prompt),
        token_budget=config.round_tokens(training),
        rank=rank,
        num_ranks=num_ranks,
        replica=replica,
        timeout_s=config.tq.request_timeout_s,
        producers_timeout_s=0.0 if config.waits_for_others else producers_timeout_s,
        producers_setting=setting,
        arrived=arrived,
    )
