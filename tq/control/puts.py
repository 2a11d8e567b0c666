"""How rows come into the table: new ones, lost ones that are put again, those of an inventory. Pure.

    RowsCreated --room--> in the table
          '--no room--> parked, in order --room--> in the table
                             '--deadline--> refused, or its unit went: forgotten
    RowsCreated(held) --room--> announced --RowsConfirmed--> in the table
                                    '--the put failed, or the unit went--> forgotten

Where there are several controllers, each hands out rows of other tasks, and each may know of another task that was done
with a lost row before. So a put is held: every controller says what it knows, and a row is handed out only when all
controllers have agreed and heard what the others know.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from asyncflow.errors import PeerRefused, PutPending, QueueFull, RowsExist
from tq.control.events import Answer
from tq.control.row_table import RowTable
from tq.control.rows import Row, RowState, UnitLife
from tq.messages import OutputsWritten, RowsAccepted, RowsConfirmed, RowsCreated


class Backpressure:
    """How many rows and bytes may be alive (0: no limit), and which puts wait for room."""

    def __init__(self, *, row_limit: int, byte_limit: int) -> None:
        self.row_limit = row_limit
        self.byte_limit = byte_limit
        self.waiting: dict[int, RowsCreated] = {}  # request -> put, in order of arrival

    def check(self, put: RowsCreated) -> None:
        """Raise QueueFull for a put that is larger than the queue."""
        if 0 < self.row_limit < len(put.rows):
            raise QueueFull(f"a put of {len(put.rows)} rows is larger than the queue ({self.row_limit} live rows)")
        if 0 < self.byte_limit < put.num_bytes:
            raise QueueFull(f"a put of {put.num_bytes} bytes is larger than the queue ({self.byte_limit} live bytes)")

    def fits(self, put: RowsCreated, *, num_rows: int, num_bytes: int) -> bool:
        rows_fit = not self.row_limit or num_rows + len(put.rows) <= self.row_limit
        return rows_fit and (not self.byte_limit or num_bytes + put.num_bytes <= self.byte_limit)

    def refusal(self, put: RowsCreated, *, num_rows: int, num_bytes: int, because: str) -> QueueFull:
        """Return the reply to a put that waited too long."""
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


Marks = dict[str, list[int]]  # task -> rows, or positions of rows, that it is done with


class Arrivals:
    """Takes rows into the table."""

    def __init__(self, table: RowTable) -> None:
        self.num_bytes = 0  # of announced rows
        self._table = table
        self._announced: dict[int, Row] = {}
        # Announced rows that another unit had and dropped in their favour: lost if the announcement comes to nothing.
        self._let_go: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self._announced)

    def check(self, event: RowsCreated) -> int:
        """Return how many rows of an announcement are new, and were not lost either.

        Raises:
            RowsExist: a row is at another unit, and no unit has announced one.
            PutPending: another unit announced a row, which may come to nothing.
            PeerRefused: it is malformed.
        """
        count = len(event.rows)
        if len(event.groups) != count or len(event.tokens) != count or len(set(event.rows)) != count:
            raise PeerRefused(
                f"{count} rows with {len(event.groups)} groups and {len(event.tokens)} lengths: one each, named once"
            )
        for task, positions in event.commits.items():
            self._table.rows.bit(task)
            if any(not 0 <= k < count for k in positions):
                raise PeerRefused(f"{event.unit}: commits of {task} name rows beyond the put's {count}")
        num_new = 0
        all_rows = self._table.rows
        finished = all_rows.finished(event.partition)
        for number in event.rows:
            coming = self._announced.get(number)
            if coming is not None and coming.unit.name != event.unit and not coming.unit.lost:
                raise PutPending(
                    f"row {number} is just being put, at {coming.unit.name}; put it again once that put has ended"
                )
        for number in event.rows:
            row = self._announced.get(number) or all_rows.rows.get(number)
            if row is None:
                num_new += number not in finished
            elif row.unit.name != event.unit and not row.lost:
                raise RowsExist(
                    f"row {number} exists already, at {row.unit.name}; row indices are never reused in a run"
                )
        return num_new

    def left_by(self, event: RowsCreated) -> list[UnitLife]:
        """Return units that are away and whose rows are now put elsewhere: their producer knows that the unit died."""
        # The put may have reached this controller but not another one, which then could never report the rows as lost.
        here, coming = self._table.rows.rows, self._announced
        known = [row.unit for number in event.rows if (row := coming.get(number) or here.get(number)) is not None]
        return [unit for unit in dict.fromkeys(known) if unit.name != event.unit and not unit.online and not unit.lost]

    def create(self, event: RowsCreated) -> RowsAccepted:
        """Take new rows, and lost ones that were put again; `check` must have passed."""
        accepted: Marks = {}
        all_rows, finished = self._table.rows, self._table.rows.finished(event.partition)
        new = []
        for k, (number, row) in enumerate(self._rows(event)):
            if not event.held and number not in all_rows.rows and number not in finished:
                new.append((number, row))
                continue
            kept = self.announce(number, row) if event.held else self.merge(number, row)
            for name in all_rows.tasks(kept):
                accepted.setdefault(name, []).append(k)
        if new:
            self._table.add(event.partition, new)
        if not event.held:
            self._came([event.partition], event.rows)
        return RowsAccepted(accepted)

    def announce(self, number: int, row: Row) -> int:
        """A row is somewhere, but not confirmed; returns the tasks (bits) that are known to be done with it."""
        self._drop(number)
        known = self._table.rows.rows.get(number)
        if known is not None and not known.lost:
            return self._table.rows.every_task & ~known.left  # announced twice
        row.to(RowState.ANNOUNCED)
        self._announced[number] = row
        self.num_bytes += row.num_bytes
        if known is not None:
            return self._table.graph.still_done(known, row)
        return self._table.rows.every_task if self._table.rows.is_finished(number, row.partition) else 0

    def expects(self, number: int) -> bool:
        """Whether a unit that is up announced this row."""
        row = self._announced.get(number)
        return row is not None and row.unit.online

    def let_go(self, number: int, row: Row) -> None:
        """A returning unit had this row, and was told to drop it for the announcement of a unit that is up."""
        if number not in self._table.rows.rows:
            self._let_go[number] = row

    def confirm(self, event: RowsConfirmed) -> RowsAccepted:
        """Every controller has agreed to these rows. The reply says what was learned since."""
        accepted: Marks = {}
        done = self._done(event.commits)
        partitions = set()
        for k, number in enumerate(event.rows):
            row = self._announced.get(number)
            if row is not None and row.unit.name == event.unit:
                self._drop(number)
                self._lose_let_go(number)  # first: what is known of it counts for the row that is merged
                row.done(done[k])
                partitions.add(row.partition)
                for name in self._table.rows.tasks(self.merge(number, row) & row.left):
                    accepted.setdefault(name, []).append(k)
            for name in self._table.rows.tasks(done[k]):
                self._table.mark_done(name, [number])
        self._came(partitions, event.rows)
        return RowsAccepted(accepted)

    def write(self, event: OutputsWritten) -> None:
        """A holder of a lost row put its outputs where the row is put again, before that was confirmed."""
        mask, bit = self._table.rows.mask(event.columns), self._table.rows.bit(event.task)
        grown = event.num_bytes // max(1, len(event.rows))
        for k, number in enumerate(event.rows):
            row = self._announced.get(number)
            if row is not None and row.unit.name == event.unit and row.left & bit:
                row.done(bit)
                row.wrote(mask, event.tokens[k] if event.tokens else 0)
                row.num_bytes += grown
                self.num_bytes += grown

    def forget(self, unit: str, rows: "set[int] | None" = None) -> None:
        """Drop a unit's announcements (with rows: of those), which will not be confirmed."""
        for number in [number for number, row in self._announced.items() if row.unit.name == unit]:
            if rows is None or number in rows:
                self._drop(number)
                self._lose_let_go(number)

    def merge(self, number: int, row: Row, *, values_kept: bool = False) -> int:
        """A row is at a unit; returns the tasks (bits) known to be done with it; see `RowTable.revive`."""
        table, all_rows = self._table, self._table.rows
        known = all_rows.rows.get(number)
        if all_rows.is_finished(number, row.partition):
            table.finished_again(number, row)
            return all_rows.every_task
        if known is None:
            table.add(row.partition, [(number, row)])
            return 0
        if known.lost:
            return table.revive(number, known, row, values_kept=values_kept)
        return 0  # an inventory brought it already

    def _drop(self, number: int) -> None:
        row = self._announced.pop(number, None)
        if row is not None:
            self.num_bytes -= row.num_bytes

    def _lose_let_go(self, number: int) -> None:
        row = self._let_go.pop(number, None)
        if row is not None:
            self._table.add_lost(number, row)

    def _rows(self, event: RowsCreated) -> list[tuple[int, Row]]:
        all_rows = self._table.rows
        unit, written = all_rows.unit(event.unit), all_rows.mask(event.columns)
        sizes = Counter(event.groups)
        done = self._done(event.commits)
        size, rest = divmod(event.num_bytes, max(1, len(event.rows)))
        return [
            (
                number,
                Row(
                    unit, event.partition, event.groups[k], event.group_size or sizes[event.groups[k]], written,
                    all_rows.every_task & ~done[k], event.tokens[k], size + (k < rest),
                ),
            )
            for k, number in enumerate(event.rows)
        ]  # fmt: skip

    def _done(self, commits: Marks) -> Counter[int]:
        """Return position -> tasks (bits) that are done with the row."""
        done: Counter[int] = Counter()
        for task, positions in commits.items():
            bit = self._table.rows.bit(task)
            for k in positions:
                done[k] |= bit
        return done

    def _came(self, partitions: Iterable[int], rows: Iterable[int]) -> None:
        if self._table.removals.groups:
            self._table.removals.keep_out(rows)
        # The partitions may be complete now.
        for partition in partitions:
            self._table.drop_finished(partition)
            self._table.recount(partition)


class PutQueue:
    """Part of a `ControlState`: answers puts, or parks them until there is room."""

    def __init__(self, table: RowTable, arrivals: Arrivals, backpressure: Backpressure) -> None:
        self.closed = False  # closed for writing: only known rows may come, that is lost ones and repeated puts
        self._table = table
        self._arrivals = arrivals
        self._backpressure = backpressure

    @property
    def drained(self) -> bool:
        """Whether no unknown row can come any more."""
        return self.closed and not self._backpressure.waiting and not len(self._arrivals)

    def create(self, event: RowsCreated, request: int) -> None:
        """Answer a put, or park it; raises PeerRefused (malformed), RowsExist or QueueFull (will never fit)."""
        rows = self._table.rows
        if self.closed and any(
            row not in rows.rows and not rows.is_finished(row, event.partition) for row in event.rows
        ):
            raise PeerRefused("the queue was closed for writing: it takes no new rows")
        for unit in self._arrivals.left_by(event):
            self.lose(unit)
        num_new = self._arrivals.check(event)
        # Lost rows that are put again, and rows restored from a snapshot, do not wait for room.
        if num_new and not event.commits:
            self._backpressure.check(event)
            if self._backpressure.waiting or not self._fits(event):
                self._backpressure.waiting[request] = event
                return
        self._take(event, request)

    def admit(self) -> None:
        """Take the puts that there is room for now, the oldest first."""
        waiting = self._backpressure.waiting
        while waiting and self._fits(waiting[first := next(iter(waiting))]):
            event = waiting.pop(first)
            try:
                self._arrivals.check(event)
            except PeerRefused as error:  # another producer put these rows in the meantime
                self._table.out.append(Answer(first, error))
            else:
                self._take(event, first)

    def expire(self, request: int, because: Callable[[], str]) -> bool:
        """Refuse a put that waited long enough; returns whether there was one."""
        put = self._backpressure.waiting.pop(request, None)
        if put is not None:
            self._table.out.append(Answer(request, self._backpressure.refusal(put, **self._used(), because=because())))
        return put is not None

    def cancel(self, unit: str, rows: "set[int] | None" = None) -> None:
        """Drop parked puts of a unit (with rows: those that name one): they will be told again, or were taken back."""
        for request in self._backpressure.cancel(unit, rows):
            self._table.out.append(Answer(request, PutPending(f"{unit}: a put no longer waits for room; put again")))

    def lose(self, unit: UnitLife) -> None:
        """A unit is gone, with its rows and its announcements."""
        self._arrivals.forget(unit.name)
        self._table.lose(unit)

    def _take(self, event: RowsCreated, request: int) -> None:
        accepted = self._arrivals.create(event)
        self._table.out.append(Answer(request, accepted))

    def _fits(self, event: RowsCreated) -> bool:
        return self._backpressure.fits(event, **self._used())

    def _used(self) -> dict[str, int]:
        """Return what counts toward the limits, including announced rows."""
        rows, coming = self._table.rows, self._arrivals
        return {"num_rows": len(rows) + len(coming), "num_bytes": rows.num_bytes + coming.num_bytes}
