"""What one unit has still to be told, in order. A thread of its own tells it, so that no unit waits for another, and no
life of a unit for an earlier one: a thread may wait long for an end that died while it was connecting.

    add --> told --> settled, forgotten
        '-> refused: the unit cannot confirm yet --> told again
        '-> the unit cannot be reached --> settled, owed --(the next `add`, or `catch_up`)--> told --> forgotten

Used by `UnitOrders`. The unit may hear a message twice; it is none the wiser.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from asyncflow.errors import PeerRefused, Superseded, TransportError
from asyncflow.service_threads import ServiceThreads
from tq.messages import Message

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


@dataclass(eq=False)
class _Entry:
    message: Message
    settled: "Future[None]" = field(default_factory=Future)
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
        return entry.settled

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
            except (PeerRefused, Superseded) as error:  # it is up, but cannot confirm yet: nobody may rely on it
                logger.warning("%s is told %s again: %s", self._unit, type(entry.message).__name__, error)
                self._again = True
                continue
            except TransportError as error:
                if self._over:  # the thread of the unit's new life tells what is left
                    return
                logger.warning("%s is still owed %s: %s", self._unit, type(entry.message).__name__, error)
                reachable = False
            self._settle(entry)

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
        self._settle(entry)

    def _settle(self, entry: _Entry) -> None:
        with self._changed:
            before, entry.is_settled = entry.is_settled, True
        if not before:
            entry.settled.set_result(None)
