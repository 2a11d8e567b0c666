"""How rows come into the table: new ones, lost ones that are put again, those of an inventory. Pure.

    RowsCreated ---------------------------> in the table
    RowsCreated(held) --> announced --RowsConfirmed--> in the table
                              '--the put failed, or the unit went--> forgotten

Where there are several controllers, each hands out rows of other tasks, and each may know of another task that was done
with a lost row before. So a put is held: every controller says what it knows, and only when all have agreed, and heard
what the others know, is a row handed out.
"""

from collections import Counter
from collections.abc import Iterable

from asyncflow.errors import PeerRefused, PutPending, RowsExist
from tq.control.live_rows import LiveRow, UnitInfo
from tq.control.row_book import RowBook
from tq.messages import OutputsWritten, RowsAccepted, RowsConfirmed, RowsCreated

Marks = dict[str, list[int]]
"""Task -> rows, or positions of rows, that it is done with."""


class Arrivals:
    """Takes rows into a book."""

    def __init__(self, book: RowBook) -> None:
        """Args:
        book: rows and tasks.
        """
        self.num_bytes = 0
        """Of announced rows."""
        self._book = book
        self._announced: dict[int, LiveRow] = {}
        self._let_go: dict[int, LiveRow] = {}
        """Announced rows that another unit had, and let go of for them: lost if the announcement comes to nothing."""

    def __len__(self) -> int:
        return len(self._announced)

    def check(self, event: RowsCreated) -> int:
        """Return how many rows of an announcement are new, and were not lost either.

        Raises:
            PeerRefused: it is malformed.
            RowsExist: a row is at another unit, and none is announced by one.
            PutPending: another unit announced a row, which may come to nothing.
        """
        count = len(event.rows)
        if len(event.groups) != count or len(event.tokens) != count or len(set(event.rows)) != count:
            raise PeerRefused(
                f"{count} rows with {len(event.groups)} groups and {len(event.tokens)} lengths: one each, named once"
            )
        for task, positions in event.commits.items():
            self._book.bit(task)
            if any(not 0 <= k < count for k in positions):
                raise PeerRefused(f"{event.unit}: commits of {task} name rows beyond the put's {count}")
        num_new = 0
        table = self._book.rows
        finished = table.finished(event.partition)
        for number in event.rows:
            coming = self._announced.get(number)
            if coming is not None and coming.unit.name != event.unit and not coming.unit.lost:
                raise PutPending(
                    f"row {number} is just being put, at {coming.unit.name}; put it again when that is over"
                )
        for number in event.rows:
            row = self._announced.get(number) or table.rows.get(number)
            if row is None:
                num_new += number not in finished
            elif row.unit.name != event.unit and not row.unit.lost:
                raise RowsExist(
                    f"row {number} exists already, at {row.unit.name}; row indices are never reused in a run"
                )
        return num_new

    def left_by(self, event: RowsCreated) -> list[UnitInfo]:
        """Return units that are away and whose rows somebody puts elsewhere: who put them there knows that it died.

        The put may have reached this controller and not another one, which then could never report the rows as lost.
        """
        here, coming = self._book.rows.rows, self._announced
        known = [row.unit for number in event.rows if (row := coming.get(number) or here.get(number)) is not None]
        return [unit for unit in dict.fromkeys(known) if unit.name != event.unit and not unit.online and not unit.lost]

    def create(self, event: RowsCreated) -> RowsAccepted:
        """Take new rows, and lost ones that were put again; `check` found nothing wrong."""
        accepted: Marks = {}
        table, finished = self._book.rows, self._book.rows.finished(event.partition)
        new = []
        for k, (number, row) in enumerate(self._rows(event)):
            if not event.held and number not in table.rows and number not in finished:
                new.append((number, row))
                continue
            kept = self.announce(number, row) if event.held else self.merge(number, row)
            for name in table.tasks(kept):
                accepted.setdefault(name, []).append(k)
        if new:
            self._book.add(event.partition, new)
        if not event.held:
            self._settled([event.partition], event.rows)
        return RowsAccepted(accepted)

    def announce(self, number: int, row: LiveRow) -> int:
        """A row is somewhere, but not confirmed; returns the tasks that are known to be done with it (bits)."""
        self._drop(number)
        known = self._book.rows.rows.get(number)
        if known is not None and not known.unit.lost:
            return self._book.rows.every_task & ~known.left  # told twice
        self._announced[number] = row
        self.num_bytes += row.num_bytes
        if known is not None:
            return self._book.still_done(known, row)
        return self._book.rows.every_task if self._book.rows.is_finished(number, row.partition) else 0

    def expects(self, number: int) -> bool:
        """Whether a unit that is up announced this row."""
        row = self._announced.get(number)
        return row is not None and row.unit.online

    def let_go(self, number: int, row: LiveRow) -> None:
        """Another unit returned with this row, which is announced by one that is up, and was told to let go of it."""
        if number not in self._book.rows.rows:
            self._let_go[number] = row

    def confirm(self, event: RowsConfirmed) -> RowsAccepted:
        """Every controller has agreed to these rows. What was learnt since is told."""
        accepted: Marks = {}
        done = self._done(event.commits)
        partitions = set()
        for k, number in enumerate(event.rows):
            row = self._announced.get(number)
            if row is not None and row.unit.name == event.unit:
                self._drop(number)
                self._lose_let_go(number)  # what is known of it counts for the row that is merged
                row.left &= ~done[k]
                partitions.add(row.partition)
                for name in self._book.rows.tasks(self.merge(number, row) & row.left):
                    accepted.setdefault(name, []).append(k)
            for name in self._book.rows.tasks(done[k]):
                self._book.settle(name, [number])
        self._settled(partitions, event.rows)
        return RowsAccepted(accepted)

    def write(self, event: OutputsWritten) -> None:
        """Who had a lost row in hand put its outputs where it is put again, before that is confirmed."""
        mask, bit = self._book.rows.mask(event.columns), self._book.bit(event.task)
        grown = event.num_bytes // max(1, len(event.rows))
        for k, number in enumerate(event.rows):
            row = self._announced.get(number)
            if row is not None and row.unit.name == event.unit and row.left & bit:
                row.left &= ~bit
                row.written |= mask
                row.tokens += event.tokens[k] if event.tokens else 0
                row.num_bytes += grown
                self.num_bytes += grown

    def forget(self, unit: str, rows: "set[int] | None" = None) -> None:
        """What a unit announced (with rows: of those) will not be confirmed."""
        for number in [number for number, row in self._announced.items() if row.unit.name == unit]:
            if rows is None or number in rows:
                self._drop(number)
                self._lose_let_go(number)

    def merge(self, number: int, row: LiveRow, *, values_kept: bool = False) -> int:
        """A row is at a unit; returns the tasks that are known to be done with it (bits).

        Args:
            number: of the row.
            row: what there is.
            values_kept: a lost row came back with everything that was written.
        """
        book, table = self._book, self._book.rows
        known = table.rows.get(number)
        if table.is_finished(number, row.partition):
            book.finished_again(number, row)
            return table.every_task
        if known is None:
            book.add(row.partition, [(number, row)])
            return 0
        if known.unit.lost:
            return book.revive(number, known, row, values_kept=values_kept)
        return 0  # it was in an inventory already

    def _drop(self, number: int) -> None:
        row = self._announced.pop(number, None)
        if row is not None:
            self.num_bytes -= row.num_bytes

    def _lose_let_go(self, number: int) -> None:
        row = self._let_go.pop(number, None)
        if row is not None:
            self._book.add_lost(number, row)

    def _rows(self, event: RowsCreated) -> list[tuple[int, LiveRow]]:
        table = self._book.rows
        unit, written = self._book.unit(event.unit), table.mask(event.columns)
        sizes = Counter(event.groups)
        done = self._done(event.commits)
        size, rest = divmod(event.num_bytes, max(1, len(event.rows)))
        return [
            (
                number,
                LiveRow(
                    unit, event.partition, event.groups[k], event.group_size or sizes[event.groups[k]], written,
                    table.every_task & ~done[k], event.tokens[k], size + (k < rest),
                ),
            )
            for k, number in enumerate(event.rows)
        ]  # fmt: skip

    def _done(self, commits: Marks) -> Counter[int]:
        """Return, by position, the tasks (bits) that are done with a row."""
        done: Counter[int] = Counter()
        for task, positions in commits.items():
            bit = self._book.bit(task)
            for k in positions:
                done[k] |= bit
        return done

    def _settled(self, partitions: Iterable[int], rows: Iterable[int]) -> None:
        """Rows came; some may be in quarantine, and some partitions complete."""
        self._book.quarantines.keep_out(list(rows))
        for partition in partitions:
            self._book.drop_partition_if_finished(partition)
            self._book.recount(partition)
