"""The parts of one gang, each on a node of its own: which to kill when one fails, and how the gang ended. Pure.

part of node 0 failed --> kill the parts on nodes 1, 2 --> they are gone --> GangExited with what failed first
"""

import signal
from dataclasses import dataclass, replace

from asyncflow.job import GangSpec
from launcher.run_events import GangExited

_KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class KillPart:
    """SIGKILL the gang's ranks on a node."""

    node: int


class GangParts:
    """One attempt of one gang; the next one begins when all parts of this one are gone."""

    def __init__(self, gang: GangSpec) -> None:
        self._running = set(gang.parts)
        self._killed: set[int] = set()
        self._failures: list[GangExited] = []

    def kill(self) -> list[KillPart]:
        """End the gang: say which parts that still run have not been told yet."""
        orders = [KillPart(node) for node in sorted(self._running - self._killed)]
        self._killed |= self._running
        return orders

    def exited(self, node: int, part: GangExited) -> list[KillPart | GangExited]:
        """Take in the end of a node's ranks; the whole gang's end follows the last one."""
        if node not in self._running:
            return []
        self._running.discard(node)
        orders: list[KillPart | GangExited] = []
        if part.code != 0:
            if not (self._failures and node in self._killed and part.code == _KILLED):  # else it is our own doing
                self._failures.append(part)
            orders += self.kill()
        return orders if self._running else [self._merged(part)]

    def _merged(self, last: GangExited) -> GangExited:
        if not self._failures:
            return last
        # A signal first: the ranks that lost their peer then raise errors about it.
        first = min(self._failures, key=lambda part: (part.code >= 0, part.at))
        return replace(first, deadline=any(part.deadline for part in self._failures))
