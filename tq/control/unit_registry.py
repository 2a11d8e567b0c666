"""What a unit says when it meets a controller, or meets it again, against what the controller knows. Pure.

never seen             its rows are new, or were lost elsewhere; its tombstones count as done
same life as before    its rows are available again; changes that were told in vain are made up for
another life           it started empty: what is not in the inventory is lost
"""

from collections.abc import Iterator

from tq.control.events import Commit
from tq.control.live_rows import LiveRow, UnitInfo
from tq.control.row_book import RowBook
from tq.messages import RegisterUnit, UnitAccepted


class UnitRegistry:
    """Merges inventories into the book."""

    def __init__(self, book: RowBook, tasks: list[str]) -> None:
        """Args:
        book: rows and tasks.
        tasks: all tasks of the queue.
        """
        self._book = book
        self._tasks = tasks
        self._lives: set[tuple[str, str]] = set()

    def register(self, event: RegisterUnit) -> UnitAccepted:
        """Take an inventory."""
        unit, old = self._unit(event)
        reply = UnitAccepted(self._tasks, [])
        listed = set()
        for number, row, returns in self._records(event, unit):
            listed.add(number)
            kept = self._merge(number, row, reply)
            for task in self._book.rows.tasks(kept & row.left):
                reply.commits.setdefault(task, []).append(number)
            for name, times in returns.items():
                task_state = self._book.tasks.get(name)
                if task_state is not None and times and number in self._book.rows.rows:
                    known = task_state.leases.returns
                    known[number] = max(times, known.get(number, 0))
        self._take_tombstones(event, [unit] if old is None else [unit, old], listed)
        self._book.set_online(unit, online=True)
        for partition in {record.partition for record in event.records} | event.finished.keys():
            for task in self._book.tasks:
                self._book.drop_finished(task, [partition])
            self._book.recount(partition)
        return reply

    def count_finished(self, partition: int, rows: set[int]) -> None:
        """Rows were done before this controller met their unit, or before it started."""
        info = self._book.rows.partition(partition)
        new = rows.difference(info.finished)
        if not new:
            return
        info.num_finished += len(new)
        info.num_nameless += len(new)
        info.finished.update(new)
        for task in self._book.tasks.values():
            task.finished_before(partition, len(new))

    def _finish(self, number: int, *, here: bool) -> None:
        """All tasks were done with a row; if another unit has it again since, that one is told (`here` False)."""
        book = self._book
        for name in book.rows.tasks(book.rows.rows[number].left):
            if not here and name in book.tasks:
                book.out.append(Commit(name, "", book.token(), book.rows.by_unit([number])))
            book.settle(name, [number])

    def _unit(self, event: RegisterUnit) -> tuple[UnitInfo, UnitInfo | None]:
        """Return this life of the unit, and the same life if it was given up before."""
        units = self._book.rows.units
        known = units.get(event.unit)
        if known is not None and known.incarnation in ("", event.incarnation):
            known.incarnation = event.incarnation
            return known, None
        if known is not None:
            self._book.lose(known)
        unit = units[event.unit] = UnitInfo(event.unit, event.incarnation, online=False)
        return unit, next((dead for dead in self._book.rows.dead_units if _same(dead, unit)), None)

    def _records(self, event: RegisterUnit, unit: UnitInfo) -> Iterator[tuple[int, LiveRow, dict[str, int]]]:
        table = self._book.rows
        for record in event.records:
            written = table.mask(record.columns)
            done = sum(table.bits.get(task, 0) for task in set(record.done))
            for k, number in enumerate(record.rows):
                row = LiveRow(
                    unit, record.partition, record.groups[k], record.group_sizes[k], written,
                    table.every_task & ~done, record.tokens[k], record.num_bytes[k],
                )  # fmt: skip
                yield number, row, {task: times[k] for task, times in record.deliveries.items()}

    def _merge(self, number: int, row: LiveRow, reply: UnitAccepted) -> int:
        """Take one row of an inventory; returns the tasks that are known to be done with it (bits)."""
        book = self._book
        known = book.rows.rows.get(number)
        if known is None and book.rows.is_finished(number, row.partition):
            return book.rows.every_task
        if known is None:
            book.add(number, row)
            return 0
        if known.unit.lost:
            same_life = _same(known.unit, row.unit)
            return book.revive(number, known, row, values_kept=same_life)
        if known.unit is not row.unit:
            reply.drop.append(number)
            return 0
        done = book.rows.every_task & ~known.left
        book.grow(known, row.written, row.tokens - known.tokens, row.num_bytes - known.num_bytes)
        for name in book.rows.tasks(known.left & ~row.left):
            book.settle(name, [number])
        book.refresh(number)
        return done

    def _take_tombstones(self, event: RegisterUnit, lives: list[UnitInfo], listed: set[int]) -> None:
        book, table = self._book, self._book.rows.rows
        first_time = (event.unit, event.incarnation) not in self._lives
        self._lives.add((event.unit, event.incarnation))
        for partition, rows in event.finished.items():
            known = [number for number in rows if number in table]
            for number in known:
                self._finish(number, here=table[number].unit in lives or table[number].unit.lost)
            if first_time:
                self.count_finished(partition, set(rows).difference(known))
        for number in [number for unit in lives for number in book.rows.at_unit(unit)]:
            if number in listed or number not in table:
                continue
            if table[number].withheld:  # or cleared, or taken back, while nobody could tell
                book.quarantines.remove([number])
            else:
                book.remove(number)


def _same(one: UnitInfo, other: UnitInfo) -> bool:
    return one.name == other.name and one.incarnation == other.incarnation
