"""Channels of one process: one to each service, opened on first use, reopened when it broke.

Used by `QueueSession`, and by a controller's `UnitOrders` and `LeadQuestions`. Never decides what is sent.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from asyncflow.clock import awake_result
from asyncflow.errors import DeadlineExceeded, PeerRefused, TransportError
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection, Reply
from tq.messages import Alive, Heartbeat


class ServiceChannels:
    """Connections by service name. Thread-safe; two threads never open the same one twice.

    `greet` is called with (service, connection) before anybody uses a new connection.
    """

    def __init__(
        self, credentials: Credentials, name: str, limits: Limits, greet: Callable[[str, Connection], None]
    ) -> None:
        self._credentials = credentials
        self._name = name
        self._limits = limits
        self._greet = greet
        self._lock = threading.Lock()
        self._links: dict[str, Connection] = {}
        self._connecting: dict[str, threading.Lock] = {}
        self._stops: dict[str, threading.Event] = {}
        self._closing = threading.Event()

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def get(self, service: str, replies: Any, *, timeout_s: float | None = None) -> Connection:
        """Return the connection to `service`, opening it if necessary; `replies` is the msgspec type of its answers.

        `timeout_s` bounds the handshake. Raises TransportError when the service does not answer, or after `close`.
        """
        with self._lock:
            one_at_a_time = self._connecting.setdefault(service, threading.Lock())
        # Other services stay reachable while this one is being connected.
        with one_at_a_time:
            with self._lock:
                stop = self._stops.setdefault(service, threading.Event())
                connection = self._links.get(service)
                self._refuse_closed()
            if connection is not None and not connection.closed:
                return connection
            connection = Connection(
                self._credentials,
                service,
                self._name,
                replies,
                limits=self._limits,
                timeout_s=timeout_s,
                stop=stop,
            )
            try:
                self._greet(service, connection)
                with self._lock:
                    self._refuse_closed()
                    self._links[service] = connection
            except TransportError:
                connection.close()
                raise
        return connection

    def find_open(self, service: str) -> Connection | None:
        """Return the connection to `service` if there is one that works."""
        with self._lock:
            connection = self._links.get(service)
        return None if connection is None or connection.closed else connection

    def give_up_waiting(self, service: str) -> None:
        """The service restarted: calls that still connect to its earlier life fail, and delay no others."""
        with self._lock:
            self._connecting.pop(service, None)
            stop = self._stops.pop(service, None)
        if stop is not None:
            stop.set()

    def close(self) -> None:
        """Close all channels and open no more: calls that wait for a service fail. Idempotent."""
        with self._lock:
            self._closing.set()
            for stop in self._stops.values():
                stop.set()
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.close()

    def _refuse_closed(self) -> None:
        if self.closed:
            raise TransportError(f"{self._name}: its channels are closed")


def await_reply(future: "Future[Reply]", service: str, what: str, timeout_s: float) -> Reply:
    """Wait for an answer; raises DeadlineExceeded, TransportError (the service is gone), or its refusal."""
    try:
        return awake_result(future, timeout_s)
    except FutureTimeout as error:
        raise DeadlineExceeded(f"{service} did not answer {what} within {timeout_s:g} s") from error


# Keeps a client's leases alive, and keeps what the controllers answer: which units are up, and how full they are.
#
# One thread per controller, so that one that is gone does not silence this client at the others. The client joins a
# controller that is back, or that gave it up, again at once, so that it soon knows what its live consumers hold.

logger = logging.getLogger(__name__)


class Heartbeats:
    """Sends heartbeats every `interval_s` until `close`; starts with the first controller that is joined.

    `join` returns a joined connection to a controller; `rejoin` joins again on the open one, when the controller does
    not know this owner any more.
    """

    def __init__(
        self, owner: str, interval_s: float, *, join: Callable[[str], Connection], rejoin: Callable[[str], None]
    ) -> None:
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
        """Send heartbeats to this controller from now on."""
        with self._lock:
            if controller in self._threads or self._closed.is_set():
                return
            name = f"heartbeat-{controller}"
            thread = threading.Thread(target=self._beat_repeatedly, args=(controller,), name=name, daemon=True)
            self._threads[controller] = thread
        thread.start()

    def note_columns(self, columns: Iterable[str]) -> None:
        """This client puts such columns; the next heartbeat says so."""
        # The set is replaced, never changed, so that reading it needs no lock: this runs for every put.
        new = set(columns) - self._writes
        if new:
            with self._lock:
                self._writes = self._writes | new

    def units(self, controller: str) -> dict[str, int]:
        """Return unit -> bytes held for the units that are up, by this controller's last answer."""
        with self._lock:
            heard = self._heard.get(controller)
            return dict(heard.units) if heard is not None else {}

    def list_away_units(self, controller: str) -> list[str]:
        """Return the units that, by this controller's last answer, are down but may come back with their rows."""
        with self._lock:
            heard = self._heard.get(controller)
            return list(heard.away) if heard is not None else []

    def send_beat(self, controller: str, *, timeout_s: float | None = None) -> None:
        """Send one heartbeat now; `timeout_s` None: four intervals. Raises TransportError without an answer."""
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
        self._closed.set()
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(timeout=1)  # a thread that waits for a controller's return ends with its channels

    def _beat_repeatedly(self, controller: str) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self.send_beat(controller)
            except PeerRefused as error:
                logger.warning("%s: %s", self._owner, error)
            except TransportError as error:
                logger.debug("%s: %s", self._owner, error)
            except Exception:  # the leases of this client depend on the next heartbeat
                logger.exception("%s: a heartbeat to %s failed; the next one follows", self._owner, controller)
