"""What ranks of a data-parallel replica do in these tests: a fake queue at rank 0, a real group between them."""

import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe

import torch
import torch.distributed as dist
from peers import CPU, credentials
from torch.distributed import PrefixStore

from asyncflow.device import connect_group
from asyncflow.errors import TransportError
from tq.client.dataloader import DeviceRoute, Replica, StreamingDataLoader
from tq.columns import Column, PackedBatch
from tq.config import ReplicaFetch
from tq.messages import FetchRound, LeaseGrant, NoRows, NoRowsReason

LARGE = 20_000
BIG_ID = 2**40


def round_of(partition: int, index: int) -> LeaseGrant:
    """Return a lease: partition p has p rounds of three rows, the second one empty."""
    rows = [] if index == 1 else [100 * partition + 10 * index + k for k in range(3)]
    return LeaseGrant("train", index, partition, rows, rows, ["storage-0"] * len(rows), [5] * len(rows), 3)


def batch_of(granted: LeaseGrant) -> PackedBatch:
    """Return its values; a partition's first round is too large for a header."""
    rows = granted.rows
    size = LARGE if rows and rows[0] % 100 == 0 else 4
    columns = {
        "tokens": Column.of_rows([torch.arange(size) + row for row in rows]),
        "ids": Column.of_scalars(torch.tensor(rows) + BIG_ID),
        "rewards": Column.of_scalars(torch.tensor(rows, dtype=torch.bfloat16)),
        "texts": Column.of_texts([f"row {row}" for row in rows]),
    }
    return PackedBatch(tuple(rows), columns, tuple(rows))


class CountingQueue:
    """A queue client: partition p has p rounds. Fails, parks or stops where told."""

    def __init__(self, *, fail_at: int = 0, stop_at: int = 0, park_at: int = 0, late: int = 0) -> None:
        self.fail_at, self.stop_at, self.park_at = fail_at, stop_at, park_at
        self.late = late
        self.data = self
        self.acked: list[int] = []
        self.ended = threading.Event()

    def fetch_round(self, request: FetchRound) -> LeaseGrant | NoRows:
        if request.partition == self.fail_at:
            raise TransportError("controller-0 is gone")
        if request.partition == self.stop_at:
            return NoRows(NoRowsReason.STOP, 0)
        if request.partition == self.park_at:
            self.ended.wait(60)
            raise TransportError("the queue client is closed")
        if self.late:
            self.late -= 1
            return NoRows(NoRowsReason.DEADLINE, 0)
        if request.round_index == request.partition:
            return NoRows(NoRowsReason.PARTITION_DONE, 0)
        return round_of(request.partition, request.round_index)

    def get(self, granted: LeaseGrant, names: Sequence[str]) -> PackedBatch:
        batch = batch_of(granted)
        return PackedBatch(batch.indices, {name: batch[name] for name in names}, batch.groups)

    def ack(self, granted: LeaseGrant, rows: Sequence[int]) -> None:
        self.acked += granted.rows

    def forget_lease(self, granted: LeaseGrant) -> None:
        """Nothing is remembered here."""


def replica_of(port: int, rank: int, size: int, fetch: str = "broadcast") -> Replica:
    """Connect the ranks; `device`: rows go over the default group, `stage`: two stages make the replica."""
    if fetch == "stage":
        size, stage, rank = size // 2, *divmod(rank, size // 2)
        store = PrefixStore(f"stage {stage}", credentials(port).group_store())
        group = connect_group(store, rank, size, CPU)
        return Replica(group, "replica 0", fetch=ReplicaFetch.STAGE, acks=stage == 0)
    store = PrefixStore("replica", credentials(port).group_store())
    if fetch != "device":
        return Replica(connect_group(store, rank, size, CPU), "replica 0", fetch=ReplicaFetch(fetch))
    dist.init_process_group("gloo", store=PrefixStore("gang", store), rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    route = DeviceRoute((dist.group.WORLD,), CPU)
    return Replica(connect_group(store, rank, size, CPU), "replica 0", fetch=ReplicaFetch.BROADCAST, route=route)


def loader_of(
    replica: Replica, client: CountingQueue, columns: Sequence[str] = ("tokens", "ids", "rewards", "texts")
) -> StreamingDataLoader:
    """Open a loader over three partitions."""
    return StreamingDataLoader(
        client if replica.fetches else None,  # type: ignore[arg-type]
        "train", columns, first_partition=1, last_partition=3, rows_per_round=3, replica=replica,
    )  # fmt: skip


def check(batch: PackedBatch) -> None:
    """Compare with what the queue holds, bit by bit."""
    rows = list(batch.indices)
    expected = batch_of(LeaseGrant("train", 0, 0, rows, rows, [])) if rows else PackedBatch((), {})
    for name, column in batch.columns.items():
        assert column.kind is expected[name].kind
        assert column.values.dtype is expected[name].values.dtype
        assert torch.equal(column.values, expected[name].values)
        assert torch.equal(column.lengths, expected[name].lengths)


def read_rank(port: int, pipe: Pipe, rank: int, size: int, fetch: str, behaviour: dict[str, int]) -> None:
    """Read everything; report rounds, how it ended, acks, requests and threads that are left."""
    replica = replica_of(port, rank, size, fetch)
    client = CountingQueue(**behaviour)
    columns = ("tokens", "ids", "rewards", "texts") if fetch != "each" or rank == 0 else ("ids",)
    loader = loader_of(replica, client, columns)
    rounds = []
    error = ""
    try:
        while partition := loader.next_partition():
            for batch in loader:
                check(batch)
                rounds.append((partition, batch.indices, loader.largest_slice, batch.groups, list(batch.columns)))
            if not loader.stopped:
                loader.ack()
    except TransportError as caught:
        error = f"{type(caught).__name__}: {caught}"
    stopped = loader.stopped
    loader.close()
    assert error or not replica._aborted, "what was read to its end needs no abort"
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    pipe.send((rounds, stopped, error, client.acked, loader.requests, left))
    pipe.poll(60)
    if dist.is_initialized():
        dist.destroy_process_group()


def dying_rank(port: int, pipe: Pipe, rank: int, size: int, fetch: str = "broadcast") -> None:
    """Read one round and wait to be killed."""
    loader = loader_of(replica_of(port, rank, size, fetch), CountingQueue())
    loader.next_partition()
    pipe.send(next(iter(loader)).indices)
    pipe.recv()


def surviving_rank(port: int, pipe: Pipe, rank: int, size: int, fetch: str = "broadcast") -> None:
    """Read one round, then, when told, the rest; report the error and how long it took to come."""
    loader = loader_of(replica_of(port, rank, size, fetch), CountingQueue())
    loader.next_partition()
    pipe.send(next(iter(loader)).indices)
    pipe.recv()
    began = time.monotonic()
    try:
        for _ in range(3):
            list(loader)
        pipe.send(("no error", time.monotonic() - began))
    except TransportError as error:
        pipe.send((str(error), time.monotonic() - began))
    loader.close()


def closing_rank(port: int, pipe: Pipe, rank: int, size: int) -> None:
    """Close while rank 0's fetch is parked; report the threads that are left, then leave like any process."""
    client = CountingQueue(park_at=2)
    loader = loader_of(replica_of(port, rank, size), client)
    loader.next_partition()
    rounds = [batch.indices for batch in loader]
    pipe.send(rounds)
    pipe.recv()
    loader.close()
    client.ended.set()  # what closing the client does to a parked fetch
    assert loader._ahead is not None
    ended = loader._ahead.join(10)
    pipe.send(ended)
