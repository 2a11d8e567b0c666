"""`Lease`: rows in hand. `LeaseStream`: a task's work as an iterable of leases, for tasks without rounds.

for lease in client.stream("ref_log_probs", ["prompts", "responses"], num_rows=32):
    lease.put({"ref_log_probs": log_probs(lease.batch)})

                      .-> put(columns) / ack()    the task is done with the rows
fetched ahead -> lease -> keep()                  for example, another thread puts or releases them later
                      '-> nothing                 the loop moved on or failed: the rows are released, others get them
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from asyncflow.errors import AsyncFlowError, ConfigError, LeaseFenced, PeerRefused, TransportError
from tq.client.arguments import as_columns, check_names, check_rows_of
from tq.client.read_ahead import ReadAhead
from tq.client.session import StallMonitor
from tq.columns import Column, PackedBatch
from tq.messages import LeaseGrant, NoRows, NoRowsReason

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_JOIN_S = 5.0


class LeaseCalls(Protocol):
    """What a lease needs of the client's data plane; see `tq.client.session.DataPlane`."""

    def get(self, grant: LeaseGrant, names: Sequence[str]) -> PackedBatch: ...

    def put(self, grant: LeaseGrant, rows: Sequence[int], columns: Mapping[str, Column]) -> None: ...

    def ack(self, grant: LeaseGrant, rows: Sequence[int]) -> None: ...

    def release_rows(self, grant: LeaseGrant, rows: Sequence[int]) -> None: ...

    def filter_groups(self, grant: LeaseGrant, rows: Sequence[int], *, failures: int = 0) -> None: ...


class Lease:
    """Rows in hand; a context manager that releases what is still open at its end. One thread at a time."""

    def __init__(self, calls: LeaseCalls, grant: LeaseGrant, columns: Mapping[str, Column] | None = None) -> None:
        self.grant = grant
        """The queue's own description: task, token, partition, units."""
        self.kept = False
        """Whether the stream's loop moves on without releasing this lease."""
        self._calls = calls
        self._batch = PackedBatch(tuple(grant.rows), columns or {}, tuple(grant.groups))
        self._open = dict.fromkeys(grant.rows)

    def __len__(self) -> int:
        return len(self.grant.rows)

    def __getitem__(self, name: str) -> Column:
        """Return a column, reading it now unless it was read before."""
        return self.read([name])[name]

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def batch(self) -> PackedBatch:
        """The columns that were read so far, packed."""
        return self._batch

    @property
    def rows(self) -> list[int]:
        """Global indices of the rows."""
        return self.grant.rows

    @property
    def units(self) -> list[str]:
        """The unit of each row."""
        return self.grant.units

    @property
    def groups(self) -> list[int]:
        return self.grant.groups

    @property
    def partition(self) -> int:
        """The step that the rows belong to."""
        return self.grant.partition

    @property
    def open_rows(self) -> list[int]:
        """Rows that were neither put, acknowledged nor released yet."""
        return list(self._open)

    def read(self, columns: Sequence[str]) -> PackedBatch:
        """Return columns of all rows, in the lease's order; reads together those that were not read before.

        Raises:
            LeaseFenced: the lease is void, or the rows were lost with their unit.
            PeerRefused: a column is not written.
            TransportError: a unit is gone, or not all of them answered within `request_timeout_s`.
        """
        names = check_names(columns)
        missing = [name for name in names if name not in self._batch.columns]
        if missing:
            self._batch = self._batch.with_columns(self._calls.get(self.grant, missing).columns)
        return PackedBatch(tuple(self.rows), {name: self._batch[name] for name in names}, tuple(self.groups))

    def put(self, columns: Mapping[str, Any], rows: Sequence[int] | None = None) -> bool:
        """Write all output columns of `rows` (None: all open ones); the task is then done with them.

        `columns` maps names to `Column`, tensor or list, in the order of the rows; at least one (see `ack`). Returns
        False when the lease was fenced: other consumers have the rows now, and this work is dropped (logged).

        Raises:
            ConfigError: rows and columns do not go together; nothing was put.
            TransportError: a unit is gone, or not all of them answered within `request_timeout_s`; putting again is
                safe.
        """
        rows = self.open_rows if rows is None else check_rows_of(self.grant, rows)
        packed, number = as_columns(columns)
        if rows and number != len(rows):
            raise ConfigError(f"{self.grant.task}: columns of {number} rows, but {len(rows)} rows are named")
        return self._finish_rows(rows, lambda: self._calls.put(self.grant, rows, packed))

    def ack(self, rows: Sequence[int] | None = None) -> bool:
        """Like `put`, for a task without outputs. Works for rows lost with their unit, too."""
        rows = self.open_rows if rows is None else check_rows_of(self.grant, rows)
        return self._finish_rows(rows, lambda: self._calls.ack(self.grant, rows))

    def release(self, rows: Sequence[int] | None = None) -> None:
        """Return rows (None: all open ones) to other consumers. Idempotent.

        Raises TransportError when the controller does not answer; it hears of the release when it is back.
        """
        rows = self.open_rows if rows is None else check_rows_of(self.grant, rows)
        self._finish_rows(rows, lambda: self._calls.release_rows(self.grant, rows))

    def filter(self, rows: Sequence[int], *, failures: int = 0) -> None:
        """Remove the groups of these rows from the queue: no task works on them any more.

        Where prompts are admitted, the next one takes each one's place in its step. A lease that is void by now changes
        nothing: the rows' new owner judges them. `failures`: how often work on them failed here, which makes the groups
        dead letters; 0: they teach nothing.
        """
        rows = check_rows_of(self.grant, rows)
        self._finish_rows(rows, lambda: self._calls.filter_groups(self.grant, rows, failures=failures))

    def keep(self) -> "Lease":
        """Let the stream's loop move on without releasing these rows; the caller puts or releases them."""
        self.kept = True
        return self

    def _finish_rows(self, rows: Sequence[int], call: Callable[[], None]) -> bool:
        if not rows:
            return True
        mine = True
        try:
            call()
        except LeaseFenced as error:
            logger.warning("%s: dropped %d rows: %s", self.grant.task, len(rows), error)
            mine = False
        for row in rows:
            self._open.pop(row, None)
        return mine


def read_or_release(
    lease: Lease, columns: Sequence[str], *, monitor: StallMonitor, closing: threading.Event
) -> PackedBatch | None:
    """Read columns of a lease's rows; when their unit is gone, release them and return None.

    A producer must then put the rows again. `monitor` raises the TransportError once that has lasted too long;
    `closing` cuts short the pause after a failure.
    """
    try:
        batch = lease.read(columns)
    except PeerRefused:
        raise
    except TransportError as error:
        monitor.note_unreadable(error)
        with contextlib.suppress(LeaseFenced):
            lease.release()
        closing.wait(_RETRY_S)
        return None
    monitor.note_served()
    return batch


class LeaseStream(Iterable[Lease]):
    """What `QueueClient.stream` returns. Iterate once; leaving the loop in any way closes it."""

    def __init__(
        self,
        fetch: Callable[..., Lease | NoRows],
        task: str,
        columns: Sequence[str],
        *,
        num_rows: int,
        token_budget: int,
        version: int | Callable[[], int],
        prefetch: int,
        timeout_s: float,
        producers_timeout_s: float,
    ) -> None:
        self.ended_by: NoRowsReason | None = None
        """Why the queue has no more leases: a stop, closed for writing and empty, or weights newer than `version`."""
        self._fetch = fetch
        self._task = task
        self._columns = check_names(columns)
        self._num_rows = num_rows
        self._token_budget = token_budget
        self._version = version
        self._timeout_s = timeout_s
        self._monitor = StallMonitor(producers_timeout_s=producers_timeout_s)
        self._closing = threading.Event()
        self._asking = False
        self._prefetch = prefetch
        self._ahead: ReadAhead[Lease] | None = None

    def __iter__(self) -> Iterator[Lease]:
        lease: Lease | None = None
        try:
            for lease in self._iterate_leases():
                yield lease
                self._move_on(lease)
                lease = None
        finally:
            if lease is not None:
                self._move_on(lease)
            self.close()

    def close(self) -> None:
        """End the iteration and release what was fetched ahead. Idempotent; does not wait for a parked fetch."""
        self._closing.set()
        if self._ahead is not None:
            self._ahead.close()
            # A parked fetch cannot be interrupted; its thread ends with it.
            if not self._asking:
                self._ahead.join(_JOIN_S)

    def _iterate_leases(self) -> Iterator[Lease]:
        source = self._fetch_leases()
        if not self._prefetch:
            return source
        name = f"prefetch-{self._task}"
        discard = _release_quietly
        self._ahead = ReadAhead(source, depth=self._prefetch, name=name, closing=self._closing, discard=discard)
        return self._ahead

    def _move_on(self, lease: Lease) -> None:
        if lease.open_rows and not lease.kept:
            number = len(lease.open_rows)
            logger.warning("%s: %d rows were neither put nor acked, releasing them", self._task, number)
            _release_quietly(lease)

    def _fetch_leases(self) -> Iterator[Lease]:
        while not self._closing.is_set():
            answer = self._ask_for_lease()
            if isinstance(answer, Lease):
                batch = read_or_release(answer, self._columns, monitor=self._monitor, closing=self._closing)
                if batch is not None:
                    yield answer
            elif answer.reason is NoRowsReason.DEADLINE:
                self._monitor.note_no_rows(answer)
            else:
                self.ended_by = answer.reason
                return

    def _ask_for_lease(self) -> Lease | NoRows:
        self._asking = True
        try:
            return self._fetch(
                self._task,
                num_rows=self._num_rows,
                version=self._version() if callable(self._version) else self._version,
                timeout_s=self._monitor.ask(self._task, self._timeout_s),
                token_budget=self._token_budget,
            )
        finally:
            self._asking = False


class AckThread:
    """Acknowledges leases in its own thread, oldest first; the next `add_leases` retries those that failed."""

    def __init__(self, name: str, ack: Callable[[LeaseGrant], None]) -> None:
        self._name = name
        self._ack = ack
        self._waiting: deque[LeaseGrant] = deque()
        self._void: deque[LeaseFenced] = deque()  # to be raised in the caller's thread
        self._thread: ThreadPoolExecutor | None = None
        self._latest: Future[None] | None = None
        self._before: Future[None] | None = None

    @property
    def idle(self) -> bool:
        return not self._waiting

    def add_leases(self, grants: Iterable[LeaseGrant]) -> None:
        """Acknowledge these leases, and those that failed before."""
        self._waiting.extend(grants)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._before, self._latest = self._latest, self._thread.submit(self._ack_waiting)

    def wait(self) -> None:
        """Wait until all are acknowledged; raises AsyncFlowError if some are not.

        A void lease raises LeaseFenced, once: its rows were trained for nothing.
        """
        if self._latest is not None:
            self._latest.result()
        self._latest = None
        self._raise_void()

    def check(self) -> None:
        """Raise what went wrong before the last `add_leases`; does not wait."""
        if self._before is not None and self._before.done():
            self._before.result()
        self._raise_void()

    def close(self) -> None:
        """Acknowledge what was added, within some seconds. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False)
            if self._latest is not None:
                wait([self._latest], timeout=_JOIN_S)

    def _ack_waiting(self) -> None:
        while self._waiting:
            try:
                self._ack(self._waiting[0])
            except LeaseFenced as error:
                self._void.append(error)
            self._waiting.popleft()

    def _raise_void(self) -> None:
        void = [self._void.popleft() for _ in range(len(self._void))]
        if void:
            raise void[0]


def _release_quietly(lease: Lease) -> None:
    try:
        lease.release()
    except AsyncFlowError as error:  # the rows come back anyway when this consumer's heartbeats end
        logger.warning("%d rows could not be released: %s", len(lease), error)
