"""Keeps a client's leases alive, and what the controllers say in return: which units are up, and how full.

One thread per controller, so that one that is gone does not silence this client at the others. A controller that is
back, or that has given this client up, is joined again at once, so that it soon knows what its live consumers hold.
"""

import logging
import threading
from collections.abc import Callable, Iterable

from asyncflow.errors import PeerRefused, TransportError
from asyncflow.transport.server import Connection
from tq.messages import Alive, Heartbeat
from tq.service_channels import await_reply

logger = logging.getLogger(__name__)


class Heartbeats:
    """Beats until `close`; starts with the first controller that is joined."""

    def __init__(
        self, owner: str, interval_s: float, *, join: Callable[[str], Connection], rejoin: Callable[[str], None]
    ) -> None:
        """Args:
        owner: the consumer.
        interval_s: between beats; an answer must come within as much.
        join: returns the connection to a controller, opened and joined if need be.
        rejoin: the controller does not know this owner any more: join once more on the open connection.
        """
        self._owner = owner
        self._interval_s = interval_s
        self._join = join
        self._rejoin = rejoin
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._heard: dict[str, Alive] = {}
        self._writes: set[str] = set()
        self._closed = threading.Event()

    def watch(self, controller: str) -> None:
        """Beat for this controller from now on."""
        with self._lock:
            if controller in self._threads or self._closed.is_set():
                return
            name = f"heartbeat-{controller}"
            thread = threading.Thread(target=self._run, args=(controller,), name=name, daemon=True)
            self._threads[controller] = thread
        thread.start()

    def writes(self, columns: Iterable[str]) -> None:
        """This client puts such columns; the next beat says so."""
        new = set(columns) - self._writes
        if new:
            with self._lock:
                self._writes = self._writes | new

    def units(self, controller: str) -> dict[str, int]:
        """Return the units that are up as this controller said last, with the bytes that they hold."""
        with self._lock:
            heard = self._heard.get(controller)
            return dict(heard.units) if heard is not None else {}

    def away(self, controller: str) -> list[str]:
        """Return the units that, as this controller said last, are not up but may come back with their rows."""
        with self._lock:
            heard = self._heard.get(controller)
            return list(heard.away) if heard is not None else []

    def beat(self, controller: str, *, timeout_s: float | None = None) -> None:
        """Beat once, now.

        Args:
            controller: for whom.
            timeout_s: for the answer; default four intervals.

        Raises:
            TransportError: the controller is gone or does not answer.
        """
        with self._lock:
            message = Heartbeat(self._owner, sorted(self._writes))
        future = self._join(controller).submit(message)
        reply, _ = await_reply(future, controller, "a heartbeat", timeout_s or self._interval_s * 4)
        assert isinstance(reply, Alive)
        if not reply.known:
            self._rejoin(controller)
        with self._lock:
            self._heard[controller] = reply

    def close(self) -> None:
        """Stop; idempotent."""
        self._closed.set()
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(timeout=1)  # one that waits for a controller's return ends with its links

    def _run(self, controller: str) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self.beat(controller)
            except PeerRefused as error:
                logger.warning("%s: %s", self._owner, error)
            except TransportError as error:
                logger.debug("%s: %s", self._owner, error)
            except Exception:  # the leases of this client depend on the next beat
                logger.exception("%s: a heartbeat to %s failed; the next one follows", self._owner, controller)
