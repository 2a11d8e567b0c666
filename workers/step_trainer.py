"""Trains one step after another on one rank of the actor: rows as they arrive, update by update.

    rounds arrive      -> columns -> statistics -> forward_backward of the first mini-batch, later rounds are kept
    the last is there  -> update | forward_backward ... update | ...        as many as the configuration says

A stop before a step's last round abandons it, and nothing has changed; after that the step is finished. Called by
`workers.actor`; publishing, recording and saving are its part.
"""

import math
from collections.abc import Callable, Iterator

import torch

from asyncflow.errors import TrainingDiverged
from tq.batch import PackedBatch
from tq.client.dataloader import StreamingDataLoader
from workers.columns.chain import TaskChain
from workers.context import WorkerContext
from workers.engines.base import TrainEngine
from workers.gather import gather, sum_over_ranks
from workers.ledger import check_staleness, ledger_lines
from workers.mini_batches import Round, StepRounds
from workers.objective import algorithm_of
from workers.packing import sequences_of
from workers.records import StepRecord
from workers.step_totals import UpdateTotals


class StepTrainer:
    """One rank's part of every step; `train` is collective over the gang."""

    def __init__(
        self,
        context: WorkerContext,
        engine: TrainEngine,
        loader: StreamingDataLoader,
        *,
        columns: TaskChain,
        before_update: Callable[[], float],
        after_update: Callable[[int, int, int], None],
    ) -> None:
        """Args:
        context: of this rank.
        engine: that is trained.
        loader: brings this rank's rows.
        columns: the tasks that the actor hosts.
        before_update: waits until nobody reads the weights any more; returns the seconds that it took.
        after_update: is told of every update at once: its step, its number there, and how many the engine counts.
        """
        schedule = context.config.schedule
        self._context = context
        self._config = context.config
        self._engine = engine
        self._loader = loader
        self._columns = columns
        self._before_update = before_update
        self._after_update = after_update
        self._algorithm = algorithm_of(context.config)
        self._step_rows = schedule.step_rows

    def train(self, step: int) -> StepRecord | None:
        """Train the step that the loader is at; None: a stop came before its rows were all there.

        Raises:
            TrainingDiverged: a loss or a gradient is not finite, on all ranks; the weights are those before the update.
        """
        record = StepRecord(step)
        rounds = StepRounds(self._config.actor, step_rows=self._step_rows)
        for arrived in self._arriving(record):
            if rounds.add(arrived):
                self._train_round(arrived, record)
        if self._loader.stopped:
            self._engine.zero_grad()
            return None
        self._update(record)
        for mini_batch in rounds.later_mini_batches(seed=self._config.seed, step=step):
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

    def _next(self, rounds: Iterator[tuple[PackedBatch, tuple[int, ...]]], step: int) -> PackedBatch | None:
        self._context.report("waiting for rows", step=step)
        with self._context.timeline.span("wait for rows", step=step):
            batch, _ = next(rounds, (None, ()))
        return batch

    def _prepared(self, batch: PackedBatch, record: StepRecord) -> Round:
        """Compute the columns of a round, and count its rows, once."""
        round_rows = self._loader.round_rows
        batch = self._columns.add_columns(batch, step=record.step, round_rows=round_rows)
        if len(batch):
            job = self._context.job
            admitted_step = self._loader.round_partition
            lines = ledger_lines(
                batch,
                step=record.step,
                admitted_step=admitted_step,
                lineage=job.lineage,
                time_s=self._context.elapsed_s,
            )
            check_staleness(lines, bound=self._config.schedule.staleness_bound)
            record.add_rows(batch, lines, admitted_step=admitted_step)
        several = self._config.actor.num_updates > 1
        total_rows = sum_over_ranks(len(batch), device=self._context.device) if several else len(batch)
        return Round(batch, round_rows, total_rows)

    def _train_round(self, one: Round, record: StepRecord) -> None:
        size = self._config.actor.micro_batch_size
        for start in range(0, one.round_rows, size):
            positions = range(start, min(start + size, len(one.batch)))
            self._context.progress()
            with self._context.timeline.span("forward_backward", step=record.step, rows=len(positions)):
                whole = len(positions) == len(one.batch)
                batch = one.batch if whole else one.batch.select(positions)
                self._train_micro_batch(batch if positions else None, record)

    def _train_micro_batch(self, batch: PackedBatch | None, record: StepRecord) -> None:
        if batch is None:
            self._engine.forward_backward(None, _no_loss)
            return
        loss = self._algorithm.loss(batch, device=self._context.device)
        self._engine.forward_backward(sequences_of(batch), loss)
        record.add_loss(self._algorithm.counts(batch), loss.stats)

    def _update(self, record: StepRecord) -> None:
        """Scale by what all ranks trained since the last update, and update."""
        with self._context.timeline.span("wait for peers", step=record.step):
            parts = gather(vars(record.next_update), device=self._context.device)
        totals = UpdateTotals.merged(UpdateTotals(**part) for part in parts)
        scale = self._algorithm.scale(totals.counts)
        self._check_finite("loss", totals.loss * scale, record)
        record.sync_exposed_s += self._before_update()
        with self._context.timeline.span("optimizer", step=record.step):
            stats = self._engine.step(scale)
        self._check_finite("gradient norm", stats.grad_norm, record)
        self._after_update(record.step, len(record.updates) + 1, self._engine.optimizer_updates)
        record.add_update(totals, scale=scale, stats=stats)

    def _check_finite(self, what: str, value: float, record: StepRecord) -> None:
        if math.isfinite(value):
            return
        saved = max((path.name for path in (self._context.run_dir / "checkpoints").glob("step_*")), default="")
        source = f"go back to checkpoint {saved}" if saved else "start again (there is no checkpoint yet)"
        raise TrainingDiverged(
            f"step {record.step}, update {len(record.updates) + 1}: the {what} is {value}, so the weights were not "
            f"changed; {source} with a smaller actor.lr, and look at the rewards in samples/"
        )

    def _report(self, record: StepRecord, *, num_arrived: int = 0) -> None:
        number, every = len(record.updates) + 1, self._config.actor.num_updates
        update = f", update {number} of {every}" if every > 1 else ""
        answers = record.num_rows + num_arrived
        self._context.report("training", f"step {record.step}{update}, {answers} answers", step=record.step)


def _no_loss(log_probs_A: torch.Tensor, entropy_A: torch.Tensor) -> torch.Tensor:
    return log_probs_A.sum() * 0.0
