"""How fast each task gets on. Pure; the caller holds the lock and passes the clock (s, monotonic)."""

from collections.abc import Iterable

from tq.messages import TaskStats

_WINDOW_S = 10.0


class TaskRates:
    """Remembers, per task, how much was done some seconds ago."""

    def __init__(self, now: float) -> None:
        self._started = now
        self._before: dict[str, tuple[float, int]] = {}

    def note(self, tasks: Iterable[TaskStats], now: float) -> None:
        """Fill in the rows per second since about the last window's begin."""
        for task in tasks:
            before, done = self._before.get(task.task, (self._started, 0))
            task.rows_per_s = (task.acked - done) / max(now - before, 1e-3)
            if now - before > _WINDOW_S:
                self._before[task.task] = (now, task.acked)
