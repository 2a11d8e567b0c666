"""The loop of every role that only computes columns: ref, reward, advantages and the like.

    fetch -> get inputs -> add_columns -> put outputs -> fetch ...
                                           newer weights are needed -> take_weights -> fetch ...

Called by `workers.main`. What is computed is in `workers.tasks`.
"""

from tq.batch import PackedBatch
from tq.client.lease import Lease, read_or_release
from tq.client.stall_monitor import StallMonitor
from tq.messages import NoRowsReason
from workers.algorithms.dapo import uniform_groups
from workers.context import WorkerContext
from workers.tasks.chain import TaskChain
from workers.tasks.dataflow import PlacedTask
from workers.tasks.graph import task_of


def run_task(context: WorkerContext) -> None:
    """Serve this role's task until the queue stops."""
    task = task_of(context.gang.role, context.config, context.job)
    chain = TaskChain((*task.fused, task.name), context)
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
                _serve(answer, batch, task, chain, context=context)
        elif answer.reason is NoRowsReason.NEWER_VERSION:
            context.report("waiting for weights")
            chain.take_weights(answer.newest_version)
        elif answer.reason is NoRowsReason.STOP:
            break
    client.close()
    chain.close()


def _serve(lease: Lease, batch: PackedBatch, task: PlacedTask, chain: TaskChain, *, context: WorkerContext) -> None:
    batch = chain.add_columns(batch, step=lease.partition)
    with context.timeline.span("put", step=lease.partition, rows=len(batch)):
        batch = _without_uniform_groups(lease, batch, task, context=context)
        if len(batch):
            lease.put({name: batch[name] for name in task.outputs})


def _without_uniform_groups(
    lease: Lease, batch: PackedBatch, task: PlacedTask, *, context: WorkerContext
) -> PackedBatch:
    """Have groups that teach nothing taken out where this role scores and the algorithm filters; returns the others."""
    config = context.config
    if not config.algorithm.filters_groups or "rewards" not in task.outputs:
        return batch
    rewards, size = batch["rewards"].values.tolist(), config.schedule.n_samples_per_prompt
    uniform = uniform_groups(lease.groups, rewards, group_size=size)
    if not uniform:
        return batch
    lease.filter([row for row, group in zip(lease.rows, lease.groups, strict=True) if group in uniform])
    return batch.select([k for k, group in enumerate(lease.groups) if group not in uniform])
