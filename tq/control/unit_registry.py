"""What a unit says when it meets a controller, or meets it again, against what the controller knows. Pure.

never seen             its rows are new, or were lost elsewhere; its tombstones count as done
same life as before    its rows are available again; changes that were told in vain are made up for
another life           it started empty: what is not in the inventory is lost
a life that is over    told of by the next one. Where it was met, every row of it was known. Else no controller of that
                       time may have survived: its rows are lost, unless they were put again since, and what was
                       finished stays so
"""

from collections.abc import Iterable, Iterator

from tq.control.events import Commit
from tq.control.puts import Arrivals
from tq.control.recovery import fence_void_leases
from tq.control.row_table import RowTable
from tq.control.rows import Row, RowState, UnitLife
from tq.messages import RegisterUnit, RemovalReason, RowRecords, RowsRemoved, UnitAccepted, UnitLoss


class UnitRegistry:
    """Merges inventories into the table."""

    def __init__(self, table: RowTable, arrivals: Arrivals, tasks: list[str]) -> None:
        """Args:
        table: rows and tasks.
        arrivals: takes rows in.
        tasks: all tasks of the queue.
        """
        self._table = table
        self._arrivals = arrivals
        self._tasks = tasks
        self._lives: set[tuple[str, str]] = set()

    def register(self, event: RegisterUnit) -> UnitAccepted:
        """Take an inventory."""
        self._arrivals.forget(event.unit)
        is_new = (event.unit, event.incarnation) not in self._lives
        unit, old = self._unit(event)
        reply = UnitAccepted(self._tasks, [])
        listed = set()
        for record, number, row, returns in self._records(event, unit):
            listed.add(number)
            kept = self._merge(number, row, reply, pending=record.pending)
            for task in self._table.rows.tasks(kept & row.left):
                reply.commits.setdefault(task, []).append(number)
            for name, times in returns.items():
                task_state = self._table.tasks.get(name)
                if task_state is not None and times and number in self._table.rows.rows:
                    task_state.leases.returned_before(number, times)
        self._take_tombstones(event, [unit] if old is None else [unit, old], listed)
        self._table.set_online(unit, online=True)
        self._table.removals.keep_out(sorted(listed))
        unmet = [one for one in event.earlier if (one.unit, one.incarnation) not in self._lives]
        for life in reversed(unmet):  # a row may have been in two lives: the later one knows more
            self._take_life(life)
        if is_new and any(self._table.losses):  # rows that were lost earlier may be put here, where no fence is known
            for served in self._table.tasks.values():
                fence_void_leases(self._table, served, [event.unit] if served.leases.some_void else ())
        for told in [event, *unmet]:
            partitions = {record.partition for record in told.records} | told.finished.keys()
            for partition in partitions | {group.partition for group in told.removed_groups}:
                self._table.drop_finished(partition)
                self._table.recount(partition)
        return reply

    def remove(self, event: RowsRemoved) -> None:
        """A unit let go of rows."""
        self._arrivals.forget(event.unit, set(event.rows))
        all_rows = self._table.rows.rows
        at_unit = [number for number in event.rows if number in all_rows and all_rows[number].unit.name == event.unit]
        here = [number for number in at_unit if not all_rows[number].lost]  # else an earlier life of the unit had it
        if event.reason is RemovalReason.GROUP_LEFT:
            self._table.removals.remove(here, event.cause)
            return
        if event.reason is RemovalReason.DROPPED:
            self._table.misplace(here)
            return
        for number in here:
            self._table.remove(number, may_return=True)
        if event.reason is RemovalReason.CLEARED:
            self._table.clear_if_empty(event.partition)

    def lost_records(self, rows: Iterable[int]) -> list[RowRecords]:
        """Describe rows that went with their unit."""
        all_rows = self._table.rows
        records: dict[tuple[int, int, int], RowRecords] = {}
        for number in sorted(rows):
            row = all_rows.rows[number]
            key = (row.partition, row.written, row.left)
            if key not in records:
                done = all_rows.tasks(all_rows.every_task & ~row.left)
                records[key] = RowRecords(row.partition, [], [], [], [], [], all_rows.columns(row.written), done)
            records[key].append(
                number, group=row.group, group_size=row.group_size, tokens=row.tokens, num_bytes=row.num_bytes
            )
        return list(records.values())

    def losses(self) -> list[UnitLoss]:
        """Return the rows that went with their unit, by the unit's life."""
        lives: dict[tuple[str, str], list[int]] = {}
        for number in self._table.losses:
            unit = self._table.rows.rows[number].unit
            lives.setdefault((unit.name, unit.incarnation), []).append(number)
        return [UnitLoss(*life, self.lost_records(rows)) for life, rows in sorted(lives.items())]

    def adopt(self, losses: Iterable[UnitLoss]) -> None:
        """Another controller lost these: those of a life that was never met here are lost here, too.

        Of a life that was met every row was known, so what is not known any more is done.
        """
        for loss in losses:
            if loss.incarnation and (loss.unit, loss.incarnation) not in self._lives:
                self.take_lost(loss.records)

    def done_of(self, losses: Iterable[UnitLoss]) -> dict[str, list[int]]:
        """Return task -> positions of lost rows that it is known to be done with."""
        all_rows = self._table.rows
        known: dict[str, list[int]] = {}
        told = [(number, record.partition) for loss in losses for record in loss.records for number in record.rows]
        for k, (number, partition) in enumerate(told):
            row = all_rows.rows.get(number)
            finished = all_rows.every_task if all_rows.is_finished(number, partition) else 0
            for name in all_rows.tasks(finished if row is None else all_rows.every_task & ~row.left):
                known.setdefault(name, []).append(k)
        return known

    def take_lost(self, records: Iterable[RowRecords]) -> None:
        """An earlier incarnation knew that these rows went with their unit."""
        for record in records:
            for number, row in self._rows(record, UnitLife("")):
                self._table.add_lost(number, row)

    def count_finished(self, partition: int, rows: Iterable[int]) -> None:
        """Rows were done before this controller met their unit, or before it started."""
        known = self._table.rows.finished(partition)
        new = [number for number in rows if number not in known]
        if not new:
            return
        self._table.rows.finish(partition, new, nameless=True)
        for task in self._table.tasks.values():
            task.finished_before(partition, len(new))

    def _finish(self, number: int, *, here: bool) -> None:
        """All tasks were done with a row; a unit that has the row again since is told (`here` False)."""
        table = self._table
        for name in table.rows.tasks(table.rows.rows[number].left):
            if not here and name in table.tasks:
                table.out.append(Commit(name, table.token(), table.rows.by_unit([number])))
            table.mark_done(name, [number])

    def _unit(self, event: RegisterUnit) -> tuple[UnitLife, UnitLife | None]:
        """Return this life of the unit, and the same life if it was given up before."""
        units = self._table.rows.units
        known = units.get(event.unit)
        if known is not None and known.incarnation in ("", event.incarnation):
            known.incarnation = event.incarnation
            return known, None
        if known is not None:
            self._table.lose(known)
        unit = units[event.unit] = UnitLife(event.unit, event.incarnation, online=False)
        return unit, next((dead for dead in self._table.rows.dead_units if _same(dead, unit)), None)

    def _records(self, event: RegisterUnit, unit: UnitLife) -> Iterator[tuple[RowRecords, int, Row, dict[str, int]]]:
        for record in event.records:
            for k, (number, row) in enumerate(self._rows(record, unit)):
                yield record, number, row, {task: times[k] for task, times in record.deliveries.items()}

    def _rows(self, record: RowRecords, unit: UnitLife) -> Iterator[tuple[int, Row]]:
        all_rows = self._table.rows
        written = all_rows.mask(record.columns)
        done = sum(all_rows.bits.get(task, 0) for task in set(record.done))
        for k, number in enumerate(record.rows):
            yield number, Row(
                unit, record.partition, record.groups[k], record.group_sizes[k], written,
                all_rows.every_task & ~done, record.tokens[k], record.num_bytes[k],
            )  # fmt: skip

    def _merge(self, number: int, row: Row, reply: UnitAccepted, *, pending: bool) -> int:
        """Take one row of an inventory; returns the tasks that are known to be done with it (bits)."""
        table = self._table
        known = table.rows.rows.get(number)
        elsewhere = known is not None and not known.lost and known.unit is not row.unit
        if elsewhere or self._arrivals.expects(number):
            reply.drop.append(number)
            if not pending:
                self._arrivals.let_go(number, row)
            return 0
        if known is None or known.lost:
            if pending:
                return self._arrivals.announce(number, row)
            return self._arrivals.merge(number, row, values_kept=known is not None and _same(known.unit, row.unit))
        done = table.rows.every_task & ~known.left
        table.grow(known, row.written, row.tokens - known.tokens, row.num_bytes - known.num_bytes)
        for name in table.rows.tasks(known.left & ~row.left):
            table.mark_done(name, [number])
        table.refresh(number)
        return done

    def _take_life(self, life: RegisterUnit) -> None:
        """A life of a unit is over that was not met: its rows are where they were put again, or lost."""
        table, all_rows = self._table, self._table.rows.rows
        self._take_finished(life, [])
        for record in life.records:
            for number, row in self._rows(record, UnitLife("")):
                known = all_rows.get(number)
                if known is None and not row.left:
                    self.count_finished(record.partition, [number])
                elif known is None:
                    table.add_lost(number, row)
                elif known.lost:  # as an earlier incarnation knew it, before or after: what was done then stays done
                    known.wrote(row.written)
                    for name in table.rows.tasks(known.left & ~row.left):
                        table.mark_done(name, [number])
                else:  # put again by a producer who knew of the loss: judged by what was put
                    done = table.rows.tasks(table.graph.still_done(row, known) & known.left)
                    if done:
                        table.losses.ack_elsewhere(number)
                    for name in done:
                        table.out.append(Commit(name, table.token(), table.rows.by_unit([number])))
                    for name in done:
                        table.mark_done(name, [number])

    def _take_finished(self, event: RegisterUnit, lives: list[UnitLife]) -> None:
        table, all_rows = self._table, self._table.rows.rows
        first_time = (event.unit, event.incarnation) not in self._lives
        self._lives.add((event.unit, event.incarnation))
        for partition, rows in event.finished.items():
            known = [number for number in rows if number in all_rows]
            for number in known:
                self._finish(number, here=all_rows[number].unit in lives or all_rows[number].lost)
            if first_time:
                self.count_finished(partition, set(rows).difference(known))
        for gone in event.removed_groups if first_time else ():
            finished = table.rows.finished(gone.partition)
            unknown = [number for number in gone.rows if number not in all_rows and number not in finished]
            if unknown:  # an earlier incarnation, or another controller, knew of them
                table.removals.lack(gone.partition, unknown)

    def _take_tombstones(self, event: RegisterUnit, lives: list[UnitLife], listed: set[int]) -> None:
        table, all_rows = self._table, self._table.rows.rows
        self._take_finished(event, lives)
        removed = {number: gone.cause for gone in event.removed_groups for number in gone.rows}
        for number in [number for unit in lives for number in table.rows.at_unit(unit)]:
            if number in listed or number not in all_rows:
                continue
            if number in removed:  # another controller's doing
                table.removals.remove([number], removed[number])
            elif all_rows[number].state is RowState.WITHHELD:
                table.removals.remove([number])
            else:  # cleared, or the put was undone, while the unit was away
                table.remove(number)


def _same(one: UnitLife, other: UnitLife) -> bool:
    return one.name == other.name and one.incarnation == other.incarnation
