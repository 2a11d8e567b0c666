"""The deadline of one call, shared by all services that the call asks. Pure, with a clock that is passed in."""

import time
from collections.abc import Callable

_LEAST_S = 0.5


class Deadline:
    """Begins when it is made."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        timeout_s: until it passes.
        clock: seconds.
        """
        self.timeout_s = timeout_s
        """How long the whole call has (s)."""
        self._clock = clock
        self._end = clock() + timeout_s

    @property
    def passed(self) -> bool:
        """Whether nobody is waited for any more."""
        return self._clock() >= self._end

    @property
    def left_s(self) -> float:
        """How long whoever is asked next may take (s).

        Never nothing: else one service that is silent would make those that are asked after it seem so, every time.
        """
        return max(_LEAST_S, self._end - self._clock())
