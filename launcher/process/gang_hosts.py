"""What starts and ends the ranks of gangs: this node (`LocalGangs`), or all nodes of a run as one (`AllHosts`).

`run_job` has an `AllHosts`. The launcher of another node has its `LocalGangs`, which node 0 reaches through
`launcher.nodes.head.RemoteNode`. A gang that spans several nodes starts on each of them and ends as a whole:

    part on node 0 failed --> kill the parts on nodes 1, 2 --> they are gone --> GangExited with the first failure
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from asyncflow.job import GangSpec
from launcher.process.fork_server import ForkServers
from launcher.process.run_events import FAILED, GangExited
from workers.settings.dataflow import STORAGE

if TYPE_CHECKING:
    from launcher.process.gang import Gang
    from launcher.process.job_store import JobStoreClient
    from tq.unit.row_journal import JournalMemory


logger = logging.getLogger(__name__)


class GangHost(Protocol):
    """One host, or all of them. A single thread calls it; ends of gangs are reported elsewhere, as `GangExited`."""

    def start(self, gang: GangSpec, attempt: int) -> None:
        """Start this host's ranks of a gang; returns at once."""

    def kill(self, gang: str) -> None:
        """SIGKILL its ranks here, including ranks about to start. Idempotent; an unknown gang is ignored."""

    def dump_stacks(self) -> None:
        """Have every process here write its threads' stacks into its log."""

    def close(self, timeout_s: float) -> None:
        """Kill what is left and wait until it is gone."""


class LocalGangs:
    """The gangs of this node; each has at most one live attempt.

    Only the launcher's main thread may use it: the fork server lives as long as the thread that started it.

    Args:
        entrypoint: `module:function` that every rank runs as `function(run_dir, gang)`.
        servers: of this node's interpreters.
        pythons: role -> its interpreter; the others have this process's.
        exited: called by other threads when this node's ranks of a gang are gone.
    """

    def __init__(
        self,
        *,
        entrypoint: str,
        run_dir: Path,
        store: "JobStoreClient",
        servers: ForkServers,
        pythons: Mapping[str, str],
        exited: Callable[[GangExited], None],
        node: int = 0,
    ) -> None:
        self._entrypoint = entrypoint
        self._run_dir = run_dir
        self._store = store
        self._servers = servers
        self._pythons = pythons
        self._exited = exited
        self._node = node
        self._gangs: dict[str, Gang] = {}
        # Of this node's storage units, kept across their attempts.
        self._journals: dict[str, JournalMemory] = {}

    def start(self, gang: GangSpec, attempt: int) -> None:
        """Start this node's ranks; returns at once. Any earlier attempt must be gone."""
        from launcher.process.gang import Gang  # imports torch

        if gang.role == STORAGE and gang.name not in self._journals:
            self._journals[gang.name] = self._store.keep_journal(gang.name)
        python = self._pythons.get(gang.role, sys.executable)
        try:
            server = self._servers.server_of(python)
        except OSError as error:  # it was there when the run was checked
            text = f"{python} cannot be run: {error.strerror}"
            self._exited(GangExited(gang.name, FAILED, text, gang.ranks_on(self._node).start, time.time()))
            return
        self._gangs[gang.name] = Gang(
            gang,
            attempt,
            server=server,
            entrypoint=self._entrypoint,
            run_dir=self._run_dir,
            store=self._store,
            exited=self._exited,
            node=self._node,
        )
        self._gangs[gang.name].start()

    def kill(self, gang: str) -> None:
        if gang in self._gangs:
            self._gangs[gang].kill()

    def dump_stacks(self) -> None:
        for gang in self._gangs.values():
            gang.dump_stacks()

    def close(self, timeout_s: float) -> None:
        """Kill what is left, end the fork servers, and wait for the threads."""
        for gang in self._gangs.values():
            gang.kill()
        self._servers.stop()
        deadline = time.monotonic() + timeout_s
        for name, gang in self._gangs.items():
            if not gang.join(max(0.0, deadline - time.monotonic())):
                logger.error("the thread of gang %s did not end", name)
        while self._journals:
            self._journals.popitem()[1].close()


class AllHosts:
    """One `GangHost` made of one per node; it knows which node runs which part of a gang.

    `report` is called, from any thread, when all ranks of a gang are gone.
    """

    def __init__(self, report: Callable[[GangExited], None]) -> None:
        self._report = report
        self._hosts: dict[int, GangHost] = {}
        self._parts: dict[str, GangParts] = {}
        self._lock = threading.Lock()

    def add_hosts(self, hosts: Mapping[int, GangHost]) -> None:
        self._hosts.update(hosts)

    def start(self, gang: GangSpec, attempt: int) -> None:
        with self._lock:
            self._parts[gang.name] = GangParts(gang)
        for node in gang.parts:
            self._hosts[node].start(gang, attempt)

    def kill(self, gang: str) -> None:
        with self._lock:
            parts = self._parts.get(gang)
            orders = [] if parts is None else parts.kill()
        for order in orders:
            self._hosts[order.node].kill(gang)

    def dump_stacks(self) -> None:
        for host in self._hosts.values():
            host.dump_stacks()

    def close(self, timeout_s: float) -> None:
        for host in self._hosts.values():
            host.close(timeout_s)

    def part_exited(self, node: int, part: GangExited) -> None:
        """Report that a gang's ranks on a node are gone. Any thread may call it."""
        with self._lock:
            parts = self._parts.get(part.gang)
            orders = [] if parts is None else parts.part_exited(node, part)
        for order in orders:
            match order:
                case KillPart():
                    self._hosts[order.node].kill(part.gang)
                case GangExited():
                    self._report(order)


@dataclass(frozen=True)
class KillPart:
    """SIGKILL the gang's ranks on a node."""

    node: int


class GangParts:
    """The parts of one attempt of a gang, by node; the next attempt begins when all of them are gone. Pure."""

    def __init__(self, gang: GangSpec) -> None:
        self._running = set(gang.parts)
        self._killed: set[int] = set()
        self._failures: list[GangExited] = []

    def kill(self) -> list[KillPart]:
        """End the gang: return orders for the running parts that were not told yet."""
        orders = [KillPart(node) for node in sorted(self._running - self._killed)]
        self._killed |= self._running
        return orders

    def part_exited(self, node: int, part: GangExited) -> list[KillPart | GangExited]:
        """Take in the end of a node's ranks; the end of the whole gang follows the last one."""
        if node not in self._running:
            return []
        self._running.discard(node)
        orders: list[KillPart | GangExited] = []
        if part.code != 0:
            if not (self._failures and part.ordered):
                self._failures.append(part)
            orders += self.kill()
        return orders if self._running else [self._merge_exits(part)]

    def _merge_exits(self, last: GangExited) -> GangExited:
        if not self._failures:
            return last
        first = min(self._failures, key=GangExited.failure_precedence)
        return replace(first, deadline=any(part.deadline for part in self._failures))
