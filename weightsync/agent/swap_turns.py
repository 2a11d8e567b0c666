"""Turns that receivers take to swap their weights. Pure; the planner's simulation takes the same turns.

receiver   ask (parks) ............. granted -> swap -> end
agent      at most `max_updating` swap, the others wait in the order of asking
"""

from collections import deque


class SwapTurns:
    """At most `most` receivers swap at the same time (None: any number), in the order of asking."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._swapping: set[object] = set()
        self._waiting: deque[tuple[object, object, float]] = deque()

    def ask(self, call: object, session: object, deadline: float | None) -> bool | None:
        """Return whether the session may swap now; None: its call waits until `deadline`."""
        if session in self._swapping or self._most is None or len(self._swapping) < self._most:
            self._swapping.add(session)
            return True
        if deadline is None:
            return False
        self._waiting.append((call, session, deadline))
        return None

    def end(self, session: object) -> list[object]:
        """The session has swapped, or is gone; return the calls whose turn has come."""
        self._swapping.discard(session)
        self._waiting = deque(each for each in self._waiting if each[1] != session)
        turns = []
        while self._waiting and (self._most is None or len(self._swapping) < self._most):
            call, following, _ = self._waiting.popleft()
            self._swapping.add(following)
            turns.append(call)
        return turns

    def take_overdue(self, now: float) -> list[object]:
        """Return the calls whose deadline has passed, and forget them."""
        late = [call for call, _, deadline in self._waiting if deadline <= now]
        self._waiting = deque(each for each in self._waiting if each[2] > now)
        return late
