"""Acks that no unit could take, because the rows were lost while the consumer had them in hand. Pure."""

from asyncflow.errors import PeerRefused, Superseded
from tq.control.events import Commit
from tq.control.row_book import RowBook
from tq.messages import AckLost


def ack_lost(book: RowBook, event: AckLost, *, promised: bool = False) -> None:
    """Count an ack. Where the rows were put again since, their units are told by a `Commit`.

    The controller that serves the task judges; the others are told afterwards, and may not know of the loss yet.

    Args:
        book: rows and tasks.
        event: the ack.
        promised: the consumer was told that it counts, so it does, also when the rows turn out to be at a unit.

    Raises:
        Superseded: somebody else has the rows; nothing changed.
        PeerRefused: the rows are not lost; nothing changed.
    """
    open_rows = _under_lease(book, event)
    table = book.rows.rows
    for number in open_rows:
        if event.task in book.tasks and not (table[number].unit.lost or promised or number in book.moved):
            raise PeerRefused(f"row {number} is not lost: {table[number].unit.name} has it; ack it there")
    where = book.rows.by_unit(open_rows)
    book.settle(event.task, open_rows)
    if where and event.task in book.tasks:
        book.out.append(Commit(event.task, event.token, where))


def _under_lease(book: RowBook, event: AckLost) -> list[int]:
    """Return the rows that are not done yet; only the controller that serves the task can check the lease."""
    bit, task = book.bit(event.task), book.tasks.get(event.task)
    open_rows = []
    for number in event.rows:
        row = book.rows.rows.get(number)
        is_open = row is not None and bool(row.left & bit)
        if task is not None and not is_open and not task.leases.settled(event.token, number):
            raise Superseded(f"row {number}: the lease {event.token} of {event.task} is void")
        if task is not None and is_open and task.leases.holders.get(number) != event.token:
            raise Superseded(f"row {number}: the lease {event.token} of {event.task} was given to another")
        if is_open:
            open_rows.append(number)
    return open_rows
