"""What a controller has to tell the units: fences, quarantine, acks that it took in their place.

Each unit is told by a thread of its own (`UnitBacklog`), so that none waits for another one that is stopped, and no
handler for any. One more thread reports the fences, each for one unit.

A unit that is down gets what it missed when it registers again, before its rows are handed out: only the handler of a
registration waits for a unit, the one that registers.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable

from asyncflow.errors import PeerRefused, Superseded
from asyncflow.service_threads import ServiceThreads
from asyncflow.transport.frame import Limits
from asyncflow.transport.handshake import Credentials
from tq.control.events import Commit, Fence, FenceAll, Fenced, Quarantine
from tq.control.unit_backlog import UnitBacklog
from tq.messages import UNIT_REPLIES, FenceRows, FenceTask, Message, PutOutputs, QuarantineRows
from tq.service_channels import ServiceChannels, await_reply

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0

Order = Commit | Fence | FenceAll | Quarantine


class UnitOrders:
    """Carries orders to the units and reports fences that hold."""

    def __init__(
        self,
        credentials: Credentials,
        name: str,
        *,
        timeout_s: float,
        fenced: Callable[[Fenced], None],
        threads: ServiceThreads,
    ) -> None:
        """Tell nobody anything yet.

        Args:
            credentials: store and secret.
            name: of the controller.
            timeout_s: deadline of one request.
            fenced: called from a thread when a fence holds at its unit, or when that is away, and is owed it.
            threads: the controller's: without one of ours, rows of void leases would never come back.
        """
        self._links = ServiceChannels(credentials, name, Limits(), lambda *_: None)
        self._timeout_s = timeout_s
        self._fenced = fenced
        self._threads = threads
        self._lock = threading.Lock()
        self._backlogs: dict[str, UnitBacklog] = {}
        self._closed = False
        self._holding: queue.SimpleQueue[Fenced | None] = queue.SimpleQueue()
        self._thread = threads.start(self._report, name="unit-orders")

    def add(self, order: Order) -> None:
        """Have it done soon: at each unit, after the orders that were added before."""
        with self._lock:
            if self._closed:
                return
            settled = [self._backlog(unit).add(message) for unit, message in _messages(order)]
        if isinstance(order, Fence | FenceAll):
            fenced = Fenced(order.task, order.token)
            settled[0].add_done_callback(lambda _: self._holding.put(fenced))

    def catch_up(self, unit: str) -> None:
        """The unit registers: tell it what it missed. One that started empty has no use for it, which does no harm.

        Raises:
            TransportError: it does not answer; what it was not told is still owed.
        """
        with self._lock:
            backlog = self._backlogs.get(unit)
        if backlog is not None:
            self._links.give_up_waiting(unit)
            backlog.catch_up()

    def owes(self, unit: str) -> bool:
        """Whether the unit has not confirmed something that it was, or is to be, told."""
        with self._lock:
            backlog = self._backlogs.get(unit)
        return backlog is not None and backlog.owes

    def close(self) -> None:
        """Stop; idempotent."""
        with self._lock:
            self._closed = True
            backlogs = list(self._backlogs.values())
        for backlog in backlogs:
            backlog.stop()
        self._holding.put(None)
        self._links.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for backlog in backlogs:
            backlog.join(max(0.0, deadline - time.monotonic()))
        self._thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _backlog(self, unit: str) -> UnitBacklog:
        if unit not in self._backlogs:
            self._backlogs[unit] = UnitBacklog(unit, self._tell, self._threads)
        return self._backlogs[unit]

    def _report(self) -> None:
        while (fenced := self._holding.get()) is not None:
            self._fenced(fenced)

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
        case Commit(task, token):
            return [(unit, PutOutputs(task, token, list(rows), [])) for unit, rows in order.rows.items()]
        case Fence():
            return [(order.unit, FenceRows(order.task, order.token, list(order.rows)))]
        case FenceAll():
            return [(order.unit, FenceTask(order.task, order.token, list(order.alive)))]
        case Quarantine():
            return [(unit, QuarantineRows(list(rows), order.cause)) for unit, rows in order.rows.items()]
