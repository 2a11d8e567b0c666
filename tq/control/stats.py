"""Counts of a controller's rows, from counters: nothing here looks at single rows. Pure."""

from collections.abc import Iterable

from tq.control.fetches import Fetches
from tq.control.puts import Backpressure
from tq.control.row_table import RowTable
from tq.control.task_state import TaskState
from tq.messages import QueueStats, TaskStats


def count_rows(
    table: RowTable, fetches: Fetches, backpressure: Backpressure, admitted_groups: int, units: dict[str, int]
) -> QueueStats:
    return QueueStats(
        tasks=[_count_task(task, fetches.parked.count(name)) for name, task in table.tasks.items()],
        live_rows=len(table.rows),
        newest_version=fetches.newest_version,
        admitted_groups=admitted_groups,
        units=units,
        live_bytes=table.rows.num_bytes,
        row_limit=backpressure.row_limit,
        byte_limit=backpressure.byte_limit,
        waiting_puts=len(backpressure.waiting),
        lost_rows=table.rows.num_lost,
        dead_letter_groups=table.removals.count,
        filtered_groups=table.removals.num_filtered,
    )


def _count_task(task: TaskState, parked: int) -> TaskStats:
    ready = sum(part.queue.num_rows for part in task.partitions.values())
    leased = len(task.leases.holders)
    return TaskStats(
        task=task.spec.name,
        waiting=task.num_left - ready - leased,
        ready=ready,
        leased=leased,
        done=sum(part.num_done for part in task.partitions.values()),
        parked_requests=parked,
        acked=task.num_acked,
        deliveries=task.num_deliveries,
        released=task.num_released,
    )


_WINDOW_S = 10.0


class TaskRates:
    """How fast each task progresses, from what was done some seconds ago.

    The caller holds the lock and passes the clock (s, monotonic).
    """

    def __init__(self, now: float) -> None:
        self._started = now
        self._before: dict[str, tuple[float, int]] = {}

    def note(self, tasks: Iterable[TaskStats], now: float) -> None:
        """Fill in the rows per second since roughly the beginning of the last window."""
        for task in tasks:
            before, done = self._before.get(task.task, (self._started, 0))
            task.rows_per_s = (task.acked - done) / max(now - before, 1e-3)
            if now - before > _WINDOW_S:
                self._before[task.task] = (now, task.acked)
