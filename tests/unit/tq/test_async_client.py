"""`AsyncQueueClient` over a client that blocks until told."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from asyncflow.errors import LeaseFenced, PeerRefused, TransportError
from tq.client.lease import Lease
from tq.client.queue_client import AsyncLease, AsyncQueueClient
from tq.columns import Column, PackedBatch
from tq.messages import LeaseGrant, NoRows, NoRowsReason

GRANTED = LeaseGrant("t", 1, 1, [3], [3], ["storage-0"])
X = {"x": Column.of_scalars(torch.zeros(1))}


class BlockingClient:
    """Fetches wait for `rows`; every call is noted."""

    def __init__(self) -> None:
        self.owner = "fake@1"
        self.rows = threading.Event()
        self.fetching = threading.Semaphore(0)
        self.released = threading.Event()
        self.error: Exception | None = None
        self.num_leases = 9
        self.is_closed = False
        self.calls: list[tuple[Any, ...]] = []

    def fetch(self, task: str, **request: Any) -> Lease | NoRows:
        self.fetching.release()
        assert self.rows.wait(10)
        if self.is_closed:
            raise TransportError("closed")
        if self.num_leases == 0:
            return NoRows(NoRowsReason.CLOSED, 0)
        self.num_leases -= 1
        return Lease(self, GRANTED)

    def get(self, granted: LeaseGrant, names: Any) -> PackedBatch:
        return PackedBatch((3,), dict.fromkeys(names, X["x"]))

    def release_rows(self, granted: LeaseGrant, rows: Any) -> None:
        self.calls.append(("release", rows))
        self.released.set()

    def put(self, granted: LeaseGrant, rows: Any, columns: Any) -> None:
        self.calls.append(("put", rows, list(columns)))
        if self.error is not None:
            raise self.error

    def ack(self, granted: LeaseGrant, rows: Any) -> None:
        self.calls.append(("ack", rows))

    def filter_groups(self, granted: LeaseGrant, rows: Any) -> None:
        raise NotImplementedError

    def put_rows(self, columns: Any, **options: Any) -> tuple[int, ...]:
        self.calls.append(("put_rows", options["partition"]))
        return (3,)

    def close(self) -> None:
        self.is_closed = True
        self.rows.set()


def run(test: Callable[[AsyncQueueClient, BlockingClient], Coroutine[Any, Any, None]]) -> BlockingClient:
    """Run a coroutine with a client; closes it."""
    client = BlockingClient()

    async def body() -> None:
        async with AsyncQueueClient(client, max_fetches=2, max_calls=1) as queue:  # type: ignore[arg-type]
            await test(queue, client)

    asyncio.run(asyncio.wait_for(body(), 30))
    assert client.is_closed
    return client


async def parked(client: BlockingClient) -> None:
    """Wait until a fetch is in its thread."""
    assert await asyncio.to_thread(client.fetching.acquire, timeout=10)


def test_calls_run_while_fetches_park() -> None:
    async def body(queue: AsyncQueueClient, client: BlockingClient) -> None:
        fetches = [asyncio.create_task(queue.fetch("t", num_rows=1)) for _ in range(2)]
        await parked(client)
        await parked(client)
        assert await queue.put_rows(X, partition=4) == (3,)
        client.rows.set()
        first, _ = await asyncio.gather(*fetches)
        assert isinstance(first, AsyncLease)
        assert (await first.read(["x"]))["x"] is first["x"]
        assert await first.put({"y": torch.zeros(1)})

    assert run(body).calls == [("put_rows", 4), ("put", [3], ["y"])]


def test_cancelled_fetch_releases_what_it_is_granted_later() -> None:
    async def body(queue: AsyncQueueClient, client: BlockingClient) -> None:
        fetch = asyncio.create_task(queue.fetch("t", num_rows=1))
        await parked(client)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        assert client.calls == []
        client.rows.set()
        assert await asyncio.to_thread(client.released.wait, 10)

    assert run(body).calls == [("release", [3])]


def test_fetch_that_times_out_in_asyncio_is_a_cancelled_one() -> None:
    async def body(queue: AsyncQueueClient, client: BlockingClient) -> None:
        fetch = asyncio.create_task(queue.fetch("t", num_rows=1))
        await parked(client)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(fetch, 0.01)
        client.rows.set()
        assert await asyncio.to_thread(client.released.wait, 10)

    run(body)


def test_fetch_cancelled_before_it_had_a_thread_asks_nothing() -> None:
    async def body(queue: AsyncQueueClient, client: BlockingClient) -> None:
        fetches = [asyncio.create_task(queue.fetch("t", num_rows=1)) for _ in range(3)]
        await parked(client)
        await parked(client)
        fetches[2].cancel()
        await asyncio.wait([fetches[2]])
        client.rows.set()
        assert all(isinstance(it, AsyncLease) for it in await asyncio.gather(*fetches[:2]))
        assert not client.fetching.acquire(blocking=False)

    assert run(body).calls == []


def test_stream_yields_rows_that_are_read_and_releases_what_the_loop_leaves_open() -> None:
    async def body(queue: AsyncQueueClient, client: BlockingClient) -> None:
        client.num_leases = 2
        client.rows.set()
        acked = False
        async for lease in queue.stream("t", ["x"], num_rows=1):
            assert lease["x"] is X["x"]
            acked = acked or await lease.ack()

    assert run(body).calls == [("ack", [3]), ("release", [3])]


def test_errors_reach_the_coroutine() -> None:
    async def body(queue: AsyncQueueClient, client: BlockingClient) -> None:
        client.rows.set()
        lease = await queue.fetch("t")
        assert isinstance(lease, AsyncLease)
        client.error = PeerRefused("column y is written")
        with pytest.raises(PeerRefused):
            await lease.put(X)
        client.error = LeaseFenced("other consumers have the rows")
        assert not await lease.put(X)

    run(body)


def test_close_ends_parked_fetches_and_refuses_more() -> None:
    async def body(queue: AsyncQueueClient, client: BlockingClient) -> None:
        fetch = asyncio.create_task(queue.fetch("t", num_rows=1))
        await parked(client)
        await queue.close()
        with pytest.raises(TransportError, match="closed"):
            await fetch
        with pytest.raises(TransportError, match="fake@1: the queue client is closed"):
            await queue.put_rows(X)
        await queue.close()

    run(body)
