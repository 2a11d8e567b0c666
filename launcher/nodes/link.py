"""Another node's link to node 0: a channel that carries orders in, and events and heartbeats out.

    join      hello, welcome, clock offset, ready
    threads   orders -> inbox | outgoing events, or heartbeats

The threads may wait for node 0 when its host is stopped or cut off. That is why the owner, which never waits for them,
polls `lost()`. Imports torch.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from torch.distributed import DistError

from asyncflow.clock import HostClock, RoundTrip
from asyncflow.errors import TransportError, one_line
from asyncflow.job import (
    GLOO_INTERFACE,
    Job,
    NetworkListeners,
    address_towards,
    choose_interfaces,
    list_reached,
    own_interface,
    reached_everywhere,
)
from asyncflow.process import variables_set
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection
from launcher.nodes.head import HEARTBEAT_S, SERVICE, SILENT_S
from launcher.nodes.node_messages import (
    FinishRun,
    FromHead,
    FromNode,
    Hello,
    Inbound,
    LauncherAlive,
    NextOrder,
    Ping,
    Pong,
    Ready,
    Refuse,
    Welcome,
)
from launcher.process.job_store import JobStoreClient

ANSWER_TIMEOUT_S = 5.0
"""For node 0's answer to a hello or a ping (s)."""
_PROBE_TIMEOUT_S = 2.0
_NUM_PINGS = 16
_IDLE_S = timedelta(days=30).total_seconds()

logger = logging.getLogger(__name__)


class HeadLink:
    """One launcher's link to node 0; made by `join`."""

    @staticmethod
    def join(
        job: Job, hello: Hello, inbox: "SimpleQueue[Inbound]", given_up: threading.Event
    ) -> "HeadLink | Refuse | FinishRun":
        """Join a run; return the link, or node 0's refusal. Blocks, also as long as node 0's host is stopped.

        Args:
            job: read from the run directory; perhaps of a run that is over.
            hello: of this launcher; its address and networks are filled in.
            inbox: receives orders.
            given_up: set when the caller no longer waits.

        Raises:
            TransportError: node 0 does not answer, or the attempt was abandoned.
        """
        where = (job.store_host, job.store_port)
        try:
            # Probe first: a store client would retry for long and print stack traces.
            socket.create_connection(where, _PROBE_TIMEOUT_S).close()
            hello.address = address_towards(job.store_host)
            places = [(cidr, own_interface(cidr)) for cidr in list_reached(job.networks, job.secret)]
            listeners = NetworkListeners([(cidr, own[1]) for cidr, own in places if own is not None], job.secret)
            hello.networks = list(listeners.networks)
            try:
                link = HeadLink(job, hello.rank, given_up, listeners)
                answer = link._say_hello(hello)
            except BaseException:
                listeners.close()
                raise
        except (OSError, DistError, TransportError) as error:
            raise TransportError(f"node 0 does not answer at {where[0]}:{where[1]} ({error})") from error
        if answer is not None or given_up.is_set():
            link._connection.close()
            listeners.close()
            return answer or Refuse("another run began meanwhile", True)
        link._start_threads(inbox)
        return link

    def __init__(self, job: Job, rank: int, given_up: threading.Event, listeners: NetworkListeners) -> None:
        self.job = job
        self._listeners = listeners
        self.store = JobStoreClient(job.store_host, job.store_port, job.secret)
        self.clock = job.clock
        credentials = Credentials(self.store.open_client(), bytes.fromhex(job.secret))
        chosen = dict(os.environ)
        choose_interfaces(job.store_host, env=chosen)
        # Restored: the job may be of a run that is over, and the interface leads to its node 0.
        with variables_set({GLOO_INTERFACE: chosen[GLOO_INTERFACE]}):
            self._connection = Connection(
                credentials, SERVICE, f"{rank}.{secrets.token_hex(8)}", FromHead,
                timeout_s=ANSWER_TIMEOUT_S, stop=given_up,
            )  # fmt: skip
        self._outgoing: SimpleQueue[FromNode | None] = SimpleQueue()
        self._gone = ""
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def send(self, event: FromNode) -> None:
        """Tell node 0 something; returns at once."""
        self._outgoing.put(event)

    def lost(self) -> str:
        """Return why node 0 counts as lost, or ""."""
        return self._gone

    def close(self, timeout_s: float) -> bool:
        """Send what is left to send and end the threads; return whether they ended.

        They may not while node 0 is stopped or its host is cut off.
        """
        self._closing.set()
        self._listeners.close()
        self._outgoing.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _say_hello(self, hello: Hello) -> Refuse | FinishRun | None:
        """Introduce this launcher and align its clock; return what prevented that, or None: it is a member now."""
        answer = self._ask(hello)
        if not isinstance(answer, Welcome):
            told = isinstance(answer, Refuse | FinishRun)
            return answer if told else Refuse(f"no answer to a hello, but {answer}", True)
        networks = reached_everywhere([each.cidr for each in hello.networks], answer.others, self.job.secret)
        trips: list[RoundTrip] = []
        while len(trips) < _NUM_PINGS:
            answer = self._ask(Ping(time.monotonic()))
            heard = time.monotonic()
            if not isinstance(answer, Pong):
                return answer if isinstance(answer, FinishRun) else Refuse(f"no answer to a ping, but {answer}", True)
            trips.append(RoundTrip(answer.asked, answer.arrived, answer.answered, heard))
        self.clock = HostClock.from_round_trips(trips)
        self._ask(Ready(self.clock.host, self.clock.offset_s, time.time() - self.clock.now(), networks))
        return None

    def _start_threads(self, inbox: "SimpleQueue[Inbound]") -> None:
        for name, work in (("orders", partial(self._receive_orders, inbox)), ("events", self._send_events)):
            thread = threading.Thread(target=self._until_gone, args=(work,), name=f"head-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _until_gone(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - thread boundary: the owner must learn that no more orders arrive
            if not self._closing.is_set():
                logger.warning("node 0: %s", one_line(error))
                self._gone = self._gone or _why(error)
        finally:
            self._connection.close()  # ends the other thread, too

    def _receive_orders(self, inbox: "SimpleQueue[Inbound]") -> None:
        while True:
            order = self._ask(NextOrder(), timeout_s=_IDLE_S)
            logger.info("order: %s", order)
            inbox.put(order)

    def _send_events(self) -> None:
        while (event := self._next_event()) is not None:
            self._ask(event, timeout_s=SILENT_S)

    def _next_event(self) -> FromNode | None:
        try:
            event = self._outgoing.get(timeout=HEARTBEAT_S)
        except Empty:
            return LauncherAlive()
        logger.info("event: %s", event)
        return event

    def _ask(self, message: FromNode, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        return self._connection.call_service(message, timeout_s=timeout_s)[0]


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, TransportError) else f"a thread died: {one_line(error)}"
