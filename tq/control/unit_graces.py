"""Units whose channel ended, until they are back or their time is up.

Owned by a `ControllerService`, whose lock the caller holds.
"""

from collections.abc import Callable
from functools import partial

from tq.timers import Timer, Timers


class UnitGraces:
    """One grace for each break of a channel: that of an earlier break never ends a later one."""

    def __init__(self, timers: Timers, grace_s: float, expired: Callable[[str, int], None]) -> None:
        """Args:
        timers: run the deadlines.
        grace_s: how long a unit may be away.
        expired: called without the lock with what `over` wants to know.
        """
        self._timers = timers
        self._grace_s = grace_s
        self._expired = expired
        self._running: dict[str, tuple[int, Timer]] = {}
        self._breaks = 0

    def begin(self, unit: str) -> None:
        """A unit's channel ended."""
        self.end(unit)
        self._breaks += 1
        self._running[unit] = (
            self._breaks,
            self._timers.after(self._grace_s, partial(self._expired, unit, self._breaks)),
        )

    def end(self, unit: str) -> None:
        """The unit is back."""
        _, timer = self._running.pop(unit, (0, None))
        if timer is not None:
            timer.cancel()

    def over(self, unit: str, number: int) -> bool:
        """Whether a break has really lasted too long: the unit did not come back just now."""
        if self._running.get(unit, (0, None))[0] != number:
            return False
        del self._running[unit]
        return True
