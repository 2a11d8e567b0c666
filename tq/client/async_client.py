"""The queue for asyncio: the calls of a consumer or producer as coroutines, run by threads that this object owns.

    async with AsyncQueueClient(client) as queue:
        await queue.put_rows({"prompt": ["1 + 1 =", "2 + 2 ="]})
        async for lease in queue.stream("score", ["prompt"]):
            await lease.put({"score": await scores(lease.batch["prompt"])})

Fetches wait for long, so they have threads of their own: they never keep a put waiting. A fetch that is cancelled
releases what it is granted later. A put that is cancelled is carried out nevertheless. Everything else (partitions,
versions, snapshots) is the wrapped `QueueClient`'s.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from asyncflow.errors import AsyncFlowError, TransportError
from tq.client.lease import Lease
from tq.client.queue_client import QueueClient
from tq.columns import Column, PackedBatch
from tq.messages import LostRows, NoRows, NoRowsReason

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class AsyncQueueClient:
    """One consumer or producer of an asyncio program. Use it from one event loop."""

    def __init__(self, client: QueueClient, *, max_fetches: int = 16, max_calls: int = 8) -> None:
        """Args:
        client: does the work; closed by `close`.
        max_fetches: fetches and watches for lost rows that wait at the same time; others wait for a thread.
        max_calls: other calls at the same time.
        """
        self._client = client
        self._closed = False
        self._fetches = ThreadPoolExecutor(max_fetches, thread_name_prefix="queue-fetch")
        self._calls = ThreadPoolExecutor(max_calls, thread_name_prefix="queue-call")

    async def __aenter__(self) -> "AsyncQueueClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Carry out what was begun, then close the client, which ends waiting fetches. Idempotent."""
        self._closed = True
        await asyncio.to_thread(self._calls.shutdown)
        await asyncio.to_thread(self._client.close)
        await asyncio.to_thread(self._fetches.shutdown, cancel_futures=True)

    async def put_rows(self, columns: Mapping[str, Any], **options: Any) -> tuple[int, ...]:
        """See `QueueClient.put_rows`. A full queue keeps one of the `max_calls` threads waiting."""
        return await self.call(self._client.put_rows, columns, **options)

    async def fetch(self, task: str, **options: Any) -> "AsyncLease | NoRows":
        """See `QueueClient.fetch`, also for the options."""
        self._refuse_when_closed()
        future = self._fetches.submit(self._client.fetch, task, **options)
        try:
            answer = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._return)
            raise
        return AsyncLease(self, answer) if isinstance(answer, Lease) else answer

    async def stream(self, task: str, columns: Sequence[str], **options: Any) -> "AsyncIterator[AsyncLease]":
        """Iterate over a task's rows, read already, until the queue stops, or is closed for writing and done.

        Leases that the loop leaves open are released when it moves on. Nothing is fetched ahead: run several loops.

        Args:
            task: whose inputs must be complete.
            columns: to read.
            options: of `QueueClient.fetch`.
        """
        while True:
            lease = await self.fetch(task, **options)
            if isinstance(lease, NoRows):
                if lease.reason is NoRowsReason.DEADLINE:
                    continue
                return
            try:
                await lease.read(columns)
                yield lease
            finally:
                await asyncio.shield(lease.release())

    async def read_rows(self, rows: Sequence[int], columns: Sequence[str]) -> PackedBatch:
        """See `QueueClient.read_rows`."""
        return await self.call(self._client.read_rows, rows, columns)

    async def lost_rows(self, after: int = 0, *, timeout_s: float | None = None) -> LostRows | None:
        """See `QueueClient.lost_rows`."""
        self._refuse_when_closed()
        return await asyncio.wrap_future(self._fetches.submit(self._client.lost_rows, after, timeout_s=timeout_s))

    async def close_writing(self) -> None:
        """See `QueueClient.close_writing`."""
        await self.call(self._client.close_writing)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run any short call of the client in one of the `max_calls` threads."""
        self._refuse_when_closed()
        return await asyncio.wrap_future(self._calls.submit(function, *args, **kwargs))

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise TransportError(f"{self._client.owner}: the queue client is closed")

    def _return(self, fetched: "Future[Lease | NoRows]") -> None:
        """A cancelled fetch ended, in its own thread or, if it was faster, in the event loop's: so do not block."""
        if fetched.cancelled() or fetched.exception() is not None:
            return
        lease = fetched.result()
        if isinstance(lease, Lease):
            try:
                self._calls.submit(_release, lease)
            except RuntimeError:  # the pool is shut down: the client closes, and its leases return with it
                logger.debug("%s: a cancelled fetch was granted rows while closing", lease.grant.task)


class AsyncLease:
    """A `Lease` whose calls are coroutines."""

    def __init__(self, queue: AsyncQueueClient, lease: Lease) -> None:
        self._queue = queue
        self._lease = lease

    def __len__(self) -> int:
        return len(self._lease)

    def __getitem__(self, name: str) -> Column:
        """Return a column that was read."""
        return self._lease.batch[name]

    @property
    def batch(self) -> PackedBatch:
        """The columns that were read so far, packed."""
        return self._lease.batch

    @property
    def rows(self) -> list[int]:
        """Global indices of the rows."""
        return self._lease.rows

    async def read(self, columns: Sequence[str]) -> PackedBatch:
        """See `Lease.read`."""
        return await self._queue.call(self._lease.read, columns)

    async def put(self, columns: Mapping[str, Any], rows: Sequence[int] | None = None) -> bool:
        """See `Lease.put`."""
        return await self._queue.call(self._lease.put, columns, rows)

    async def ack(self, rows: Sequence[int] | None = None) -> bool:
        """See `Lease.ack`."""
        return await self._queue.call(self._lease.ack, rows)

    async def release(self, rows: Sequence[int] | None = None) -> None:
        """See `Lease.release`."""
        if self._lease.open_rows:
            await self._queue.call(self._lease.release, rows)


def _release(lease: Lease) -> None:
    try:
        lease.release()
    except AsyncFlowError as error:
        logger.warning("%s: rows of a cancelled fetch could not be released: %s", lease.grant.task, error)
