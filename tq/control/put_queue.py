"""Puts of new rows: checked, taken at once, or parked in their order while the queue is full. Pure.

RowsCreated --room--> taken (`Arrivals`)
      '--no room--> parked --room, in order--> taken
                       '--deadline--> refused, or its unit went: forgotten
"""

from collections.abc import Callable

from asyncflow.errors import PeerRefused, PutPending
from tq.control.arrivals import Arrivals
from tq.control.events import Answer
from tq.control.live_rows import UnitInfo
from tq.control.losses import Losses
from tq.control.room import Room
from tq.control.row_book import RowBook
from tq.messages import RowsCreated


class PutQueue:
    """Part of a `ControlState`."""

    def __init__(self, book: RowBook, arrivals: Arrivals, losses: Losses, room: Room) -> None:
        """Args:
        book: rows and tasks.
        arrivals: takes rows into it.
        losses: forgets what is somewhere again.
        room: the limits.
        """
        self._book = book
        self._arrivals = arrivals
        self._losses = losses
        self._room = room

    def create(self, event: RowsCreated, request: int) -> None:
        """Answer a put, or park it.

        Raises:
            PeerRefused: it is malformed; its children say that rows exist already, or that it will never fit.
        """
        for unit in self._arrivals.left_by(event):
            self.lose(unit)
        num_new = self._arrivals.check(event)
        if num_new and not event.commits:
            self._room.check(event)
            if self._room.waiting or not self._fits(event):
                self._room.waiting[request] = event
                return
        self._take(event, request)

    def admit(self) -> None:
        """Take the puts that there is room for now, the oldest first."""
        waiting = self._room.waiting
        while waiting and self._fits(waiting[first := next(iter(waiting))]):
            event = waiting.pop(first)
            try:
                self._arrivals.check(event)
            except PeerRefused as error:  # somebody else put these rows meanwhile
                self._book.out.append(Answer(first, error))
            else:
                self._take(event, first)

    def expire(self, request: int, because: Callable[[], str]) -> bool:
        """Refuse a put that waited long enough; returns whether there was one."""
        put = self._room.waiting.pop(request, None)
        if put is not None:
            self._book.out.append(Answer(request, self._room.refusal(put, **self._used(), because=because())))
        return put is not None

    def cancel(self, unit: str, rows: "set[int] | None" = None) -> None:
        """Parked puts of a unit (with rows: those that name one) will be told again, or were taken back."""
        for request in self._room.cancel(unit, rows):
            self._book.out.append(Answer(request, PutPending(f"{unit}: a put that waited for room does so no more")))

    def lose(self, unit: UnitInfo) -> None:
        """A unit is gone, with its rows and with what it announced."""
        self._arrivals.forget(unit.name)
        self._book.lose(unit)

    def _take(self, event: RowsCreated, request: int) -> None:
        accepted = self._arrivals.create(event)
        if not event.held:
            self._losses.forget(event.rows)
        self._book.out.append(Answer(request, accepted))

    def _fits(self, event: RowsCreated) -> bool:
        return self._room.fits(event, **self._used())

    def _used(self) -> dict[str, int]:
        """Return what counts toward the limits: rows that are coming, too."""
        rows, coming = self._book.rows, self._arrivals
        return {"num_rows": len(rows) + len(coming), "num_bytes": rows.num_bytes + coming.num_bytes}
