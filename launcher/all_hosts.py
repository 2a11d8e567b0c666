"""Gangs over all nodes of a run: one `GangHost` made of one per node.

`launcher.job` talks to it as if there were one host; a gang that several nodes share starts on each and ends as a
whole. Ends of parts come from any thread.
"""

import threading
from collections.abc import Callable, Mapping

from asyncflow.job import GangSpec
from launcher.gang_host import GangHost
from launcher.gang_parts import GangParts, KillPart
from launcher.run_events import GangExited


class AllHosts:
    """Knows which node has which part of a gang."""

    def __init__(self, report: Callable[[GangExited], None]) -> None:
        """Args:
        report: is told, from any thread, when all ranks of a gang are gone.
        """
        self._report = report
        self._hosts: dict[int, GangHost] = {}
        self._parts: dict[str, GangParts] = {}
        self._lock = threading.Lock()

    def add(self, hosts: Mapping[int, GangHost]) -> None:
        """Have these start and end what is on their nodes."""
        self._hosts.update(hosts)

    def start(self, gang: GangSpec, attempt: int) -> None:
        """Start a gang's ranks on all its nodes."""
        with self._lock:
            self._parts[gang.name] = GangParts(gang)
        for node in gang.parts:
            self._hosts[node].start(gang, attempt)

    def kill(self, gang: str) -> None:
        """SIGKILL a gang's ranks wherever they are."""
        with self._lock:
            parts = self._parts.get(gang)
            orders = [] if parts is None else parts.kill()
        for order in orders:
            self._hosts[order.node].kill(gang)

    def dump_stacks(self) -> None:
        """Have every process of the run write the stacks of its threads into its log."""
        for host in self._hosts.values():
            host.dump_stacks()

    def close(self, timeout_s: float) -> None:
        """Kill what is left on every host."""
        for host in self._hosts.values():
            host.close(timeout_s)

    def part_exited(self, node: int, part: GangExited) -> None:
        """A gang's ranks on a node are gone; from any thread."""
        with self._lock:
            parts = self._parts.get(part.gang)
            orders = [] if parts is None else parts.exited(node, part)
        for order in orders:
            match order:
                case KillPart():
                    self._hosts[order.node].kill(part.gang)
                case GangExited():
                    self._report(order)
