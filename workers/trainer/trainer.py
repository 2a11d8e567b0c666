"""A step of training on one rank: get rows, add columns, loss, update, publish, record.

    a round arrives    -> columns -> samples -> forward_backward, if it is of the first mini-batch; the others are kept
                          (all are kept by an algorithm that normalises over the step: `Algorithm.whole_step`)
    the last is there  -> update | forward_backward ... update | ...        as many as the configuration says
    all are made       -> publish the weights, record the step

A stop before a step's last round abandons it, and nothing has changed; after that the step is finished. The actor and
a critic in a role of its own both train by this; `TrainingRole` is what they do differently.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from asyncflow.errors import TrainingDiverged
from asyncflow.run_files import list_checkpoints
from tq.client.dataloader import Replica, StreamingDataLoader
from tq.client.queue_client import QueueClient
from tq.columns import PackedBatch
from workers.algorithms.algorithm import PPO, Moments
from workers.algorithms.load import load_algorithm
from workers.algorithms.parts import MicroLoss
from workers.engines.base import TrainedEngine, TrainEngine, ValueEngine
from workers.rank.context import WorkerContext
from workers.rank.peers import gather, max_over_ranks, sum_over_ranks
from workers.records.log_prob_gap import Comparison, MoveProbe
from workers.records.step_record import Model, StepRecord
from workers.records.step_totals import UpdateTotals
from workers.rows.rows import micro_batches, samples_of, sequences_of
from workers.settings.dataflow import PlacedTask
from workers.settings.engines import ActorConfig, TrainingConfig
from workers.settings.run import RunConfig
from workers.tasks.chain import TaskChain
from workers.trainer.batching import Round, StepRounds
from workers.trainer.tri_model import LossOfMicroStep, MicroStep, TriModel


class TrainingRole(Protocol):
    """What the actor and a critic in a role of its own do differently in a step; all ranks of a gang call alike."""

    def take(self, batch: PackedBatch, record: StepRecord) -> None:
        """Take a round with its columns, once; rows of whole groups, maybe none."""

    def commit(self, record: StepRecord, stopped: bool) -> bool:
        """Decide, alike on all ranks, whether the step is finished, once all of its rows were asked for.

        Args:
            stopped: a stop came before they were all there.
        """

    def before_update(self) -> float:
        """Wait until nothing reads the weights any more; returns the seconds that it took."""

    def after_update(self, step: int, number: int, optimizer_updates: int) -> None:
        """An update of the policy was made: its number in the step, and how many the engine counts."""

    def publish(self, record: StepRecord) -> None:
        """The step's updates are made: send the weights to those that follow them."""

    def record(self, record: StepRecord) -> None:
        """Acknowledge the step's rows and write down what it was."""


class Trainer:
    """One rank's part of every step; `train` is collective over the gang."""

    def __init__(
        self,
        context: WorkerContext,
        learners: Sequence["Learner"],
        loader: StreamingDataLoader,
        *,
        columns: TaskChain,
        training: ActorConfig,
        role: TrainingRole,
        tri_model: TriModel | None = None,
        counts: bool = True,
    ) -> None:
        """Args:
        learners: the models that are trained, one after the other on every micro-batch.
        loader: brings this rank's rows.
        columns: the tasks that this process computes before it trains.
        training: how rounds are cut into micro-batches, and how many updates a step makes.
        role: whose step it is.
        tri_model: scores the policy's micro-batches with its older copies and the reference.
        counts: this rank's rows; False: they are those of another rank, which counts them.
        """
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
        self._algorithm = load_algorithm(config.algorithm, config.rollout)
        self._move_probe = self._open_move_probe()
        self._whole_step = self._algorithm.whole_step and any(one.model is Model.POLICY for one in learners)

    def train(self, step: int) -> StepRecord | None:
        """Train the step that the loader is at; None: a stop came before its rows were all there.

        Raises:
            TrainingDiverged: a loss or a gradient is not finite, on all ranks; the weights are those before the update.
        """
        record, rounds = StepRecord(step), self._step_rounds(step)
        if self._move_probe is not None:
            move = self._move_probe.move()
            record.gap.move = move if self._counts else {}
        for batch in self._arriving(record):
            arrived = self._with_columns(batch, record)
            if rounds.add(arrived):
                self._accumulate(arrived, record)
        if not self._role.commit(record, self._loader.stopped):
            self._forget_gradients()
            return None
        for mini_batch in rounds.mini_batches(self._normalized):
            self._report(record)
            for kept in mini_batch:
                self._accumulate(kept, record)
            self._update(record)
        self._role.publish(record)
        self._role.record(record)
        return record

    def _open_move_probe(self) -> MoveProbe | None:
        """Return what judges log-probabilities of older weights, where there are any; simulated engines have none."""
        schedule, engine = self._config.schedule, self._config.actor.engine
        policies = [one.engine for one in self._learners if one.model is Model.POLICY]
        if not policies or not schedule.staleness_bound or engine == "sim":
            return None
        return MoveProbe(cast(TrainEngine, policies[0]))

    def _step_rounds(self, step: int) -> StepRounds:
        return StepRounds(
            self._training,
            step_rows=self._config.schedule.step_rows,
            seed=f"{self._config.seed}/{step}",
            streams=not self._whole_step,
        )

    def _arriving(self, record: StepRecord) -> Iterator[PackedBatch]:
        """Yield this rank's rows, round after round."""
        rounds = iter(self._loader)
        while True:
            self._context.report("waiting for rows", step=record.step)
            with self._context.timeline.span("wait for rows", step=record.step):
                batch = next(rounds, None)
            if batch is None:
                return
            record.arrived()
            self._report(record, num_arrived=len(batch))
            yield batch

    def _with_columns(self, batch: PackedBatch, record: StepRecord) -> Round:
        """Compute the columns of a round, and count its rows, once."""
        round_rows = self._loader.round_rows
        batch = self._columns.add_columns(batch, step=record.step, round_rows=round_rows)
        self._role.take(batch, record)
        several = self._training.num_updates > 1 or self._whole_step
        total_rows = sum_over_ranks(len(batch) * self._counts) if several else len(batch)
        samples = samples_of(batch)
        return Round(samples, self._micro_batches(samples, round_rows), total_rows, self._drawn_by(batch))

    def _drawn_by(self, batch: PackedBatch) -> Sequence[int]:
        """Return the versions that drew tokens of a round, on any rank, so that all score it with the same copies."""
        if self._tri_model is None:
            return ()
        parts = gather(self._tri_model.versions_of(batch))
        return sorted({version for part in parts for version in part})

    def _micro_batches(self, batch: PackedBatch, round_rows: int) -> list[Sequence[int]]:
        """Return as many micro-batches as the rank with the most of them has."""
        training = self._training
        cuts = micro_batches(batch, training)
        if training.max_tokens_per_micro_batch:
            most = max_over_ranks(len(cuts))
        else:
            most = -(-round_rows // training.micro_batch_size)
        return [*cuts, *([range(0)] * (most - len(cuts)))]

    def _normalized(self, batches: list[PackedBatch]) -> list[PackedBatch]:
        """Normalise the advantages of this rank's rounds by those of all ranks; collective."""
        algorithm = self._algorithm
        own = Moments.merged(algorithm.moments(batch) for batch in batches if len(batch) and self._counts)
        parts = gather(vars(own))
        moments = Moments.merged(Moments(**part) for part in parts)
        return [algorithm.normalized(batch, moments) if len(batch) else batch for batch in batches]

    def _accumulate(self, one: Round, record: StepRecord) -> None:
        """Add a round's loss to the gradient of every model, micro-batch after micro-batch."""
        for positions in one.micro_batches:
            self._context.progress()
            with self._context.timeline.span("forward_backward", step=record.step, rows=len(positions)):
                whole = len(positions) == len(one.batch)
                batch = one.batch if whole else one.batch.select(positions)
                self._train_micro_batch(batch if len(positions) else None, one, record)

    def _train_micro_batch(self, batch: PackedBatch | None, one: Round, record: StepRecord) -> None:
        for learner in self._learning(record):
            scored, comparison = None, None
            if learner.model is Model.POLICY:
                updated = bool(record.policy.made)
                if self._tri_model is not None:
                    scored = self._tri_model.micro_step(
                        batch, one.drawn_by, step=record.step, updated=updated, device=self._context.device
                    )
                if batch is not None and not updated:
                    held = None if scored is None else scored.drew
                    comparison = Comparison.of(batch, step=record.step, held=held)
            stats = learner.train(batch, self._context.device, scored, comparison)
            if self._move_probe is not None and batch is not None and comparison is not None:
                assert comparison.log_probs_A is not None, "the loss was called"
                self._move_probe.keep(batch, comparison.log_probs_A)
            if batch is not None and self._counts:
                gap = {} if comparison is None else comparison.stats
                record.add_loss(learner.model, self._algorithm.counts(batch), stats, gap)

    def _update(self, record: StepRecord) -> None:
        """Scale by what all ranks trained since the last update, and update."""
        with self._context.timeline.span("wait for the device", step=record.step):
            record.fetch()
        for learner in self._learning(record):
            log = record.log(learner.model)
            with self._context.timeline.span("wait for peers", step=record.step):
                parts = gather(vars(log.next_update))
            totals = UpdateTotals.merged(UpdateTotals(**part) for part in parts)
            scale = self._algorithm.scale(totals.counts)
            self._check_finite("loss", totals.loss * scale, learner, record)
            record.sync_exposed_s += self._role.before_update()
            if learner.model is Model.POLICY and self._tri_model is not None:
                self._tri_model.before_update(record.step)
            with self._context.timeline.span("optimizer", step=record.step):
                stats = learner.engine.step(scale)
            self._check_finite("gradient norm", stats.grad_norm, learner, record)
            if learner.model is Model.POLICY:
                self._role.after_update(record.step, len(log.made) + 1, learner.engine.optimizer_updates)
                if self._move_probe is not None:
                    self._move_probe.updated()
            log.add(totals, scale=scale, stats=stats)

    def _learning(self, record: StepRecord) -> list["Learner"]:
        return [learner for learner in self._learners if learner.first_step <= record.step]

    def _forget_gradients(self) -> None:
        for learner in self._learners:
            learner.engine.zero_grad()

    def _check_finite(self, what: str, value: float, learner: "Learner", record: StepRecord) -> None:
        if math.isfinite(value):
            return
        saved = next(reversed(list_checkpoints(self._context.run_dir).values()), None)
        source = f"go back to checkpoint {saved.name}" if saved else "start again (there is no checkpoint yet)"
        whose, section = ("", "actor") if learner.model is Model.POLICY else ("critic's ", "critic")
        raise TrainingDiverged(
            f"step {record.step}, update {len(record.log(learner.model).made) + 1}: the {whose}{what} is {value}, so "
            f"the weights were not changed; {source} with a smaller {section}.lr, and look at the rewards in samples/"
        )

    def _report(self, record: StepRecord, *, num_arrived: int = 0) -> None:
        number, every = record.num_updates + 1, self._training.num_updates
        update = f", update {number} of {every}" if every > 1 else ""
        responses = record.num_rows + num_arrived
        self._context.report("training", f"step {record.step}{update}, {responses} responses", step=record.step)


@dataclass(frozen=True)
class Learner:
    """A model in training: its engine with its loss.

    The actor has the policy, and the critic where that has no role of its own; the role `critic` has the critic.

    Attributes:
        model: which.
        engine: that holds it.
        loss: (micro-batch, device) -> its loss.
        first_step: it is trained from this step on.
    """

    model: Model
    engine: TrainedEngine
    loss: Callable[[PackedBatch, torch.device], MicroLoss]
    first_step: int = 1

    def train(
        self,
        batch: PackedBatch | None,
        device: torch.device,
        scored: MicroStep | None = None,
        comparison: Comparison | None = None,
    ) -> Mapping[str, Tensor]:
        """Accumulate the gradient of a micro-batch; collective.

        Args:
            batch: None: this rank has no rows.
            device: where the engine computes.
            scored: the micro-batch as older policies and the reference see it, with `actor.tri_model`.
            comparison: is told the policy's log-probabilities.
        Returns:
            The loss's `stats`; none without rows.
        """
        if batch is None:
            self.engine.forward_backward(None, _no_loss)
            return {}
        if scored is None:
            loss: MicroLoss = self.loss(batch, device)
            sequences = sequences_of(batch)
        else:
            loss = LossOfMicroStep(scored, lambda whole: self.loss(whole, device))
            sequences = scored.sequences
        self.engine.forward_backward(sequences, loss if comparison is None else comparison.before(loss))
        return loss.stats


def policy_learner(config: RunConfig, engine: TrainEngine) -> Learner:
    """Return the policy in training: from the first step on, or after those of the critic alone."""
    algorithm = load_algorithm(config.algorithm, config.rollout)
    return Learner(
        Model.POLICY,
        engine,
        lambda batch, device: algorithm.loss(batch, device=device),
        first_step=1 + config.critic_only_steps,
    )


def critic_learner(config: RunConfig, engine: ValueEngine) -> Learner:
    """Return the critic in training."""
    algorithm = load_algorithm(config.algorithm, config.rollout)
    assert isinstance(algorithm, PPO), f"{config.algorithm.name} has no critic"
    return Learner(Model.CRITIC, engine, lambda batch, device: algorithm.value_loss(batch, device=device))


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
) -> StreamingDataLoader:
    """Return what brings a training task's rows, from the step after the weights that the run starts from.

    Args:
        training: of the model that is trained: how many rows a rank gets at a time.
        rank, num_ranks: which part of the rows; ranks of a replica get the same one.
        replica: shares the rows among its ranks.
    """
    config = context.config
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
        # A generating engine may load for as long as any worker; until then no writer is connected.
        producers_timeout_s=0.0 if config.waits_for_others else config.launcher.start_timeout_s,
        producers_setting="launcher.start_timeout_s",
    )
