"""The queue for asyncio: every call of `QueueClient` as a coroutine, run by threads that this object owns.

    async with AsyncQueueClient(client) as queue:
        granted = await queue.fetch("rewards", num_rows=8)
        batch = await queue.get(granted, ["responses"])
        await queue.put("rewards", granted, batch.indices, {"rewards": await score(batch)})

Fetches park for long, so they have threads of their own: they never keep a put waiting. A fetch that is cancelled
gives back what it is granted later, but not a round's share: who asks for that round again is granted it again. A put
that is cancelled is carried out nevertheless.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from asyncflow.errors import AsyncFlowError, TransportError
from tq.batch import Column, PackedBatch
from tq.client.queue_client import QueueClient
from tq.messages import FetchRound, Granted, LostRows, NoRows, QueueStats, UnitStats
from tq.refill import Refill

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class AsyncQueueClient:
    """One consumer or producer of an asyncio program. Use it from one event loop."""

    def __init__(self, client: QueueClient, *, max_fetches: int = 16, max_calls: int = 8) -> None:
        """Args:
        client: does the work; closed by `close`.
        max_fetches: fetches and watches for lost rows that park at the same time; others wait for a thread.
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
        """Carry out what was begun, then close the client, which ends parked fetches. Idempotent."""
        self._closed = True
        await asyncio.to_thread(self._calls.shutdown)
        await asyncio.to_thread(self._client.close)
        await asyncio.to_thread(self._fetches.shutdown, cancel_futures=True)

    async def fetch(
        self,
        task: str,
        *,
        num_rows: int,
        version: int = 0,
        timeout_s: float | None = None,
        token_budget: int = 0,
        replica: str = "",
        sequence: int = 0,
        lineage: int = 0,
    ) -> Granted | NoRows:
        """See `QueueClient.fetch`."""
        call = partial(
            self._client.fetch,
            task,
            num_rows=num_rows,
            version=version,
            timeout_s=timeout_s,
            token_budget=token_budget,
            replica=replica,
            sequence=sequence,
            lineage=lineage,
        )
        self._refuse_when_closed()
        future = self._fetches.submit(call)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(partial(self._return, task))
            raise

    async def fetch_round(self, request: FetchRound) -> Granted | NoRows:
        """See `QueueClient.fetch_round`."""
        return await self._park(self._client.fetch_round, request)

    async def lost_rows(self, after: int = 0, *, timeout_s: float | None = None) -> LostRows | None:
        """See `QueueClient.lost_rows`."""
        return await self._park(self._client.lost_rows, after, timeout_s=timeout_s)

    async def get(self, granted: Granted, names: Sequence[str]) -> PackedBatch:
        """See `QueueClient.get`."""
        return await self._call(self._client.get, granted, names)

    async def put(self, task: str, granted: Granted, rows: Sequence[int], columns: Mapping[str, Column]) -> None:
        """See `QueueClient.put`."""
        await self._call(self._client.put, task, granted, rows, columns)

    async def ack(self, task: str, granted: Granted, rows: Sequence[int] | None = None) -> None:
        """See `QueueClient.ack`."""
        await self._call(self._client.ack, task, granted, rows)

    async def give_back(self, task: str, granted: Granted, rows: Sequence[int] | None = None) -> None:
        """See `QueueClient.give_back`."""
        await self._call(self._client.give_back, task, granted, rows)

    async def filter_groups(self, task: str, granted: Granted, rows: Sequence[int]) -> None:
        """See `QueueClient.filter_groups`."""
        await self._call(self._client.filter_groups, task, granted, rows)

    async def forget(self, task: str, granted: Granted) -> None:
        """See `QueueClient.forget`."""
        await self._call(self._client.forget, task, granted)

    async def put_rows(
        self,
        columns: Mapping[str, Column],
        *,
        partition: int = 0,
        groups: Sequence[int] | None = None,
        group_size: int = 0,
        rows: Sequence[int] | None = None,
        timeout_s: float | None = None,
        commits: Mapping[str, Sequence[int]] | None = None,
    ) -> tuple[int, ...]:
        """See `QueueClient.put_rows`. A full queue keeps one of the `max_calls` threads waiting."""
        return await self._call(
            self._client.put_rows,
            columns,
            partition=partition,
            groups=groups,
            group_size=group_size,
            rows=rows,
            timeout_s=timeout_s,
            commits=commits,
        )

    async def open_partition(self, partition: int, num_rows: int) -> None:
        """See `QueueClient.open_partition`."""
        await self._call(self._client.open_partition, partition, num_rows)

    async def publish_version(self, step: int, *, refills_known: int = 0) -> list[Refill]:
        """See `QueueClient.publish_version`."""
        return await self._call(self._client.publish_version, step, refills_known=refills_known)

    async def clear_partition(self, partition: int) -> None:
        """See `QueueClient.clear_partition`."""
        await self._call(self._client.clear_partition, partition)

    async def commit(self, newest: int) -> None:
        """See `QueueClient.commit`."""
        await self._call(self._client.commit, newest)

    async def snapshot(self, directory: Path, *, after_partition: int = -1, forget_acks_of: Sequence[str] = ()) -> int:
        """See `QueueClient.snapshot`."""
        return await self._call(
            self._client.snapshot, directory, after_partition=after_partition, forget_acks_of=forget_acks_of
        )

    async def restore(self, directory: Path) -> int:
        """See `QueueClient.restore`."""
        return await self._call(self._client.restore, directory)

    async def checkpoint_wanted(self) -> bool:
        """See `QueueClient.checkpoint_wanted`."""
        return await self._call(self._client.checkpoint_wanted)

    async def unit_stats(self) -> dict[str, UnitStats]:
        """See `QueueClient.unit_stats`."""
        return await self._call(self._client.unit_stats)

    async def stats(self) -> list[QueueStats]:
        """See `QueueClient.stats`."""
        return await self._call(self._client.stats)

    async def stop(self) -> None:
        """See `QueueClient.stop`."""
        await self._call(self._client.stop)

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._refuse_when_closed()
        return await asyncio.wrap_future(self._calls.submit(function, *args, **kwargs))

    async def _park(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._refuse_when_closed()
        return await asyncio.wrap_future(self._fetches.submit(function, *args, **kwargs))

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise TransportError(f"{self._client.owner}: the queue client is closed")

    def _return(self, task: str, fetched: "Future[Granted | NoRows]") -> None:
        """A cancelled fetch ended, in its own thread or, if it was faster, in the event loop's: so do not block."""
        if fetched.cancelled() or fetched.exception() is not None:
            return
        granted = fetched.result()
        if isinstance(granted, Granted):
            try:
                self._calls.submit(self._give_back, task, granted)
            except RuntimeError:  # the pool is shut down: the client closes, and its leases return with it
                logger.debug("%s: a cancelled fetch was granted rows while closing", task)

    def _give_back(self, task: str, granted: Granted) -> None:
        try:
            self._client.give_back(task, granted)
        except AsyncFlowError as error:
            logger.warning("%s: rows of a cancelled fetch could not be given back: %s", task, error)
