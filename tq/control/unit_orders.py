"""What a controller has to tell the units: fences, quarantine, acks that it took in their place.

Carried out one after the other in a thread of its own, since no handler of a controller may wait for a unit.

A unit that is down gets what it missed when it registers again, before its rows are handed out.
"""

import logging
import queue
import threading
from collections.abc import Callable

from asyncflow.errors import PeerRefused, Superseded, TransportError
from asyncflow.transport.frame import Limits
from asyncflow.transport.handshake import Credentials
from tq.control.state import Commit, Fence, FenceAll, Fenced, Quarantine
from tq.messages import UNIT_REPLIES, FenceRows, FenceTask, Message, PutOutputs, QuarantineRows
from tq.service_channels import ServiceChannels, await_reply

logger = logging.getLogger(__name__)

Order = Commit | Fence | FenceAll | Quarantine


class UnitOrders:
    """Carries orders to the units and reports fences that hold."""

    def __init__(
        self, credentials: Credentials, name: str, *, timeout_s: float, fenced: Callable[[Fenced], None]
    ) -> None:
        """Start the thread.

        Args:
            credentials: store and secret.
            name: of the controller.
            timeout_s: deadline of one request.
            fenced: called from the thread when a fence holds at every unit that is up.
        """
        self._links = ServiceChannels(credentials, name, Limits(), lambda *_: None)
        self._timeout_s = timeout_s
        self._fenced = fenced
        self._lock = threading.Lock()
        self._owed: dict[str, list[Message]] = {}
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="unit-orders", daemon=True)
        self._thread.start()

    def add(self, order: Order) -> None:
        """Have it done soon."""
        self._orders.put(order)

    def catch_up(self, unit: str) -> None:
        """The unit registers: tell it what it missed. One that started empty has no use for it, which does no harm.

        Raises:
            TransportError: it does not answer; what it was not told is still owed.
        """
        while (message := self._next_owed(unit)) is not None:
            self._tell(unit, message)
            with self._lock:
                if message in self._owed[unit]:  # else another registration of the unit told it, too
                    self._owed[unit].remove(message)

    def close(self) -> None:
        """Stop; idempotent."""
        self._orders.put(None)
        self._links.close()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            for unit, message in _messages(order):
                try:
                    self._tell(unit, message)
                except TransportError as error:
                    logger.warning("%s gets %s when it is back: %s", unit, type(message).__name__, error)
                    with self._lock:
                        self._owed.setdefault(unit, []).append(message)
            if isinstance(order, Fence | FenceAll):
                self._fenced(Fenced(order.task, order.token))

    def _next_owed(self, unit: str) -> Message | None:
        with self._lock:
            owed = self._owed.get(unit)
            return owed[0] if owed else None

    def _tell(self, unit: str, message: Message) -> None:
        connection = self._links.get(unit, UNIT_REPLIES)
        try:
            await_reply(connection.submit(message), unit, type(message).__name__, self._timeout_s)
        except (PeerRefused, Superseded) as error:
            if not isinstance(message, PutOutputs):
                raise
            # The ack counts here; the unit lost the rows again, or keeps it until every controller has heard of it.
            logger.info("%s: an ack of rows that were lost: %s", unit, error)


def _messages(order: Order) -> list[tuple[str, Message]]:
    match order:
        case Commit(task, owner, token):
            return [(unit, PutOutputs(task, owner, token, list(rows), [])) for unit, rows in order.rows.items()]
        case Fence():
            return [(unit, FenceRows(order.task, order.token, list(rows))) for unit, rows in order.rows.items()]
        case FenceAll():
            return [(unit, FenceTask(order.task, order.token, list(order.alive))) for unit in order.units]
        case Quarantine():
            return [(unit, QuarantineRows(order.task, order.group, list(rows))) for unit, rows in order.rows.items()]
