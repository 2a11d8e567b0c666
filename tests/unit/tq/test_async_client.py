"""`AsyncQueueClient` over a client that blocks until told."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from asyncflow.errors import Superseded, TransportError
from tq.batch import Column
from tq.client.async_client import AsyncQueueClient
from tq.client.queue_client import QueueClient
from tq.messages import FetchRound, Granted, NoRows

GRANTED = Granted("t", 1, 1, [3], [3], ["storage-0"])
X = {"x": Column.of_scalars(torch.zeros(1))}


class BlockingClient:
    """Fetches wait for `rows`; every call is noted."""

    def __init__(self) -> None:
        self.owner = "fake@1"
        self.rows = threading.Event()
        self.fetching = threading.Semaphore(0)
        self.given_back = threading.Event()
        self.is_closed = False
        self.calls: list[tuple[Any, ...]] = []

    def fetch(self, task: str, **request: Any) -> Granted | NoRows:
        self.fetching.release()
        assert self.rows.wait(10)
        if self.is_closed:
            raise TransportError("closed")
        return GRANTED

    def fetch_round(self, request: FetchRound) -> Granted | NoRows:
        return self.fetch(request.task)

    def give_back(self, task: str, granted: Granted, rows: Any = None) -> None:
        self.calls.append(("give_back", task, granted.rows, rows))
        self.given_back.set()

    def put(self, *arguments: Any) -> None:
        self.calls.append(("put", *arguments))
        if arguments[0] == "superseded":
            raise Superseded("somebody else's")

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
        await queue.put("t", GRANTED, [3], X)
        client.rows.set()
        assert await asyncio.gather(*fetches) == [GRANTED, GRANTED]

    assert run(body).calls == [("put_rows", 4), ("put", "t", GRANTED, [3], X)]


def test_cancelled_fetch_gives_back_what_it_is_granted_later() -> None:
    async def body(queue: AsyncQueueClient, client: BlockingClient) -> None:
        fetch = asyncio.create_task(queue.fetch("t", num_rows=1))
        await parked(client)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        assert client.calls == []
        client.rows.set()
        assert await asyncio.to_thread(client.given_back.wait, 10)

    assert run(body).calls == [("give_back", "t", [3], None)]


def test_fetch_that_times_out_in_asyncio_is_a_cancelled_one() -> None:
    async def body(queue: AsyncQueueClient, client: BlockingClient) -> None:
        fetch = asyncio.create_task(queue.fetch("t", num_rows=1))
        await parked(client)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(fetch, 0.01)
        client.rows.set()
        assert await asyncio.to_thread(client.given_back.wait, 10)

    run(body)


def test_fetch_cancelled_before_it_had_a_thread_asks_nothing() -> None:
    async def body(queue: AsyncQueueClient, client: BlockingClient) -> None:
        fetches = [asyncio.create_task(queue.fetch("t", num_rows=1)) for _ in range(3)]
        await parked(client)
        await parked(client)
        fetches[2].cancel()
        await asyncio.wait([fetches[2]])
        client.rows.set()
        assert await asyncio.gather(*fetches[:2]) == [GRANTED, GRANTED]
        assert not client.fetching.acquire(blocking=False)

    assert run(body).calls == []


def _calls(kind: type) -> dict[str, list[str]]:
    functions = {name: it for name, it in vars(kind).items() if inspect.isfunction(it) and not name.startswith("_")}
    return {name: list(inspect.signature(it).parameters) for name, it in functions.items()}


def test_every_call_of_the_client_is_there_with_the_same_parameters() -> None:
    assert {name: sorted(it) for name, it in _calls(AsyncQueueClient).items()} == {
        name: sorted(it) for name, it in _calls(QueueClient).items()
    }


def test_a_cancelled_round_is_not_given_back_since_it_is_granted_again() -> None:
    async def body(queue: AsyncQueueClient, client: BlockingClient) -> None:
        fetch = asyncio.create_task(queue.fetch_round(FetchRound("t", "", 1, 0, 1, 0, 1, 60)))
        await parked(client)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        client.rows.set()

    assert run(body).calls == []


def test_errors_reach_the_coroutine() -> None:
    async def body(queue: AsyncQueueClient, client: BlockingClient) -> None:
        with pytest.raises(Superseded):
            await queue.put("superseded", GRANTED, [3], X)

    run(body)


def test_close_ends_parked_fetches_and_refuses_more() -> None:
    async def body(queue: AsyncQueueClient, client: BlockingClient) -> None:
        fetch = asyncio.create_task(queue.fetch("t", num_rows=1))
        await parked(client)
        await queue.close()
        with pytest.raises(TransportError, match="closed"):
            await fetch
        with pytest.raises(TransportError, match="fake@1: the queue client is closed"):
            await queue.put("t", GRANTED, [3], X)
        await queue.close()

    run(body)
