"""Another node's link to node 0: joins its job store, then carries orders in, events out, and heartbeats both ways.

    join      hello, welcome, clock offset, ready
    threads   orders -> inbox | outgoing events | heartbeats

Each thread has its own store client and may hang in it when node 0's host is stopped or cut off. That is why the
owner, which never touches the store, polls `lost()`. Imports torch.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from asyncflow.clock import HostClock, RoundTrip
from asyncflow.errors import TransportError, one_line
from asyncflow.job import Job, address_towards
from launcher.nodes.head import EVENTS, EVERYBODY, HEAD_BEAT, HEAD_NAME, IDLE, beat_key, orders_key
from launcher.nodes.membership import HEARTBEAT_S, HeartbeatTimeout
from launcher.nodes.node_messages import (
    FinishRun,
    FromNode,
    Hello,
    Inbound,
    Opener,
    Order,
    Ping,
    Pong,
    Ready,
    Refuse,
    Sealer,
    Welcome,
    read_body,
    read_envelope,
)
from launcher.process.job_store import JobStoreClient

ANSWER_TIMEOUT_S = 5.0
"""For node 0's answer to a hello or a ping (s)."""
_PROBE_TIMEOUT_S = 2.0
_NUM_PINGS = 16

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
            hello: of this launcher; its address is filled in.
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
            link = HeadLink(job, f"{hello.rank}.{secrets.token_hex(8)}")
            answer = link._say_hello(hello)
            if answer is not None:
                return answer
            if given_up.is_set():
                raise TransportError("another run began meanwhile")
            link._begin(inbox)
        except (OSError, DistError) as error:
            raise TransportError(f"node 0 does not answer at {where[0]}:{where[1]} ({error})") from error
        return link

    def __init__(self, job: Job, token: str) -> None:
        self.job = job
        self.store = JobStoreClient(job.store_host, job.store_port, job.secret)
        self.clock = job.clock
        self._token = token
        secret = bytes.fromhex(job.secret)
        self._events = Sealer(secret, token, HEAD_NAME)
        self._orders = Opener(secret, HEAD_NAME, token)
        self._beats = Sealer(secret, f"{token}/beat", HEAD_NAME)
        self._heads_beats = Opener(secret, f"{HEAD_NAME}/beat", EVERYBODY)
        self._heartbeat = HeartbeatTimeout(time.monotonic())
        self._outgoing: SimpleQueue[FromNode | None] = SimpleQueue()
        self._gone = ""
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def send(self, event: FromNode) -> None:
        """Tell node 0 something; returns at once."""
        self._outgoing.put(event)

    def lost(self) -> str:
        """Return why node 0 counts as lost, or ""; call it often, always from the same thread."""
        if self._heartbeat.look(self._heads_beats.number, time.monotonic()):
            return self._gone or "it gives no sign of life"
        return self._gone

    def close(self, timeout_s: float) -> bool:
        """Send what is left to send and end the threads; return whether they ended.

        They do not while node 0 is stopped or its host is cut off.
        """
        self._closing.set()
        self._outgoing.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _say_hello(self, hello: Hello) -> Refuse | FinishRun | None:
        """Introduce this launcher and align its clock; return what prevented that, or None: it is a member now."""
        client = self.store.client(timedelta(seconds=ANSWER_TIMEOUT_S))
        self._push(client, hello)
        answer = self._next(client)
        if not isinstance(answer, Welcome):
            return answer if isinstance(answer, (Refuse, FinishRun)) else Refuse(f"no welcome, but {answer}", True)
        trips: list[RoundTrip] = []
        while len(trips) < _NUM_PINGS:
            self._push(client, Ping(time.monotonic()))
            answer = self._next(client)
            heard = time.monotonic()
            if not isinstance(answer, Pong):
                return answer if isinstance(answer, FinishRun) else Refuse(f"no answer to a ping, but {answer}", True)
            trips.append(RoundTrip(answer.asked, answer.arrived, answer.answered, heard))
        self.clock = HostClock.aligned(trips)
        self._push(client, Ready(self.clock.host, self.clock.offset_s, time.time() - self.clock.now()))
        return None

    def _begin(self, inbox: "SimpleQueue[Inbound]") -> None:
        # Silence counts from here, not from the start of joining.
        self._heartbeat = HeartbeatTimeout(time.monotonic())
        for work, arguments in ((self._receive, (inbox,)), (self._beat, ()), (self._send, ())):
            # Its own client: TCPStore has no deadline on a call to a stopped server, and a blocked call stalls the
            # client.
            client = self.store.client(IDLE)
            name = f"head-{work.__name__.strip('_')}"
            thread = threading.Thread(target=self._until_gone, args=(work, client, *arguments), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _until_gone(self, work: Callable[..., None], client: TCPStore, *arguments: object) -> None:
        try:
            work(client, *arguments)
        except Exception as error:  # noqa: BLE001 - thread boundary: the owner must learn that no more orders arrive
            if not self._closing.is_set():
                logger.warning("node 0: %s", one_line(error))
                self._gone = self._gone or _why(error)

    def _receive(self, client: TCPStore, inbox: "SimpleQueue[Inbound]") -> None:
        while not self._closing.is_set():
            order = self._next(client)
            if order is not None:
                logger.info("order: %s", order)
                inbox.put(order)

    def _beat(self, client: TCPStore) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            client.set(beat_key(self._token), self._beats.seal())  # type: ignore[arg-type]  # the stub lacks bytes
            envelope = read_envelope(client.get(HEAD_BEAT))
            if envelope is not None:
                self._heads_beats.newest(envelope)

    def _send(self, client: TCPStore) -> None:
        while (event := self._outgoing.get()) is not None:
            logger.info("event: %s", event)
            self._push(client, event)
        client.queue_push(orders_key(self._token), b"")  # wakes the thread that waits for orders

    def _push(self, client: TCPStore, message: FromNode) -> None:
        client.queue_push(EVENTS, self._events.seal(message))

    def _next(self, client: TCPStore) -> Order | None:
        """Wait for the next genuine order; None: this link is being closed."""
        while True:
            envelope = read_envelope(client.queue_pop(orders_key(self._token)))
            if self._closing.is_set():
                return None
            body = None if envelope is None else self._orders.open(envelope)
            if body is not None:
                order: Order = read_body(body, Order)
                return order
            logger.warning("dropped an order that does not prove the job's secret")


def _why(error: Exception) -> str:
    if isinstance(error, DistError):
        return "its job store does not answer"
    return str(error) if isinstance(error, TransportError) else f"a thread died: {one_line(error)}"
