"""Groups that a task failed on too often, or that were filtered out: nobody is given anything of them, and they leave
the queue. Pure.

begin -> rows withheld, units told (RemoveGroup) -> each reports its rows removed -> GroupRemoved, once
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from tq.control.events import GroupRemoved, Instruction, RemoveGroup, Shrunk
from tq.control.rows import Row, Rows, RowState
from tq.control.task_state import TaskState
from tq.refill import UNKNOWN, RemovalCause


class Table(Protocol):
    """What is needed of a `RowTable`."""

    rows: Rows
    tasks: dict[str, TaskState]
    out: list[Instruction]

    def refresh(self, number: int) -> None:
        """What tasks may be given of a row changed."""

    def remove(self, number: int) -> None:
        """A row leaves before all tasks are done with it."""


class GroupRemovals:
    """Part of a `RowTable`."""

    def __init__(self, book: Table, *, refill: bool) -> None:
        """Args:
        book: rows and tasks.
        refill: admission replaces groups, so partitions keep their size; else they get smaller.
        """
        self.count = 0
        """Groups that left because a task failed on them."""
        self.num_filtered = 0
        """Groups that left because they were filtered out."""
        self._book = book
        self._refill = refill
        self._groups: dict[tuple[int, int], RemovalCause] = {}
        self._reported: set[tuple[int, int]] = set()

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return bool(self._groups)

    def has(self, row: Row) -> bool:
        """Whether a row's group is a dead letter."""
        return (row.partition, row.group) in self._groups

    def begin(self, row: Row, cause: RemovalCause) -> None:
        """No consumer gets rows of this row's group any more, and the units take it out."""
        if self.has(row):
            return
        table = self._book.rows
        members = self._withhold(row, cause)
        where = table.by_unit(members)
        self.remove(number for number in members if table.rows[number].lost)
        if where:
            self._book.out.append(RemoveGroup(where, cause))

    def keep_out(self, numbers: Sequence[int]) -> None:
        """New rows of a dead-letter group leave at once."""
        table = self._book.rows
        there = [number for number in numbers if number in table.rows] if self._groups else []
        members: dict[RemovalCause, list[int]] = {}
        for number in there:
            row = table.rows[number]
            if row.state is RowState.WITHHELD:
                members.setdefault(self._groups[row.partition, row.group], []).append(number)
        for cause, withheld in members.items():
            self._book.out.append(RemoveGroup(table.by_unit(withheld), cause))

    def remove(self, numbers: Iterable[int], cause: RemovalCause = UNKNOWN) -> None:
        """Rows of dead-letter groups left the queue; `cause`: as the removal's originator named it.

        If that was another controller, lost rows of these groups leave here now: no unit will report them.
        """
        table = self._book.rows
        removed: dict[int, list[int]] = {}
        leaving = deque(numbers)
        while leaving:
            number = leaving.popleft()
            row = table.rows[number]
            if not self.has(row):
                leaving += [member for member in self._withhold(row, cause) if table.rows[member].lost]
            self._report(row)
            self._book.remove(number)
            for task in self._book.tasks.values():
                task.partition(row.partition).queue.forget_group(row.group)
            removed.setdefault(row.partition, []).append(number)
        for partition, gone in removed.items():
            self.lack(partition, gone)
            for task in self._book.tasks.values():
                task.sized(partition)

    def lack(self, partition: int, numbers: Iterable[int]) -> None:
        """A partition will not have these rows, which are not in the table, unless admission replaces their groups."""
        if not self._refill:
            self._book.rows.partition(partition).removed.update(numbers)
            self._book.out.append(Shrunk(partition))

    def forget(self, partition: int) -> None:
        """A partition was cleared."""
        self._groups = {key: cause for key, cause in self._groups.items() if key[0] != partition}
        self._reported = {key for key in self._reported if key[0] != partition}

    def _report(self, row: Row) -> None:
        key = (row.partition, row.group)
        if key not in self._reported:
            self._reported.add(key)
            cause = self._groups[key]
            self.num_filtered += cause.filtered
            self.count += not cause.filtered
            self._book.out.append(GroupRemoved(row.partition, row.group, row.group_size, cause))

    def _withhold(self, row: Row, cause: RemovalCause) -> list[int]:
        """Hand out nothing of a row's group any more; returns the group's rows."""
        table = self._book.rows
        self._groups[row.partition, row.group] = cause
        members = [number for number in table.numbers(row.partition) if table.rows[number].group == row.group]
        for number in members:
            if not table.rows[number].lost:
                table.rows[number].to(RowState.WITHHELD)
                self._book.refresh(number)
        return members
