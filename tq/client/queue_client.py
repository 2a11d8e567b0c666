"""A process's access to the queue: put rows, lease them, read and list them. Thread-safe; connects on first use.

    client = tq.connect(address, "scorer")
    for lease in client.stream("score", ["prompt"], num_rows=32):
        lease.put({"score": scores(lease["prompt"])})

Calls wait for a controller that restarts. A unit that is gone is an error, except for new rows and for acks.
"""

import asyncio
import logging
import secrets
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from asyncflow.errors import AsyncFlowError, CheckpointError, ConfigError, TransportError
from asyncflow.transport.meeting import Credentials
from tq.client.arguments import (
    as_columns,
    check_marks,
    check_names,
    check_number,
    check_numbers,
    check_task,
    check_timeout,
)
from tq.client.lease import Lease, LeaseStream
from tq.client.session import DataPlane, QueueSession, expect
from tq.columns import Column, PackedBatch
from tq.config import QueueConfig, ReplicaBroadcast, ReplicaFetch
from tq.messages import (
    NEW_ROWS,
    ClearPartition,
    CloseWriting,
    CutSnapshot,
    Done,
    FetchRound,
    FetchRows,
    GetQueueStats,
    GetUnitStats,
    HoldPuts,
    LeaseGrant,
    LostRows,
    NoRows,
    NoRowsReason,
    OpenPartition,
    Published,
    PublishVersion,
    PutRows,
    QueueStats,
    ReleaseCheckpointed,
    RowInfo,
    SnapshotWritten,
    Stop,
    UnitStats,
    WatchLost,
    WriteSnapshot,
)
from tq.refill import Refill
from tq.snapshot import last_rows, read_manifest, read_snapshot, write_manifest
from tq.wire import disclose

# Snapshot and restore of a whole queue, driven by one client over all units.
#
#     hold every unit ---- cut every unit ---- write files ---- manifest, rename
#     puts wait (milliseconds)   |  traffic continues
#
# All units are cut while all of them hold, so the snapshot is the queue at one moment. It appears under its name only
# when it is complete. Restoring puts the rows again, spread over however many units there are now.

_HOLD_S = 10.0
_WRITE_TIMEOUT_S = 3600.0


def take_snapshot(
    session: QueueSession, directory: Path, *, after_partition: int, forget_acks_of: Sequence[str]
) -> int:
    """Write the queue's rows into `directory`, which must not exist; all units must see the same file system.

    Returns the number of rows. On an error nothing is left behind.

    Raises:
        CheckpointError: the directory exists.
        TransportError: a unit is away and does not come back in time, goes in the meantime, or is too slow.
    """
    if directory.exists():
        raise CheckpointError(f"queue snapshot: {directory} exists already; choose another directory")
    # Written under another name, so that a snapshot appears only when it is complete.
    beside = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    hold = secrets.token_hex(8)
    try:
        held = session.tell_units(HoldPuts(hold, _HOLD_S), Done, every=True)
        cut = session.tell_units(CutSnapshot(hold, after_partition, list(forget_acks_of)), Done)
        write = WriteSnapshot(hold, str(beside.resolve()))
        written = session.tell_units(write, SnapshotWritten, timeout_s=_WRITE_TIMEOUT_S)
        # A unit that vanished between the steps takes its part with it.
        _refuse_missing(held.keys(), cut.keys() & written.keys())
        num_rows = sum(part.num_rows for part in written.values())
        files = [file for part in written.values() for file in part.files]
        outputs = session.outputs.read(session.directory.tasks)
        write_manifest(beside, files, num_rows=num_rows, outputs=outputs)
        beside.rename(directory)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return num_rows


def restore_snapshot(put_rows: Callable[..., Sequence[int]], session: QueueSession, directory: Path) -> int:
    """Put a snapshot's rows into a queue that has none of them; tasks that were done with a row stay done.

    Returns the number of rows. `put_rows` is the client's method. Partitions must be declared again (`open_partition`).

    Raises:
        CheckpointError: the snapshot is incomplete or damaged; nothing was put.
        RowsExist: the queue already has such a row.
    """
    for task, columns in read_manifest(directory).outputs.items():
        session.outputs.note_outputs(task, columns)
    # New rows that are put later without explicit indices must not take those of the snapshot.
    session.reserve_rows(last_rows(directory))
    num_rows = 0
    for chunk in read_snapshot(directory):
        num_rows += len(
            put_rows(
                chunk.columns,
                partition=chunk.partition,
                rows=chunk.rows,
                groups=chunk.groups,
                group_size=chunk.group_size,
                commits=chunk.commits,
            )
        )
    return num_rows


def _refuse_missing(held: Set[str], written: Set[str]) -> None:
    gone = sorted(held - written)
    if gone:
        raise TransportError(f"queue snapshot: {' '.join(gone)} went away while it was taken; take it again")


_MOST_ROWS = 2**31


class QueueClient:
    """One consumer or producer; a context manager. Its leases live as long as its heartbeats.

    Args:
        name: of this process, for messages; need not be unique.
        stop: once set, calls do not wait for services that are gone.
        attempt: how many processes of this name were started before, one at a time: leases of earlier ones return as
            soon as this one asks for something. None: several may run at once.
    """

    def __init__(
        self,
        credentials: Credentials,
        name: str,
        *,
        config: QueueConfig,
        stop: threading.Event | None = None,
        attempt: int | None = None,
    ) -> None:
        self._config = config
        stop = stop or threading.Event()
        self._session = QueueSession(credentials, name, config=config, stop=stop, attempt=attempt)
        self.data = DataPlane(self._session, max_message_bytes=config.max_message_bytes)
        """What `Lease` and `StreamingDataLoader` use to ask the units."""

    def __enter__(self) -> "QueueClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def owner(self) -> str:
        """This consumer with its incarnation; leases are bound to it."""
        return self._session.owner

    @property
    def replica_fetch(self) -> ReplicaFetch:
        """Which of the ranks that share rows fetch, by the queue's config."""
        return self._config.replica_fetch

    @property
    def replica_broadcast(self) -> ReplicaBroadcast:
        """What carries rows between the ranks of a replica, as the queue's config says."""
        return self._config.replica_broadcast

    def close(self) -> None:
        """Leave the queue; leases return. Idempotent."""
        self._session.close()

    # Producing

    def declare_outputs(self, columns: Iterable[str]) -> None:
        """Tell all controllers that this client will put these columns, so that consumers find their producer."""
        # Otherwise they hear it with the first put; a consumer that waits longer raises `ProducersGone`.
        self._session.declare_outputs(columns)

    def put_rows(
        self,
        columns: Mapping[str, Any],
        *,
        partition: int = 0,
        rows: Sequence[int] | None = None,
        groups: Sequence[int] | None = None,
        group_size: int = 0,
        timeout_s: float | None = None,
        commits: Mapping[str, Sequence[int]] | None = None,
    ) -> tuple[int, ...]:
        """Create rows with their first columns on the emptiest unit; waits while the queue is full. Returns the rows.

        Args:
            columns: name -> tensor or array [N, ...], list of N tensors, strings, bytes or JSON values, or `Column`.
            partition: the step that the rows belong to.
            rows: global indices; None: new ones from the job store.
            groups: group ids; None: every `group_size` consecutive rows form a group, or each row its own.
            group_size: rows of each group, over all puts; 0: the groups are complete in this put.
            timeout_s: how long to wait for room; None: `request_timeout_s`.
            commits: task -> positions of rows that the task is already done with (restored ones).

        Raises:
            ConfigError: the arguments do not go together; nothing was put.
            QueueFull: no room within `timeout_s`; says what it waited for.
            RowsExist: a row exists already.
            PeerRefused: the queue was closed for writing.
            TransportError: no unit took the rows in time, or another put of one of them did not end in time.
        """
        timeout_s = check_timeout(self._session.resolve_timeout(timeout_s))
        packed, number = as_columns(columns)
        partition = check_number("partition", partition)
        group_size = check_number("group_size", group_size)
        rows = None if rows is None else check_numbers("rows", rows)
        groups = None if groups is None else check_numbers("groups", groups)
        for what, given in (("rows", rows), ("groups", groups)):
            if given is not None and len(given) != number:
                raise ConfigError(f"a put of {number} rows names {len(given)} {what}; name one for each row")
        marks = check_marks(commits or {}, number)
        headers, payload = self.data.describe_columns(packed)
        if rows is not None:
            self._session.reserve_rows(rows)
        indices = list(self._session.new_rows(number) if rows is None else rows)
        if groups is None:
            size = max(1, group_size)
            groups = [indices[k - k % size] for k in range(number)]
        self._session.beats.note_columns((NEW_ROWS, *packed))
        message = PutRows(partition, indices, list(groups), headers, group_size, timeout_s, marks)
        self.data.put_rows(message, payload)
        return tuple(indices)

    def close_writing(self) -> None:
        """Refuse new rows from now on. Streams end when their task is done with all rows that are there.

        Tasks still write outputs, and lost rows may still be put again.
        """
        self._session.tell_controllers(CloseWriting())

    def open_partition(self, partition: int, num_rows: int) -> None:
        """Declare how many rows a partition will have, so that its end can be known."""
        message = OpenPartition(check_number("partition", partition), check_number("num_rows", num_rows))
        self._session.tell_controllers(message)

    def lost_rows(self, after: int = 0, *, timeout_s: float | None = None) -> LostRows | None:
        """Wait for rows that were lost with a unit: put them again under the same indices. None: the time is up.

        `after` is the `sequence` of the last answer, 0 at first.
        """
        timeout_s = check_timeout(self._session.resolve_timeout(timeout_s))
        message = WatchLost(check_number("after", after), timeout_s)
        reply = self._session.ask(self._session.directory.lead, message, timeout_s)
        return reply if isinstance(reply, LostRows) else None

    # Consuming

    def stream(
        self,
        task: str,
        columns: Sequence[str],
        *,
        num_rows: int = 64,
        token_budget: int = 0,
        version: int | Callable[[], int] = 0,
        prefetch: int = 1,
        timeout_s: float = 60.0,
        producers_timeout_s: float = 0.0,
    ) -> LeaseStream:
        """Iterate over a task's rows as they become ready, until the queue stops, or is closed for writing and done.

        The next lease is fetched and read while the loop works on this one. When the loop moves on or ends, also by an
        error, rows that it neither put nor acknowledged are released; the queue's `max_deliveries` keeps poisonous rows
        from coming back forever.

        Args:
            task: the task whose inputs must be complete.
            columns: to read ahead.
            num_rows, token_budget: limits of one lease; `token_budget` 0: no limit.
            version: newest weights that this consumer holds, for version-gated tasks. Newer ones end the stream
                (`ended_by`), so that the consumer loads them and starts another one.
            prefetch: leases fetched ahead; 0: none, and no thread.
            timeout_s: a fetch is repeated after this time at the latest; it does not end the iteration.
            producers_timeout_s: raise `ProducersGone` when no producer of the inputs has been connected for this long
                (s); 0: wait for one forever.
        """
        return LeaseStream(
            self.fetch,
            task,
            columns,
            num_rows=num_rows,
            token_budget=token_budget,
            version=version,
            prefetch=prefetch,
            timeout_s=timeout_s,
            producers_timeout_s=producers_timeout_s,
        )

    def fetch(
        self,
        task: str,
        *,
        num_rows: int = 64,
        version: int = 0,
        timeout_s: float | None = None,
        token_budget: int = 0,
        replica: str = "",
        sequence: int = 0,
        lineage: int = 0,
        tell_held_back: bool = False,
    ) -> Lease | NoRows:
        """Lease ready rows; waits until there are some, the deadline passes, or the queue stops. See also `stream`.

        Args:
            num_rows: at most, but at least one item (a row, or a whole group).
            version: newest weights that this consumer holds (version-gated tasks).
            timeout_s: None: `request_timeout_s`.
            token_budget, replica, sequence, lineage, tell_held_back: see `FetchRows`.
        """
        timeout_s = check_timeout(self._session.resolve_timeout(timeout_s))
        if not isinstance(replica, str):
            raise ConfigError(f"replica: {replica!r} is not a string")
        message = FetchRows(
            task,
            self.owner,
            check_number("num_rows", num_rows, least=1, most=_MOST_ROWS),
            check_number("version", version),
            timeout_s,
            check_number("token_budget", token_budget),
            replica,
            check_number("sequence", sequence),
            check_number("lineage", lineage),
            tell_held_back,
        )
        answer = self._fetch_grant(message, timeout_s)
        return Lease(self.data, answer, disclose(answer.values)) if isinstance(answer, LeaseGrant) else answer

    def fetch_round(self, request: FetchRound) -> LeaseGrant | NoRows:
        """Lease this rank's slice of a round; see `FetchRound`. A formed round is granted again on request."""
        request.owner = self.owner
        check_number("num_rows", request.num_rows, least=1, most=_MOST_ROWS)
        return self._fetch_grant(request, check_timeout(request.timeout_s))

    # Rows without a lease

    def list_rows(self, *, partition: int | None = None) -> list[RowInfo]:
        """Return the rows that the units hold, by index; `partition` None: all. For people and tests, not for loops.

        Raises:
            TransportError: a unit is away and did not come back within `request_timeout_s`.
        """
        partition = None if partition is None else check_number("partition", partition)
        listed = self.data.list_rows(partition=partition)
        rows = [
            info
            for unit, part in listed.items()
            for record in part.records
            for info in RowInfo.from_record(record, unit)
        ]
        return sorted(rows, key=lambda row: row.index)

    def read_rows(self, rows: Sequence[int], columns: Sequence[str]) -> PackedBatch:
        """Read columns of any rows, in this order. Leases are not affected.

        Raises:
            PeerRefused: a row is not in the queue (any more), or a column is not written.
            TransportError: a unit is away and did not come back within `request_timeout_s`.
        """
        return self.data.read(check_numbers("rows", rows), check_names(columns))

    def clear_rows(self, rows: Sequence[int]) -> list[int]:
        """Remove rows; returns those that existed. Leases on them become void, and the rows may be put anew.

        Finished rows stay finished: those that wait for a checkpoint are left alone.

        Raises:
            TransportError: a unit or a controller did not come back within `request_timeout_s`. Clear again.
        """
        return self.data.clear_rows(check_numbers("rows", rows))

    # The queue as a whole

    def publish_version(self, step: int, *, refills_known: int = 0) -> list[Refill]:
        """Announce that weights of `step` exist; returns the groups that admission replaced, as failed or filtered.

        `refills_known` says how many replacements this trainer already knows; the later ones are returned, in order.
        Every refill whose group, or a later one, could be fetched by now is among them.
        """
        message = PublishVersion(check_number("step", step), check_number("refills_known", refills_known))
        return expect(self._session.tell_controllers(message)[0], Published).refills

    def stop(self) -> None:
        """End all streams: every fetch gets `NoRows(stop)` from now on."""
        self._session.tell_controllers(Stop())

    def clear_partition(self, partition: int) -> None:
        """Remove all rows of a partition; their leases become void. The rows may be put anew once this has returned.

        Raises:
            TransportError: a unit or controller that is away did not come back within `request_timeout_s`. Clear again.
        """
        message = ClearPartition(check_number("partition", partition))
        self._session.tell_units(message, Done, every=True)
        self._session.tell_controllers(message)

    def release_checkpointed(self, step: int) -> None:
        """A durable checkpoint covers partitions up to and including `step`: units free their retained rows.

        Raises:
            TransportError: a controller, or a unit that is up, did not answer within `request_timeout_s`. The next call
                makes up for it.
        """
        message = ReleaseCheckpointed(check_number("step", step))
        # Controllers first: they write down which rows are finished before units forget it. A unit that is away is not
        # awaited, since the next call covers the same partitions and more.
        self._session.tell_controllers(message)
        self._session.tell_units(message, Done)

    def snapshot(self, directory: Path, *, after_partition: int = -1, forget_acks_of: Sequence[str] = ()) -> int:
        """Write all rows of partitions after `after_partition` into a new directory; see `take_snapshot`."""
        return take_snapshot(
            self._session, Path(directory), after_partition=after_partition, forget_acks_of=forget_acks_of
        )

    def restore(self, directory: Path) -> int:
        """Put the rows of a snapshot; see `restore_snapshot`."""
        return restore_snapshot(self.put_rows, self._session, Path(directory))

    def checkpoint_wanted(self) -> bool:
        """Whether rows that only wait for a checkpoint take so much room that one should be saved soon."""
        limit = self._config.spill_after_bytes
        try:
            return any(unit.retained_bytes > limit for unit in self.unit_stats().values())
        except TransportError:
            # A unit does not answer just now; the caller asks again later.
            return False

    def stats(self) -> list[QueueStats]:
        """Return each controller's counts, the lead's first."""
        return [expect(counted, QueueStats) for counted in self._session.tell_controllers(GetQueueStats())]

    def unit_stats(self) -> dict[str, UnitStats]:
        """Return unit -> what it holds, for the units that are up."""
        return self._session.tell_units(GetUnitStats(), UnitStats)

    def _fetch_grant(self, message: FetchRows | FetchRound, timeout_s: float) -> LeaseGrant | NoRows:
        check_task(message.task, self._session.directory.tasks)
        reply = self._session.ask(self._session.directory.controller_of(message.task), message, timeout_s)
        if isinstance(reply, LeaseGrant):
            self._session.held.granted(message, reply)
            return reply
        return expect(reply, NoRows)


# The queue for asyncio: the calls of a consumer or producer as coroutines, run by threads that the client owns.
#
#     async with AsyncQueueClient(client) as queue:
#         await queue.put_rows({"prompt": ["1 + 1 =", "2 + 2 ="]})
#         async for lease in queue.stream("score", ["prompt"]):
#             await lease.put({"score": await scores(lease.batch["prompt"])})
#
# Fetches wait for long, so they have their own threads and never keep a put waiting. A fetch that is cancelled
# releases what it is granted later. A cancelled put is carried out nevertheless. Everything else (partitions,
# versions, snapshots) is the wrapped `QueueClient`'s.

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class AsyncQueueClient:
    """One consumer or producer of an asyncio program. Use it from one event loop; `close` also closes `client`.

    Args:
        max_fetches: fetches and watches for lost rows that may wait at the same time; others wait for a thread.
        max_calls: other calls at the same time.
    """

    def __init__(self, client: QueueClient, *, max_fetches: int = 16, max_calls: int = 8) -> None:
        self._client = client
        self._closed = False
        self._fetches = ThreadPoolExecutor(max_fetches, thread_name_prefix="queue-fetch")
        self._calls = ThreadPoolExecutor(max_calls, thread_name_prefix="queue-call")

    async def __aenter__(self) -> "AsyncQueueClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish the calls that were begun, then close the client, which ends waiting fetches. Idempotent."""
        self._closed = True
        # Calls first: they need the client. Closing the client then ends the waiting fetches.
        await asyncio.to_thread(self._calls.shutdown)
        await asyncio.to_thread(self._client.close)
        await asyncio.to_thread(self._fetches.shutdown, cancel_futures=True)

    async def put_rows(self, columns: Mapping[str, Any], **options: Any) -> tuple[int, ...]:
        """See `QueueClient.put_rows`. A full queue keeps one of the `max_calls` threads waiting."""
        return await self.call(self._client.put_rows, columns, **options)

    async def fetch(self, task: str, **options: Any) -> "AsyncLease | NoRows":
        self._refuse_when_closed()
        future = self._fetches.submit(self._client.fetch, task, **options)
        try:
            answer = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._return_fetched)
            raise
        return AsyncLease(self, answer) if isinstance(answer, Lease) else answer

    async def stream(self, task: str, columns: Sequence[str], **options: Any) -> "AsyncIterator[AsyncLease]":
        """Iterate over a task's rows, already read, until the queue stops, or is closed for writing and done.

        Leases that the loop leaves open are released when it moves on. Nothing is fetched ahead: run several loops.
        `options` are those of `QueueClient.fetch`.
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
                # Shielded: a cancelled loop must still return its rows.
                await asyncio.shield(lease.release())

    async def read_rows(self, rows: Sequence[int], columns: Sequence[str]) -> PackedBatch:
        return await self.call(self._client.read_rows, rows, columns)

    async def lost_rows(self, after: int = 0, *, timeout_s: float | None = None) -> LostRows | None:
        self._refuse_when_closed()
        return await asyncio.wrap_future(self._fetches.submit(self._client.lost_rows, after, timeout_s=timeout_s))

    async def close_writing(self) -> None:
        await self.call(self._client.close_writing)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run any short call of the client in one of the `max_calls` threads."""
        self._refuse_when_closed()
        return await asyncio.wrap_future(self._calls.submit(function, *args, **kwargs))

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise TransportError(f"{self._client.owner}: the queue client is closed")

    def _return_fetched(self, fetched: "Future[Lease | NoRows]") -> None:
        """Release what a cancelled fetch was granted."""
        # This runs in the fetch's thread or, if the fetch was faster, in the event loop's: it must not block.
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
        return await self._queue.call(self._lease.read, columns)

    async def put(self, columns: Mapping[str, Any], rows: Sequence[int] | None = None) -> bool:
        return await self._queue.call(self._lease.put, columns, rows)

    async def ack(self, rows: Sequence[int] | None = None) -> bool:
        return await self._queue.call(self._lease.ack, rows)

    async def release(self, rows: Sequence[int] | None = None) -> None:
        if self._lease.open_rows:
            await self._queue.call(self._lease.release, rows)


def _release(lease: Lease) -> None:
    try:
        lease.release()
    except AsyncFlowError as error:
        logger.warning("%s: rows of a cancelled fetch could not be released: %s", lease.grant.task, error)
