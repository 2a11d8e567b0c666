"""What a client asks of the units that hold a lease's rows: read columns, write outputs, ack. `QueueClient` calls it.

Reading and writing ask every unit before they wait for the first answer; a call has one deadline for all of its units.
Arguments were checked already. What is raised is said there.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from asyncflow.errors import ConfigError, PeerRefused, Superseded, TransportError
from asyncflow.transport.payload import Payload
from tq.batch import Column, PackedBatch
from tq.client.deadline import Deadline
from tq.client.services import QueueServices, expect
from tq.messages import AckLost, Columns, GetColumns, Granted, PutOutputs
from tq.wire import ColumnHeader, describe, unpack


class UnitCalls:
    """Of one client."""

    def __init__(self, services: QueueServices, *, max_message_bytes: int) -> None:
        """Args:
        services: channels to units and controllers.
        max_message_bytes: of a put's payload; a unit drops the channel of a larger one.
        """
        self._services = services
        self._max_message_bytes = max_message_bytes

    def described(self, columns: Mapping[str, Column]) -> tuple[list[ColumnHeader], Payload]:
        """Return columns as a put carries them.

        Raises:
            ConfigError: they are too large for one put.
        """
        headers, payload = describe(columns, narrow=True)
        most = self._max_message_bytes
        if payload.num_bytes > most:
            raise ConfigError(f"a put of {payload.num_bytes} bytes, but max_message_bytes is {most}: put fewer rows")
        return headers, payload

    def get(self, granted: Granted, names: list[str]) -> PackedBatch:
        """Read columns of a lease's rows, in the lease's order."""
        deadline = self._services.deadline()
        by_unit = _by_unit(granted.units)
        asked = []
        for unit, positions in by_unit.items():
            rows = granted.rows if len(by_unit) == 1 else [granted.rows[i] for i in positions]
            message = GetColumns(rows, names)
            asked.append((unit, message, self._services.unit(unit, deadline.left_s).submit(message)))
        parts = []
        for unit, message, future in asked:
            reply, payload = self._services.reply(future, unit, message, deadline.left_s)
            columns = unpack(expect(reply, Columns).columns, payload)
            groups = tuple(granted.groups[i] for i in by_unit[unit])
            parts.append(PackedBatch(tuple(message.rows), columns, groups))
        joined = PackedBatch.concatenate(parts)
        if joined.indices == tuple(granted.rows):
            return joined
        place = {row: i for i, row in enumerate(joined.indices)}
        return joined.select([place[row] for row in granted.rows])

    def put(self, task: str, granted: Granted, rows: Sequence[int], columns: Mapping[str, Column]) -> None:
        """Write all output columns of some rows of a lease."""
        deadline = self._services.deadline()
        self._services.patiently(partial(self._put, task, granted, rows, columns, deadline), deadline)

    def ack(self, granted: Granted, rows: Sequence[int]) -> None:
        """Be done with rows of a lease without writing anything."""
        deadline = self._services.deadline()
        unit_of = dict(zip(granted.rows, granted.units, strict=True))
        for unit, positions in _by_unit([unit_of[row] for row in rows]).items():
            part = [rows[i] for i in positions]
            self._services.patiently(partial(self._ack, granted, unit, part, deadline), deadline)

    def _put(
        self,
        task: str,
        granted: Granted,
        rows: Sequence[int],
        columns: Mapping[str, Column],
        deadline: Deadline,
    ) -> None:
        unit_of = dict(zip(granted.rows, granted.units, strict=True))
        by_unit = _by_unit([unit_of[row] for row in rows])
        sent = []
        for unit, positions in by_unit.items():
            whole = len(by_unit) == 1
            part = {name: column if whole else column.select(positions) for name, column in columns.items()}
            headers, payload = self.described(part)
            message = PutOutputs(task, granted.token, [rows[i] for i in positions], headers)
            sent.append((unit, message, self._services.unit(unit, deadline.left_s).submit(message, payload)))
        for unit, message, future in sent:
            self._services.answer(future, unit, message, deadline.left_s)

    def _ack(self, granted: Granted, unit: str, rows: list[int], deadline: Deadline) -> None:
        """Ack at the unit, or, when it is gone or started empty, at the controller."""
        message = PutOutputs(granted.task, granted.token, rows, [])
        try:
            future = self._services.unit(unit, deadline.left_s).submit(message)
            self._services.answer(future, unit, message, deadline.left_s)
        except PeerRefused:
            raise
        except TransportError as error:
            try:
                self._ack_lost(AckLost(granted.task, granted.token, rows), deadline)
            except PeerRefused as refusal:  # the rows are not lost: their unit will be back
                if isinstance(error, Superseded):  # it is back, empty, and the controller is about to hear of that
                    raise TransportError(f"{error}; {refusal}") from None
                raise error from None

    def _ack_lost(self, lost: AckLost, deadline: Deadline) -> None:
        """Ack at the controller that gave the lease; when it agrees, the others must not ask for these rows again."""
        directory = self._services.directory
        first = directory.controller_of(lost.task)
        for service in sorted(directory.controllers, key=lambda name: name != first):
            future = self._services.controller(service, deadline.left_s).submit(lost)
            self._services.answer(future, service, lost, deadline.left_s)


def _by_unit(units: Sequence[str]) -> dict[str, Sequence[int]]:
    """Return unit -> positions."""
    if units and units.count(units[0]) == len(units):
        return {units[0]: range(len(units))}
    by_unit: dict[str, list[int]] = {}
    for position, unit in enumerate(units):
        by_unit.setdefault(unit, []).append(position)
    return dict(by_unit)
