"""The life of rows in the control plane: they come, are worked on, get lost, come back, go. Pure.

Keeps the rows and the served tasks' views of them in step; everything that changes a row goes through here. The
resulting instructions are collected in `out`; `ControlState` hands them to its shell.
"""

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

from asyncflow.errors import LeaseFenced, PeerRefused
from tq.control.assigner import RoundAssigner
from tq.control.events import Answer, Cleared, Commit, Fence, Fenced, GroupRemoved, Instruction, RemoveGroup, Shrunk
from tq.control.rows import Row, Rows, RowSet, RowState, UnitLife
from tq.control.task_state import TaskState
from tq.messages import AckLost, LostRows, OutputsWritten, WatchLost
from tq.policies import TaskSpec
from tq.refill import UNKNOWN, RemovalCause

# Dead-letter and filtered groups: no consumer gets their rows, and units remove them. Pure.
#
# begin -> rows withheld, units told (RemoveGroup) -> each reports its rows removed -> GroupRemoved, once


class Table(Protocol):
    """What `GroupRemovals` needs of a `RowTable`."""

    rows: Rows
    tasks: dict[str, TaskState]
    out: list[Instruction]

    def refresh(self, number: int) -> None:
        """What tasks may be given of a row changed."""

    def remove(self, number: int) -> None:
        """A row leaves before all tasks are done with it."""


class GroupRemovals:
    """Dead-letter and filtered groups.

    With `refill`, admission replaces the groups, so partitions keep their size; otherwise they shrink.
    """

    def __init__(self, table: Table, *, refill: bool) -> None:
        self.count = 0  # groups removed because a task failed on them
        self.num_filtered = 0  # groups removed because they were filtered out
        self._table = table
        self._refill = refill
        self.groups: dict[tuple[int, int], RemovalCause] = {}  # (Partition, group) -> why the group leaves
        self._reported: set[tuple[int, int]] = set()

    def has(self, row: Row) -> bool:
        """Whether the row's group is leaving: a dead letter, or filtered."""
        return (row.partition, row.group) in self.groups

    def begin(self, row: Row, cause: RemovalCause) -> None:
        """Withhold the rows of this row's group from consumers, and have the units remove them."""
        if self.has(row):
            return
        all_rows = self._table.rows
        members = self._withhold(row, cause)
        where = all_rows.by_unit(members)
        self.remove(number for number in members if all_rows.rows[number].lost)
        if where:
            self._table.out.append(RemoveGroup(where, cause))

    def give_up(self, task: TaskState, token: int, rows: Iterable[int], *, failures: int = 0) -> None:
        """Remove the groups of some leased rows: their holder failed on them, or (`failures` 0) filters them out."""
        for number in task.leases.by_token[token].rows.intersection(rows):
            row = self._table.rows.rows.get(number)
            if row is not None:
                self.begin(row, RemovalCause(task.spec.name, failures, filtered=not failures))

    def keep_out(self, numbers: Iterable[int]) -> None:
        """Remove new rows at once if their group is leaving."""
        all_rows = self._table.rows
        members: dict[RemovalCause, list[int]] = {}
        for number in numbers:
            row = all_rows.rows.get(number)
            if row is not None and row.state is RowState.WITHHELD:
                members.setdefault(self.groups[row.partition, row.group], []).append(number)
        for cause, withheld in members.items():
            self._table.out.append(RemoveGroup(all_rows.by_unit(withheld), cause))

    def remove(self, numbers: Iterable[int], cause: RemovalCause = UNKNOWN) -> None:
        """Rows left the queue with their groups, for `cause` as the originator of the removal named it."""
        all_rows = self._table.rows
        removed: dict[int, list[int]] = {}
        leaving = deque(numbers)
        while leaving:
            number = leaving.popleft()
            row = all_rows.rows[number]
            if not self.has(row):
                # Another controller removed the group. Its lost rows leave here and now: no unit will report them.
                leaving += [member for member in self._withhold(row, cause) if all_rows.rows[member].lost]
            self._report(row)
            self._table.remove(number)
            for task in self._table.tasks.values():
                task.partition(row.partition).queue.forget_group(row.group)
            removed.setdefault(row.partition, []).append(number)
        for partition, gone in removed.items():
            self.lack(partition, gone)
            for task in self._table.tasks.values():
                task.sized(partition)

    def lack(self, partition: int, numbers: Iterable[int]) -> None:
        """Shrink a partition by rows that are not in the table, unless admission replaces their groups."""
        if not self._refill:
            self._table.rows.partition(partition).lack(RowSet(numbers))
            self._table.out.append(Shrunk(partition))

    def forget(self, partition: int) -> None:
        self.groups = {key: cause for key, cause in self.groups.items() if key[0] != partition}
        self._reported = {key for key in self._reported if key[0] != partition}

    def _report(self, row: Row) -> None:
        key = (row.partition, row.group)
        if key not in self._reported:
            self._reported.add(key)
            cause = self.groups[key]
            self.num_filtered += cause.filtered
            self.count += not cause.filtered
            self._table.out.append(GroupRemoved(row.partition, row.group, row.group_size, cause))

    def _withhold(self, row: Row, cause: RemovalCause) -> list[int]:
        """Stop handing out the row's group; returns the rows of the group."""
        all_rows = self._table.rows
        self.groups[row.partition, row.group] = cause
        members = [number for number in all_rows.numbers(row.partition) if all_rows.rows[number].group == row.group]
        for number in members:
            if not all_rows.rows[number].lost:
                all_rows.rows[number].to(RowState.WITHHELD)
                self._table.refresh(number)
        return members


# Rows whose unit is gone: which must be put again, which clients hear of them, what must be made durable, and which
# tasks stay done with a row that is put again. Pure.
#
# lose 5, 9000      undecided: 5, 9000     changed: parts 0, 2
# report 5          watchers are told of 5, under a sequence number
# take              {0: [5], 2: [9000]}    the store holds both
# back 5            changed: -, the record stays: the unit may not know yet which tasks were done with the row
# end 5             changed: part 0        take -> {0: []}: the store forgets the part

_ROWS = 4096  # this many consecutive row indices share one part of the durable record
_PARTS = 256  # part numbers wrap around here, so the record has at most this many parts


class Losses:
    """Rows lost with their unit. Sequence numbers start at `first`: above those of earlier incarnations."""

    def __init__(self, first: int) -> None:
        self.watchers: dict[int, WatchLost] = {}  # request -> watcher
        self._sequence = first
        # Row -> sequence number of its report, so that no watcher misses a loss or sees it twice.
        self._reported: dict[int, int] = {}
        # Lost rows for which it is open whether they must be put again -> whether a reader of the row's own lease waits
        # for it.
        self.undecided: dict[int, bool] = {}
        self.lost: dict[int, set[int]] = {}  # part -> lost rows
        # Part -> rows at a unit that has not heard, and may never hear, that a task is done with them.
        self.acked: dict[int, set[int]] = {}
        self._noted: dict[int, set[int]] = {}
        # Parts to save again, because of a loss, an ack of a lost row, or the end of a recorded row.
        self.changed: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        for rows in self.lost.values():
            yield from rows

    # What happens to rows

    def lose(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.lost.setdefault(_part(number), set()).add(number)
            self.changed.add(_part(number))
            self.undecided.setdefault(number, False)

    def look_again(self, numbers: Iterable[int], *, wanted: bool = False) -> None:
        """Decide again on lost rows that left a lease, or that a reader of their lease waits for (`wanted`)."""
        for number in numbers:
            self.undecided[number] = wanted or self.undecided.get(number, False)

    def ack(self, number: int) -> None:
        self.changed.add(_part(number))

    def ack_elsewhere(self, number: int) -> None:
        """Record a row that is not lost: a task is done with it, and the row's unit is yet to hear."""
        self.acked.setdefault(_part(number), set()).add(number)
        self.changed.add(_part(number))

    def back(self, number: int) -> None:
        """A row was put again; losing it once more counts as another loss."""
        self.lost.get(_part(number), set()).discard(number)
        self._reported.pop(number, None)

    def end(self, number: int) -> None:
        """Forget a row that was finished or removed."""
        self.back(number)
        self.acked.get(_part(number), set()).discard(number)
        if number in self._noted.get(_part(number), ()):
            self.changed.add(_part(number))

    # Clients that are told

    def take_undecided(self) -> dict[int, bool]:
        undecided, self.undecided = self.undecided, {}
        return undecided

    def report(self, rows: Iterable[int]) -> list[int]:
        """Note that these rows must be put again; returns those that were not reported yet."""
        new = [number for number in rows if number not in self._reported]
        if new:
            self._sequence += 1
            self._reported.update(dict.fromkeys(new, self._sequence))
        return new

    def take_answers(self, all_rows: dict[int, Row]) -> list[tuple[int, LostRows]]:
        """Return (request, reply) for watchers that have not seen the newest losses, and drop these watchers."""
        answers = []
        for request, watch in list(self.watchers.items()):
            rows = sorted(number for number, sequence in self._reported.items() if sequence > watch.after)
            if rows:
                held = [all_rows[number] for number in rows]
                places = [row.partition for row in held]
                answers.append((request, LostRows(self._sequence, places, rows, [row.group for row in held])))
                del self.watchers[request]
        return answers

    # What is durable

    def take(self) -> dict[int, list[int]]:
        """Return, for each part that changed since the last call, the rows that its record must hold."""
        changed, self.changed = self.changed, set()
        for part in changed:
            self._noted[part] = self.lost.get(part, set()) | self.acked.get(part, set())
        return {part: sorted(self._noted[part]) for part in sorted(changed)}


class TaskGraph:
    """All tasks of the queue; tasks and columns are bits."""

    def __init__(self, tasks: Sequence[TaskSpec], rows: Rows) -> None:
        self._rows = rows
        self._declared = {rows.bit(spec.name): rows.mask(spec.outputs) for spec in tasks}
        self._inputs = {rows.bit(spec.name): rows.mask(spec.inputs) for spec in tasks}
        self.known = dict(self._declared)  # task -> columns that it declares, or was seen to write for some row

    def learn(self, task: str, columns: Iterable[str]) -> None:
        self.known[self._rows.bit(task)] |= self._rows.mask(columns)

    def outputs(self, tasks: int) -> int:
        mask = 0
        for task, outputs in self.known.items():
            mask |= outputs if tasks & task else 0
        return mask

    def upstream(self, task: int) -> int:
        """Return the tasks that wrote, directly or indirectly, what `task` reads."""
        found, read = 0, self._inputs[task]
        while True:
            new = sum(writer for writer, outputs in self.known.items() if outputs & read) & ~found
            if not new:
                return found & ~task
            found |= new
            for reader, inputs in self._inputs.items():
                read |= inputs if new & reader else 0

    def still_done(self, row: Row, put: Row) -> int:
        """Return the tasks that stay done with a lost row that was put again: those whose outputs came back with it."""
        done = self._rows.every_task & ~row.left
        for task, outputs in self.known.items():
            # A task must have its declared outputs back, plus any undeclared ones that it wrote into this row.
            if (self._declared[task] | outputs & row.written) & ~put.written:
                done &= ~task
        return done


def _part(number: int) -> int:
    return number // _ROWS % _PARTS


_LOST = RowState.LOST  # enum attribute access is slow, and this value is compared for every row and task


class RowTable:
    """Rows, and the served tasks' view of them; see `ControlState` for the arguments."""

    def __init__(
        self, tasks: Sequence[TaskSpec], *, served: Collection[str] | None, first_token: int, refill: bool
    ) -> None:
        self.rows = Rows([spec.name for spec in tasks])
        self.tasks = {spec.name: TaskState(spec, self.rows) for spec in tasks if served is None or spec.name in served}
        self.assigners = {name: RoundAssigner(task) for name, task in self.tasks.items()}
        self.out: list[Instruction] = []
        self.removals = GroupRemovals(self, refill=refill)
        self.losses = Losses(first_token)
        self.graph = TaskGraph(tasks, self.rows)
        self._nowhere = UnitLife("", online=False, lost=True)
        self._tokens = itertools.count(first_token)

    def token(self) -> int:
        return next(self._tokens)

    # Coming

    def add_lost(self, number: int, row: Row) -> None:
        """Add a row that no unit has, unless the row is here or finished; a unit may still turn up with it."""
        if number in self.rows.rows or self.rows.is_finished(number, row.partition):
            return
        if self.removals.has(row):
            self.removals.lack(row.partition, [number])
            return
        row.unit = self._lost_unit()
        self.add(row.partition, [(number, row)])
        self.losses.lose([number])

    def add(self, partition: int, rows: Sequence[tuple[int, Row]]) -> None:
        """Add rows of one partition that were unknown so far, all at one unit."""
        state = rows[0][1].unit.row_state
        some_leave = self.removals.groups and state is not _LOST
        for _, row in rows:
            row.to(RowState.WITHHELD if some_leave and self.removals.has(row) else state)
        self.rows.add(partition, rows)
        for task in self.tasks.values():
            task.created(partition, rows)
            for number, row in rows if task.leases.fencing else ():
                if number in task.leases.fencing and row.left & task.bit:
                    self._fence(task, [number], counts=False)
        for number in [number for number, row in rows if not row.left]:
            self._finish(number)

    def revive(self, number: int, row: Row, put: Row, *, values_kept: bool = False) -> int:
        """A lost row is somewhere again, as `put` describes; returns the tasks (bits) that stay done with it.

        `values_kept`: the row came back with everything that was written into it.
        """
        done = self.rows.every_task & ~row.left if values_kept else self.graph.still_done(row, put)
        reopened = self.rows.every_task & ~row.left & ~done
        newly = row.left & ~put.left
        row.reopen(reopened)
        if row.group < 0:  # known only from a trainer's lease
            for task in self.tasks.values():
                if row.left & task.bit & ~reopened:
                    task.partition(row.partition).queue.expect_again(put)
        row.became(put)
        self.rows.move(row, put.unit, put.num_bytes)
        row.to(RowState.WITHHELD if self.removals.has(row) else put.unit.row_state)
        self.losses.back(number)
        for task in self.tasks.values():
            if reopened & task.bit:
                task.reopened(number, row)
        for name in self.rows.tasks(newly):
            self._done(name, number, row)
        # The last task may just have finished it.
        if number in self.rows.rows:
            self._resume_leases(number, row)
        return done

    def _resume_leases(self, number: int, row: Row) -> None:
        for task in self.tasks.values():
            lease = task.leases.holder(number)
            # This holder read the lost values, and cannot continue with the new ones: void its lease behind a fence.
            if lease is not None and lease.readers and not task.spec.keeps_leases:
                task.void(lease.token, [number])
                task.leases.owe_fence([number])
            if number in task.leases.fencing:
                self._fence(task, [number], counts=False)
            task.refresh(number, row)
            task.changed.add(row.partition)

    # Work

    def write(self, event: OutputsWritten) -> None:
        """Take in a task's outputs for some rows; a repeated notification changes nothing."""
        bit = self.rows.bit(event.task)
        if event.tokens and len(event.tokens) != len(event.rows):
            raise PeerRefused(f"{event.unit}: {len(event.rows)} rows with {len(event.tokens)} lengths")
        mask = self.rows.mask(event.columns)
        if mask & ~self.graph.known[bit]:
            self.graph.learn(event.task, event.columns)
        grown = event.num_bytes // max(1, len(event.rows))
        partitions = set()
        for k, number in enumerate(event.rows):
            row = self.rows.rows.get(number)
            if row is None or not row.left & bit or row.unit.name != event.unit or row.state is _LOST:
                continue
            self.grow(row, mask, event.tokens[k] if event.tokens else 0, grown)
            self._done(event.task, number, row)
            partitions.add(row.partition)
            if row.left:
                for task in self.tasks.values():
                    if task.inputs & mask:
                        task.refresh(number, row)
        self._drop_finished_of(event.task, partitions)

    def grow(self, row: Row, mask: int, tokens: int, num_bytes: int) -> None:
        for task in self.tasks.values() if tokens else ():
            if row.queued & task.bit:
                task.partition(row.partition).queue.grew(row, tokens)
        row.wrote(mask, tokens)
        self.rows.grow(row, num_bytes)

    def mark_done(self, task: str, numbers: Iterable[int]) -> None:
        partitions = set()
        for number in numbers:
            row = self.rows.rows.get(number)
            if row is not None and row.left & self.rows.bits[task]:
                self._done(task, number, row)
                partitions.add(row.partition)
        self._drop_finished_of(task, partitions)

    def mark_lost_done(self, task: str, numbers: Iterable[int]) -> None:
        """Mark lost rows done on the word of another controller."""
        bit, all_rows = self.rows.bit(task), self.rows.rows
        # Rows that were put again in the meantime are judged by what was put.
        lost = [
            number for number in numbers if number in all_rows and all_rows[number].lost and all_rows[number].left & bit
        ]
        for number in lost:
            # What the task wrote was lost with the row; this controller may never have heard of it.
            all_rows[number].wrote(self.graph.outputs(bit))
        self.mark_done(task, lost)

    def ack_lost(self, event: AckLost, *, promised: bool = False) -> None:
        """Count an ack that no unit could take, because the rows were lost while the consumer had them in hand.

        Units that hold rows put again since then hear of it by a `Commit`. The controller that serves the task judges
        the ack; the others are told afterwards, and may not know of the loss yet. `promised`: the consumer was told
        that the ack counts, so it counts even if the rows turn out to be at a unit.

        Raises:
            LeaseFenced: another consumer has the rows; nothing changed.
            PeerRefused: the rows are not lost; nothing changed.
        """
        open_rows = self._under_lease(event)
        task, all_rows = self.tasks.get(event.task), self.rows.rows
        for number in open_rows:
            row = all_rows[number]
            if task is not None and not (row.lost or promised or task.spec.keeps_leases):
                raise PeerRefused(f"row {number} is not lost: {row.unit.name} has it; ack it there")
        where = self.rows.by_unit(open_rows)
        for number in open_rows:
            if not all_rows[number].lost:
                self.losses.ack_elsewhere(number)
        self.mark_done(event.task, open_rows)
        if where and task is not None:
            self.out.append(Commit(event.task, event.token, where))

    def release(self, task: TaskState, token: int, rows: Iterable[int] | None = None, *, counts: bool = True) -> None:
        """Return rows (None: all) of a lease once the units refuse late puts; `counts`: as a failed try."""
        taken = task.void(token, rows)
        lost = [number for number in taken if self.rows.rows[number].lost]
        task.leases.owe_fence(lost)
        self.losses.look_again(lost)
        here = [number for number in taken if not self.rows.rows[number].lost]
        if here:
            self._fence(task, here, counts=counts)

    def fenced(self, event: Fenced) -> None:
        """A fence holds: its rows are ready again, in their old place in the order."""
        task = self.tasks.get(event.task)
        fencing = None if task is None else task.leases.fenced(event.token)
        if task is None or fencing is None:
            return
        for number in fencing.rows:
            row = self.rows.rows.get(number)
            if row is None or not row.left & task.bit:
                continue  # the last put under the lease came before the fence
            if row.lost:
                task.leases.owe_fence([number])
            if fencing.counts:
                task.num_released += 1
                times = task.leases.returned(number)
                if 0 < task.spec.max_deliveries <= times:
                    self.removals.begin(row, RemovalCause(event.task, times))
            task.refresh(number, row)

    # Loss, removal

    def remove(self, number: int, *, may_return: bool = False) -> None:
        """Drop a row before all tasks are done with it; `may_return`: leases on it are void if it is put anew."""
        row = self.rows.rows[number]
        for task in self.tasks.values():
            task.removed(number, row, may_return=may_return)
        self._drop(number, RowState.REMOVED)

    def clear_if_empty(self, partition: int) -> None:
        """Forget a cleared partition once no unit has rows of it."""
        numbers = list(self.rows.numbers(partition))
        if any(not self.rows.rows[number].lost for number in numbers):
            return
        for number in numbers:
            self.remove(number)
        self.rows.forget(partition)
        for task in self.tasks.values():
            task.clear(partition)
        self.removals.forget(partition)
        self.out.append(Cleared(partition))

    def lose(self, unit: UnitLife) -> None:
        """A unit is gone with its rows; look again at ranks that wait for a slice with some of them."""
        unit.online, unit.lost = False, True
        self.rows.dead_units.append(unit)
        if self.rows.units.get(unit.name) is unit:
            del self.rows.units[unit.name]
        numbers = self.rows.at_unit(unit)
        self.losses.lose(numbers)
        for number in numbers:
            if self.rows.rows[number].state is RowState.WITHHELD:
                self.removals.remove([number])
                continue
            self.rows.rows[number].to(RowState.LOST)
            self._moved(number)

    def misplace(self, numbers: Sequence[int]) -> None:
        """A unit dropped rows that another controller says are elsewhere; word of where may follow."""
        for number in numbers:
            row = self.rows.rows[number]
            self.rows.move(row, self._lost_unit(), row.num_bytes)
            row.to(RowState.LOST)
            self._moved(number)
        self.losses.lose(numbers)

    def set_online(self, unit: UnitLife, *, online: bool) -> None:
        """A unit's channel ended or is back: hand out its rows, or not."""
        unit.online = online
        for number in self.rows.at_unit(unit):
            row = self.rows.rows[number]
            if row.state is not RowState.WITHHELD:
                row.to(unit.row_state)
            self._moved(number)

    def needed(self) -> Iterator[int]:
        """Take the recently lost rows that must be put again."""
        for number, wanted in self.losses.take_undecided().items():
            row = self.rows.rows.get(number)
            if row is None or not row.lost:
                continue
            if wanted or any(self._needs(name, number) for name in self.rows.tasks(row.left)):
                yield number

    def tell_watchers(self) -> None:
        """Send watchers the losses that they have not seen."""
        self.out += [Answer(*told) for told in self.losses.take_answers(self.rows.rows)]

    def recount(self, partition: int) -> None:
        """After a restart, once all rows are known: complete the groups that lack only rows finished before."""
        info = self.rows.partitions.get(partition)
        if info is None or not info.nameless or not info.all_known:
            return
        info.nameless = RowSet()
        for task in self.tasks.values():
            if task.spec.whole_groups and not task.over(partition):
                task.partition(partition).queue.recount(self.rows.numbers(partition))
                task.sized(partition)

    def finished_again(self, number: int, row: Row) -> None:
        # The row stays done.
        info = self.rows.partition(row.partition)
        if number not in info.nameless:
            return
        # The row was finished before this start, so its group was unknown until now.
        info.nameless.discard(number)
        for task in self.tasks.values():
            if not task.over(row.partition):
                task.done_before(row)

    def refresh(self, number: int) -> None:
        row = self.rows.rows.get(number)
        if row is not None:
            for task in self.tasks.values():
                task.refresh(number, row)

    def drop_finished(self, partition: int) -> None:
        """Forget a partition in every served task that is done with it."""
        for task in self.tasks.values():
            task.drop_finished(partition)

    def _drop_finished_of(self, name: str, partitions: Iterable[int]) -> None:
        for partition in partitions if name in self.tasks else ():
            self.tasks[name].drop_finished(partition)

    # Private

    def _under_lease(self, event: AckLost) -> list[int]:
        """Return the rows that are not done yet. Only the controller that serves the task can check the lease."""
        bit, task = self.rows.bit(event.task), self.tasks.get(event.task)
        open_rows = []
        for number in event.rows:
            row = self.rows.rows.get(number)
            is_open = row is not None and bool(row.left & bit)
            if task is not None and not is_open and not task.leases.was_done(event.token, number):
                raise LeaseFenced(f"row {number}: the lease {event.token} of {event.task} is void")
            if task is not None and is_open and task.leases.holders.get(number) != event.token:
                raise LeaseFenced(
                    f"row {number}: the lease {event.token} of {event.task} was given to another consumer"
                )
            if is_open:
                open_rows.append(number)
        return open_rows

    def _needs(self, name: str, number: int) -> bool:
        task = self.tasks.get(name)
        lease = None if task is None else task.leases.holder(number)
        # Not needed: a row whose only open tasks are trainers that have already read it.
        return task is None or lease is None or not task.spec.keeps_leases or not lease.readers

    def _moved(self, number: int) -> None:
        """Where a row is changed: refresh it for the tasks, and for a rank that waits for a slice with it."""
        self.refresh(number)
        for task in self.tasks.values():
            if number in task.leases.holders:
                task.changed.add(self.rows.rows[number].partition)

    def _fence(self, task: TaskState, numbers: Sequence[int], *, counts: bool) -> None:
        # One fence per unit, so that a stopped unit does not hold back the rows of the others.
        for unit, rows in self.rows.by_unit(numbers).items():
            token = self.token()
            task.fence(token, rows, counts=counts)
            self.out.append(Fence(task.spec.name, token, unit, rows))

    def _done(self, name: str, number: int, row: Row) -> None:
        row.done(self.rows.bits[name])
        if row.state is _LOST:
            self.losses.ack(number)
        task = self.tasks.get(name)
        if task is not None:
            task.done(number, row)
        if not row.left:
            self._finish(number)

    def _finish(self, number: int) -> None:
        row = self._drop(number, RowState.FINISHED)
        self.rows.finish(row.partition, [number])

    def _drop(self, number: int, state: RowState) -> Row:
        if self.losses.lost or self.losses.acked:  # skip the lookups as long as nothing was ever lost
            self.losses.end(number)
        return self.rows.remove(number, state)

    def _lost_unit(self) -> UnitLife:
        if self._nowhere not in self.rows.dead_units:
            self.rows.dead_units.append(self._nowhere)
        return self._nowhere
