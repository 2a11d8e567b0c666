"""Dead-letter and filtered groups: no consumer gets their rows, and units remove them. Pure.

begin -> rows withheld, units told (RemoveGroup) -> each reports its rows removed -> GroupRemoved, once
"""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from tq.control.events import GroupRemoved, Instruction, RemoveGroup, Shrunk
from tq.control.row_set import RowSet
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

    def __init__(self, table: Table, *, refill: bool) -> None:
        """Args:
        table: rows and tasks.
        refill: admission replaces groups, so partitions keep their size; else they get smaller.
        """
        self.count = 0
        """Groups that left because a task failed on them."""
        self.num_filtered = 0
        """Groups that left because they were filtered out."""
        self._table = table
        self._refill = refill
        self.groups: dict[tuple[int, int], RemovalCause] = {}
        """(Partition, group) -> why it leaves."""
        self._reported: set[tuple[int, int]] = set()

    def has(self, row: Row) -> bool:
        """Whether a row's group is leaving: a dead letter, or filtered."""
        return (row.partition, row.group) in self.groups

    def begin(self, row: Row, cause: RemovalCause) -> None:
        """No consumer gets rows of this row's group any more, and the units take it out."""
        if self.has(row):
            return
        all_rows = self._table.rows
        members = self._withhold(row, cause)
        where = all_rows.by_unit(members)
        self.remove(number for number in members if all_rows.rows[number].lost)
        if where:
            self._table.out.append(RemoveGroup(where, cause))

    def give_up(self, task: TaskState, token: int, rows: Iterable[int], *, failures: int = 0) -> None:
        """The holder of a lease has no use for the groups of some of its rows, or failed on them so often."""
        for number in task.leases.by_token[token].rows.intersection(rows):
            row = self._table.rows.rows.get(number)
            if row is not None:
                self.begin(row, RemovalCause(task.spec.name, failures, filtered=not failures))

    def keep_out(self, numbers: Iterable[int]) -> None:
        """New rows of a group that is leaving leave at once."""
        all_rows = self._table.rows
        members: dict[RemovalCause, list[int]] = {}
        for number in numbers:
            row = all_rows.rows.get(number)
            if row is not None and row.state is RowState.WITHHELD:
                members.setdefault(self.groups[row.partition, row.group], []).append(number)
        for cause, withheld in members.items():
            self._table.out.append(RemoveGroup(all_rows.by_unit(withheld), cause))

    def remove(self, numbers: Iterable[int], cause: RemovalCause = UNKNOWN) -> None:
        """Rows of groups that are leaving left the queue; `cause`: as the removal's originator named it.

        If that was another controller, lost rows of these groups leave here now: no unit will report them.
        """
        all_rows = self._table.rows
        removed: dict[int, list[int]] = {}
        leaving = deque(numbers)
        while leaving:
            number = leaving.popleft()
            row = all_rows.rows[number]
            if not self.has(row):
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
        """A partition will not have these rows, which are not in the table, unless admission replaces their groups."""
        if not self._refill:
            self._table.rows.partition(partition).lack(RowSet(numbers))
            self._table.out.append(Shrunk(partition))

    def forget(self, partition: int) -> None:
        """A partition was cleared."""
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
        """Hand out nothing of a row's group any more; returns the group's rows."""
        all_rows = self._table.rows
        self.groups[row.partition, row.group] = cause
        members = [number for number in all_rows.numbers(row.partition) if all_rows.rows[number].group == row.group]
        for number in members:
            if not all_rows.rows[number].lost:
                all_rows.rows[number].to(RowState.WITHHELD)
                self._table.refresh(number)
        return members
