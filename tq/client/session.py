"""A client's session with the queue: its name, channels to services, heartbeats, deadlines, and the leases it holds.

`QueueClient` and `DataPlane` call it. The session knows which service does what and how long to wait, not what is
asked. It waits for a controller that restarts, and joins again; it waits for a unit until the caller's deadline.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from functools import cached_property, partial
from typing import Any, TypeVar

from asyncflow.errors import (
    ConfigError,
    DeadlineExceeded,
    LeaseFenced,
    PeerRefused,
    ProducersGone,
    PutPending,
    RowsExist,
    SealBroken,
    TransportError,
)
from asyncflow.transport.frame import Limits, Payload
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection, Reply
from tq.columns import Column, PackedBatch
from tq.config import QueueConfig
from tq.directory import Directory, TaskOutputs, allocate_rows, reserve_rows
from tq.messages import (
    CONTROLLER_REPLIES,
    UNIT_REPLIES,
    AckLost,
    ClearRows,
    Columns,
    FetchRound,
    FetchRows,
    GetColumns,
    Held,
    Join,
    Joined,
    LeaseGrant,
    ListRows,
    Message,
    NoRows,
    PutOutputs,
    PutRows,
    Release,
    RowList,
    Stored,
)
from tq.refill import new_owner
from tq.service_channels import Heartbeats, ServiceChannels, await_reply
from tq.wire import ColumnHeader, describe, unpack

_BEATS_PER_TIMEOUT = 4
# How long a client waits for an answer beyond the request's own deadline, which the service enforces (s).
_GRACE_S = 30.0
_LEAST_S = 0.5
_RETRY_S = 0.1
_LOOK_S = 1.0  # a wait for a unit checks this often whether the unit is still up (s)
_ROW_BLOCK = 1024

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class QueueSession:
    """Controllers and units as one client sees them. Thread-safe.

    Once `stop` is set, the session does not wait for services that are gone. `attempt`: see `tq.refill`; `clock`: in
    seconds, for deadlines.
    """

    def __init__(
        self,
        credentials: Credentials,
        name: str,
        *,
        config: QueueConfig,
        stop: threading.Event,
        attempt: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.outputs = TaskOutputs(credentials)
        self.owner = new_owner(name, attempt)  # the consumer with its incarnation
        self._credentials = credentials
        self._config = config
        self._stop = stop
        self._clock = clock
        self.held = HeldLeases()  # what a controller hears when this client joins it
        limits = Limits(payload_bytes=config.max_message_bytes, shared_memory=config.shared_memory)
        self._links = ServiceChannels(credentials, name, limits, self._greet_controller)
        interval_s = config.lease_timeout_s / _BEATS_PER_TIMEOUT
        self.beats = Heartbeats(self.owner, interval_s, join=self.connect_controller, rejoin=self._rejoin_controller)
        self._rows_lock = threading.Lock()
        self._rows = range(0)
        self._reserved = 0

    @cached_property
    def directory(self) -> Directory:
        with self._credentials.borrowed_store() as store:
            return Directory.read(store)

    def declare_outputs(self, columns: Iterable[str]) -> None:
        """See `QueueClient.declare_outputs`."""
        self.beats.note_columns(columns)
        for controller in self.directory.controllers:
            self.beats.watch(controller)

    def units(self) -> dict[str, int]:
        """Return unit -> bytes held for the units that are up, by the lead controller's last answer."""
        return self.beats.units(self.directory.lead)

    def may_answer(self, unit: str) -> bool:
        """Whether a unit is up or may come back with its rows, by the lead controller's last answer."""
        return unit in self.units() or unit in self.beats.list_away_units(self.directory.lead)

    def start_deadline(self, timeout_s: float | None = None) -> "Deadline":
        """Start the deadline of a call; None: `request_timeout_s`."""
        return Deadline(self.resolve_timeout(timeout_s), self._clock)

    def resolve_timeout(self, timeout_s: float | None) -> float:
        """Return `timeout_s`, or `request_timeout_s` for None."""
        return self._config.request_timeout_s if timeout_s is None else timeout_s

    def connect_unit(self, name: str, timeout_s: float | None = None) -> Connection:
        """Return the channel to a unit; raises TransportError when the unit is gone."""
        return self._links.get(name, UNIT_REPLIES, timeout_s=timeout_s)

    def connect_controller(self, name: str, timeout_s: float | None = None) -> Connection:
        """Return the joined channel to a controller; raises TransportError when the controller is gone."""
        return self._links.get(name, CONTROLLER_REPLIES, timeout_s=timeout_s)

    def call_controller(self, controller: str, message: Message, timeout_s: float | None = None) -> Any:
        """Ask a controller once; the request may park for `timeout_s`. Raises TransportError without an answer."""
        wait_s = self.resolve_timeout(timeout_s) + _GRACE_S
        return self.connect_controller(controller, wait_s).call_service(message, timeout_s=wait_s)[0]

    def ask(self, controller: str, message: Message, timeout_s: float | None = None) -> Any:
        """Like `call_controller`, but waits for a controller that is gone to come back."""
        return self.retry_until(
            lambda: self.call_controller(controller, message, timeout_s), self.start_deadline(timeout_s)
        )

    def post_message(self, controller: str, message: Message) -> None:
        """Send a message over an open channel without waiting for the answer; without a channel, drop it."""
        connection = self._links.find_open(controller)
        if connection is not None:
            # Lost only if the controller or the channel goes, and then this client joins anew.
            with contextlib.suppress(TransportError):
                connection.submit(message)

    def tell_controllers(self, message: Message) -> list[Any]:
        """Send one message to every controller; returns their answers, the lead's first."""
        return [self.ask(service, message) for service in self.directory.controllers]

    def tell_units(
        self, message: Message, answer: type[M], *, every: bool = False, timeout_s: float | None = None
    ) -> dict[str, M]:
        """Send one message to the units that are up; returns unit -> answer of kind `answer`.

        `every`: first wait until no unit that may come back with its rows (killed, restarting) is away. Raises
        TransportError when a unit does not answer, or is still away, after `timeout_s`.
        """
        deadline = self.start_deadline(timeout_s)
        self.retry_until(partial(self._find_units, every=every), deadline)
        futures = {unit: self.connect_unit(unit, deadline.left_s).submit(message) for unit in sorted(self.units())}
        return {
            unit: expect(self.answer(future, unit, message, deadline.left_s), answer)
            for unit, future in futures.items()
        }

    def answer(self, future: Any, service: str, message: Message, timeout_s: float | None = None) -> Any:
        return self.wait_for_reply(future, service, message, timeout_s)[0]

    def wait_for_reply(self, future: Any, service: str, message: Message, timeout_s: float | None = None) -> Reply:
        """Wait for the reply to a submitted message, with its payload; raises TransportError if none comes in time."""
        deadline = self._clock() + self.resolve_timeout(timeout_s)
        absence = Absence(self._clock)
        while (left_s := deadline - self._clock()) > _LOOK_S:
            with contextlib.suppress(FutureTimeout):
                reply: Reply = future.result(_LOOK_S)
                return reply
            if service in self.directory.controllers:
                continue
            # A unit that is away may be a stopped process: fail early, so that another unit can take the rows.
            if absence.note_answer(away=self._is_away(service)) > self._config.unit_timeout_s:
                raise TransportError(f"{service} does not answer {type(message).__name__}, and counts as away")
        return await_reply(future, service, type(message).__name__, max(0.0, left_s))

    def _is_away(self, unit: str) -> bool:
        lead = self.directory.lead
        with contextlib.suppress(TransportError):
            self.beats.send_beat(lead, timeout_s=_LOOK_S)
            return unit not in self.beats.units(lead)
        return False

    def retry_until(self, attempt: Callable[[], T], deadline: "Deadline") -> T:
        """Retry until `attempt` works or is refused; services that are gone may come back in the meantime.

        Raises DeadlineExceeded with the last obstacle, or TransportError when this client is closed or its run stops.
        """
        while True:
            try:
                return attempt()
            except (PeerRefused, LeaseFenced, SealBroken):
                raise
            except TransportError as error:
                if deadline.passed:
                    raise DeadlineExceeded(f"{self.owner} tried for {deadline.timeout_s:g} s: {error}") from error
                if self._links.closed or self._stop.wait(_RETRY_S):
                    if error.deadline:  # the last attempt's own deadline passed, but not that of this call
                        raise TransportError(str(error)) from error
                    raise

    def new_rows(self, number: int) -> range:
        """Return row indices that no other client has; asks the store once per block."""
        with self._rows_lock:
            if len(self._rows) < number:
                with self._credentials.borrowed_store() as store:
                    self._rows = allocate_rows(store, max(number, _ROW_BLOCK))
            taken, self._rows = self._rows[:number], self._rows[number:]
        return taken

    def reserve_rows(self, rows: Sequence[int]) -> None:
        """Keep `new_rows`, in any client, from returning these rows; asks the store once per block."""
        if not rows:
            return
        with self._rows_lock:
            # Rows that another client took earlier, and has not put yet, are beyond reach.
            last = max(rows)
            if min(rows) < self._rows.stop and last >= self._rows.start:
                self._rows = range(last + 1, max(last + 1, self._rows.stop))
            if last >= self._reserved:
                with self._credentials.borrowed_store() as store:
                    self._reserved = max(last + 1, reserve_rows(store, last + _ROW_BLOCK))

    def close(self) -> None:
        """Close all channels; idempotent."""
        self._links.close()
        self.beats.close()

    def _find_units(self, *, every: bool) -> None:
        lead = self.directory.lead
        self.beats.send_beat(lead)
        away = self.beats.list_away_units(lead)
        if every and away:
            raise TransportError(
                f"storage units are away: {' '.join(away)}; this needs the rows of all units, so ask again when they "
                f"are back, or are given up (unit_grace_s)"
            )

    def _greet_controller(self, service: str, connection: Connection) -> None:
        if service in self.directory.controllers:
            self._join_controller(service, connection)
            self.beats.watch(service)

    def _rejoin_controller(self, service: str) -> None:
        self._join_controller(service, self.connect_controller(service))

    def _join_controller(self, service: str, connection: Connection) -> None:
        tasks = self.directory.served_by(service)
        message = Join(self.owner, self.held.of_tasks(tasks))
        joined = expect(self.answer(connection.submit(message), service, message), Joined)
        self.held.void(tasks, joined.void)


class Deadline:
    """The deadline of one call, shared by all services that the call asks; it starts at construction."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._end = clock() + timeout_s

    @property
    def passed(self) -> bool:
        return self._clock() >= self._end

    @property
    def left_s(self) -> float:
        """How long the next service may take (s); never zero."""
        # With zero, one silent service would make every service that is asked after it look silent, too.
        return max(_LEAST_S, self._end - self._clock())


class HeldLeases:
    """The leases that a client holds. Thread-safe; a lease leaves when its last row is done, released or void."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int], Held] = {}

    def granted(self, fetch: FetchRows | FetchRound, answer: LeaseGrant) -> None:
        """Note a lease; the same one again changes nothing."""
        held = Held(fetch.task, answer.token, answer.partition, list(answer.rows))
        if isinstance(fetch, FetchRound):
            held.round_index, held.rank, held.num_ranks = fetch.round_index, fetch.rank, fetch.num_ranks
            held.largest_slice, held.last, held.total_rows = answer.largest_slice, answer.last, answer.total_rows
            held.step, held.slice_rows = fetch.partition, len(answer.rows)
        elif not answer.rows:
            return
        with self._lock:
            self._held.setdefault((fetch.task, answer.token), held)
            if isinstance(fetch, FetchRound):
                self._forget_old_rounds(fetch.task, fetch.partition)

    def done(self, grant: LeaseGrant, rows: Iterable[int]) -> None:
        """Rows left the lease: put, acknowledged or released."""
        key, gone = (grant.task, grant.token), set(rows)
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                held.rows = [row for row in held.rows if row not in gone]
                if not held.rows and held.round_index < 0:  # rounds stay: other ranks may still want their slices
                    del self._held[key]

    def void(self, tasks: Collection[str], tokens: Collection[int]) -> None:
        """A controller no longer counts these leases as this client's."""
        with self._lock:
            for task in tasks:
                for token in tokens:
                    self._held.pop((task, token), None)

    def forget_lease(self, grant: LeaseGrant) -> None:
        with self._lock:
            self._held.pop((grant.task, grant.token), None)

    def of_tasks(self, tasks: Collection[str]) -> list[Held]:
        with self._lock:
            return [held for (task, _), held in self._held.items() if task in tasks]

    def _forget_old_rounds(self, task: str, step: int) -> None:
        over = [key for key, held in self._held.items() if key[0] == task and not held.rows and held.step < step - 1]
        for key in over:
            del self._held[key]


def expect(reply: Any, kind: type[M]) -> M:
    """Return `reply`; raises TransportError if it is not of this kind."""
    if isinstance(reply, kind):
        return reply
    raise TransportError(f"expected {kind.__name__}, got {type(reply).__name__}")


class Absence:
    """How long a unit has counted as away, by the lead's repeated answers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None

    def note_answer(self, *, away: bool) -> float:
        """Take in an answer; returns how long (s) all answers have been "away"."""
        if not away:
            self._since = None
        # Time before the first "away" does not count: the lead was not asked, did not answer, or had just restarted.
        elif self._since is None:
            self._since = self._clock()
        return 0.0 if self._since is None else self._clock() - self._since


# What a client asks the units: put rows, read columns, write outputs, ack, find rows. Releases go to controllers.
#
# Called by `QueueClient`, `Lease` and `StreamingDataLoader`. Reading and writing ask every unit before they wait for
# the first answer; a call has one deadline for all of its units.

PUT_GRACE_S = 6.0  # a put is awaited for this long beyond its own deadline; then another unit takes the rows (s)


class DataPlane:
    """The units as one client sees them. Thread-safe. A unit closes the channel on a put beyond `max_message_bytes`."""

    def __init__(self, session: QueueSession, *, max_message_bytes: int) -> None:
        self._session = session
        self._max_message_bytes = max_message_bytes
        self._loads = UnitLoads()

    # New rows

    def describe_columns(self, columns: Mapping[str, Column]) -> tuple[list[ColumnHeader], Payload]:
        """Return columns in the form that a put carries; raises ConfigError if they are too large for one put."""
        headers, payload = describe(columns, narrow=True)
        most = self._max_message_bytes
        if payload.num_bytes > most:
            raise ConfigError(f"a put of {payload.num_bytes} bytes, but max_message_bytes is {most}: put fewer rows")
        return headers, payload

    def put_rows(self, message: PutRows, payload: Payload) -> None:
        """Put new rows on the emptiest unit; when a unit dies or an answer is lost, try another one.

        Raises:
            RowsExist, PeerRefused: the rows existed before the first attempt, or were refused.
            TransportError: no unit took them in time, or another put of one of them did not end in time.
        """
        session, loads = self._session, self._loads
        unsure: set[str] = set()  # units that may have taken the rows although their answer did not arrive
        ask_again: set[str] = set()

        def attempt() -> None:
            if not session.units():
                session.beats.send_beat(session.directory.lead)
            units = session.units()
            unit = loads.choose_emptiest({name: units[name] for name in ask_again & units.keys()} or units, unsure)
            ask_again.clear()
            try:
                loads.put(unit, self._put_rows(unit, message, payload))
            except RowsExist as error:
                if not unsure:
                    raise
                # An earlier attempt got through, or died before a controller noticed: ask the units in doubt again.
                if unit not in unsure:
                    ask_again.update(unsure)
                    raise TransportError(str(error)) from error
            except PutPending as error:  # the rows' existence depends on how the other put ends
                raise TransportError(str(error)) from error
            except (PeerRefused, LeaseFenced):
                raise
            except TransportError:
                unsure.add(unit)
                raise

        session.retry_until(attempt, session.start_deadline(message.timeout_s))

    # Rows of a lease

    def get(self, grant: LeaseGrant, names: Sequence[str]) -> PackedBatch:
        """Read columns of a lease's rows, in the lease's order, into tensors that the caller owns.

        Raises:
            LeaseFenced: the rows were freed, since the lease is void, or were lost with their unit.
            PeerRefused: a column is not written.
            TransportError: a unit is gone, or not all of them answered within `request_timeout_s`.
        """
        return self._read_columns(grant.rows, grant.groups, grant.units, names)

    def put(self, grant: LeaseGrant, rows: Sequence[int], columns: Mapping[str, Column]) -> None:
        """Write all output columns of some rows of a lease, after which the task is done with them. Repeatable.

        Raises:
            LeaseFenced: the lease is void, or the rows were lost; drop the work.
            TransportError: a unit is gone, or not all of them answered within `request_timeout_s`.
        """
        self._session.beats.note_columns(columns)
        deadline = self._session.start_deadline()
        self._finish_rows(grant, rows, lambda: self._put_outputs(grant, rows, columns, deadline), deadline)

    def ack(self, grant: LeaseGrant, rows: Sequence[int]) -> None:
        """Finish rows of a lease without outputs, even rows lost with their unit; acknowledging again is safe.

        Raises:
            LeaseFenced: the lease is void.
            TransportError: neither unit nor controller answered within `request_timeout_s`.
        """
        deadline = self._session.start_deadline()
        for unit, positions in _by_unit(_units_of(grant, rows)).items():
            part = [rows[i] for i in positions]
            self._finish_rows(
                grant, rows, partial(self._ack_at_unit, grant, unit, part, deadline), deadline, done=False
            )
        self._session.held.done(grant, rows)

    def release_rows(self, grant: LeaseGrant, rows: Sequence[int]) -> None:
        """Return rows of a lease to the queue; a controller that is away hears of it when it is back.

        Raises TransportError when there is no answer: a trainer's lease (`keeps_leases`) must then be released again.
        """
        self._session.held.done(grant, rows)
        self._ask_controller(grant, Release(grant.task, grant.token, list(rows)))

    def filter_groups(self, grant: LeaseGrant, rows: Sequence[int], *, failures: int = 0) -> None:
        """Remove the groups of these rows from the queue; a void lease changes nothing.

        `failures`: how often the consumer failed on the rows, which makes the groups dead letters; 0: only filtered
        out. Raises TransportError when the controller does not answer within `request_timeout_s`.
        """
        self._ask_controller(
            grant, Release(grant.task, grant.token, list(rows), filtered=not failures, failures=failures)
        )
        self._session.held.done(grant, rows)

    def forget_lease(self, grant: LeaseGrant) -> None:
        """Leave this lease to another reader of it (a rank of the same replica), which answers for it from now on."""
        self._session.held.forget_lease(grant)

    # Rows by their index

    def list_rows(self, *, rows: Sequence[int] | None = None, partition: int | None = None) -> dict[str, RowList]:
        """Return unit -> what it knows of these rows (None: all)."""
        asked = ListRows(None if rows is None else list(rows), partition)
        return self._session.tell_units(asked, RowList, every=True)

    def read(self, rows: Sequence[int], names: Sequence[str]) -> PackedBatch:
        """Read columns of any rows, in this order.

        Raises PeerRefused if a row is not in the queue or a column is not written, TransportError if a unit does not
        answer.
        """
        home = {
            number: (group, unit)
            for unit, listed in self.list_rows(rows=rows).items()
            for record in listed.records
            for number, group in zip(record.rows, record.groups, strict=True)
        }
        missing = [row for row in rows if row not in home]
        if missing:
            raise PeerRefused(f"rows {missing[:8]} are not in the queue; finished rows are freed")
        return self._read_columns(rows, [home[row][0] for row in rows], [home[row][1] for row in rows], names)

    def clear_rows(self, rows: Sequence[int]) -> list[int]:
        """Remove rows; returns those that existed, ascending."""
        cleared = self._session.tell_units(ClearRows(list(rows)), RowList, every=True)
        return sorted(row for listed in cleared.values() for record in listed.records for row in record.rows)

    def _put_rows(self, unit: str, message: PutRows, payload: Payload) -> int:
        future = self._session.connect_unit(unit).submit(message, payload)
        stored = self._session.answer(future, unit, message, message.timeout_s + PUT_GRACE_S)
        return expect(stored, Stored).num_bytes

    def _read_columns(
        self, rows: Sequence[int], groups: Sequence[int], units: Sequence[str], names: Sequence[str]
    ) -> PackedBatch:
        deadline = self._session.start_deadline()
        by_unit = _by_unit(units)
        asked = []
        for unit, positions in by_unit.items():
            message = GetColumns(list(rows) if len(by_unit) == 1 else [rows[i] for i in positions], list(names))
            asked.append((unit, message, self._session.connect_unit(unit, deadline.left_s).submit(message)))
        parts = []
        for unit, message, future in asked:
            reply, payload = self._session.wait_for_reply(future, unit, message, deadline.left_s)
            columns = unpack(expect(reply, Columns).columns, payload)
            of_groups = tuple(groups[i] for i in by_unit[unit])
            parts.append(PackedBatch(tuple(message.rows), columns, of_groups))
        joined = PackedBatch.concatenate(parts)
        if joined.indices == tuple(rows):
            return joined
        place = {row: i for i, row in enumerate(joined.indices)}
        return joined.select([place[row] for row in rows])

    def _finish_rows(
        self,
        grant: LeaseGrant,
        rows: Sequence[int],
        attempt: Callable[[], None],
        deadline: Deadline,
        *,
        done: bool = True,
    ) -> None:
        """Try to put or ack; when the lease is void for one of the rows, drop the work on all of them."""
        try:
            self._session.retry_until(attempt, deadline)
        except LeaseFenced:
            self._session.held.done(grant, rows)
            # Return the other rows. A recovering controller rebuilds the leases it heard of when this client joined, so
            # it may still count the rows as this client's, and would never hand them out.
            service = self._session.directory.controller_of(grant.task)
            self._session.post_message(service, Release(grant.task, grant.token, list(rows), fenced=True))
            raise
        if done:
            self._session.held.done(grant, rows)

    def _put_outputs(
        self, grant: LeaseGrant, rows: Sequence[int], columns: Mapping[str, Column], deadline: Deadline
    ) -> None:
        by_unit = _by_unit(_units_of(grant, rows))
        sent = []
        for unit, positions in by_unit.items():
            whole = len(by_unit) == 1
            part = {name: column if whole else column.select(positions) for name, column in columns.items()}
            headers, payload = self.describe_columns(part)
            message = PutOutputs(grant.task, grant.token, [rows[i] for i in positions], headers)
            sent.append((unit, message, self._session.connect_unit(unit, deadline.left_s).submit(message, payload)))
        for unit, message, future in sent:
            self._session.answer(future, unit, message, deadline.left_s)

    def _ack_at_unit(self, grant: LeaseGrant, unit: str, rows: list[int], deadline: Deadline) -> None:
        """Ack at the unit or, when the unit is gone or restarted empty, at the controller."""
        message = PutOutputs(grant.task, grant.token, rows, [])
        try:
            future = self._session.connect_unit(unit, deadline.left_s).submit(message)
            self._session.answer(future, unit, message, deadline.left_s)
        except PeerRefused:
            raise
        except TransportError as error:
            try:
                self._ack_lost(AckLost(grant.task, grant.token, rows), deadline)
            except PeerRefused as refusal:  # the rows are not lost: their unit will return
                if isinstance(error, LeaseFenced):  # the unit is back, empty, and the controller has yet to hear of it
                    raise TransportError(f"{error}; {refusal}") from None
                raise error from None
            except LeaseFenced:
                # A restarted controller forgot under which lease rows were done before; the unit knows.
                if isinstance(error, LeaseFenced) or not self._session.may_answer(unit):
                    raise
                raise error from None

    def _ack_lost(self, lost: AckLost, deadline: Deadline) -> None:
        directory = self._session.directory
        # The controller that gave the lease judges first. Once it agrees, the others must hear, or they would ask for
        # these rows again.
        first = directory.controller_of(lost.task)
        for service in sorted(directory.controllers, key=lambda name: name != first):
            future = self._session.connect_controller(service, deadline.left_s).submit(lost)
            self._session.answer(future, service, lost, deadline.left_s)

    def _ask_controller(self, grant: LeaseGrant, message: Release) -> Any:
        return self._session.ask(self._session.directory.controller_of(grant.task), message)


class UnitLoads:
    """How full the units are: the last heartbeat's numbers, corrected by the answers to this client's own puts."""

    def __init__(self) -> None:
        self._reported: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._puts: dict[str, int] = {}

    def put(self, unit: str, num_bytes: int) -> None:
        """A put succeeded; the unit now holds `num_bytes`."""
        self._seen[unit] = num_bytes
        self._puts[unit] = self._puts.get(unit, 0) + 1

    def choose_emptiest(self, units: Mapping[str, int], passed_over: Collection[str]) -> str:
        """Choose among `units` (unit -> bytes), preferably not `passed_over`; raises TransportError if none is up."""
        if not units:
            raise TransportError("no storage unit is up")
        for unit, num_bytes in units.items():
            if self._reported.get(unit) != num_bytes:  # newer than what the last put said
                self._reported[unit] = num_bytes
                self._seen[unit] = num_bytes
        return min(
            units,
            key=lambda unit: (unit in passed_over, self._seen.get(unit, 0), self._puts.get(unit, 0), unit),
        )


def _units_of(grant: LeaseGrant, rows: Sequence[int]) -> list[str]:
    unit_of = dict(zip(grant.rows, grant.units, strict=True))
    return [unit_of[row] for row in rows]


def _by_unit(units: Sequence[str]) -> dict[str, Sequence[int]]:
    """Return unit -> positions."""
    if units and units.count(units[0]) == len(units):
        return {units[0]: range(len(units))}
    by_unit: dict[str, list[int]] = {}
    for position, unit in enumerate(units):
        by_unit.setdefault(unit, []).append(position)
    return dict(by_unit)


# Watches how long a consumer waits for rows: logs the wait, and gives up when no producer of the rows is left.
#
# Pure except for the log: it gets every reply, and its clock is passed in.

logger = logging.getLogger(__name__)

SAY_EVERY_S = 30.0
UNREADABLE_S = 60.0


class StallMonitor:
    """The waiting of one consumer: `ask`, then `note_served`, `note_no_rows` or `note_unreadable`, again and again.

    Args:
        producers_timeout_s: fail when there has been no producer for this long without a break (s); 0: wait forever.
        setting: the user's name for that limit.
        narrates: log warnings (one rank of a gang does).
    """

    def __init__(
        self,
        *,
        producers_timeout_s: float,
        setting: str = "producers_timeout_s",
        narrates: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._producers_timeout_s = producers_timeout_s
        self._setting = setting
        self._level = logging.WARNING if narrates else logging.DEBUG
        self._clock = clock
        self._what = ""
        self._asked_at: float | None = None
        self._said_at = 0.0
        self._alone_since: float | None = None
        self._unreadable_since: float | None = None

    def ask(self, what: str, timeout_s: float) -> float:
        """Begin to wait for `what`; returns how long the next request may park (s)."""
        self._what = what
        if self._asked_at is None:
            self._asked_at = self._said_at = self._clock()
        return min(timeout_s, SAY_EVERY_S, self._producers_timeout_s or SAY_EVERY_S)

    def note_served(self) -> None:
        self._asked_at = self._alone_since = self._unreadable_since = None

    def note_no_rows(self, answer: NoRows) -> None:
        """A request's deadline passed. Raises ProducersGone after `producers_timeout_s` without a producer."""
        now = self._clock()
        if answer.producers_alive:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        alone_s = now - self._alone_since if self._alone_since is not None else 0.0
        missing = answer.waiting_for or "rows"
        if self._alone_since is not None and 0 < self._producers_timeout_s <= alone_s:
            raise ProducersGone(
                f"{self._what}: waits for {missing}, but for {alone_s:.0f} s no process was connected that writes them "
                f"or said that it will; read in the logs why the producers ended or did not start, or raise "
                f"{self._setting} if they only start slowly"
            )
        self._log_stall(
            now, f"still waits for {missing}" + (" (no producer is connected)" if self._alone_since else "")
        )

    def note_unreadable(self, error: TransportError) -> None:
        """The unit of leased rows is gone; they come back when put again. Raises `error` if this lasts too long."""
        now = self._clock()
        if self._unreadable_since is None:
            self._unreadable_since = now
            logger.warning("%s: rows could not be read, asking for them again: %s", self._what, error)
        if now - self._unreadable_since >= (self._producers_timeout_s or UNREADABLE_S):
            raise error

    def _log_stall(self, now: float, text: str) -> None:
        if self._asked_at is not None and now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            logger.log(self._level, "%s: %s, for %.0f s so far", self._what, text, now - self._asked_at)
