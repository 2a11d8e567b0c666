"""A process's access to the queue: lease, read, write. Thread-safe; connects to each service on first use.

client = QueueClient(credentials, "ref-0/0", controller="controller", config=config)
granted = client.fetch("ref_log_probs", num_rows=32, timeout_s=60)
batch = client.get(granted, ["prompts", "responses"])
client.put("ref_log_probs", granted, batch.indices, {"ref_log_probs": column})
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar, overload

from torch import Tensor

from asyncflow.errors import TransportError
from asyncflow.transport.connection import Connection, Reply
from asyncflow.transport.frame import Limits
from asyncflow.transport.handshake import Credentials
from tq.batch import Column, PackedBatch
from tq.config import QueueConfig
from tq.messages import (
    CONTROLLER_REPLIES,
    UNIT_REPLIES,
    Columns,
    Done,
    DropRows,
    FenceRows,
    FetchRound,
    FetchRows,
    GetColumns,
    GetQueueStats,
    Granted,
    Message,
    NoRows,
    PublishVersion,
    PutOutputs,
    PutRows,
    QueueStats,
    Stop,
)
from tq.wire import pack, unpack

_GRACE_S = 30.0

A = TypeVar("A")
B = TypeVar("B")


@overload
def _expect(reply: object, kind: type[A]) -> A: ...
@overload
def _expect(reply: object, kind: type[A], other: type[B]) -> A | B: ...
def _expect(reply: object, kind: type[A], other: type[B] | None = None) -> A | B:
    if isinstance(reply, kind) or (other is not None and isinstance(reply, other)):
        return reply
    raise TransportError(f"expected {kind.__name__}, got {type(reply).__name__}")


class QueueClient:
    """One consumer or producer. Its leases live as long as its channel to the controller."""

    def __init__(self, credentials: Credentials, name: str, *, controller: str, config: QueueConfig) -> None:
        """Args:
        credentials: store and secret.
        name: of this process, for messages; leases are bound to the channel, so names need not be unique.
        controller: service name of the control plane.
        config: limits and deadlines.
        """
        self._credentials = credentials
        self._name = name
        self._controller = controller
        self._config = config
        self._lock = threading.Lock()
        self._connections: dict[str, Connection] = {}
        self._connecting: dict[str, threading.Lock] = {}
        self._closed = False

    def close(self) -> None:
        """Say goodbye everywhere; leases return. Idempotent."""
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            connection.close()

    def fetch(self, task: str, *, num_rows: int, version: int = 0, timeout_s: float | None = None) -> Granted | NoRows:
        """Lease up to `num_rows` ready rows; waits until there are some, the deadline passes, or the queue stops.

        Args:
            task: whose inputs must be complete.
            num_rows: at most, but at least one parcel.
            version: newest weights that this consumer holds (version-gated tasks).
            timeout_s: default `request_timeout_s`.
        """
        timeout_s = timeout_s or self._config.request_timeout_s
        reply, _ = self._ask_controller(FetchRows(task, self._name, num_rows, version, timeout_s), timeout_s)
        return _expect(reply, Granted, NoRows)

    def fetch_round(self, request: FetchRound) -> Granted | NoRows:
        """Lease this rank's share of a round; see `FetchRound`. Asking again for a formed round grants it again."""
        reply, _ = self._ask_controller(request, request.timeout_s)
        return _expect(reply, Granted, NoRows)

    def get(self, granted: Granted, names: Sequence[str]) -> PackedBatch:
        """Read columns of a lease's rows, in the lease's order.

        Raises:
            PeerRefused: a column is not written.
        """
        by_unit: dict[str, list[int]] = {}
        for position, unit in enumerate(granted.units):
            by_unit.setdefault(unit, []).append(position)
        futures = {
            unit: self._connection(unit).submit(GetColumns([granted.rows[i] for i in positions], list(names)))
            for unit, positions in by_unit.items()
        }
        parts = []
        for unit, positions in by_unit.items():
            reply, payload = self._await(unit, futures[unit], "GetColumns")
            columns = unpack(_expect(reply, Columns).columns, payload)
            rows = tuple(granted.rows[i] for i in positions)
            parts.append(PackedBatch(rows, columns, tuple(granted.groups[i] for i in positions)))
        joined = PackedBatch.concatenate(parts)
        if joined.indices == tuple(granted.rows):
            return joined
        place = {row: i for i, row in enumerate(joined.indices)}
        return joined.select([place[row] for row in granted.rows])

    def put(self, task: str, granted: Granted, rows: Sequence[int], columns: Mapping[str, Column]) -> None:
        """Write all output columns of some rows of a lease; the task is then done with them.

        Args:
            task: that holds the lease.
            granted: the lease.
            rows: some of its rows, in the order of the columns' rows.
            columns: may be empty: a plain ack.

        Raises:
            Superseded: the lease is void; drop the work.
        """
        unit_of = dict(zip(granted.rows, granted.units, strict=True))
        by_unit: dict[str, list[int]] = {}
        for position, row in enumerate(rows):
            by_unit.setdefault(unit_of[row], []).append(position)
        futures = []
        for unit, positions in by_unit.items():
            whole = len(by_unit) == 1
            part = {name: column if whole else column.select(positions) for name, column in columns.items()}
            headers, payload = pack(part)
            message = PutOutputs(task, self._name, granted.token, [rows[i] for i in positions], headers)
            futures.append((unit, self._connection(unit).submit(message, payload)))
        for unit, future in futures:
            self._await(unit, future, "PutOutputs")

    def put_rows(
        self, unit: str, partition: int, *, rows: Sequence[int], groups: Sequence[int], columns: dict[str, Column]
    ) -> None:
        """Create rows on a unit with their first columns (a source's put)."""
        headers, payload = pack(columns)
        message = PutRows(partition, list(rows), list(groups), headers)
        self._ask(unit, message, payload)

    def publish_version(self, step: int) -> None:
        """Announce that weights of `step` exist."""
        self._ask_controller(PublishVersion(step))

    def stop(self) -> None:
        """Answer everybody's fetches with `NoRows(stop)` from now on."""
        self._ask_controller(Stop())

    def stats(self) -> QueueStats:
        """Return the controller's counts."""
        return _expect(self._ask_controller(GetQueueStats())[0], QueueStats)

    def fence(self, unit: str, task: str, token: int, rows: Sequence[int]) -> None:
        """Void older leases at a unit (the controller's call)."""
        self._ask(unit, FenceRows(task, token, list(rows)))

    def drop(self, unit: str, rows: Sequence[int]) -> None:
        """Free rows at a unit (the controller's call)."""
        self._ask(unit, DropRows(list(rows)))

    def _ask_controller(self, message: Message, timeout_s: float | None = None) -> Reply:
        timeout_s = (timeout_s or self._config.request_timeout_s) + _GRACE_S
        return self._connection(self._controller).call(message, timeout_s=timeout_s)

    def _ask(self, unit: str, message: Message, payload: Tensor | None = None) -> Done:
        timeout_s = self._config.request_timeout_s
        reply, _ = self._connection(unit).call(message, payload, timeout_s=timeout_s)
        return _expect(reply, Done)

    def _connection(self, service: str) -> Connection:
        with self._lock:
            one_at_a_time = self._connecting.setdefault(service, threading.Lock())
        with one_at_a_time:
            with self._lock:
                connection = self._connections.get(service)
                if self._closed:
                    raise TransportError(f"{self._name}: the queue client is closed")
            if connection is not None and not connection.closed:
                return connection
            replies = CONTROLLER_REPLIES if service == self._controller else UNIT_REPLIES
            limits = Limits(payload_bytes=self._config.max_message_bytes)
            connection = Connection(self._credentials, service, self._name, replies, limits=limits)
            with self._lock:
                closed = self._closed
                if not closed:
                    self._connections[service] = connection
        if closed:
            connection.close()
            raise TransportError(f"{self._name}: the queue client is closed")
        return connection

    def _await(self, unit: str, future: "Future[Reply]", what: str) -> Reply:
        try:
            return future.result(self._config.request_timeout_s)
        except FutureTimeout as error:
            raise TransportError(
                f"{self._name}: {unit} did not answer {what} within {self._config.request_timeout_s:g} s"
            ) from error
