"""The life of rows in the control plane: they come, are worked on, get lost, come back, go. Pure.

Keeps the table and the served tasks in step; everything that changes a row goes through here. Instructions that a
change causes are collected in `out`; `ControlState` hands them to its shell.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from asyncflow.errors import PeerRefused
from tq.control.events import Cleared, Fence, Fenced, Instruction
from tq.control.live_rows import LiveRow, LiveRows, UnitInfo
from tq.control.lost_numbers import LostNumbers
from tq.control.quarantines import Quarantines
from tq.control.row_set import RowSet
from tq.control.task_state import TaskState
from tq.messages import OutputsWritten
from tq.refill import QuarantineCause
from tq.task_spec import TaskSpec


class RowBook:
    """Rows, and the served tasks' view of them."""

    def __init__(
        self, tasks: Sequence[TaskSpec], *, served: Collection[str] | None, first_token: int, refill: bool
    ) -> None:
        """Args:
        tasks: all tasks of the queue.
        served: those whose rows are handed out here; None: all.
        first_token: lease tokens count up from here.
        refill: admission replaces groups in quarantine, so partitions keep their size.
        """
        self.rows = LiveRows([spec.name for spec in tasks])
        self.tasks = {spec.name: TaskState(spec, self.rows) for spec in tasks if served is None or spec.name in served}
        self.out: list[Instruction] = []
        self.lost_now: list[int] = []
        """Rows of which somebody must decide whether they are put again."""
        self.wanted: set[int] = set()
        """Of those, rows that a reader waits for though they are in its lease."""
        self.quarantines = Quarantines(self, refill=refill)
        self.lost = LostNumbers()
        """Rows whose unit is gone."""
        self._declared = [self.rows.mask(spec.outputs) for spec in tasks]
        self._outputs = list(self._declared)
        self._inputs = [self.rows.mask(spec.inputs) for spec in tasks]
        self._nowhere = UnitInfo("", online=False, lost=True)
        self.moved: set[int] = set()
        """Rows that were lost and put again while a trainer had them in hand."""
        self._tokens = itertools.count(first_token)

    def token(self) -> int:
        """Return the next lease token."""
        return next(self._tokens)

    def bit(self, task: str) -> int:
        """Return a task's bit.

        Raises:
            PeerRefused: there is no such task.
        """
        bit = self.rows.bits.get(task)
        if bit is None:
            raise PeerRefused(f"no task is named {task!r}; known: {' '.join(self.rows.bits)}")
        return bit

    def learn_outputs(self, task: str, mask: int) -> None:
        """A task was seen to write such columns (bits), for some row."""
        self._outputs[self.bit(task).bit_length() - 1] |= mask

    def columns_of(self, tasks: int) -> int:
        """Return the columns (bits) that tasks (bits) write."""
        mask = 0
        for k, outputs in enumerate(self._outputs):
            mask |= outputs if tasks >> k & 1 else 0
        return mask

    def upstream(self, task: TaskState) -> int:
        """Return the tasks (bits) that wrote, directly or not, what `task` reads."""
        found, read = 0, task.inputs
        while True:
            new = sum(1 << k for k, outputs in enumerate(self._outputs) if outputs & read) & ~found
            if not new:
                return found & ~task.bit
            found |= new
            for k, inputs in enumerate(self._inputs):
                read |= inputs if new >> k & 1 else 0

    # Coming

    def add_lost(self, number: int, row: LiveRow) -> None:
        """A row is known, but no unit has it; the units may prove otherwise. One in the table, or done, stays."""
        if number in self.rows.rows or self.rows.is_finished(number, row.partition):
            return
        row.unit = self._lost_unit()
        self.add(row.partition, [(number, row)])
        self.lost_now.append(number)
        self.lost.lose([number])

    def add(self, partition: int, rows: Sequence[tuple[int, LiveRow]]) -> None:
        """Rows of a partition that were not known are at a unit."""
        for _, row in rows if self.quarantines.any else ():
            row.withheld = self.quarantines.has(row)
        self.rows.add(partition, rows)
        for task in self.tasks.values():
            task.created(partition, rows)
            stale = task.leases.stale
            for number, row in rows if stale else ():
                if number in stale and row.left & task.bit:
                    self._fence(task, [number], counts=False)
        for number in [number for number, row in rows if not row.left]:
            self._finish(number)

    def revive(self, number: int, row: LiveRow, put: LiveRow, *, values_kept: bool = False) -> int:
        """A lost row is somewhere again; returns the tasks that stay done with it (bits).

        Args:
            number: of the row.
            row: what is known of it.
            put: what there is now.
            values_kept: it came back with everything that was written.
        """
        done = self.rows.every_task & ~row.left if values_kept else self.still_done(row, put)
        reopened = self.rows.every_task & ~row.left & ~done
        newly = row.left & ~put.left
        row.left |= reopened
        if row.group < 0:  # only a lease told of it so far
            for task in self.tasks.values():
                if row.left & task.bit & ~reopened:
                    task.partition(row.partition).queue.expect_again(put)
        row.group, row.group_size, row.written = put.group, put.group_size, put.written
        self.rows.move(row, put.unit, put.num_bytes)
        self.lost.back(number)
        row.tokens = put.tokens
        for task in self.tasks.values():
            if reopened & task.bit:
                task.reopened(number, row)
        for name in self.rows.tasks(newly):
            self._done(name, number, row)
        if number in self.rows.rows:
            self._resume_leases(number, row)
        return done

    def still_done(self, row: LiveRow, put: LiveRow) -> int:
        """Return the tasks (bits) that are done with a lost row that was put again: not those whose outputs went.

        These are the declared ones and, beside them, what the task was seen to write and the row had.
        """
        done = self.rows.every_task & ~row.left
        for k, (declared, outputs) in enumerate(zip(self._declared, self._outputs, strict=True)):
            if (declared | outputs & row.written) & ~put.written:
                done &= ~(1 << k)
        return done

    def _resume_leases(self, number: int, row: LiveRow) -> None:
        """A row that was lost is back: holders that cannot go on with it lose it, behind a fence."""
        for task in self.tasks.values():
            lease = task.leases.holder(number)
            if lease is not None and lease.readers and task.spec.keeps_leases:
                self.moved.add(number)
            elif lease is not None and lease.readers:
                task.void(lease.token, [number])
                task.leases.stale.add(number)
            if number in task.leases.fencing or number in task.leases.stale:
                self._fence(task, [number], counts=False)
            task.refresh(number, row)
            task.changed.add(row.partition)

    # Work

    def write(self, event: OutputsWritten) -> None:
        """A task's outputs for some rows are in; notifications that come twice change nothing."""
        self.bit(event.task)
        if event.tokens and len(event.tokens) != len(event.rows):
            raise PeerRefused(f"{event.unit}: {len(event.rows)} rows with {len(event.tokens)} lengths")
        mask = self.rows.mask(event.columns)
        bit = self.rows.bits[event.task]
        self.learn_outputs(event.task, mask)
        grown = event.num_bytes // max(1, len(event.rows))
        partitions = set()
        for k, number in enumerate(event.rows):
            row = self.rows.rows.get(number)
            if row is None or not row.left & bit or row.unit.name != event.unit or row.unit.lost:
                continue
            self.grow(row, mask, event.tokens[k] if event.tokens else 0, grown)
            self._done(event.task, number, row)
            partitions.add(row.partition)
            if row.left:
                for task in self.tasks.values():
                    if task.inputs & mask:
                        task.refresh(number, row)
        self.drop_finished(event.task, partitions)

    def grow(self, row: LiveRow, mask: int, tokens: int, num_bytes: int) -> None:
        """Columns were written."""
        row.written |= mask
        if tokens:
            for task in self.tasks.values():
                if row.queued & task.bit:
                    task.partition(row.partition).queue.grew(row, tokens)
            row.tokens += tokens
        self.rows.grow(row, num_bytes)

    def settle(self, task: str, numbers: Iterable[int]) -> None:
        """A task is known to be done with rows."""
        partitions = set()
        for number in numbers:
            row = self.rows.rows.get(number)
            if row is not None and row.left & self.rows.bits[task]:
                self._done(task, number, row)
                partitions.add(row.partition)
        self.drop_finished(task, partitions)

    def settle_lost(self, task: str, numbers: Iterable[int]) -> None:
        """Another controller knows that a task was done with rows when they were lost; here it may not have been told.

        What it wrote went with them. Rows that were put again meanwhile are judged by what was put.
        """
        bit, table = self.bit(task), self.rows.rows
        lost = [
            number for number in numbers if number in table and table[number].unit.lost and table[number].left & bit
        ]
        for number in lost:
            table[number].written |= self.columns_of(bit)
        self.settle(task, lost)

    def give_back(self, task: TaskState, token: int, rows: Iterable[int] | None = None, *, counts: bool = True) -> None:
        """Rows (default: all) of a lease return, once the units refuse late puts; `counts`: as a try that failed."""
        taken = task.void(token, rows)
        lost = [number for number in taken if self.rows.rows[number].unit.lost]
        task.leases.stale.update(lost)
        self.lost_now += lost
        here = [number for number in taken if not self.rows.rows[number].unit.lost]
        if here:
            self._fence(task, here, counts=counts)

    def filter_groups(self, task: TaskState, token: int, rows: Iterable[int]) -> None:
        """The holder of a lease has no use for the groups of some of its rows."""
        for number in task.leases.by_token[token].rows.intersection(rows):
            row = self.rows.rows.get(number)
            if row is not None:
                self.quarantines.begin(row, QuarantineCause(task.spec.name, filtered=True))

    def fenced(self, event: Fenced) -> None:
        """A fence holds: its rows are ready again, in their old place in the order."""
        task = self.tasks.get(event.task)
        fencing = None if task is None else task.leases.fenced(event.token)
        if task is None or fencing is None:
            return
        for number in fencing.rows:
            row = self.rows.rows.get(number)
            if row is None or not row.left & task.bit:
                continue  # its last put came before the fence
            if row.unit.lost:
                task.leases.stale.add(number)
            if fencing.counts:
                task.num_given_back += 1
                task.leases.returns[number] = task.leases.returns.get(number, 0) + 1
                if 0 < task.spec.max_deliveries <= task.leases.returns[number]:
                    self.quarantines.begin(row, QuarantineCause(event.task, task.leases.returns[number]))
            task.refresh(number, row)

    # Loss, removal

    def remove(self, number: int) -> None:
        """A row leaves before all tasks are done with it."""
        row = self.rows.rows[number]
        for task in self.tasks.values():
            task.removed(number, row)
        self.rows.remove(number)
        self.lost.end(number)
        self.moved.discard(number)

    def clear_if_empty(self, partition: int) -> None:
        """Forget a cleared partition once no unit has rows of it."""
        numbers = list(self.rows.numbers(partition))
        if any(not self.rows.rows[number].unit.lost for number in numbers):
            return
        for number in numbers:
            self.remove(number)
        self.rows.forget(partition)
        for task in self.tasks.values():
            task.clear(partition)
        self.quarantines.forget(partition)
        self.out.append(Cleared(partition))

    def lose(self, unit: UnitInfo) -> None:
        """A unit is gone with its rows; whoever waits for a share with some of them is looked at again."""
        unit.online, unit.lost = False, True
        self.rows.dead_units.append(unit)
        if self.rows.units.get(unit.name) is unit:
            del self.rows.units[unit.name]
        numbers = self.rows.at_unit(unit)
        self.lost.lose(numbers)
        for number in numbers:
            self.refresh(number)
            self._look_at_shares_with(number)
        self.quarantines.remove([number for number in numbers if self.rows.rows[number].withheld])
        self.lost_now += [number for number in numbers if number in self.rows.rows]

    def misplace(self, numbers: Sequence[int]) -> None:
        """A unit let go of rows that are elsewhere, as another controller says: where that is will be told, or not."""
        for number in numbers:
            row = self.rows.rows[number]
            self.rows.move(row, self._lost_unit(), row.num_bytes)
            self.refresh(number)
            self._look_at_shares_with(number)
        self.lost.lose(numbers)
        self.lost_now += numbers

    def unit(self, name: str) -> UnitInfo:
        """Return a unit that is up, made when new."""
        return self.rows.units.setdefault(name, UnitInfo(name))

    def set_online(self, unit: UnitInfo, *, online: bool) -> None:
        """A unit's channel ended, or it is back: its rows may be handed out, or not."""
        unit.online = online
        for number in self.rows.at_unit(unit):
            self.refresh(number)
            self._look_at_shares_with(number)

    def needed(self) -> Iterator[int]:
        """Take the rows that were lost lately and that somebody must put again.

        A row is not needed when the only tasks left are trainers that have it in hand.
        """
        lost, self.lost_now = self.lost_now, []
        wanted, self.wanted = self.wanted, set()
        for number in dict.fromkeys(lost):
            row = self.rows.rows.get(number)
            if row is None or not row.unit.lost:
                continue
            if number in wanted or any(self._needs(name, number) for name in self.rows.tasks(row.left)):
                yield number

    def recount(self, partition: int) -> None:
        """After a restart: groups that miss rows which were finished before are complete once all rows are known."""
        info = self.rows.partitions.get(partition)
        if info is None or not info.nameless or not info.all_known:
            return
        info.nameless = RowSet()
        for task in self.tasks.values():
            if task.spec.whole_groups and not task.over(partition):
                task.partition(partition).queue.recount(self.rows.numbers(partition))
                task.sized(partition)

    def finished_again(self, number: int, row: LiveRow) -> None:
        """A finished row was put again: it stays done. If it was finished before this start, its group is known now."""
        info = self.rows.partition(row.partition)
        if number not in info.nameless:
            return
        info.nameless.discard(number)
        for task in self.tasks.values():
            if not task.over(row.partition):
                task.settled_before(row)

    def refresh(self, number: int) -> None:
        """What tasks may be given of a row changed."""
        row = self.rows.rows.get(number)
        if row is not None:
            for task in self.tasks.values():
                task.refresh(number, row)

    def drop_partition_if_finished(self, partition: int) -> None:
        """Forget a partition in every served task that is done with it."""
        for task in self.tasks.values():
            task.drop_finished(partition)

    def drop_finished(self, name: str, partitions: Iterable[int]) -> None:
        """Forget partitions that a task is done with."""
        task = self.tasks.get(name)
        for partition in partitions:
            if task is not None:
                task.drop_finished(partition)

    # Private

    def _needs(self, name: str, number: int) -> bool:
        task = self.tasks.get(name)
        lease = None if task is None else task.leases.holder(number)
        return task is None or lease is None or not task.spec.keeps_leases or not lease.readers

    def _look_at_shares_with(self, number: int) -> None:
        for task in self.tasks.values():
            if number in task.leases.holders:
                task.changed.add(self.rows.rows[number].partition)

    def _fence(self, task: TaskState, numbers: Sequence[int], *, counts: bool) -> None:
        """One fence for each unit: the rows of one return though another one is stopped."""
        for unit, rows in self.rows.by_unit(numbers).items():
            token = self.token()
            task.fence(token, rows, counts=counts)
            self.out.append(Fence(task.spec.name, token, unit, rows))

    def _done(self, name: str, number: int, row: LiveRow) -> None:
        row.left &= ~self.rows.bits[name]
        if row.unit.lost:
            self.lost.ack(number)
        task = self.tasks.get(name)
        if task is not None:
            task.done(number, row)
        if not row.left:
            self._finish(number)

    def _finish(self, number: int) -> None:
        row = self.rows.remove(number)
        self.rows.finish(row.partition, [number])
        self.moved.discard(number)
        self.lost.end(number)

    def _lost_unit(self) -> UnitInfo:
        if self._nowhere not in self.rows.dead_units:
            self.rows.dead_units.append(self._nowhere)
        return self._nowhere
