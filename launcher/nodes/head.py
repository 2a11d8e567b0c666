"""Node 0's side of a run on several nodes: admits the other launchers, gives orders, learns what happens there.

Everything goes through the job store. `launcher.nodes.node_messages` has the messages and their proofs.
Keys, where TOKEN names one launcher's attempt to join:

    launcher/events         queue, from all nodes             launcher/beat/TOKEN   their heartbeats
    launcher/orders/TOKEN   queue, to one                     launcher/beat/head    node 0's

One thread takes events, one watches the heartbeats. All orders go out through one store client, under a lock.
Imports torch.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from asyncflow.clock import HostClock
from asyncflow.errors import ConfigError, RoleFailed, TransportError
from asyncflow.job import GangSpec, Job, Node
from asyncflow.process import ServiceThreads
from launcher.nodes.membership import HEARTBEAT_S, HeartbeatTimeout, Membership
from launcher.nodes.node_messages import (
    DumpStacks,
    Envelope,
    FinishRun,
    FromNode,
    Hello,
    KillPart,
    Left,
    Opener,
    Order,
    PartExited,
    Ping,
    Pong,
    Ready,
    Refuse,
    Sealer,
    StartPart,
    StopAsked,
    read_body,
    read_envelope,
)
from launcher.process.gang_hosts import GangHost
from launcher.process.job_store import JobStoreClient
from launcher.process.run_events import FAILED, USAGE, GangExited, NodeLost, StopRequested

HEAD_NAME = "head"
EVERYBODY = "nodes"
EVENTS = "launcher/events"
HEAD_BEAT = "launcher/beat/head"
IDLE = timedelta(days=30)
LEAVE_TIMEOUT_S = 10.0
"""How long node 0 waits for the other launchers to end what they started (s)."""
_LOOK_S = 0.1
_JOIN_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


def orders_key(token: str) -> str:
    """Return the key of the queue of orders to one launcher."""
    return f"launcher/orders/{token}"


def beat_key(token: str) -> str:
    """Return the key under which one launcher writes its heartbeats."""
    return f"launcher/beat/{token}"


@dataclass
class _Link:
    """A launcher that proved knowledge of the secret."""

    rank: int
    events: Opener
    orders: Sealer
    beats: Opener
    heartbeat: HeartbeatTimeout | None = None
    is_gone: bool = False
    sending: threading.Lock = field(default_factory=threading.Lock)


class NodeHead:
    """The launchers of all other nodes, seen from node 0. The constructor starts answering them.

    Args:
        store: of the job; each thread gets a client of its own.
        secret: the job's (hex).
        members: decides who takes part.
        clock: of this host; all others are aligned to it.
        part_exited: called by a thread when a node's ranks of a gang are gone.
        report: called by a thread with signals that reached other launchers, and with launchers that are gone.
    """

    def __init__(
        self,
        store: JobStoreClient,
        secret: str,
        members: Membership,
        *,
        clock: HostClock,
        run_dir: Path,
        part_exited: Callable[[int, GangExited], None],
        report: Callable[[StopRequested | NodeLost], None],
    ) -> None:
        self._store = store
        self._secret = bytes.fromhex(secret)
        self._members = members
        self._clock = clock
        self.run_dir = run_dir
        self._part_exited = part_exited
        self._report = report
        self._links: dict[str, _Link] = {}
        self._changed = threading.Condition()
        self._finished = False
        self._lost_node = ""
        self._stops = 0
        self._closing = threading.Event()
        self._orders = store.client()
        self._ordering = threading.Lock()
        self.threads = ServiceThreads("node 0's launcher")
        self._running = [
            self.threads.start(self._receive, store.client(IDLE), name="node-events"),
            self.threads.start(self._watch, store.client(), name="node-beats"),
        ]

    def end(self, error: BaseException | None) -> None:
        """End the threads. Launchers that do not know yet how the run ended are told: by `error` of node 0."""
        code = USAGE if isinstance(error, ConfigError) else FAILED
        self.finish(code, f"Error: {error}" if error is not None else "node 0 ended without a word")
        self.close()

    def gather(self, timeout_s: float, stopped: Callable[[], bool]) -> str:
        """Wait until the launchers of all nodes are ready; return "", or the event that came first.

        Args:
            timeout_s: for all of them together (s).
            stopped: whether the user or the scheduler asked to stop.

        Raises:
            ConfigError: one cannot take part.
            RoleFailed: not all arrived in time, or a thread of node 0 died.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._members.is_complete():
                self.threads.check()
                if self._members.obstacle:
                    raise ConfigError(self._members.obstacle)
                if self._lost_node or stopped():
                    return f"{self._lost_node} is gone" if self._lost_node else "stopped"
                if time.monotonic() > deadline:
                    raise RoleFailed(self._members.complaint(timeout_s, str(self.run_dir)))
                self._changed.wait(_LOOK_S)
            return ""

    def nodes(self) -> list[Node]:
        """Return all nodes but this one."""
        with self._changed:
            return self._members.nodes()

    def warnings(self) -> list[str]:
        with self._changed:
            return self._members.warnings()

    def hosts(self) -> dict[int, GangHost]:
        """Return node -> the object that starts and ends ranks there; call it after all have joined."""
        with self._changed:
            return {node.rank: RemoteNode(self, self._members.token(node.rank)) for node in self._members.nodes()}

    def order(self, token: str, message: Order) -> None:
        """Send a message to one launcher; one that is gone does not receive it."""
        with self._changed:
            link = self._links[token]
        # Sealing and pushing under one lock, so that numbers arrive in order.
        with link.sending:
            data = link.orders.seal(message)
            with self._ordering:
                self._orders.queue_push(orders_key(token), data)

    def finish(self, code: int, line: str) -> None:
        """End the run on all nodes: they kill what is left there, print `line` and exit with `code`. Idempotent."""
        with self._changed:
            if self._finished:
                return
            self._finished = True
            waiting = {token: link for token, link in self._links.items() if not link.is_gone}
        for token in waiting:
            self.order(token, FinishRun(code, line))
        with self._changed:
            # Only launchers that joined have processes to end.
            joined = [link for link in waiting.values() if link.heartbeat is not None]
            self._changed.wait_for(lambda: all(link.is_gone for link in joined), LEAVE_TIMEOUT_S)

    def close(self) -> None:
        """End the threads. Idempotent."""
        self.threads.close()  # from now on an error is expected: the store may end before its clients
        self._closing.set()
        try:
            with self._ordering:
                # Wakes the receiving thread, which then sees that we are closing.
                self._orders.queue_push(EVENTS, b"")
        except DistError:
            logger.debug("the job store is gone before its last client")
        for thread in self._running:
            thread.join(_JOIN_TIMEOUT_S)

    def _receive(self, store: TCPStore) -> None:
        while True:
            data = store.queue_pop(EVENTS)
            if self._closing.is_set():
                return
            envelope = read_envelope(data)
            if envelope is None:
                logger.warning("%s: dropped something that is not a launcher's message", EVENTS)
                continue
            try:
                self._take(envelope)
            except TransportError as error:
                self._lose(envelope.sender, str(error))

    def _take(self, envelope: Envelope) -> None:
        token = envelope.sender
        link = self._links.get(token)
        # A launcher is unknown until its hello, which the same secret proves.
        opener = Opener(self._secret, token, HEAD_NAME) if link is None else link.events
        body = opener.open(envelope)
        if body is None:
            logger.warning("%s: dropped a message that does not prove the job's secret", EVENTS)
            return
        message = read_body(body, FromNode)
        arrived = self._clock.now()
        if isinstance(message, Hello):
            orders, beats = Sealer(self._secret, HEAD_NAME, token), Opener(self._secret, f"{token}/beat", HEAD_NAME)
            link = _Link(message.rank, opener, orders, beats)
            with self._changed:
                self._links[token] = link
        if link is None:
            logger.warning("%s: %s did not say hello first", EVENTS, token)
            return
        match message:
            case Ping(asked=asked):
                self.order(token, Pong(asked, arrived, self._clock.now()))
            case PartExited(exited=exited):
                self._part_exited(link.rank, exited)
            case _:
                self._note(token, link, message)

    def _note(self, token: str, link: _Link, message: Hello | Ready | StopAsked | Left) -> None:
        logger.info("node %d: %s", link.rank, message)
        match message:
            case Hello():
                with self._changed:
                    answer = Refuse("the run is over", True) if self._finished else self._members.hello(token, message)
                self.order(token, answer)
            case Ready():
                with self._changed:
                    if self._members.ready(token, message):
                        link.heartbeat = HeartbeatTimeout(time.monotonic())
            case StopAsked(count=count):
                if count > self._stops:  # a scheduler signals all launchers at once
                    self._stops = count
                    self._report(StopRequested(count))
            case Left():
                self._lose(token, "its launcher left")
        with self._changed:
            self._changed.notify_all()

    def _watch(self, store: TCPStore) -> None:
        own = Sealer(self._secret, f"{HEAD_NAME}/beat", EVERYBODY)
        while not self._closing.is_set():
            store.set(HEAD_BEAT, own.seal())  # type: ignore[arg-type]  # the stub lacks bytes
            self._look(store)
            self._closing.wait(HEARTBEAT_S)

    def _look(self, store: TCPStore) -> None:
        with self._changed:
            watched = [(token, link) for token, link in self._links.items() if link.heartbeat and not link.is_gone]
        for token, link in watched:
            key = beat_key(token)
            envelope = read_envelope(store.get(key)) if store.check([key]) else None
            number = link.beats.number if envelope is None else link.beats.newest(envelope)
            assert link.heartbeat is not None
            if link.heartbeat.look(number, time.monotonic()):
                self._lose(token, "no sign of life of its launcher")

    def _lose(self, token: str, reason: str) -> None:
        """A launcher is gone; during the run, that ends the run."""
        with self._changed:
            link = self._links.get(token)
            if link is None or link.is_gone:
                return
            link.is_gone = True
            # A launcher that has not joined runs nothing, so the run does not depend on it.
            expected = self._finished or link.heartbeat is None
            name = self._members.name(link.rank)
            self._changed.notify_all()
        if not expected:
            logger.error("%s: %s", name, reason)
            self._lost_node = self._lost_node or name
            self._report(NodeLost(name))


class RemoteNode:
    """The `GangHost` of another node: passes every call on to its launcher."""

    def __init__(self, head: NodeHead, token: str) -> None:
        self._head = head
        self._token = token
        self._started: dict[str, None] = {}

    def start(self, gang: GangSpec, attempt: int) -> None:
        self._started[gang.name] = None
        self._head.order(self._token, StartPart(gang.name, attempt, Job.load(self._head.run_dir).revision))

    def kill(self, gang: str) -> None:
        self._head.order(self._token, KillPart(gang))

    def dump_stacks(self) -> None:
        self._head.order(self._token, DumpStacks())

    def close(self, timeout_s: float) -> None:
        """Have its launcher kill whatever it started; does not wait."""
        for gang in self._started:
            self.kill(gang)
