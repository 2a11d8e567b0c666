"""Says when somebody who gives signs of life has been silent for too long. Pure: the clock is passed in."""

BEAT_S = 0.5
"""How often launchers give a sign of life (s)."""
SILENT_S = 4.0
"""Silence that counts as death (s): with the pauses between looks that is seen within 5 s."""
_LONGEST_LOOK_S = 1.0
"""Time between two looks that counts. More means that whoever looks did not run itself, and knows nothing of it (s)."""


class Pulse:
    """One peer's. Its signs of life carry a number that grows."""

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._silent_s = 0.0
        self._last = -1

    def look(self, number: int, now: float) -> bool:
        """Take in the newest number that is known; returns whether the peer has been silent for too long.

        Args:
            number: of the peer's last sign of life.
            now: monotonic time (s).
        """
        self._silent_s += min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        if number > self._last:
            self._last = number
            self._silent_s = 0.0
        return self._silent_s > SILENT_S
