"""Node 0's side of a run on several nodes: admits the other launchers, gives orders, learns what happens there.

It serves a channel to each of them; `launcher.nodes.node_messages` has the messages. A launcher is lost if its channel
ends before it has left, or if it is silent. Imports torch.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

from asyncflow.clock import HeartbeatMonitor, HostClock
from asyncflow.errors import ConfigError, RoleFailed
from asyncflow.job import GangSpec, Job, Network, Node
from asyncflow.process import ServiceThreads
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Call, ChannelServer, ChannelSession
from launcher.nodes.membership import Membership
from launcher.nodes.node_messages import (
    DumpStacks,
    FinishRun,
    FromHead,
    FromNode,
    Hello,
    KillPart,
    LauncherAlive,
    Left,
    NextOrder,
    Noted,
    Order,
    PartExited,
    Ping,
    Pong,
    Ready,
    Refuse,
    StartPart,
    StopAsked,
)
from launcher.process.gang_hosts import GangHost
from launcher.process.job_store import JobStoreClient
from launcher.process.run_events import FAILED, USAGE, GangExited, NodeLost, StopRequested

SERVICE = "node-0"
HEARTBEAT_S = 0.5
"""How often launchers send a heartbeat (s)."""
SILENT_S = 4.0
"""Silence that counts as death (s); with the pauses between checks, it is noticed within 5 s."""
LEAVE_TIMEOUT_S = 10.0
"""How long node 0 waits for the other launchers to end what they started (s)."""
_MOST_CLIENTS = 2**13  # more than there are nodes: a launcher may ask several times
_LONGEST_LOOK_S = 1.0
_LOOK_S = 0.1
_JOIN_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


@dataclass
class _Link:
    """A launcher that said hello; `waiting` is its request for the next order."""

    rank: int
    session: ChannelSession
    orders: deque[Order] = field(default_factory=deque)
    waiting: Call | None = None
    is_member: bool = False
    is_gone: bool = False


class NodeHead:
    """The launchers of all other nodes, seen from node 0. The constructor starts answering them.

    Args:
        store: of the job.
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
        self._members = members
        self._clock = clock
        self.run_dir = run_dir
        self._part_exited = part_exited
        self._report = report
        self._links: dict[str, _Link] = {}
        self._monitor: HeartbeatMonitor[str] = HeartbeatMonitor(_LONGEST_LOOK_S)
        self._changed = threading.Condition()
        self._end: FinishRun | None = None
        self._lost_node = ""
        self._stops = 0
        self._closing = threading.Event()
        self.threads = ServiceThreads("node 0's launcher")
        credentials = Credentials(store.open_client(), bytes.fromhex(secret))
        self._server = ChannelServer(
            credentials, SERVICE, FromNode, self, max_clients=_MOST_CLIENTS, threads=self.threads
        )
        self._watcher = self.threads.start(self._watch_heartbeats, name="node-heartbeats")

    def end(self, error: BaseException | None) -> None:
        """End the threads. Launchers that do not know yet how the run ended are told: by `error` of node 0."""
        code = USAGE if isinstance(error, ConfigError) else FAILED
        self.finish_run(code, f"Error: {error}" if error is not None else "node 0 ended without a word")
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
                    raise RoleFailed(self._members.describe_missing(timeout_s, str(self.run_dir)))
                self._changed.wait(_LOOK_S)
            return ""

    def other_nodes(self) -> list[Node]:
        """Return all nodes but this one."""
        with self._changed:
            return self._members.ready_nodes()

    def choose_network(self, offered: Iterable[Network]) -> str:
        """Return the first of the networks in which all nodes reach each other; "": none."""
        with self._changed:
            return next((each.cidr for each in offered if self._members.are_in_network(each.cidr)), "")

    def clock_warnings(self) -> list[str]:
        with self._changed:
            return self._members.clock_warnings()

    def remote_hosts(self) -> dict[int, GangHost]:
        """Return node -> the object that starts and ends ranks there; call it after all have joined."""
        with self._changed:
            return {node.rank: RemoteNode(self, self._members.token(node.rank)) for node in self._members.ready_nodes()}

    def send_order(self, token: str, message: Order) -> None:
        """Send a message to one launcher; one that is gone does not receive it."""
        with self._changed:
            link = self._links[token]
            link.orders.append(message)
        self._hand_out(link)

    def finish_run(self, code: int, line: str) -> None:
        """End the run on all nodes: they kill what is left there, print `line` and exit with `code`. Idempotent."""
        with self._changed:
            if self._end is not None:
                return
            self._end = FinishRun(code, line)
            waiting = {token: link for token, link in self._links.items() if not link.is_gone}
        for token in waiting:
            self.send_order(token, self._end)
        with self._changed:
            # Only launchers that joined have processes to end.
            joined = [link for link in waiting.values() if link.is_member]
            self._changed.wait_for(lambda: all(link.is_gone for link in joined), LEAVE_TIMEOUT_S)

    def close(self) -> None:
        """End the threads and channels. Idempotent."""
        self.threads.close()  # from now on an error is expected
        self._closing.set()
        self._server.close()
        self._watcher.join(_JOIN_TIMEOUT_S)

    def handle(self, call: Call) -> None:
        """Take in what a launcher says; each has a thread of its own."""
        try:
            answer = self._answer(call)
        except Exception as error:
            self.threads.fail("node-events", error)
            raise
        if answer is not None:
            call.send_reply(answer)

    def handle_disconnect(self, session: ChannelSession) -> None:
        self._lose_node(session.client, "its channel ended")

    def _answer(self, call: Call) -> FromHead | None:
        """Return the answer; None: it comes later."""
        arrived = self._clock.now()
        token, message = call.session.client, call.message
        if not isinstance(message, Ping | NextOrder | LauncherAlive):
            logger.info("%s: %s", token, message)
        with self._changed:
            if isinstance(message, Hello):
                self._links[token] = _Link(message.rank, call.session)
                answer = Refuse("the run is over", True) if self._end else self._members.answer_hello(token, message)
                self._changed.notify_all()
                return answer
            link = self._links.get(token)
            if link is None:
                return Refuse("it did not say hello first", True)
            if isinstance(message, Ready):
                link.is_member = self._members.ready(token, message)
                self._changed.notify_all()
            if link.is_member and not link.is_gone:
                self._monitor.hear(token, time.monotonic())
        match message:
            case Ping(asked=asked):
                return self._end or Pong(asked, arrived, self._clock.now())
            case NextOrder():
                with self._changed:
                    link.waiting = call
                self._hand_out(link)
                return None
            case Ready() | LauncherAlive():
                pass
            case PartExited(exited=exited):
                self._part_exited(link.rank, exited)
            case StopAsked(count=count):
                with self._changed:
                    is_first, self._stops = count > self._stops, max(count, self._stops)
                if is_first:  # a scheduler signals all launchers at once
                    self._report(StopRequested(count))
            case Left():
                self._lose_node(token, "its launcher left")
            case _:
                assert_never(message)
        return Noted()

    def _hand_out(self, link: _Link) -> None:
        """Answer a launcher's request with the next order, if there are both."""
        with self._changed:
            if link.waiting is None or not link.orders:
                return
            call, link.waiting = link.waiting, None
            order = link.orders.popleft()
        call.send_reply(order)  # one at a time, so they arrive in their order

    def _watch_heartbeats(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            with self._changed:
                silences = self._monitor.silences(time.monotonic())
            for token, silent_s in silences.items():
                if silent_s > SILENT_S:
                    self._lose_node(token, "no sign of life of its launcher")
                    self._server.cut_off(self._links[token].session.number)

    def _lose_node(self, token: str, reason: str) -> None:
        """A launcher is gone; during the run, that ends the run."""
        with self._changed:
            link = self._links.get(token)
            if link is None or link.is_gone:
                return
            link.is_gone = True
            self._monitor.forget(token)
            # A launcher that has not joined runs nothing, so the run does not depend on it.
            expected = self._end is not None or not link.is_member
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
        self._head.send_order(self._token, StartPart(gang.name, attempt, Job.load(self._head.run_dir).revision))

    def kill(self, gang: str) -> None:
        self._head.send_order(self._token, KillPart(gang))

    def dump_stacks(self) -> None:
        self._head.send_order(self._token, DumpStacks())

    def close(self, timeout_s: float) -> None:
        """Have its launcher kill whatever it started; does not wait."""
        for gang in self._started:
            self.kill(gang)
