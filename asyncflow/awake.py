"""Waits that do not count the time in which this process stood still itself, on a host that is overloaded or suspended.

What is waited for stood still as well, or spoke and was not heard yet, and would be blamed for it.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TypeVar

R = TypeVar("R")

_LONGEST_S = 1.0
_FEWEST = 4


def awake_slices(timeout_s: float) -> Iterator[float]:
    """Yield how long to wait next (s), until `timeout_s` is over: `any(event.wait(s) for s in awake_slices(10.0))`.

    A slice has at most a second and a quarter of the whole, and counts no more, whenever the caller comes back.
    """
    longest_s = min(_LONGEST_S, timeout_s / _FEWEST)
    left_s = timeout_s
    while left_s > 0:
        slice_s = min(longest_s, left_s)
        began = time.monotonic()
        yield slice_s
        left_s -= min(time.monotonic() - began, slice_s)


def awake_result(future: "Future[R]", timeout_s: float) -> R:
    """Return a future's result.

    Raises:
        TimeoutError: there is none within `timeout_s`.
        BaseException: the future's own.
    """
    for slice_s in awake_slices(timeout_s):
        try:
            return future.result(slice_s)
        except TimeoutError:
            if future.done():
                return future.result()
    return future.result(0.0)


def excused(heard_at: float, *, looked_at: float, now: float, longest_s: float) -> float:
    """Return the time from which a peer's silence counts, for a caller that looks again and again. Pure.

    Args:
        heard_at: from when on it counted at the last look.
        looked_at: of that look.
        now: of this one; all of one clock (monotonic s).
        longest_s: time between two looks that counts; the rest of a longer one does not.
    """
    return min(now, heard_at + max(0.0, now - looked_at - longest_s))
