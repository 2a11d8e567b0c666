"""Which gangs start again together when one fails, how soon, and when that has been too often; the record of it. Pure.

a gang fails            itself, in place; the trainer: with all that follows its weights, from the last checkpoint
again, and again        after 1, 2, 4 ... s
`max_restarts` times    everything, from the last checkpoint
that too often, too     nothing: the run ends
twice alike, and it was never at work       nothing: it would go on like that
"""

import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from asyncflow.job import GangSpec
from workers.settings.dataflow import CONTROLLER, OBSERVERS, STORAGE, TRAINERS

FOLLOWERS = TRAINERS | OBSERVERS | {CONTROLLER, STORAGE, "actor_fwd"}
"""What starts again with the trainer: it holds samples, columns or figures of steps that are no more. Rollouts are not
among them: they drop what they run, and take the new lineage's weights."""
_QUEUE = frozenset({CONTROLLER, STORAGE})
"""With a critic in a role of its own, what the queue lost cannot be put again by itself: a response that the critic has
seen, and the actor has not, would come to the actor as another one."""
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0


class Scope(StrEnum):
    """How much starts again."""

    GANG = "gang"
    """What failed, and what follows it."""
    ALL = "all"
    NONE = "none"
    """It has been too often."""


@dataclass(frozen=True)
class Restart:
    """What to do about a failure.

    Attributes:
        scope: how much starts again.
        wait_s: before it does (s).
        count: failures of this gang within the window, this one among them.
    """

    scope: Scope
    wait_s: float = 0.0
    count: int = 1


class RestartBudget:
    """Counts failures per gang and decides how much starts again."""

    def __init__(
        self,
        *,
        max_restarts: int,
        max_global_restarts: int,
        window_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        max_restarts: a gang that fails more often within the window takes all others with it.
        max_global_restarts: restarts of everything within the window.
        window_s: failures longer ago do not count (s).
        clock: seconds; not the wall's, which may be set.
        """
        self._max_restarts = max_restarts
        self._max_global = max_global_restarts
        self._window_s = window_s
        self._clock = clock
        self._failures: defaultdict[str, deque[float]] = defaultdict(deque)
        self._globals: deque[float] = deque()

    def failed(self, gang: str) -> Restart:
        """Count a failure of a gang, which happened just now."""
        at = self._clock()
        mine = self._failures[gang]
        mine.append(at)
        self._forget(mine, at)
        count = len(mine)
        if count <= self._max_restarts:
            wait_s = 0.0 if count == 1 else min(_FIRST_WAIT_S * 2.0 ** (count - 2), _LONGEST_WAIT_S)
            return Restart(Scope.GANG, wait_s, count)
        self._forget(self._globals, at)
        if len(self._globals) >= self._max_global:
            return Restart(Scope.NONE, count=count)
        self._globals.append(at)
        self._failures.clear()
        return Restart(Scope.ALL, count=count)

    def _forget(self, times: deque[float], now: float) -> None:
        while times and times[0] <= now - self._window_s:
            times.popleft()


class FirstStarts:
    """Tells which gangs fail alike at their first two starts: what never worked would go on failing so. Pure."""

    def __init__(self) -> None:
        self._worked: set[str] = set()
        self._failed_with: dict[str, tuple[int, str]] = {}

    def worked(self, gang: str) -> None:
        """All ranks of a gang are at work, or were."""
        self._worked.add(gang)

    def fails_again(self, gang: str, code: int, error: str) -> bool:
        """Take in a failure; returns whether the gang failed like that at its last start, and has never worked.

        Args:
            error: in one line; numbers in it (ports, processes, times) may differ.
        """
        if gang in self._worked:
            return False
        how = code, re.sub(r"\d+", "#", error)
        before, self._failed_with[gang] = self._failed_with.get(gang), how
        return before == how


def restarts_with(gang: GangSpec, gangs: Iterable[GangSpec], *, reference_follows: bool) -> tuple[str, ...]:
    """Return the gangs that start again when `gang` fails, by name.

    Args:
        gang: that failed.
        gangs: of the run.
        reference_follows: the reference's weights are earlier ones of the policy.
    """
    gangs = tuple(gangs)
    if gang.role not in TRAINERS and not (gang.role in _QUEUE and any(one.role == "critic" for one in gangs)):
        return (gang.name,)
    roles = FOLLOWERS | {"ref"} if reference_follows else FOLLOWERS
    return tuple(one.name for one in gangs if one.role in roles)


@dataclass
class RestartLog:
    """What failed so far and what was started again, for `asyncflow status`: counts of one start of the command.

    Attributes:
        gangs: how often each was started again.
        lineage: of the weights now.
        restores: how often the run went back to a checkpoint.
        last_error: what failed last, and what follows from it; "" when nothing did.
        last_error_at: when (unix time, s).
    """

    gangs: Counter[str] = field(default_factory=Counter)
    lineage: int = 0
    restores: int = 0
    last_error: str = ""
    last_error_at: float = 0.0

    def started_again(self, gang: str) -> None:
        """Count another start of a gang."""
        self.gangs[gang] += 1

    def restored(self, lineage: int) -> None:
        """Count a return to a checkpoint."""
        self.restores += 1
        self.lineage = lineage

    def failed(self, text: str) -> None:
        """Keep the last failure; `text` is one line."""
        self.last_error, self.last_error_at = text, time.time()

    @staticmethod
    def from_summary(fields: Mapping[str, Any]) -> "RestartLog":
        """Read what `summary` returned."""
        return RestartLog(**{**fields, "gangs": Counter(fields["gangs"])})

    def summary(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**vars(self), "gangs": dict(self.gangs)}
