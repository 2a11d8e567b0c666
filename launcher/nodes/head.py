"""Node 0's side of a run on several nodes: takes the other launchers in, gives orders, hears what happens there.

Everything goes through the job store. `launcher.nodes.messages` has the messages and their proofs.
Keys, where TOKEN names one launcher's try to join:

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
from launcher.nodes.messages import (
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
from launcher.process.events import FAILED, USAGE, GangExited, NodeLost, StopRequested
from launcher.process.gang_hosts import GangHost
from launcher.process.job_store import JobStoreClient

HEAD_NAME = "head"
EVERYBODY = "nodes"
EVENTS = "launcher/events"
HEAD_BEAT = "launcher/beat/head"
IDLE = timedelta(days=30)
LEAVE_TIMEOUT_S = 10.0
"""How long node 0 waits until the other launchers have ended what they started (s)."""
_LOOK_S = 0.1
_JOIN_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


def orders_key(token: str) -> str:
    """Return the queue of orders to one launcher."""
    return f"launcher/orders/{token}"


def beat_key(token: str) -> str:
    """Return where one launcher writes its heartbeats."""
    return f"launcher/beat/{token}"


@dataclass
class _Link:
    """One launcher that proved that it knows the secret."""

    rank: int
    events: Opener
    orders: Sealer
    beats: Opener
    heartbeat: HeartbeatTimeout | None = None
    is_gone: bool = False
    sending: threading.Lock = field(default_factory=threading.Lock)


class NodeHead:
    """The launchers of all other nodes, seen from node 0."""

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
        """Begin to answer launchers.

        Args:
            store: of the job; each thread gets a client of its own.
            secret: the job's (hex).
            members: decides who takes part.
            clock: of this host; all others are aligned to it.
            run_dir: of the run.
            part_exited: is told by a thread that a node's ranks of a gang are gone.
            report: is told by a thread of signals that came to other launchers, and of launchers that are gone.
        """
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
        """End the threads. Launchers that were not told yet how the run ended learn it now: it was node 0's error."""
        code = USAGE if isinstance(error, ConfigError) else FAILED
        self.finish(code, f"Error: {error}" if error is not None else "node 0 ended without a word")
        self.close()

    def gather(self, timeout_s: float, stopped: Callable[[], bool]) -> str:
        """Wait until the launchers of all nodes are ready; returns what came first instead, or "".

        Args:
            timeout_s: for all of them.
            stopped: the user or the scheduler asked for it.
        Raises:
            ConfigError: one cannot take part.
            RoleFailed: not all came in time, or a thread of node 0 died.
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
        """Return what users should know about the nodes."""
        with self._changed:
            return self._members.warnings()

    def hosts(self) -> dict[int, GangHost]:
        """Return what starts and ends ranks on the other nodes, by node; all have joined."""
        with self._changed:
            return {node.rank: RemoteNode(self, self._members.token(node.rank)) for node in self._members.nodes()}

    def order(self, token: str, message: Order) -> None:
        """Send a message to one launcher; one that is gone does not get it."""
        with self._changed:
            link = self._links[token]
        with link.sending:
            data = link.orders.seal(message)
            with self._ordering:
                self._orders.queue_push(orders_key(token), data)

    def finish(self, code: int, line: str) -> None:
        """End the run on all nodes: they kill what is left there, say `line` and exit with `code`; idempotent."""
        with self._changed:
            if self._finished:
                return
            self._finished = True
            waiting = {token: link for token, link in self._links.items() if not link.is_gone}
        for token in waiting:
            self.order(token, FinishRun(code, line))
        with self._changed:
            joined = [link for link in waiting.values() if link.heartbeat is not None]
            self._changed.wait_for(lambda: all(link.is_gone for link in joined), LEAVE_TIMEOUT_S)

    def close(self) -> None:
        """End the threads; idempotent."""
        self.threads.close()  # the store may end before its clients
        self._closing.set()
        try:
            with self._ordering:
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
                logger.warning("%s: something that no launcher said was dropped", EVENTS)
                continue
            try:
                self._take(envelope)
            except TransportError as error:
                self._lose(envelope.sender, str(error))

    def _take(self, envelope: Envelope) -> None:
        token = envelope.sender
        link = self._links.get(token)
        opener = Opener(self._secret, token, HEAD_NAME) if link is None else link.events
        body = opener.open(envelope)
        if body is None:
            logger.warning("%s: a message that does not prove the job's secret was dropped", EVENTS)
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
        """A launcher is gone; while the run goes on, that ends it."""
        with self._changed:
            link = self._links.get(token)
            if link is None or link.is_gone:
                return
            link.is_gone = True
            expected = self._finished or link.heartbeat is None
            name = self._members.name(link.rank)
            self._changed.notify_all()
        if not expected:
            logger.error("%s: %s", name, reason)
            self._lost_node = self._lost_node or name
            self._report(NodeLost(name))


class RemoteNode:
    """The `GangHost` of another node."""

    def __init__(self, head: NodeHead, token: str) -> None:
        self._head = head
        self._token = token
        self._started: dict[str, None] = {}

    def start(self, gang: GangSpec, attempt: int) -> None:
        """Have its launcher start its ranks of a gang."""
        self._started[gang.name] = None
        self._head.order(self._token, StartPart(gang.name, attempt, Job.load(self._head.run_dir).revision))

    def kill(self, gang: str) -> None:
        """Have its launcher kill its ranks of a gang."""
        self._head.order(self._token, KillPart(gang))

    def dump_stacks(self) -> None:
        """Have its launcher ask its processes for their stacks."""
        self._head.order(self._token, DumpStacks())

    def close(self, timeout_s: float) -> None:
        """Have its launcher kill whatever it started."""
        for gang in self._started:
            self.kill(gang)
