"""Counts of a controller's rows, from counters: nothing here looks at single rows. Pure."""

from tq.control.fetches import Fetches
from tq.control.room import Room
from tq.control.row_book import RowBook
from tq.control.task_state import TaskState
from tq.messages import QueueStats, TaskStats


def count_rows(book: RowBook, fetches: Fetches, room: Room) -> QueueStats:
    """Return what a controller's state knows of itself."""
    return QueueStats(
        tasks=[_count_task(task, fetches.parked.count(name)) for name, task in book.tasks.items()],
        live_rows=len(book.rows),
        newest_version=fetches.newest_version,
        admitted_groups=0,
        live_bytes=book.rows.num_bytes,
        row_limit=room.row_limit,
        byte_limit=room.byte_limit,
        waiting_puts=len(room.waiting),
        lost_rows=book.rows.num_lost,
        quarantined_groups=book.quarantines.count,
        filtered_groups=book.quarantines.num_filtered,
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
        given_back=task.num_given_back,
    )
