"""The column tasks of one process, one after another in the graph's order.

    role     fetch -> add_columns -> put          actor    round -> add_columns -> forward_backward ...

It decides how many rows each task gets at a time, and that ranks without rows take part in collective tasks.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from tq.columns import Column, PackedBatch
from workers.data.tokenizer import TextDecoder
from workers.engines.base import TrainEngine, ValueEngine
from workers.rank.context import WorkerContext
from workers.rank.peers import max_over_ranks
from workers.rank.replicas import ReplicaPeers
from workers.rows.rows import Sequences, drawn_per_row, micro_batches, samples_of
from workers.settings.dataflow import CRITIC_TRAIN, SAMPLE_COLUMNS
from workers.settings.engines import TrainingConfig
from workers.settings.run import RunConfig
from workers.tasks.column_tasks import (
    Advantages,
    ColumnTask,
    FollowerLogProbs,
    HostedColumn,
    ReferenceLogProbs,
    Rewards,
    cut_of,
)
from workers.tasks.user import UserTask

_EMPTY = PackedBatch((), {})


class TaskChain:
    """Several column tasks as one."""

    def __init__(
        self,
        names: Sequence[str],
        context: WorkerContext,
        engine: TrainEngine | None = None,
        *,
        critic: ValueEngine | None = None,
        peers: ReplicaPeers | None = None,
    ) -> None:
        """Open the tasks.

        Args:
            names: of the tasks, producers before consumers.
            engine: of the actor that hosts them; None in a role of their own.
            critic: that the process trains; its training is no column task.
            peers: ranks that have the same rows: one computes what is not collective, for all; None: there are none.
        """
        self._peers = peers
        self._context = context
        self._tasks = {name: open_task(name, context, engine, critic) for name in names if name != CRITIC_TRAIN}

    @property
    def num_rows(self) -> int:
        """Rows that all tasks take at a time."""
        return min(task.num_rows for task in self._tasks.values())

    @property
    def version(self) -> int | None:
        """Step of the oldest weights that rows are gated by; None: by none."""
        return min((task.version for task in self._tasks.values() if task.version is not None), default=None)

    def add_columns(self, batch: PackedBatch, *, step: int, round_rows: int = 0) -> PackedBatch:
        """Return the batch with the outputs of all tasks.

        Args:
            batch: the inputs of the first task, and whatever later ones need beside the outputs of earlier ones.
            step: that the rows belong to.
            round_rows: most rows of any rank of the gang, the same on all; 0: there is one rank.
        """
        for name, task in self._tasks.items():
            if len(batch) or task.collective:
                with self._context.timeline.span(name, step=step, rows=len(batch)):
                    columns = self._computed(task, batch, step, max(len(batch), round_rows))
                batch = batch.with_columns(columns)
        return batch

    def take_weights(self, step: int) -> None:
        """Have the tasks whose rows need certain weights take those of `step` or later."""
        for task in self._tasks.values():
            if task.version is not None and task.version < step:
                task.take_weights(step)

    def close(self) -> None:
        """Close all tasks."""
        for task in self._tasks.values():
            task.close()

    def _computed(self, task: ColumnTask, batch: PackedBatch, step: int, round_rows: int) -> Mapping[str, Column]:
        if self._peers is None or task.collective:
            return self._on_rows(task, batch, step, round_rows)
        return self._peers.share(self._on_rows(task, batch, step, round_rows) if self._peers.leads else None)

    def _on_rows(self, task: ColumnTask, batch: PackedBatch, step: int, round_rows: int) -> Mapping[str, Column]:
        if task.cut is None:
            return _compute(task, batch, step, round_rows)
        samples = samples_of(PackedBatch(batch.indices, {name: batch[name] for name in SAMPLE_COLUMNS if len(batch)}))
        cuts = micro_batches(samples, task.cut)
        most = max_over_ranks(len(cuts)) if task.collective else len(cuts)
        parts = [task.compute(samples.select(cut), step) for cut in cuts]
        for _ in range(most - len(cuts)):
            task.compute(_EMPTY, step)
        order = [position for cut in cuts for position in cut]
        back = sorted(range(len(order)), key=order.__getitem__)
        joined = {name: Column.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else {})}
        return {name: Column(column.select(back).values, drawn_per_row(batch)) for name, column in joined.items()}


def _compute(task: ColumnTask, batch: PackedBatch, step: int, round_rows: int) -> Mapping[str, Column]:
    """Compute in pieces of `task.num_rows`; a collective task in as many as the fullest rank has."""
    parts = []
    for start in range(0, round_rows if task.collective else len(batch), task.num_rows):
        positions = range(start, min(start + task.num_rows, len(batch)))
        whole = len(positions) == len(batch)
        part = batch if whole else batch.select(positions) if positions else _EMPTY
        columns = task.compute(part, step)
        if len(part):
            parts.append(columns)
    return {name: Column.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else {})}


def open_task(
    name: str, context: WorkerContext, engine: TrainEngine | None, critic: ValueEngine | None = None
) -> ColumnTask:
    """Return the task `name` of this run's graph.

    Args:
        engine: of the actor that hosts the task; None in a role of its own.
        critic: that the process trains.
    """
    config = context.config
    match name:
        case "rewards":
            return Rewards(context)
        case "ref_log_probs":
            return ReferenceLogProbs(context, engine)
        case "actor_log_probs" if engine is None:
            return FollowerLogProbs(context)
        case "actor_log_probs":
            assert engine is not None
            return _hosted("old_log_probs", engine.log_probs, config.actor, config)
        case "values":
            assert critic is not None, f"{name} is computed where the critic is trained"
            section = config.actor if context.gang.role == "actor" else config.critic
            return _hosted(name, critic.values, section, config)
        case "compute_advantages_and_returns":
            return Advantages(context)
        case _:
            user = next(task for task in config.tasks if task.name == name)
            decoder = TextDecoder(context.load_tokenizer())
            return UserTask(user, decoder, num_rows=config.schedule.n_samples_per_prompt)


def _hosted(
    name: str, compute: Callable[[Sequences | None], Tensor], training: TrainingConfig, config: RunConfig
) -> HostedColumn:
    """Return what a model in training computes, and how many rows it takes at a time."""
    num_rows = training.micro_batch_size
    if training.max_tokens_per_micro_batch:  # then its own number is a whole round's, and says nothing of memory
        num_rows = min(num_rows, config.ref.micro_batch_size)
    return HostedColumn(name, compute, num_rows=num_rows, cut=cut_of(config, training))
