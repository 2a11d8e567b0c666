"""The members of a run on several nodes: node 0's list of the launchers that said hello. Pure.

Hello -> Welcome .. Ready -> here       Hello that does not fit -> Refuse, and the run ends with its reason
                                        a second launcher with the same rank -> Refuse; it may ask again
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from asyncflow.agreement import Identity, differences
from asyncflow.clock import HostClock
from asyncflow.job import GangSpec, Node
from launcher.nodes.node_messages import Hello, Ready, Refuse, Welcome

MOST_AHEAD_S = 1.0
"""A larger difference of wall clocks is worth a warning (s)."""


@dataclass(frozen=True)
class DevicesUsed:
    """Devices of a node that the placement uses: `count` of this kind, from number 0."""

    kind: str
    count: int


@dataclass
class _Entry:
    token: str
    hello: Hello
    ready: Ready | None = None


class Membership:
    """The launchers of nodes 1, 2, ...; node 0 is not among them.

    Args:
        count: nodes of the run.
        devices: what the placement needs on each node.
        identity: what must be equal on all nodes, as node 0 has it.
    """

    def __init__(self, count: int, devices: Mapping[int, DevicesUsed], identity: Identity) -> None:
        self._count = count
        self._devices = devices
        self._identity = identity
        self._entries: dict[int, _Entry] = {}
        self._turned_away: dict[int, str] = {}
        self.obstacle = ""
        """Why the run cannot begin: the complaint of the first launcher that cannot take part."""

    def answer_hello(self, token: str, hello: Hello) -> Welcome | Refuse:
        """Answer a launcher that wants to take part; `token` names this attempt."""
        before = self._entries.get(hello.rank)
        if before is not None and before.hello.launcher != hello.launcher:
            self._turned_away[hello.rank] = hello.host
            return Refuse(f"node {hello.rank} is already {before.hello.host}; give every node its own number", True)
        if before is not None and before.ready is not None:
            return Refuse(f"node {hello.rank} has joined already", True)
        obstacle = self._find_obstacle(hello)
        if obstacle:
            reason = f"node {hello.rank} ({hello.host}): {obstacle}"
            self.obstacle = self.obstacle or reason
            return Refuse(reason, False)
        others = [each for rank, entry in self._entries.items() if rank != hello.rank for each in entry.hello.networks]
        self._entries[hello.rank] = _Entry(token, hello)
        return Welcome(others)

    def ready(self, token: str, ready: Ready) -> bool:
        """Note that a launcher can start gangs; return whether it is a member."""
        entry = next((entry for entry in self._entries.values() if entry.token == token), None)
        if entry is not None:
            entry.ready = ready
        return entry is not None

    def is_complete(self) -> bool:
        return not self.missing_nodes()

    def missing_nodes(self) -> list[int]:
        """Return the nodes that are not ready."""
        here = {rank for rank, entry in self._entries.items() if entry.ready is not None}
        return [rank for rank in range(1, self._count) if rank not in here]

    def describe_missing(self, timeout_s: float, where: str) -> str:
        """Return a message that names the nodes that did not arrive; `where` is the run directory."""
        missing = self.missing_nodes()
        nodes = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        also = [f"{host} was started as node {rank}, too" for rank, host in sorted(self._turned_away.items())]
        notes = f"; {'; '.join(also)}" if also else ""
        return (
            f"{nodes} of {self._count}: did not join within {timeout_s:g} s (launcher.start_timeout_s){notes}; start "
            f"the same command on every node, with {where} on a file system that all share"
        )

    def name(self, rank: int) -> str:
        """Return a node's name for messages."""
        entry = self._entries.get(rank)
        return f"node {rank}" if entry is None else f"node {rank} ({entry.hello.host})"

    def token(self, rank: int) -> str:
        return self._entries[rank].token

    def ready_nodes(self) -> list[Node]:
        """Return the nodes that are ready."""
        return [
            Node(rank, entry.hello.host, entry.hello.address, HostClock(entry.ready.boot, entry.ready.offset_s))
            for rank, entry in sorted(self._entries.items())
            if entry.ready is not None
        ]

    def are_in_network(self, cidr: str) -> bool:
        """Return whether all nodes reach each other in a network. Of two launchers, the one that said hello later tried
        to reach the other one."""
        return all(
            cidr in [each.cidr for each in entry.hello.networks]
            and entry.ready is not None
            and cidr in entry.ready.networks
            for entry in self._entries.values()
        )

    def clock_warnings(self) -> list[str]:
        """Return a line for each node whose wall clock is wrong."""
        ahead = {rank: entry.ready.ahead_s for rank, entry in sorted(self._entries.items()) if entry.ready is not None}
        return [
            f"{self.name(rank)}: its clock is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} node 0's; "
            f"timelines are aligned, times in logs and of files are not: run an NTP client there"
            for rank, seconds in ahead.items()
            if abs(seconds) > MOST_AHEAD_S
        ]

    def _find_obstacle(self, hello: Hello) -> str:
        if hello.complaint:
            return hello.complaint
        if differing := differences(self._identity, hello.identity):
            return f"it differs from node 0: {differing}; install the same versions and copy the same files everywhere"
        if hello.count != self._count:
            return f"it was started with --nnodes {hello.count}, node 0 with {self._count}; give all the same"
        if not 1 <= hello.rank < self._count:
            return f"--node-rank {hello.rank} is not 1 to {self._count - 1}"
        needed = self._devices[hello.rank]
        if needed.count and (hello.device != needed.kind or hello.num_devices < needed.count):
            return (
                f"it has {_text(hello.device, hello.num_devices)}, but {needed.count} {needed.kind} devices are used "
                f"there; set launcher.devices_per_node to what every node has"
            )
        return ""


def needed_devices(gangs: Iterable[GangSpec], count: int) -> dict[int, DevicesUsed]:
    """Return the devices that a placement uses on each of `count` nodes."""
    used = dict.fromkeys(range(count), DevicesUsed("cpu", 0))
    for gang in gangs:
        for node, device in gang.places:
            kind, _, number = device.partition(":")
            if number:
                used[node] = DevicesUsed(kind, max(used[node].count, int(number) + 1))
    return used


def _text(kind: str, count: int) -> str:
    return "no accelerator" if kind == "cpu" else f"{count} {kind} devices"
