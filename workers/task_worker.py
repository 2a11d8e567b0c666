"""The loop of every role that only computes columns: ref, reward, advantages and the like.

    fetch -> get inputs -> add_columns -> put outputs -> fetch ...
                                           newer weights are needed -> take_weights -> fetch ...

Called by `workers.main`. What is computed is in `workers.columns`.
"""

import logging

from asyncflow.errors import Superseded
from tq.batch import PackedBatch
from tq.client.lease_reader import read_lease
from tq.client.patience import Patience
from tq.client.queue_client import QueueClient
from tq.messages import Granted, NoRowsReason
from workers.columns.chain import TaskChain
from workers.context import WorkerContext
from workers.dataflow import PlacedTask
from workers.graph import task_of
from workers.group_filter import uniform_groups

logger = logging.getLogger(__name__)


def run_task(context: WorkerContext) -> None:
    """Serve this role's task until the queue stops."""
    task = task_of(context.gang.role, context.config, context.job)
    chain = TaskChain((*task.fused, task.name), context)
    client = context.queue_client()
    patience = Patience(producers_timeout_s=0.0)
    while not context.stopping.is_set():
        context.report("waiting for rows")
        with context.timeline.span(f"wait for rows of {task.name}"):
            answer = client.fetch(
                task.name, num_rows=chain.num_rows, version=chain.version, lineage=context.job.lineage
            )
        if isinstance(answer, Granted):
            context.report(task.name, f"{len(answer.rows)} answers", step=answer.partition)
            batch = read_lease(client, answer, task.inputs, patience=patience, closing=context.stopping)
            if batch is not None:
                _serve(answer, batch, task, chain, client=client, context=context)
        elif answer.reason is NoRowsReason.NEWER_VERSION:
            context.report("waiting for weights")
            chain.take_weights(answer.newest_version)
        elif answer.reason is NoRowsReason.STOP:
            break
    client.close()
    chain.close()


def _serve(
    granted: Granted,
    batch: PackedBatch,
    task: PlacedTask,
    chain: TaskChain,
    *,
    client: QueueClient,
    context: WorkerContext,
) -> None:
    batch = chain.add_columns(batch, step=granted.partition)
    with context.timeline.span("put", step=granted.partition, rows=len(batch)):
        try:
            batch = _without_uniform_groups(granted, batch, task, client=client, context=context)
            if len(batch):
                client.put(task.name, granted, batch.indices, {name: batch[name] for name in task.outputs})
        except Superseded as error:
            logger.warning("dropped %d rows: %s", len(batch), error)


def _without_uniform_groups(
    granted: Granted, batch: PackedBatch, task: PlacedTask, *, client: QueueClient, context: WorkerContext
) -> PackedBatch:
    """Have groups that teach nothing taken out where this role scores and the algorithm filters; returns the others."""
    config = context.config
    if not config.algorithm.filters_groups or "rewards" not in task.outputs:
        return batch
    rewards, size = batch["rewards"].values.tolist(), config.schedule.n_samples_per_prompt
    uniform = uniform_groups(granted.groups, rewards, group_size=size)
    if not uniform:
        return batch
    client.filter_groups(
        task.name, granted, [row for row, group in zip(granted.rows, granted.groups, strict=True) if group in uniform]
    )
    return batch.select([k for k, group in enumerate(granted.groups) if group not in uniform])
