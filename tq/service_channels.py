"""Channels of one process: one to each service, made on first use, made again when one broke.

Used by `QueueServices`, and by a controller's `UnitOrders` and `LeadQuestions`. Never decides what is sent.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from asyncflow.clock import awake_result
from asyncflow.errors import DeadlineExceeded, TransportError
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection, Reply


class ServiceChannels:
    """Connections by service name. Thread-safe; two threads never open the same one twice."""

    def __init__(
        self, credentials: Credentials, name: str, limits: Limits, greet: Callable[[str, Connection], None]
    ) -> None:
        """Args:
        credentials: store and secret.
        name: of this process.
        limits: largest reply accepted.
        greet: called with (service, connection) before a new connection is used by anybody.
        """
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
        """Whether `close` was called."""
        return self._closing.is_set()

    def get(self, service: str, replies: Any, *, timeout_s: float | None = None) -> Connection:
        """Return the connection to `service`, opening it if need be.

        Args:
            service: whom to call.
            replies: msgspec type of its answers.
            timeout_s: for the service to answer, if that is less than the handshake's deadline.

        Raises:
            TransportError: the service does not answer, or these links are closed.
        """
        with self._lock:
            one_at_a_time = self._connecting.setdefault(service, threading.Lock())
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

    def opened(self, service: str) -> Connection | None:
        """Return the connection to `service` if there is one that works."""
        with self._lock:
            connection = self._links.get(service)
        return None if connection is None or connection.closed else connection

    def give_up_waiting(self, service: str) -> None:
        """The service started anew: calls that still connect to its earlier life fail, and delay no others."""
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
    """Wait for an answer.

    Raises:
        DeadlineExceeded: none within `timeout_s`.
        TransportError: the service is gone.
        PeerRefused, LeaseFenced: the service answered no.
    """
    try:
        return awake_result(future, timeout_s)
    except FutureTimeout as error:
        raise DeadlineExceeded(f"{service} did not answer {what} within {timeout_s:g} s") from error
