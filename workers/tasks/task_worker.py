"""The loop of every role that only computes columns: ref, reward, advantages and the like.

    fetch -> get inputs -> add_columns -> put outputs -> fetch ...
      '--> rows need newer weights, which exist -> take_weights -> fetch ...

Only a rank without rows waits for weights, and only for weights that exist. While rows wait for weights that others
still compute, it keeps fetching: those weights may need rows that have not arrived, or that come back.

If several ranks share a model, the first one, the lead, leases and puts. The others get its leases, and the rows as
`tq.replica_fetch` says: with them, or by reading them from the queue, too. So all compute together.

    broadcast   lead: lease, read -> lease and rows -> others
    each        lead: lease ------> lease ---------> others; all read
    stage       lead: lease ------> lease ---------> others; the first rank of each stage reads -> rows -> its stage

Called by `workers.roles.main`. The computations are in `workers.tasks`.
"""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch.distributed as dist

from asyncflow.errors import LeaseFenced, PeerRefused, TransportError
from tq.client.dataloader import Round
from tq.client.lease import Lease, read_or_release
from tq.client.queue_client import QueueClient
from tq.client.session import StallMonitor
from tq.columns import PackedBatch
from tq.config import ReplicaFetch
from tq.messages import LeaseGrant, NoRows, NoRowsReason
from workers.engines.load_engine import row_groups
from workers.rank.context import REWARD, WorkerContext
from workers.rank.peers import ReplicaPlace, all_ranks, meet_peers, open_replica
from workers.rewards.group_filter import load_group_filter
from workers.settings.dataflow import PlacedTask
from workers.tasks.chain import TaskChain
from workers.tasks.graph import task_of

_RETRY_S = 0.1


def run_task(context: WorkerContext) -> None:
    task = task_of(context.gang.role, context.config, context.job)
    context.check_weights(*task.fused, task.name)
    shared = context.gang.num_ranks > 1
    if shared:
        meet_peers(context)
    chain = TaskChain((*task.fused, task.name), context)
    lead = _Lead(context, task, chain) if context.rank == 0 else None
    if shared:
        items = _shared_rounds(context, task, lead, chain)
    else:
        assert lead is not None, "a rank that is alone leads"
        items = lead.lease_rounds()
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
    if shared:
        dist.destroy_process_group()


def _shared_rounds(
    context: WorkerContext, task: PlacedTask, lead: "_Lead | None", chain: TaskChain
) -> Iterator[Round | NoRows]:
    """Yield the lead's rounds on every rank that shares the model."""
    config, size = context.config, context.gang.num_ranks
    if context.gang.role in (REWARD, "teacher"):  # these models have no stages
        engine, place = "fsdp", ReplicaPlace(0, 1, (tuple(range(size)),), context.rank)
    else:
        engine, place = config.ref.engine, ReplicaPlace.of_copy(config.ref, context.rank, size)
    fetch, groups = config.tq.replica_fetch, partial(row_groups, engine)
    if fetch is ReplicaFetch.STAGE and place.num_stages == 1:
        fetch = ReplicaFetch.BROADCAST  # the copy is one stage
    open_one = partial(open_replica, context, place, device_groups=groups, computing=chain.computing)
    whole = open_one(ReplicaFetch.BROADCAST)
    assert whole is not None, "several ranks share the model"
    if fetch is ReplicaFetch.BROADCAST:
        yield from whole.relay(None if lead is None else lead.lease_rounds())
        return
    stage = open_one(ReplicaFetch.STAGE) if fetch is ReplicaFetch.STAGE else None
    client = lead.client if lead is not None else None
    if client is None and (stage is None or stage.fetches):
        client = context.queue_client()
    reader = None if client is None else _RowReader(client, task)
    for item in whole.relay(None if lead is None else lead.lease_grants()):
        if isinstance(item, NoRows):
            yield item
            continue
        batch = None if reader is None else reader.read_rows(item[0])
        # A unit that is gone may have answered some ranks.
        if not all_ranks(reader is None or batch is not None):
            if lead is not None:
                lead.release()
            continue
        if stage is None or not stage.shares:
            assert batch is not None, "this rank reads for itself"
            yield item[0], batch
            continue
        found = stage.share(None if batch is None else (item[0], batch))
        assert isinstance(found, tuple), "the first rank of the stage has read the rows"
        yield found
    if client is not None and lead is None:
        client.close()


class _RowReader:
    """Reads rows that the lead has leased."""

    def __init__(self, client: QueueClient, task: PlacedTask) -> None:
        self._client = client
        self._task = task
        self._monitor = StallMonitor(producers_timeout_s=0.0)

    def read_rows(self, grant: LeaseGrant) -> PackedBatch | None:
        """Return the task's inputs; None: a unit of the rows is gone."""
        try:
            batch = self._client.data.get(grant, self._task.inputs)
        except PeerRefused:
            raise
        except TransportError as error:
            self._monitor.note_unreadable(error)
            return None
        self._monitor.note_served()
        return batch


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
        self.client = context.queue_client()
        self.client.declare_outputs(task.outputs)
        self._lease: Lease | None = None

    def lease_rounds(self) -> Iterator[Round | NoRows]:
        """Yield rounds of rows, and why there are none at the moment."""
        monitor = StallMonitor(producers_timeout_s=0.0)
        for answer in self._lease_answers():
            if isinstance(answer, NoRows):
                yield answer
                continue
            batch = read_or_release(answer, self._task.inputs, monitor=monitor, closing=self._context.stopping)
            if batch is not None:
                self._lease = answer
                yield answer.grant, batch

    def lease_grants(self) -> Iterator[Round | NoRows]:
        """As `lease_rounds`, without the rows' columns."""
        for answer in self._lease_answers():
            if isinstance(answer, NoRows):
                yield answer
            else:
                self._lease = answer
                yield answer.grant, answer.batch

    def release(self) -> None:
        """Return the last lease, whose rows cannot be read; a producer must put them again."""
        assert self._lease is not None, "lease_grants() gave no rows"
        with contextlib.suppress(LeaseFenced):
            self._lease.release()
        self._context.stopping.wait(_RETRY_S)

    def _lease_answers(self) -> Iterator[Lease | NoRows]:
        context, task, chain = self._context, self._task, self._chain
        held_back = False
        while not context.stopping.is_set():
            answer = self.client.fetch(
                task.name,
                num_rows=chain.num_rows,
                version=chain.version or 0,
                lineage=context.job.lineage,
                tell_held_back=not held_back,
            )
            held_back = isinstance(answer, NoRows) and is_held_back(answer, held_back)
            if isinstance(answer, NoRows) and answer.reason is NoRowsReason.STOP:
                return
            yield answer

    def put(self, batch: PackedBatch) -> None:
        lease = self._lease
        assert lease is not None, "rounds() gave no rows"
        with self._context.timeline.span("put", step=lease.partition, rows=len(batch)):
            batch = self._filter_groups(lease, batch)
            if len(batch):
                lease.put({name: batch[name] for name in self._task.outputs})

    def close(self) -> None:
        self.client.close()
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
