"""Who is killed next, and when: pure, from a seed.

Names are dealt like cards: all that live in a random order, then all again. So every process has its turn however few
kills there are, and a process of a role with many is no likelier victim than one of a role with few.
"""

import random
from collections.abc import Collection
from dataclasses import dataclass

_HURRY = 0.3
_LONGEST_PAUSE_S = 1.5


@dataclass(frozen=True)
class Moment:
    """When the next process is killed.

    Attributes:
        hurried: without waiting until the run got on after the last kill.
        pause_s: after that.
    """

    hurried: bool
    pause_s: float


class KillPlan:
    """Draws victims and moments."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._dealt: list[str] = []

    def moment(self) -> Moment:
        """Return when the next one dies."""
        hurried = self._random.random() < _HURRY
        return Moment(hurried, self._random.uniform(0.0, _LONGEST_PAUSE_S))

    def victim(self, alive: Collection[str]) -> str:
        """Return which of those that live dies next: the one whose last turn is longest ago, or never was."""
        fresh = sorted(set(alive) - set(self._dealt))
        name = self._random.choice(fresh) if fresh else next(name for name in self._dealt if name in alive)
        self._dealt = [*(other for other in self._dealt if other != name), name]
        return name
