"""Trains one step after another on one rank of a training gang: rows as they arrive, update by update.

    rounds arrive      -> columns -> statistics -> forward_backward of the first mini-batch, later rounds are kept
                          (all are kept by an algorithm that normalises over the step: `Algorithm.whole_step`)
    the last is there  -> update | forward_backward ... update | ...        as many as the configuration says

A stop before a step's last round abandons it, and nothing has changed; after that the step is finished. Called by
`workers.actor`, and by `workers.critic` in a role of its own; publishing, recording and saving are their part.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from asyncflow.errors import TrainingDiverged
from tq.batch import PackedBatch
from tq.client.dataloader import StreamingDataLoader
from workers.algorithms.moments import Moments
from workers.columns.chain import TaskChain
from workers.config import ActorConfig
from workers.context import WorkerContext
from workers.gather import gather, max_over_ranks, sum_over_ranks
from workers.learner import Learner, Model
from workers.log_prob_gap import Comparison
from workers.micro_batches import micro_batches
from workers.mini_batches import Round, StepRounds
from workers.objective import algorithm_of
from workers.records import StepRecord
from workers.step_totals import UpdateTotals
from workers.tri_model import TriModel


def _unless_stopped(_: StepRecord, stopped: bool) -> bool:
    return not stopped


class StepTrainer:
    """One rank's part of every step; `train` is collective over the gang."""

    def __init__(
        self,
        context: WorkerContext,
        learners: Sequence[Learner],
        loader: StreamingDataLoader,
        *,
        columns: TaskChain,
        training: ActorConfig,
        tri_model: TriModel | None = None,
        commit: Callable[[StepRecord, bool], bool] = _unless_stopped,
        taken: Callable[[PackedBatch, StepRecord], None],
        before_update: Callable[[], float],
        after_update: Callable[[int, int, int], None],
        counts: bool = True,
    ) -> None:
        """Args:
        context: of this rank.
        learners: the models that are trained, one after the other on every micro-batch.
        loader: brings this rank's rows.
        columns: the tasks that this process computes before it trains.
        training: how rounds are cut into micro-batches, and how many updates a step makes.
        tri_model: scores the policy's micro-batches with its older copies and the reference.
        commit: (the step, whether a stop came) -> whether the step is finished, once all its rows were asked for; all
            ranks call it, and get the same.
        taken: is given every round with its columns, once; rows of whole groups, maybe none.
        before_update: waits until nobody reads the weights any more; returns the seconds that it took.
        after_update: is told of every update of the policy at once: its step, its number there, and how many the engine
            counts.
        counts: this rank's rows; False: they are those of another rank, which counts them.
        """
        schedule = context.config.schedule
        self._context = context
        self._config = context.config
        self._learners = learners
        self._loader = loader
        self._columns = columns
        self._training = training
        self._commit = commit
        self._taken = taken
        self._before_update = before_update
        self._after_update = after_update
        self._counts = counts
        self._algorithm = algorithm_of(context.config)
        self._whole_step = self._algorithm.whole_step and any(one.model is Model.POLICY for one in learners)
        self._step_rows = schedule.step_rows
        self._tri_model = tri_model

    def train(self, step: int) -> StepRecord | None:
        """Train the step that the loader is at; None: a stop came before its rows were all there.

        Raises:
            TrainingDiverged: a loss or a gradient is not finite, on all ranks; the weights are those before the update.
        """
        record = StepRecord(step)
        rounds = StepRounds(
            self._training,
            step_rows=self._step_rows,
            seed=f"{self._config.seed}/{step}",
            streams=not self._whole_step,
        )
        for arrived in self._arriving(record):
            if rounds.add(arrived):
                self._train_round(arrived, record)
        if not self._commit(record, self._loader.stopped):
            for learner in self._learners:
                learner.engine.zero_grad()
            return None
        for one in rounds.settle(self._normalized):
            self._train_round(one, record)
        self._update(record)
        for mini_batch in rounds.later_mini_batches():
            self._report(record)
            for kept in mini_batch:
                self._train_round(kept, record)
            self._update(record)
        return record

    def _arriving(self, record: StepRecord) -> Iterator[Round]:
        rounds = iter(self._loader)
        while (batch := self._next(rounds, record.step)) is not None:
            record.arrived()
            self._report(record, num_arrived=len(batch))
            yield self._prepared(batch, record)

    def _next(self, rounds: Iterator[PackedBatch], step: int) -> PackedBatch | None:
        self._context.report("waiting for rows", step=step)
        with self._context.timeline.span("wait for rows", step=step):
            return next(rounds, None)

    def _prepared(self, batch: PackedBatch, record: StepRecord) -> Round:
        """Compute the columns of a round, and count its rows, once."""
        round_rows = self._loader.round_rows
        batch = self._columns.add_columns(batch, step=record.step, round_rows=round_rows)
        self._taken(batch, record)
        several = self._training.num_updates > 1 or self._whole_step
        total_rows = sum_over_ranks(len(batch) * self._counts, device=self._context.device) if several else len(batch)
        return Round(batch, self._micro_batches(batch, round_rows), total_rows, self._drawn_by(batch))

    def _drawn_by(self, batch: PackedBatch) -> Sequence[int]:
        """Return the versions that drew tokens of a round, on any rank, so that all score it with the same copies."""
        if self._tri_model is None:
            return ()
        parts = gather(self._tri_model.versions_of(batch), device=self._context.device)
        return sorted({version for part in parts for version in part})

    def _micro_batches(self, batch: PackedBatch, round_rows: int) -> list[Sequence[int]]:
        """Return as many micro-batches as the rank with the most of them has."""
        training = self._training
        cuts = micro_batches(batch, training)
        if training.max_tokens_per_micro_batch:
            most = max_over_ranks(len(cuts), device=self._context.device)
        else:
            most = -(-round_rows // training.micro_batch_size)
        return [*cuts, *([range(0)] * (most - len(cuts)))]

    def _normalized(self, batches: list[PackedBatch]) -> list[PackedBatch]:
        """Normalise the advantages of this rank's rounds by those of all ranks; collective."""
        algorithm = self._algorithm
        own = Moments.merged(algorithm.moments(batch) for batch in batches if len(batch) and self._counts)
        parts = gather(vars(own), device=self._context.device)
        moments = Moments.merged(Moments(**part) for part in parts)
        return [algorithm.normalized(batch, moments) if len(batch) else batch for batch in batches]

    def _train_round(self, one: Round, record: StepRecord) -> None:
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
                    scored = self._tri_model.micro_step(batch, one.drawn_by, step=record.step, updated=updated)
                if batch is not None and not updated:
                    comparison = Comparison.of(batch, step=record.step)
            stats = learner.train(batch, self._context.device, scored, comparison)
            if comparison is not None and self._counts:
                record.gap.add(comparison.gap())
            if batch is not None and self._counts:
                record.add_loss(learner.model, self._algorithm.counts(batch), stats)

    def _update(self, record: StepRecord) -> None:
        """Scale by what all ranks trained since the last update, and update."""
        for learner in self._learning(record):
            log = record.log(learner.model)
            with self._context.timeline.span("wait for peers", step=record.step):
                parts = gather(vars(log.next_update), device=self._context.device)
            totals = UpdateTotals.merged(UpdateTotals(**part) for part in parts)
            scale = self._algorithm.scale(totals.counts)
            self._check_finite("loss", totals.loss * scale, learner, record)
            record.sync_exposed_s += self._before_update()
            if learner.model is Model.POLICY and self._tri_model is not None:
                self._tri_model.before_update(record.step)
            with self._context.timeline.span("optimizer", step=record.step):
                stats = learner.engine.step(scale)
            self._check_finite("gradient norm", stats.grad_norm, learner, record)
            if learner.model is Model.POLICY:
                self._after_update(record.step, len(log.made) + 1, learner.engine.optimizer_updates)
            log.add(totals, scale=scale, stats=stats)

    def _learning(self, record: StepRecord) -> list[Learner]:
        return [learner for learner in self._learners if learner.first_step <= record.step]

    def _check_finite(self, what: str, value: float, learner: Learner, record: StepRecord) -> None:
        if math.isfinite(value):
            return
        saved = max((path.name for path in (self._context.run_dir / "checkpoints").glob("step_*")), default="")
        source = f"go back to checkpoint {saved}" if saved else "start again (there is no checkpoint yet)"
        whose, section = ("", "actor") if learner.model is Model.POLICY else ("critic's ", "critic")
        raise TrainingDiverged(
            f"step {record.step}, update {len(record.log(learner.model).made) + 1}: the {whose}{what} is {value}, so "
            f"the weights were not changed; {source} with a smaller {section}.lr, and look at the rewards in samples/"
        )

    def _report(self, record: StepRecord, *, num_arrived: int = 0) -> None:
        number, every = record.num_updates + 1, self._training.num_updates
        update = f", update {number} of {every}" if every > 1 else ""
        answers = record.num_rows + num_arrived
        self._context.report("training", f"step {record.step}{update}, {answers} answers", step=record.step)
