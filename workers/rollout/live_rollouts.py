"""What rollouts of users' functions are doing: for `asyncflow status`, and as spans of the timeline. Decides nothing.

rollout   |------------- id 7, row 112, 2 turns, tool_s 0.8 ---------------|
turn           |-- 31 tokens --|                    |--- 12 tokens ---|
"""

import time
from dataclasses import dataclass

from asyncflow.timeline import Spans
from workers.agents.wire import Failed, Finished
from workers.engines.base import Generation
from workers.rows.finished import RolloutRequest

_FIRST_CALL_S = 1.0
"""How long a rollout that has not called yet counts as if it would in a moment (s)."""


@dataclass
class _Live:
    """A rollout: `number` counts them, `began` is when (s, monotonic)."""

    number: int
    began: float


class LiveRollouts:
    """Told by `FunctionRollouts` of everything that happens to its rollouts; its owner is one thread."""

    def __init__(self, spans: Spans) -> None:
        """Args:
        spans: get every rollout, and every turn of it.
        """
        self._spans = spans
        self._live: dict[int, _Live] = {}
        self._coming: dict[int, float] = {}
        """Those whose first call is to come: ticket -> when it began, in order."""
        self._num_begun = 0
        self._totals = dict.fromkeys(("turns", "drawing_s", "waiting_s", "in_tools_s"), 0.0)
        self._counted_until = time.monotonic()

    @property
    def num_coming(self) -> int:
        """Rollouts whose first call is about to come. One that takes longer to it leaves the room to others."""
        since = time.monotonic() - _FIRST_CALL_S
        while self._coming and next(iter(self._coming.values())) <= since:
            del self._coming[next(iter(self._coming))]
        return len(self._coming)

    def figures(self, *, drawing: int, waiting: int) -> dict[str, float]:
        """Return `Rollouts.figures`; take in how many calls are drawn, and wait, since the last time."""
        live = len(self._live)
        counts = {"drawing": drawing, "waiting": waiting, "in_tools": max(0, live - drawing - waiting)}
        now = time.monotonic()
        for name, number in counts.items():
            self._totals[f"{name}_s"] += (now - self._counted_until) * number
        self._counted_until = now
        return {"live": live, **counts, **self._totals}

    def begin(self, ticket: int) -> None:
        """A rollout begins."""
        self._num_begun += 1
        self._coming[ticket] = began = time.monotonic()
        self._live[ticket] = _Live(self._num_begun, began)

    def called(self, ticket: int) -> None:
        """It wants a reply."""
        self._coming.pop(ticket, None)

    def drawn(self, ticket: int, generation: Generation, *, since: float) -> None:
        """The engine has drawn for it, since then (s, monotonic)."""
        self._totals["turns"] += 1
        if (live := self._live.get(ticket)) is not None:
            tokens = len(generation.response_R)
            self._spans.record("turn", time.monotonic() - since, id=live.number, row=generation.index, tokens=tokens)

    def end(self, request: RolloutRequest, message: Finished | Failed) -> None:
        """It came to its end."""
        self._coming.pop(request.ticket, None)
        live = self._live.pop(request.ticket)
        seconds = time.monotonic() - live.began
        told: dict[str, int | float | str] = {"failed": message.text} if isinstance(message, Failed) else {
            "turns": message.turns, "tool_s": round(message.tool_s, 3)
        }  # fmt: skip
        self._spans.record("rollout", seconds, id=live.number, row=request.index, group=request.group, **told)

    def abandon(self) -> None:
        """All are dropped."""
        self._live.clear()
        self._coming.clear()
