"""The launcher of node 1, 2, ... once it has joined: carries out the orders of node 0, and reports what happens here.

It decides nothing. However it ends (by an order, or because node 0 is lost), no process that it started is left.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Protocol

from asyncflow.clock import HostClock
from asyncflow.errors import ConfigError
from asyncflow.job import Job
from launcher.nodes.messages import (
    DumpStacks,
    FinishRun,
    FromNode,
    KillPart,
    Left,
    Order,
    PartExited,
    StartPart,
    StopAsked,
)
from launcher.process.events import FAILED, RESUMABLE, GangExited, StopRequested
from launcher.process.gang_hosts import GangHost

LOOK_S = 0.25
"""How often it looks whether node 0 is there, and whether it sees the job that an order is about (s)."""
KILL_TIMEOUT_S = 5.0
SIGHT_TIMEOUT_S = 60.0
"""How long a shared file system may take to show what node 0 wrote (s)."""

Inbound = Order | GangExited | StopRequested
"""What such a launcher handles."""

logger = logging.getLogger(__name__)


class Link(Protocol):
    """The way to node 0."""

    clock: HostClock

    def send(self, event: FromNode) -> None: ...
    def lost(self) -> str: ...


@dataclass(frozen=True)
class End:
    """How this launcher ends: exit code, and the last line for the user."""

    code: int
    line: str


class NodeFollower:
    """One node's part of the run."""

    def __init__(
        self,
        node: int,
        link: Link,
        host: GangHost,
        inbox: "SimpleQueue[Inbound]",
        *,
        load_job: Callable[[], Job],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        node: this node's number.
        link: to node 0.
        host: starts ranks here.
        inbox: orders, ends of ranks here (`GangExited`), signals (`StopRequested`).
        load_job: reads `job.json`.
        now: monotonic time (s).
        """
        self._node = node
        self._link = link
        self._host = host
        self._inbox = inbox
        self._load_job = load_job
        self._now = now
        self._unseen: dict[str, tuple[StartPart, float]] = {}

    def run(self) -> End:
        """Follow node 0 until the run ends, or node 0 is lost; then nothing that was started here is left."""
        try:
            while True:
                try:
                    end = self._take(self._inbox.get(timeout=LOOK_S))
                except Empty:
                    end = self._look()
                if end is not None:
                    return end
        finally:
            self._host.close(KILL_TIMEOUT_S)
            self._link.send(Left())

    def _take(self, event: Inbound) -> End | None:
        match event:
            case StartPart():
                self._unseen[event.gang] = (event, self._now() + SIGHT_TIMEOUT_S)
                self._start_seen()
            case KillPart(gang=gang):
                unseen = self._unseen.pop(gang, None)
                if unseen is not None:
                    self._never_started(unseen[0], "killed before it started")
                self._host.kill(gang)
            case DumpStacks():
                self._host.dump_stacks()
            case FinishRun(code=code, line=line):
                return End(code, line)
            case GangExited():
                self._link.send(self._told(event))
            case StopRequested(count=count):
                self._link.send(StopAsked(count))
            case _:
                logger.warning("%s was not expected", event)
        return None

    def _look(self) -> End | None:
        self._start_seen()
        reason = self._link.lost()
        if not reason:
            return None
        line = f"node 0 is lost ({reason}); node {self._node} ended its processes. Continue the run with --resume"
        return End(RESUMABLE, line)

    def _start_seen(self) -> None:
        """Start the gangs whose `job.json` is visible here; a shared file system may show it late."""
        if not self._unseen:
            return
        try:
            job = self._load_job()
        except (ConfigError, OSError, ValueError) as error:
            logger.info("%s", error)
            job = None
        for name, (order, deadline) in list(self._unseen.items()):
            if job is not None and job.revision >= order.revision:
                del self._unseen[name]
                self._host.start(job.gang(name), order.attempt)
            elif self._now() > deadline:
                del self._unseen[name]
                self._never_started(order, f"node {self._node} does not see the job.json that node 0 wrote")

    def _never_started(self, order: StartPart, error: str) -> None:
        exited = GangExited(order.gang, FAILED, error, at=time.time())
        self._link.send(self._told(exited))

    def _told(self, exited: GangExited) -> PartExited:
        """Return the end of a gang's ranks here as a message to node 0, in node 0's time."""
        at = exited.at - (time.time() - self._link.clock.now())
        return PartExited(replace(exited, at=at))
