"""A storage unit: one process of the data plane. Stores, notifies the controller, only then confirms.

Called by clients (put, get) and by the controller (fence, drop). Never decides who gets what.
"""

import logging
import threading
from collections import Counter
from typing import assert_never

from asyncflow.errors import TransportError
from asyncflow.transport.connection import Connection
from asyncflow.transport.frame import Limits
from asyncflow.transport.handshake import Credentials
from asyncflow.transport.server import Call, ChannelServer, Session
from tq.config import QueueConfig
from tq.messages import (
    CONTROLLER_REPLIES,
    UNIT_REQUESTS,
    Columns,
    Done,
    DropRows,
    FenceRows,
    GetColumns,
    GetUnitStats,
    OutputsWritten,
    PutOutputs,
    PutRows,
    RowsCreated,
    UnitStats,
)
from tq.unit_state import UnitState
from tq.wire import pack, unpack

logger = logging.getLogger(__name__)


class StorageUnit:
    """Serves rows under its name until `close`."""

    def __init__(self, credentials: Credentials, name: str, config: QueueConfig, *, controller: str) -> None:
        """Connect to the controller, then accept clients.

        Raises:
            TransportError: the controller does not answer.
        """
        self.name = name
        self._config = config
        self._state = UnitState()
        self._lock = threading.Lock()
        self._notified = threading.Condition(self._lock)
        self._notifying: Counter[int] = Counter()
        self._controller = Connection(credentials, controller, name, CONTROLLER_REPLIES)
        limits = Limits(payload_bytes=config.max_message_bytes)
        self._server = ChannelServer(
            credentials, name, UNIT_REQUESTS, self, limits=limits, max_clients=config.max_clients
        )

    def close(self) -> None:
        """Stop serving; rows are gone."""
        self._server.close()
        self._controller.close()

    def disconnected(self, session: Session) -> None:
        """Rows belong to nobody's channel; nothing to do."""
        logger.debug("%s left", session.client)

    def handle(self, call: Call) -> None:
        """Carry out one request of `UNIT_REQUESTS`."""
        message: PutRows | PutOutputs | GetColumns | FenceRows | DropRows | GetUnitStats = call.message
        match message:
            case PutRows():
                self._put_rows(message, call)
            case PutOutputs():
                self._put_outputs(message, call)
            case GetColumns():
                with self._lock:
                    columns = self._state.read(message.rows, message.columns)
                headers, payload = pack(columns)
                call.reply(Columns(headers), payload)
            case FenceRows():
                self._fence(message)
                call.reply(Done())
            case DropRows():
                with self._lock:
                    self._state.drop(message.rows)
                call.reply(Done())
            case GetUnitStats():
                with self._lock:
                    stats = UnitStats(len(self._state), self._state.num_bytes)
                call.reply(stats)
            case _:
                assert_never(message)

    def _put_rows(self, message: PutRows, call: Call) -> None:
        columns = unpack(message.columns, call.payload)
        with self._lock:
            self._state.create(message.rows, columns)
        try:
            self._notify(RowsCreated(self.name, message.partition, message.rows, message.groups, list(columns)))
        except TransportError:
            with self._lock:
                self._state.drop(message.rows)
            raise
        call.reply(Done())

    def _put_outputs(self, message: PutOutputs, call: Call) -> None:
        columns = unpack(message.columns, call.payload)
        with self._lock:
            self._state.commit(message.task, message.token, message.rows, columns)
            self._notifying.update(message.rows)
        try:
            self._notify(OutputsWritten(message.task, message.token, message.rows, list(columns)))
        finally:
            with self._lock:
                self._notifying.subtract(message.rows)
                self._notifying += Counter()  # forgets those at 0
                self._notified.notify_all()
        call.reply(Done())

    def _fence(self, message: FenceRows) -> None:
        """Fence, and confirm only when the controller knows all that was committed: a row is not handed out again."""
        with self._lock:
            self._state.fence(message.task, message.token, message.rows)
            rows = set(message.rows)
            if not self._notified.wait_for(lambda: rows.isdisjoint(self._notifying), self._config.request_timeout_s):
                raise TransportError(f"{self.name}: the controller did not confirm what was written before the fence")

    def _notify(self, message: RowsCreated | OutputsWritten) -> None:
        self._controller.call(message, timeout_s=self._config.request_timeout_s)
