"""What a client asks the units: put rows, read columns, write outputs, ack, find rows. Controllers hear of releases.

Called by `QueueClient`, `Lease` and `StreamingDataLoader`. Reading and writing ask every unit before they wait for the
first answer; a call has one deadline for all of its units.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from asyncflow.errors import ConfigError, LeaseFenced, PeerRefused, PutPending, RowsExist, TransportError
from asyncflow.transport.frame import Payload
from tq.client.session import Deadline, QueueSession, expect
from tq.columns import Column, PackedBatch
from tq.messages import (
    AckLost,
    ClearRows,
    Columns,
    GetColumns,
    LeaseGrant,
    ListRows,
    PutOutputs,
    PutRows,
    Release,
    RowList,
    Stored,
)
from tq.wire import ColumnHeader, describe, unpack

PUT_GRACE_S = 6.0
"""How long a put is waited for beyond its own deadline: when its unit is stopped, another one shall take the rows."""


class DataPlane:
    """The units as one client sees them. Thread-safe."""

    def __init__(self, session: QueueSession, *, max_message_bytes: int) -> None:
        """Args:
        session: channels to units and controllers.
        max_message_bytes: of a put's payload; a unit drops the channel of a larger one.
        """
        self._session = session
        self._max_message_bytes = max_message_bytes
        self._loads = UnitLoads()

    # New rows

    def describe(self, columns: Mapping[str, Column]) -> tuple[list[ColumnHeader], Payload]:
        """Return columns as a put carries them.

        Raises:
            ConfigError: they are too large for one put.
        """
        headers, payload = describe(columns, narrow=True)
        most = self._max_message_bytes
        if payload.num_bytes > most:
            raise ConfigError(f"a put of {payload.num_bytes} bytes, but max_message_bytes is {most}: put fewer rows")
        return headers, payload

    def put_rows(self, message: PutRows, payload: Payload) -> None:
        """Put new rows on some unit, the emptiest first; another one is tried when a unit dies or an answer is lost.

        Raises:
            RowsExist, PeerRefused: the rows were there before the first attempt, or were refused.
            TransportError: no unit took them in time, or another put of one of them did not end in time.
        """
        session, loads = self._session, self._loads
        unsure: set[str] = set()
        """Units that may have taken the rows though their answer did not come."""
        ask_again: set[str] = set()

        def attempt() -> None:
            if not session.units():
                session.beats.beat(session.directory.lead)
            units = session.units()
            unit = loads.emptiest({name: units[name] for name in ask_again & units.keys()} or units, unsure)
            ask_again.clear()
            try:
                loads.put(unit, self._put_rows(unit, message, payload))
            except RowsExist as error:
                if not unsure:
                    raise
                if unit not in unsure:  # an earlier attempt got through, or died and a controller does not know it yet
                    ask_again.update(unsure)
                    raise TransportError(str(error)) from error
            except PutPending as error:  # what becomes of it decides whether they exist
                raise TransportError(str(error)) from error
            except (PeerRefused, LeaseFenced):
                raise
            except TransportError:
                unsure.add(unit)
                raise

        session.retry_until(attempt, session.deadline(message.timeout_s))

    # Rows of a lease

    def get(self, grant: LeaseGrant, names: Sequence[str]) -> PackedBatch:
        """Read columns of a lease's rows, in the lease's order, into tensors that the caller owns.

        Raises:
            LeaseFenced: rows are not where they were: freed, since the lease is void, or lost with their unit.
            PeerRefused: a column is not written.
            TransportError: a unit is gone, or not all of them answered within `request_timeout_s`.
        """
        return self._read(grant.rows, grant.groups, grant.units, names)

    def put(self, grant: LeaseGrant, rows: Sequence[int], columns: Mapping[str, Column]) -> None:
        """Write all output columns of some rows of a lease; the task is then done with them.

        Raises:
            LeaseFenced: the lease is void, or the rows were lost; drop the work.
            TransportError: a unit is gone, or not all of them answered within `request_timeout_s`; putting again is
                safe.
        """
        self._session.beats.writes(columns)
        deadline = self._session.deadline()
        self._finish(grant, rows, lambda: self._put(grant, rows, columns, deadline), deadline)

    def ack(self, grant: LeaseGrant, rows: Sequence[int]) -> None:
        """Be done with rows of a lease without writing anything. Rows lost with their unit are acked too.

        Raises:
            LeaseFenced: the lease is void.
            TransportError: neither unit nor controller answered within `request_timeout_s`; acking again is safe.
        """
        deadline = self._session.deadline()
        for unit, positions in _by_unit(_units_of(grant, rows)).items():
            part = [rows[i] for i in positions]
            self._finish(grant, rows, partial(self._ack, grant, unit, part, deadline), deadline, done=False)
        self._session.held.done(grant, rows)

    def release(self, grant: LeaseGrant, rows: Sequence[int]) -> None:
        """Return rows of a lease to the queue; a controller that is away learns of it when it is back.

        Raises:
            TransportError: the controller did not answer within `request_timeout_s`. A trainer's lease (`keeps_leases`)
                must then be released again.
        """
        self._session.held.done(grant, rows)
        self._ask_controller(grant, Release(grant.task, grant.token, list(rows)))

    def filter(self, grant: LeaseGrant, rows: Sequence[int], *, failures: int = 0) -> None:
        """Take the groups of these rows out of the queue. With a void lease nothing changes.

        Args:
            grant, rows: a lease, and some of its rows.
            failures: how often the consumer failed on them, which makes the groups dead letters; 0: they are fine.

        Raises:
            TransportError: the controller did not answer within `request_timeout_s`.
        """
        self._ask_controller(
            grant, Release(grant.task, grant.token, list(rows), filtered=not failures, failures=failures)
        )
        self._session.held.done(grant, rows)

    def forget(self, grant: LeaseGrant) -> None:
        """Another reader of this lease (a rank of the same replica) answers for it from now on."""
        self._session.held.forget(grant)

    # Rows by their index

    def list_rows(self, *, rows: Sequence[int] | None = None, partition: int | None = None) -> dict[str, RowList]:
        """Return unit -> what it knows of these rows; None: of all."""
        asked = ListRows(None if rows is None else list(rows), partition)
        return self._session.tell_units(asked, RowList, every=True)

    def read(self, rows: Sequence[int], names: Sequence[str]) -> PackedBatch:
        """Read columns of any rows, in this order.

        Raises:
            PeerRefused: a row is not in the queue, or a column is not written.
            TransportError: a unit is away or does not answer.
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
        return self._read(rows, [home[row][0] for row in rows], [home[row][1] for row in rows], names)

    def clear_rows(self, rows: Sequence[int]) -> list[int]:
        """Remove rows; returns those that were there, ascending."""
        cleared = self._session.tell_units(ClearRows(list(rows)), RowList, every=True)
        return sorted(row for listed in cleared.values() for record in listed.records for row in record.rows)

    def _put_rows(self, unit: str, message: PutRows, payload: Payload) -> int:
        future = self._session.unit(unit).submit(message, payload)
        stored = self._session.answer(future, unit, message, message.timeout_s + PUT_GRACE_S)
        return expect(stored, Stored).num_bytes

    def _read(
        self, rows: Sequence[int], groups: Sequence[int], units: Sequence[str], names: Sequence[str]
    ) -> PackedBatch:
        deadline = self._session.deadline()
        by_unit = _by_unit(units)
        asked = []
        for unit, positions in by_unit.items():
            message = GetColumns(list(rows) if len(by_unit) == 1 else [rows[i] for i in positions], list(names))
            asked.append((unit, message, self._session.unit(unit, deadline.left_s).submit(message)))
        parts = []
        for unit, message, future in asked:
            reply, payload = self._session.reply(future, unit, message, deadline.left_s)
            columns = unpack(expect(reply, Columns).columns, payload)
            of_groups = tuple(groups[i] for i in by_unit[unit])
            parts.append(PackedBatch(tuple(message.rows), columns, of_groups))
        joined = PackedBatch.concatenate(parts)
        if joined.indices == tuple(rows):
            return joined
        place = {row: i for i, row in enumerate(joined.indices)}
        return joined.select([place[row] for row in rows])

    def _finish(
        self,
        grant: LeaseGrant,
        rows: Sequence[int],
        attempt: Callable[[], None],
        deadline: Deadline,
        *,
        done: bool = True,
    ) -> None:
        """Try to put or ack; when the lease is void for one of the rows, the work on all of them is dropped.

        The other rows return. The controller may also count all of them as this client's, and then they would never be
        handed out: one that recovers rebuilds the leases that it was told of when this client joined.
        """
        try:
            self._session.retry_until(attempt, deadline)
        except LeaseFenced:
            self._session.held.done(grant, rows)
            service = self._session.directory.controller_of(grant.task)
            self._session.post(service, Release(grant.task, grant.token, list(rows), fenced=True))
            raise
        if done:
            self._session.held.done(grant, rows)

    def _put(self, grant: LeaseGrant, rows: Sequence[int], columns: Mapping[str, Column], deadline: Deadline) -> None:
        by_unit = _by_unit(_units_of(grant, rows))
        sent = []
        for unit, positions in by_unit.items():
            whole = len(by_unit) == 1
            part = {name: column if whole else column.select(positions) for name, column in columns.items()}
            headers, payload = self.describe(part)
            message = PutOutputs(grant.task, grant.token, [rows[i] for i in positions], headers)
            sent.append((unit, message, self._session.unit(unit, deadline.left_s).submit(message, payload)))
        for unit, message, future in sent:
            self._session.answer(future, unit, message, deadline.left_s)

    def _ack(self, grant: LeaseGrant, unit: str, rows: list[int], deadline: Deadline) -> None:
        """Ack at the unit, or, when it is gone or started empty, at the controller."""
        message = PutOutputs(grant.task, grant.token, rows, [])
        try:
            future = self._session.unit(unit, deadline.left_s).submit(message)
            self._session.answer(future, unit, message, deadline.left_s)
        except PeerRefused:
            raise
        except TransportError as error:
            try:
                self._ack_lost(AckLost(grant.task, grant.token, rows), deadline)
            except PeerRefused as refusal:  # the rows are not lost: their unit will be back
                if isinstance(error, LeaseFenced):  # it is back, empty, and the controller is about to hear of that
                    raise TransportError(f"{error}; {refusal}") from None
                raise error from None
            except LeaseFenced:
                # A controller that was started again forgot under which lease rows were done before; the unit knows.
                if isinstance(error, LeaseFenced) or not self._session.may_answer(unit):
                    raise
                raise error from None

    def _ack_lost(self, lost: AckLost, deadline: Deadline) -> None:
        """Ack at the controller that gave the lease; when it agrees, the others must not ask for these rows again."""
        directory = self._session.directory
        first = directory.controller_of(lost.task)
        for service in sorted(directory.controllers, key=lambda name: name != first):
            future = self._session.controller(service, deadline.left_s).submit(lost)
            self._session.answer(future, service, lost, deadline.left_s)

    def _ask_controller(self, grant: LeaseGrant, message: Release) -> Any:
        return self._session.ask(self._session.directory.controller_of(grant.task), message)


class UnitLoads:
    """How full the units are: what heartbeats said last, corrected by the answers to this client's own puts."""

    def __init__(self) -> None:
        self._reported: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._puts: dict[str, int] = {}

    def put(self, unit: str, num_bytes: int) -> None:
        """A put succeeded; the unit holds so many bytes now."""
        self._seen[unit] = num_bytes
        self._puts[unit] = self._puts.get(unit, 0) + 1

    def emptiest(self, units: Mapping[str, int], passed_over: Collection[str]) -> str:
        """Choose a unit.

        Args:
            units: those that are up, with the bytes that they hold as last reported.
            passed_over: chosen only when no other is left.

        Raises:
            TransportError: no unit is up.
        """
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
