"""Roles that read rows, compute columns and put them back: ref, reward, advantages. One loop for all.

fetch -> get inputs -> compute -> put outputs -> fetch ...
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncflow.errors import Superseded
from tq.batch import Column, PackedBatch
from tq.messages import Granted, NoRowsReason
from workers.context import WorkerContext
from workers.objective import algorithm_of
from workers.packing import sequences_of
from workers.reference import Reference
from workers.rewards.scorer import Scorer, score_columns
from workers.tasks import launched_tasks
from workers.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

Compute = Callable[[PackedBatch, int], Mapping[str, Column]]


def run_ref(context: WorkerContext) -> None:
    """Score answers under the reference."""
    reference = Reference(context)

    def compute(batch: PackedBatch, step: int) -> Mapping[str, Column]:
        log_probs = reference.log_probs(sequences_of(batch), step=step).cpu()
        return {"ref_log_probs": Column(log_probs, batch["responses"].lengths)}

    run_scoring(context, compute, num_rows=context.config.ref.micro_batch_size, doing="log-probs")
    reference.close()


def run_reward(context: WorkerContext) -> None:
    """Score answers with the reward function."""
    config = context.config
    scorer = Scorer(config.reward, load_tokenizer(Path(config.model.path)))

    def compute(batch: PackedBatch, _: int) -> Mapping[str, Column]:
        scored = scorer.score_all(
            list(batch["prompts"].rows()), list(batch["responses"].rows()), batch["answers"].texts()
        )
        return score_columns(scored)

    run_scoring(context, compute, num_rows=config.schedule.n_samples_per_prompt, doing="scoring")
    scorer.close()


def run_advantages(context: WorkerContext) -> None:
    """Compute advantages of whole groups."""
    algorithm = algorithm_of(context.config)
    size = context.config.schedule.n_samples_per_prompt

    def compute(batch: PackedBatch, _: int) -> Mapping[str, Column]:
        return {"advantages": Column.of_scalars(algorithm.advantages(batch["rewards"].values, group_size=size))}

    run_scoring(context, compute, num_rows=size * 8, doing="advantages")


def run_scoring(context: WorkerContext, compute: Compute, *, num_rows: int, doing: str) -> None:
    """Serve this role's task until the queue stops.

    Args:
        context: of this worker.
        compute: from the task's inputs, and the step that they belong to, to its outputs.
        num_rows: at most so many rows at a time.
        doing: what the progress display says.
    """
    task = next(task for task in launched_tasks(context.config, context.job) if task.role == context.gang.role)
    client = context.queue_client()
    timeline = context.timeline
    while not context.stopping.is_set():
        context.report("waiting for rows")
        with timeline.span(f"wait for rows of {task.name}"):
            answer = client.fetch(task.name, num_rows=num_rows)
        if not isinstance(answer, Granted):
            if answer.reason is NoRowsReason.STOP:
                break
            continue
        context.report(doing, f"{len(answer.rows)} answers", step=answer.partition)
        with timeline.span(task.name, step=answer.partition, rows=len(answer.rows)):
            outputs = compute(client.get(answer, task.inputs), answer.partition)
            try:
                client.put(task.name, answer, answer.rows, outputs)
            except Superseded as error:
                logger.warning("dropped %d rows: %s", len(answer.rows), error)
    client.close()
