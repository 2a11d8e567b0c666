"""The loop of every role that only computes columns: ref, reward, advantages and the like.

    fetch -> get inputs -> add_columns -> put outputs -> fetch ...
      '--> rows need newer weights, which exist -> take_weights -> fetch ...

Only a rank without rows waits for weights, and only for weights that exist. While rows wait for weights that others
still compute, it keeps fetching: those weights may need rows that have not arrived, or that come back.

If several ranks share a model, the first one, the lead, fetches and puts. The others get the same rows by broadcast
(`tq.client.dataloader`), so all compute together.

Called by `workers.roles.main`. The computations are in `workers.tasks`.
"""

from collections.abc import Iterator

import torch.distributed as dist

from tq.client.dataloader import Round
from tq.client.lease import Lease, read_or_release
from tq.client.session import StallMonitor
from tq.columns import PackedBatch
from tq.messages import NoRows, NoRowsReason
from workers.rank.context import WorkerContext
from workers.rank.peers import ReplicaPlace, meet_peers, open_replica
from workers.rewards.group_filter import load_group_filter
from workers.settings.dataflow import PlacedTask
from workers.tasks.chain import TaskChain
from workers.tasks.graph import task_of


def run_task(context: WorkerContext) -> None:
    task = task_of(context.gang.role, context.config, context.job)
    ranks = tuple(range(context.gang.num_ranks))
    if len(ranks) > 1:
        meet_peers(context)
    replica = open_replica(context, ReplicaPlace(0, 1, (ranks,), context.rank))
    chain = TaskChain((*task.fused, task.name), context)
    lead = _Lead(context, task, chain) if context.rank == 0 else None
    rounds = None if lead is None else lead.lease_rounds()
    items = rounds if replica is None else replica.relay(rounds)
    assert items is not None, "a rank that is alone leads"
    held_back = False
    while True:
        context.report_state("waiting for weights" if held_back else "waiting for rows", version=chain.version)
        with context.timeline.span("wait for weights" if held_back else f"wait for rows of {task.name}"):
            item = next(items, None)
        if item is None:
            break
        held_back = is_held_back(item, held_back)
        if isinstance(item, NoRows):
            if item.reason is NoRowsReason.NEWER_VERSION:
                context.report_state("waiting for weights")
                chain.take_weights(item.newest_version)
            continue
        grant, batch = item
        context.report_state(task.name, f"{len(batch)} rows", step=grant.partition)
        batch = chain.add_columns(batch, step=grant.partition)
        if lead is not None:
            lead.put(batch)
    if lead is not None:
        lead.close()
    chain.close()
    if replica is not None:
        dist.destroy_process_group()


def is_held_back(item: Round | NoRows, before: bool) -> bool:
    """Return whether rows are ready but wait for weights that do not exist yet; `before`: the previous return value."""
    if not isinstance(item, NoRows):
        return False
    # A request that expires says nothing new, so an earlier answer still holds.
    return item.reason is NoRowsReason.HELD_BACK or (before and item.reason is NoRowsReason.DEADLINE)


class _Lead:
    def __init__(self, context: WorkerContext, task: PlacedTask, chain: TaskChain) -> None:
        self._context = context
        self._task = task
        self._chain = chain
        algorithm, size = context.config.algorithm, context.config.schedule.n_samples_per_prompt
        self._group_filter = load_group_filter(algorithm, group_size=size) if "rewards" in task.outputs else None
        self._client = context.queue_client()
        self._client.declare_outputs(task.outputs)
        self._lease: Lease | None = None

    def lease_rounds(self) -> Iterator[Round | NoRows]:
        context, task, chain = self._context, self._task, self._chain
        monitor = StallMonitor(producers_timeout_s=0.0)
        held_back = False
        while not context.stopping.is_set():
            answer = self._client.fetch(
                task.name,
                num_rows=chain.num_rows,
                version=chain.version or 0,
                lineage=context.job.lineage,
                tell_held_back=not held_back,
            )
            held_back = isinstance(answer, NoRows) and is_held_back(answer, held_back)
            if isinstance(answer, Lease):
                batch = read_or_release(answer, task.inputs, monitor=monitor, closing=context.stopping)
                if batch is not None:
                    self._lease = answer
                    yield answer.grant, batch
            elif answer.reason is NoRowsReason.STOP:
                return
            else:
                yield answer

    def put(self, batch: PackedBatch) -> None:
        lease = self._lease
        assert lease is not None, "rounds() gave no rows"
        with self._context.timeline.span("put", step=lease.partition, rows=len(batch)):
            batch = self._filter_groups(lease, batch)
            if len(batch):
                lease.put({name: batch[name] for name in self._task.outputs})

    def close(self) -> None:
        self._client.close()
        if self._group_filter is not None:
            self._group_filter.close()

    def _filter_groups(self, lease: Lease, batch: PackedBatch) -> PackedBatch:
        if self._group_filter is None:
            return batch
        refused = self._group_filter.refused(lease.groups, batch["rewards"].values.tolist())
        if not refused:
            return batch
        lease.filter([row for row, group in zip(lease.rows, lease.groups, strict=True) if group in refused])
        return batch.select([k for k, group in enumerate(lease.groups) if group not in refused])
