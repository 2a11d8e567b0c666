"""Deadlines of one process: callbacks that run at their time unless they are cancelled before, in one thread."""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

_TIDY_ABOVE = 1024


@dataclass(order=True)
class Timer:
    """One deadline.

    Attributes:
        at: on the monotonic clock (s).
        number: breaks ties.
        callback: what to do; None: cancelled.
    """

    at: float
    number: int
    callback: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        """Do nothing at that time. What the callback refers to is let go of at once. Idempotent."""
        self.callback = None


class Timers:
    """Runs callbacks, which must not block for long and must not raise."""

    def __init__(self, name: str) -> None:
        """Start the thread; `name` appears in it."""
        self._changed = threading.Condition()
        self._heap: list[Timer] = []
        self._numbers = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"timers-{name}", daemon=True)
        self._thread.start()

    def after(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Run `callback` in `delay_s` seconds."""
        timer = Timer(time.monotonic() + delay_s, next(self._numbers), callback)
        with self._changed:
            if len(self._heap) > _TIDY_ABOVE and len(self._heap) % _TIDY_ABOVE == 0:
                self._heap = [one for one in self._heap if one.callback is not None]
                heapq.heapify(self._heap)
            heapq.heappush(self._heap, timer)
            if self._heap[0] is timer:
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

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not (self._heap and self._heap[0].at <= time.monotonic()):
                    self._changed.wait(max(0.0, self._heap[0].at - time.monotonic()) if self._heap else None)
                if self._closed:
                    return
                callback = heapq.heappop(self._heap).callback
            if callback is not None:
                callback()
