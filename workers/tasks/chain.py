"""The column tasks of one process, one after the other in the graph's order.

    role     fetch -> add_columns -> put          actor    round -> add_columns -> forward_backward ...

The chain decides how many rows each task gets at a time, and lets ranks without rows take part in collective tasks.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from asyncflow.errors import UserCodeFailed
from tq.columns import Column, PackedBatch
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import excerpt
from workers.data.tokenizer import TextDecoder
from workers.engines.base import CopyingEngine, FrozenEngine, TrainEngine, ValueEngine
from workers.rank.context import WorkerContext
from workers.rank.peers import ReplicaPeers, max_over_ranks
from workers.rows.packed_rows import (
    Sequences,
    drawn_per_row,
    micro_batches,
    per_drawn_token,
    responses_of,
    samples_of,
)
from workers.settings.dataflow import CRITIC_TRAIN, LOSS_WEIGHTS, SAMPLE_COLUMNS, SOURCES, TEXT_COLUMNS
from workers.settings.engines import TrainingConfig
from workers.settings.run import RunConfig
from workers.settings.tasks import UserTaskConfig
from workers.tasks.column_tasks import (
    Advantages,
    ColumnTask,
    FollowerLogProbs,
    HostedColumn,
    ReferenceLogProbs,
    Rewards,
    TeacherLogProbs,
    cut_of,
)
from workers.tasks.row import TaskRow

_LARGEST = torch.finfo(torch.float32).max


# A response can be left out of training, but nothing replaces a missing column, so a failure ends the run.
class UserTask(ColumnTask):
    """Calls a user's function on each row, in child processes; an exception in it ends the run. The constructor raises
    ConfigError if there is no such function."""

    def __init__(self, config: UserTaskConfig, decoder: TextDecoder, *, num_rows: int) -> None:
        self.num_rows = num_rows
        self._config = config
        self._decoder = decoder
        self._what = f"task {config.name}: {config.function}"
        field = f"task {config.name}: function"
        self._pool = CallPool(
            Entry(
                "workers.tasks.row:task_function",
                {"what": self._what, "function": config.function, "field_name": field},
            ),
            what=self._what,
            limit="its timeout_s",
            timeout_s=config.timeout_s,
            concurrency=config.concurrency,
        )
        self._pool.until_ready()

    def compute_columns(self, batch: PackedBatch, _: int) -> Mapping[str, Column]:
        """Return the output, float32 [N]. Raises UserCodeFailed if the function raised or returned no usable number;
        names task and function."""
        rows = list(self._make_rows(batch))
        # NaN means that the reward failed, so the row has no weight: skip the function. Its loss weight is 0, any other
        # output NaN.
        calls = [None if any(map(math.isnan, row.columns.values())) else self._call_function(row) for row in rows]
        missing = 0.0 if self._config.output == LOSS_WEIGHTS else math.nan
        values = [
            missing if call is None else self._check_number(call.result(), row)
            for call, row in zip(calls, rows, strict=True)
        ]
        return {self._config.output: Column.of_scalars(torch.tensor(values, dtype=torch.float32))}

    def close(self) -> None:
        self._pool.close()

    def _call_function(self, row: TaskRow) -> "Future[float]":
        return self._pool.submit(
            row.prompt, row.response, row.ground_truth, row.columns, on=f"response {excerpt(row.response)}"
        )

    def _make_rows(self, batch: PackedBatch) -> Iterator[TaskRow]:
        inputs, decoder, blank = self._config.inputs, self._decoder, [""] * len(batch)
        prompts = responses = ground_truths = blank
        if "prompts" in inputs:
            prompts = [decoder.decode_prompt(tokens.tolist()) for tokens in batch["prompts"].rows()]
        if "responses" in inputs:
            responses = [decoder.decode_response(tokens.tolist()) for tokens in responses_of(batch)]
        if "ground_truth" in inputs:
            ground_truths = batch["ground_truth"].texts()
        numbers = {name: batch[name].values.double().tolist() for name in inputs if name not in TEXT_COLUMNS}
        for k, texts in enumerate(zip(prompts, responses, ground_truths, strict=True)):
            yield TaskRow(*texts, {name: values[k] for name, values in numbers.items()})

    def _check_number(self, number: float, row: TaskRow) -> float:
        if not abs(number) <= _LARGEST or (self._config.output == LOSS_WEIGHTS and not 0 <= number <= 1):
            wanted = "between 0 and 1" if self._config.output == LOSS_WEIGHTS else "that float32 holds"
            raise UserCodeFailed(
                f"{self._what} returned {number:g} on response {excerpt(row.response)}; "
                f"{self._config.output} must be a number {wanted}"
            )
        return number


_EMPTY = PackedBatch((), {})


class TaskChain:
    """Several column tasks as one.

    Args:
        names: producers before consumers.
        engine: of the actor that hosts the tasks; None in a role of its own.
        critic: the critic that this process trains; its training is not a column task.
        peers: ranks with the same rows, where one computes non-collective tasks for all; None: there are none.
    """

    def __init__(
        self,
        names: Sequence[str],
        context: WorkerContext,
        engine: TrainEngine | None = None,
        *,
        critic: ValueEngine | None = None,
        peers: ReplicaPeers | None = None,
    ) -> None:
        self._peers = peers
        self._context = context
        self._tasks = {name: open_task(name, context, engine, critic) for name in names if name != CRITIC_TRAIN}

    @property
    def num_rows(self) -> int:
        return min(task.num_rows for task in self._tasks.values())

    @property
    def version(self) -> int | None:
        """Step of the oldest weights that gate rows; None: no weights do."""
        return min((task.version for task in self._tasks.values() if task.version is not None), default=None)

    def add_columns(self, batch: PackedBatch, *, step: int, largest_slice: int = 0) -> PackedBatch:
        """Return the batch with the outputs of all tasks. `largest_slice`: most rows of any rank of the gang, the same
        on all ranks; 0: there is only one rank."""
        for name, task in self._tasks.items():
            if len(batch) or task.collective:
                with self._context.timeline.span(name, step=step, rows=len(batch)):
                    columns = self._compute_shared(task, batch, step, max(len(batch), largest_slice))
                batch = batch.with_columns(columns)
        return batch

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Enter while ranks that share the models exchange rows on their devices."""
        with ExitStack() as entered:
            for task in self._tasks.values():
                entered.enter_context(task.computing())
            yield

    @property
    def models(self) -> list[FrozenEngine]:
        """Models on this rank's device besides that of the process's role."""
        return [task.model for task in self._tasks.values() if task.model is not None]

    def take_weights(self, step: int) -> None:
        for task in self._tasks.values():
            if task.version is not None and task.version < step:
                task.take_weights(step)

    def close(self) -> None:
        for task in self._tasks.values():
            task.close()

    def _compute_shared(
        self, task: ColumnTask, batch: PackedBatch, step: int, largest_slice: int
    ) -> Mapping[str, Column]:
        if self._peers is None or task.collective:
            return self._on_rows(task, batch, step, largest_slice)
        return self._peers.share_columns(self._on_rows(task, batch, step, largest_slice) if self._peers.leads else None)

    def _on_rows(self, task: ColumnTask, batch: PackedBatch, step: int, largest_slice: int) -> Mapping[str, Column]:
        if task.cut is None:
            return _compute(task, batch, step, largest_slice)
        names = [name for name in (*SAMPLE_COLUMNS, SOURCES) if name in batch.columns and len(batch)]
        samples = samples_of(PackedBatch(batch.indices, {name: batch[name] for name in names}))
        cuts = micro_batches(samples, task.cut)
        most = max_over_ranks(len(cuts)) if task.collective else len(cuts)
        parts = [task.compute_columns(samples.select(cut), step) for cut in cuts]
        # A collective task needs the same number of calls on every rank.
        for _ in range(most - len(cuts)):
            task.compute_columns(_EMPTY, step)
        order = [position for cut in cuts for position in cut]
        # Cuts reorder samples: this puts the results back into the rows' order.
        back = sorted(range(len(order)), key=order.__getitem__)
        joined = {name: Column.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else {})}
        return {
            name: per_drawn_token(column.select(back).values, drawn_per_row(batch)) for name, column in joined.items()
        }


def _compute(task: ColumnTask, batch: PackedBatch, step: int, largest_slice: int) -> Mapping[str, Column]:
    """Compute in pieces of `task.num_rows`; a collective task in as many pieces as the fullest rank has."""
    parts = []
    for start in range(0, largest_slice if task.collective else len(batch), task.num_rows):
        positions = range(start, min(start + task.num_rows, len(batch)))
        whole = len(positions) == len(batch)
        part = batch if whole else batch.select(positions) if positions else _EMPTY
        columns = task.compute_columns(part, step)
        if len(part):
            parts.append(columns)
    return {name: Column.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else {})}


def open_task(
    name: str, context: WorkerContext, engine: TrainEngine | None, critic: ValueEngine | None = None
) -> ColumnTask:
    """Return the task `name` of this run's graph; see `TaskChain` for the arguments."""
    config = context.config
    match name:
        case "rewards":
            return Rewards(context)
        case "ref_log_probs" if engine is not None and config.reference_is_base:
            assert isinstance(engine, CopyingEngine), "the rules of the run refuse other engines with lora"
            return _hosted("ref_log_probs", engine.open_copy(initial=True).log_probs, config.actor, config)
        case "ref_log_probs":
            return ReferenceLogProbs(context, engine)
        case "teacher_log_probs":
            return TeacherLogProbs(context)
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
    num_rows = training.micro_batch_size
    if training.max_tokens_per_micro_batch:  # then `micro_batch_size` is a whole round, which may not fit in memory
        num_rows = min(num_rows, config.ref.micro_batch_size)
    return HostedColumn(name, compute, num_rows=num_rows, cut=cut_of(config, training))
