"""The loop of every role that only computes columns: ref, reward, advantages and the like.

    fetch -> get inputs -> add_columns -> put outputs -> fetch ...
                                           newer weights are needed -> take_weights -> fetch ...

Called by `workers.main`. What is computed is in `workers.tasks`.
"""

from tq.batch import PackedBatch
from tq.client.lease import Lease, read_or_release
from tq.client.stall_monitor import StallMonitor
from tq.messages import NoRowsReason
from workers.algorithms.group_filter import GroupFilter, load_group_filter
from workers.context import WorkerContext
from workers.tasks.chain import TaskChain
from workers.tasks.dataflow import PlacedTask
from workers.tasks.graph import task_of


def run_task(context: WorkerContext) -> None:
    """Serve this role's task until the queue stops."""
    task = task_of(context.gang.role, context.config, context.job)
    chain = TaskChain((*task.fused, task.name), context)
    scores, size = "rewards" in task.outputs, context.config.schedule.n_samples_per_prompt
    group_filter = load_group_filter(context.config.algorithm, group_size=size) if scores else None
    client = context.queue_client()
    monitor = StallMonitor(producers_timeout_s=0.0)
    while not context.stopping.is_set():
        context.report("waiting for rows")
        with context.timeline.span(f"wait for rows of {task.name}"):
            answer = client.fetch(
                task.name, num_rows=chain.num_rows, version=chain.version, lineage=context.job.lineage
            )
        if isinstance(answer, Lease):
            context.report(task.name, f"{len(answer)} answers", step=answer.partition)
            batch = read_or_release(answer, task.inputs, monitor=monitor, closing=context.stopping)
            if batch is not None:
                _serve(answer, batch, task, chain, context=context, group_filter=group_filter)
        elif answer.reason is NoRowsReason.NEWER_VERSION:
            context.report("waiting for weights")
            chain.take_weights(answer.newest_version)
        elif answer.reason is NoRowsReason.STOP:
            break
    client.close()
    chain.close()
    if group_filter is not None:
        group_filter.close()


def _serve(
    lease: Lease,
    batch: PackedBatch,
    task: PlacedTask,
    chain: TaskChain,
    *,
    context: WorkerContext,
    group_filter: GroupFilter | None,
) -> None:
    batch = chain.add_columns(batch, step=lease.partition)
    with context.timeline.span("put", step=lease.partition, rows=len(batch)):
        batch = batch if group_filter is None else _filtered(lease, batch, group_filter)
        if len(batch):
            lease.put({name: batch[name] for name in task.outputs})


def _filtered(lease: Lease, batch: PackedBatch, group_filter: GroupFilter) -> PackedBatch:
    """Have groups that are not to be trained taken out where this role scores; returns the others."""
    refused = group_filter.refused(lease.groups, batch["rewards"].values.tolist())
    if not refused:
        return batch
    lease.filter([row for row, group in zip(lease.rows, lease.groups, strict=True) if group in refused])
    return batch.select([k for k, group in enumerate(lease.groups) if group not in refused])
