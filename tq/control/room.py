"""Backpressure: new rows wait, in their order, while too many rows or bytes are alive. Pure."""

from asyncflow.errors import QueueFull
from tq.messages import RowsCreated


class Room:
    """How much may be alive, and which puts wait for it."""

    def __init__(self, *, row_limit: int, byte_limit: int) -> None:
        """Args:
        row_limit, byte_limit: of rows that some task is not done with; 0: none.
        """
        self.row_limit = row_limit
        self.byte_limit = byte_limit
        self.waiting: dict[int, RowsCreated] = {}
        """By request."""

    def check(self, put: RowsCreated) -> None:
        """Refuse what will never fit.

        Raises:
            QueueFull: the put is larger than the queue.
        """
        if 0 < self.row_limit < len(put.rows):
            raise QueueFull(f"a put of {len(put.rows)} rows is larger than the queue ({self.row_limit} live rows)")
        if 0 < self.byte_limit < put.num_bytes:
            raise QueueFull(f"a put of {put.num_bytes} bytes is larger than the queue ({self.byte_limit} live bytes)")

    def fits(self, put: RowsCreated, *, num_rows: int, num_bytes: int) -> bool:
        """Whether a put fits beside what is alive."""
        rows_fit = not self.row_limit or num_rows + len(put.rows) <= self.row_limit
        return rows_fit and (not self.byte_limit or num_bytes + put.num_bytes <= self.byte_limit)

    def refusal(self, put: RowsCreated, *, num_rows: int, num_bytes: int, because: str) -> QueueFull:
        """Return what a put is told that waited too long."""
        full = []
        if self.row_limit and num_rows + len(put.rows) > self.row_limit:
            full.append(f"live rows {num_rows} of {self.row_limit}")
        if self.byte_limit and num_bytes + put.num_bytes > self.byte_limit:
            full.append(f"live bytes {num_bytes} of {self.byte_limit}")
        what = ", ".join(full) or "earlier puts wait, too"
        return QueueFull(f"no room for {len(put.rows)} rows: {what}; {because}")

    def cancel(self, unit: str, rows: "set[int] | None" = None) -> list[int]:
        """Drop waiting puts of a unit (with rows: those that name one); returns their requests."""
        requests = [
            request
            for request, put in self.waiting.items()
            if put.unit == unit and (rows is None or not rows.isdisjoint(put.rows))
        ]
        for request in requests:
            del self.waiting[request]
        return requests
