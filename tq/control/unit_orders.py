"""What a controller has to tell the units: fences, dead letter, acks that it took in their place.

Each unit is told by a thread of its own (`UnitBacklog`), so that none waits for another one that is stopped, no life of
a unit waits for an earlier one (a thread may wait long for an end that died while it was connecting), and no handler
waits for any. One more thread reports the fences, each for one unit.

    add --> told --> done, forgotten
        '-> refused: the unit cannot confirm yet --> told again
        '-> the unit cannot be reached --> done, owed --(the next `add`, or `catch_up`)--> told --> forgotten

A unit that is down gets what it missed when it registers again, before its rows are handed out: only the handler of a
registration waits for a unit, the one that registers. A unit may hear a message twice; that changes nothing.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from asyncflow.errors import LeaseFenced, PeerRefused, TransportError
from asyncflow.process import ServiceThreads
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import Credentials
from tq.control.events import Commit, Fence, FenceAll, Fenced, RemoveGroup
from tq.messages import UNIT_REPLIES, FenceRows, FenceTask, Message, PutOutputs, RemoveRows
from tq.service_channels import ServiceChannels, await_reply

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


@dataclass(eq=False)
class _Entry:
    message: Message
    was_done: "Future[None]" = field(default_factory=Future)
    is_settled: bool = False


class UnitBacklog:
    """Owned by a `UnitOrders`."""

    def __init__(self, unit: str, tell: Callable[[str, Message], None], threads: ServiceThreads) -> None:
        """Start the thread.

        Args:
            unit: whom to tell.
            tell: tells a unit something and waits until it confirms; raises TransportError.
            threads: the controller's.
        """
        self._unit = unit
        self._tell = tell
        self._threads = threads
        self._changed = threading.Condition()
        self._entries: dict[_Entry, None] = {}
        self._fresh = False
        self._again = False
        self._closed = False
        self._begin()

    def add(self, message: Message) -> "Future[None]":
        """Have it told after everything that was added before.

        Returns:
            A future that completes when the unit confirmed, or when it could not be reached and is owed the message.
        """
        entry = _Entry(message)
        with self._changed:
            self._entries[entry] = None
            self._fresh = True
            self._changed.notify()
        return entry.was_done

    def catch_up(self) -> None:
        """Tell everything now, in the caller's thread: that of the backlog may wait for an earlier life of the unit.

        What is added from now on is told by a new thread.

        Raises:
            TransportError: the unit does not answer; what it was not told is still owed.
        """
        for entry in self._all():
            self._tell_once(entry)
        with self._changed:
            self._fresh = True  # the earlier thread may just have taken what was added meanwhile
            self._begin()
            self._changed.notify_all()

    @property
    def owes(self) -> bool:
        """Whether the unit has not confirmed everything."""
        with self._changed:
            return bool(self._entries)

    def stop(self) -> None:
        """End the thread soon."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for its end."""
        self._thread.join(timeout_s)

    def _begin(self) -> None:
        """Have a new thread tell; an earlier one ends as soon as it can."""
        with self._changed:  # the new thread compares itself with what is stored here
            self._thread = self._threads.start(self._run, name=f"orders-{self._unit}")

    @property
    def _over(self) -> bool:
        return self._closed or self._thread is not threading.current_thread()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._again:
                    self._changed.wait(_RETRY_S)
                while not self._over and not self._fresh and not self._again:
                    self._changed.wait()
                if self._over:
                    return
                self._fresh = self._again = False
            self._tell_all()

    def _tell_all(self) -> None:
        reachable = True
        for entry in self._all():
            try:
                if reachable:
                    self._tell_once(entry)
            except (PeerRefused, LeaseFenced) as error:  # it is up, but cannot confirm yet, so it does not count
                logger.warning("%s is told %s again: %s", self._unit, type(entry.message).__name__, error)
                self._again = True
                continue
            except TransportError as error:
                if self._over:  # the thread of the unit's new life tells what is left
                    return
                logger.warning("%s is still owed %s: %s", self._unit, type(entry.message).__name__, error)
                reachable = False
            self._mark_done(entry)

    def _all(self) -> list[_Entry]:
        with self._changed:
            return list(self._entries)

    def _tell_once(self, entry: _Entry) -> None:
        with self._changed:
            if entry not in self._entries:
                return  # the other thread was faster
        self._tell(self._unit, entry.message)
        with self._changed:
            self._entries.pop(entry, None)
        self._mark_done(entry)

    def _mark_done(self, entry: _Entry) -> None:
        with self._changed:
            before, entry.is_settled = entry.is_settled, True
        if not before:
            entry.was_done.set_result(None)


_CLOSE_TIMEOUT_S = 5.0

Order = Commit | Fence | FenceAll | RemoveGroup


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
        """Send nothing to any unit yet.

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
            was_done = [self._backlog(unit).add(message) for unit, message in _messages(order)]
        if isinstance(order, Fence | FenceAll):
            fenced = Fenced(order.task, order.token)
            was_done[0].add_done_callback(lambda _: self._holding.put(fenced))

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
        except (PeerRefused, LeaseFenced) as error:
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
        case RemoveGroup():
            return [(unit, RemoveRows(list(rows), order.cause)) for unit, rows in order.rows.items()]
