"""Holds: puts wait while all units of a queue are about to be cut at one moment. And the cuts that came of them. Pure.

HoldPuts(h) --> puts are parked --CutSnapshot(h) or the deadline--> parked puts go on
"""

from collections.abc import Callable

from asyncflow.errors import PeerRefused
from tq.timers import Timer
from tq.unit.records import Cut

Resume = Callable[[], None]


class Holds:
    """Of one unit; the caller holds its lock."""

    def __init__(self) -> None:
        self._deadlines: dict[str, Timer] = {}
        self._parked: list[Resume] = []
        self._cuts: dict[str, tuple[int, Cut]] = {}

    def begin(self, hold: str, deadline: Timer) -> None:
        """Puts wait from now on, until `end`."""
        before = self._deadlines.get(hold)
        if before is not None:
            before.cancel()
        self._deadlines[hold] = deadline

    def park(self, resume: Resume) -> bool:
        """Whether a put must wait; then it is carried out later by calling `resume`."""
        if self._deadlines:
            self._parked.append(resume)
        return bool(self._deadlines)

    def end(self, hold: str) -> list[Resume]:
        """This hold is over; returns the puts that may go on now. An unknown hold is passed over."""
        deadline = self._deadlines.pop(hold, None)
        if deadline is not None:
            deadline.cancel()
        if self._deadlines:
            return []
        parked, self._parked = self._parked, []
        return parked

    def check(self, hold: str) -> None:
        """Raise PeerRefused when the hold has ended."""
        if hold not in self._deadlines:
            raise PeerRefused(f"hold {hold} has ended; hold again, and cut within its time")

    def keep(self, hold: str, session: int, cut: Cut) -> None:
        """Keep a cut for the client that made it."""
        self._cuts[hold] = (session, cut)

    def take(self, hold: str) -> Cut:
        """Return a cut, once.

        Raises:
            PeerRefused: there is none.
        """
        try:
            return self._cuts.pop(hold)[1]
        except KeyError:
            raise PeerRefused(f"hold {hold} was not cut, or was written already") from None

    def abandoned(self, session: int) -> list[Cut]:
        """The client left; returns its cuts, which nobody will ask for."""
        gone = [hold for hold, (owner, _) in self._cuts.items() if owner == session]
        return [self._cuts.pop(hold)[1] for hold in gone]
