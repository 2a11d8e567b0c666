"""Calls to a controller that are not answered yet, by request number, each with its deadline.

    keep --> take (answered)
        '-> park --> take (answered; the deadline is off) | its time is up --> `expired`

Owned by a `ControllerService`, whose lock the caller holds. Never answers.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from asyncflow.transport.server import Call
from tq.messages import FetchRound, FetchRows
from tq.timers import Timer, Timers

_LONGEST_PARK_S = 3600.0


@dataclass(eq=False, slots=True)
class _Kept:
    call: Call
    since: float
    deadline: Timer | None = None

    def let_go(self) -> Call:
        if self.deadline is not None:
            self.deadline.cancel()
        return self.call


class PendingRequests:
    """Requests that wait."""

    def __init__(self, timers: Timers, expired: Callable[[int], None]) -> None:
        """Args:
        timers: run the deadlines.
        expired: called without the lock with a request whose time is up, though it may just be answered.
        """
        self._timers = timers
        self._expired = expired
        self._kept: dict[int, _Kept] = {}
        self._newest = 0

    def keep(self, call: Call) -> int:
        """Keep a call until it is taken; returns the request's number."""
        self._newest += 1
        self._kept[self._newest] = _Kept(call, time.monotonic())
        return self._newest

    def park(self, request: int, timeout_s: float) -> None:
        """Set the deadline of a request, unless it was answered."""
        kept = self._kept.get(request)
        if kept is not None:
            delay_s = min(max(0.0, timeout_s), _LONGEST_PARK_S)
            kept.deadline = self._timers.after(delay_s, partial(self._expired, request))

    def take(self, request: int) -> Call | None:
        """Return the call, which is to be answered now, once."""
        kept = self._kept.pop(request, None)
        return None if kept is None else kept.let_go()

    def drop(self, session: int) -> list[int]:
        """A channel ended: its calls need no reply, and would keep it alive. Returns the requests."""
        requests = [number for number, kept in self._kept.items() if kept.call.session.number == session]
        for number in requests:
            self.take(number)
        return requests

    def fetches_of(self, owner: str) -> list[int]:
        """Return the fetches of a consumer."""
        return [
            number
            for number, kept in self._kept.items()
            if isinstance(message := kept.call.message, FetchRows | FetchRound) and message.owner == owner
        ]

    def waiting_since(self) -> dict[str, float]:
        """Return, per task, when its oldest fetch began to wait (s, monotonic)."""
        oldest: dict[str, float] = {}
        for kept in self._kept.values():  # in the order of their coming
            if isinstance(kept.call.message, FetchRows | FetchRound):
                oldest.setdefault(kept.call.message.task, kept.since)
        return oldest
