"""Deadlines of one process: callbacks that run at their time unless they are cancelled before, in one thread.

Made for deadlines that hardly ever pass: setting one wakes the thread only if no other one is due earlier, and
cancelling one takes no lock.
"""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_TIDY_ABOVE = 1024


@dataclass(eq=False, slots=True)
class Timer:
    """One deadline; a `callback` of None means cancelled."""

    callback: Callable[[], None] | None

    def cancel(self) -> None:
        """Do not run the callback, unless it is running already; drops all references to it. Idempotent."""
        self.callback = None


class Timers:
    """Runs callbacks, which must not block for long. `failed` hears of one that raised; the others run all the same."""

    def __init__(self, name: str, *, failed: Callable[[Exception], None] | None = None) -> None:
        self._name = name
        self._failed = failed
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._tidy_at = _TIDY_ABOVE
        self._closed = False
        self._thread = threading.Thread(target=self._run_callbacks, name=f"timers-{name}", daemon=True)
        self._thread.start()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Run `callback` in `delay_s` seconds; never, if these timers are closed."""
        timer = Timer(callback)
        at = time.monotonic() + delay_s
        with self._changed:
            if self._closed:
                return timer
            if len(self._heap) >= self._tidy_at:
                self._drop_cancelled()
            heapq.heappush(self._heap, (at, next(self._numbers), timer))
            if self._heap[0][2] is timer:  # otherwise the thread wakes in time anyway
                self._changed.notify()
        return timer

    def close(self) -> None:
        """Forget all deadlines; idempotent."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _drop_cancelled(self) -> None:
        self._heap = [one for one in self._heap if one[2].callback is not None]
        heapq.heapify(self._heap)
        # The next sweep waits until the heap has doubled, so that the cost per timer is constant.
        self._tidy_at = max(_TIDY_ABOVE, 2 * len(self._heap))

    def _run_callbacks(self) -> None:
        while (callback := self._next_due()) is not None:
            try:
                callback()
            except Exception as error:  # a thread's boundary: without this no other deadline would ever pass
                logger.exception("%s: a callback failed", self._name)
                if self._failed is not None:
                    self._failed(error)

    def _next_due(self) -> Callable[[], None] | None:
        """Wait for the next callback; None when closed."""
        with self._changed:
            while not self._closed:
                while self._heap and self._heap[0][2].callback is None:
                    heapq.heappop(self._heap)
                wait_s = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                callback = heapq.heappop(self._heap)[2].callback
                if callback is not None:  # None: cancelled just now
                    return callback
        return None
