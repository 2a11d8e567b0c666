"""One task's view of the rows: which may be handed out, which are in whose hands. Pure.

waiting --inputs written, row stored--> ready --granted--> leased --outputs written--> done
   ^                                                          |
   '--------fence confirmed---------- fencing <--owner died or released'

Only `refresh` judges whether a row is ready; everything that could change that ends by calling it.
`TASK_TRANSITIONS` lists all transitions.
"""

import enum
import heapq
from collections.abc import Iterable, Sequence

from tq.control.partition_queue import Fencing, Leases, PartitionQueue, PoisonIsolation
from tq.control.rounds import Rounds
from tq.control.rows import Row, Rows, RowState
from tq.policies import Fifo, Policy, TaskSpec, Want

_STORED = RowState.STORED  # enum attribute access is slow, and this value is compared for every row and task


class TaskRowState(enum.IntEnum):
    """Where a row in the table is, for one task."""

    WAITING = 0  # for inputs, for its group, or for its unit
    READY = 1  # it may be handed out now
    LEASED = 2  # in a consumer's hands, or assigned to a rank
    # Its lease is void; its unit may still take a late put. If it is lost, the fence follows where it is put again.
    FENCING = 3
    DONE = 4  # outputs are written, or it was acknowledged


# State -> the states that may follow, each with its cause. A row that left the table has none. A state is not stored:
# `left`, the leases and `queued` imply it. The random models compare it over every event.
TASK_TRANSITIONS: dict[TaskRowState, dict[TaskRowState, str]] = {
    TaskRowState.WAITING: {
        TaskRowState.READY: "its inputs are written and it is stored",
        TaskRowState.LEASED: "a trainer says, after a restart of the controller, that it holds it",
        TaskRowState.FENCING: "it came back though a void lease of an earlier incarnation may have it",
        TaskRowState.DONE: "a unit or another controller knows that it is done",
    },
    TaskRowState.READY: {
        TaskRowState.WAITING: "its unit went away, or its group is leaving",
        TaskRowState.LEASED: "it was asked for",
        TaskRowState.FENCING: "it came back though a void lease of an earlier incarnation may have it",
        TaskRowState.DONE: "a unit or another controller knows that it is done",
    },
    TaskRowState.LEASED: {
        TaskRowState.FENCING: "its holder died, released it, or lost it with the unit",
        TaskRowState.DONE: "its outputs are written, or it was acked",
    },
    TaskRowState.FENCING: {
        TaskRowState.WAITING: "its unit refuses late puts",
        TaskRowState.DONE: "the last put came before the fence",
    },
    TaskRowState.DONE: {
        TaskRowState.WAITING: "its outputs were lost with a unit, and it was put again without them",
    },
}


class TaskPartition:
    def __init__(self, queue: PartitionQueue) -> None:
        self.queue = queue
        self.rounds = Rounds()
        self.num_held = 0
        self.num_done = 0
        self.listed = False  # whether `TaskState` looks here for ready rows


class TaskState:
    """Readiness and leases of one task; all tasks share the table."""

    def __init__(self, spec: TaskSpec, rows: Rows) -> None:
        self.spec = spec
        self.bit = rows.bits[spec.name]
        self.inputs = rows.mask(spec.inputs)
        self.leases = Leases()
        self.isolation = PoisonIsolation(self.leases, spec.max_deliveries)
        self.partitions: dict[int, TaskPartition] = {}
        self.changed: set[int] = set()  # partitions whose parked rounds may have become answerable since the last look
        self.num_left = 0
        self.num_acked = 0
        self.num_deliveries = 0
        self.num_released = 0
        self._rows = rows
        self._with_ready: list[int] = []
        self._finished: set[int] = set()
        self._cleared: set[int] = set()

    @property
    def has_ready(self) -> bool:
        """Whether some partition may have rows to take."""
        return bool(self._with_ready)

    @property
    def oldest_ready(self) -> int | None:
        """The oldest partition that may have rows to take."""
        return self._with_ready[0] if self._with_ready else None

    # Rows

    def refresh(self, number: int, row: Row) -> None:
        """Offer a row when it may be handed out; withdraw it otherwise."""
        wanted = self._wanted(number, row)
        if wanted == bool(row.queued & self.bit):
            return
        part = self.partition(row.partition)
        if wanted:
            part.queue.offer(number, row)
            self._list(row.partition, part)
        else:
            part.queue.withdraw(number, row)
        self.changed.add(row.partition)

    def created(self, partition: int, rows: Sequence[tuple[int, Row]]) -> None:
        """Take new rows of a partition; the task may be done with some already."""
        self._cleared.discard(partition)
        part = self.partition(partition)
        queue, bit = part.queue, self.bit
        for number, row in rows:
            queue.expect(row)
            if row.left & bit:
                self.num_left += 1
                if self._wanted(number, row):
                    queue.offer(number, row)
            else:
                queue.mark_done(row)
                part.num_done += 1
        self._list(partition, part)
        self.changed.add(partition)

    def done(self, number: int, row: Row) -> None:
        """The task is done with a row, whoever held it; its bit in `left` was just cleared."""
        part = self.partition(row.partition)
        if row.queued & self.bit:
            part.queue.withdraw(number, row)
        part.num_held -= self.leases.release(number)
        self.leases.forget(number)
        self.num_left -= 1
        self.num_acked += 1
        self._mark_done(part, row)

    def reopened(self, number: int, row: Row) -> None:
        """The task's outputs were lost: it is no longer done with this row; its bit in `left` was just set."""
        part = self._resurrected(row.partition)
        part.num_done -= 1
        part.queue.expect_again(row)
        self.num_left += 1
        self.refresh(number, row)

    def removed(self, number: int, row: Row, *, may_return: bool = False) -> None:
        """A row leaves the table before all tasks are done with it; `may_return`: it may be put anew."""
        part = self._resurrected(row.partition)
        if row.queued & self.bit:
            part.queue.withdraw(number, row)
        token = self.leases.holders.get(number)
        if token is not None:
            part.num_held -= len(self.leases.void(token, [number]))
        self.leases.forget(number)
        if token is not None and may_return:
            self.leases.owe_fence([number])
        if row.left & self.bit:
            self.num_left -= 1
        else:
            part.num_done -= 1
            part.queue.expect_again(row)
        self.changed.add(row.partition)

    def finished_before(self, partition: int, num_rows: int) -> None:
        self.partition(partition).num_done += num_rows
        self.changed.add(partition)

    def done_before(self, row: Row) -> None:
        """The group of a row that was finished before a restart is known now."""
        part = self.partition(row.partition)
        part.queue.expect(row)
        part.queue.mark_done(row)
        self._list(row.partition, part)
        self.changed.add(row.partition)

    # Partitions

    def partition(self, number: int) -> TaskPartition:
        part = self.partitions.get(number)
        if part is None:
            queue = PartitionQueue(self._rows, self.bit, whole_groups=self.spec.whole_groups)
            part = self.partitions[number] = TaskPartition(queue)
        return part

    def sized(self, number: int) -> None:
        """The partition's number of rows became known, or changed."""
        self._cleared.discard(number)
        if number in self._finished:
            return
        self._list(number, self.partition(number))
        self.changed.add(number)
        self.drop_finished(number)

    def drop_finished(self, number: int) -> None:
        part = self.partitions.get(number)
        size = self._size(number)
        if part is not None and size is not None and part.num_done >= size:
            del self.partitions[number]
            self._finished.add(number)
            self.changed.add(number)

    def clear(self, number: int) -> None:
        """Forget a partition without rows; a rank that asks for its rounds hears that it is over."""
        self.partitions.pop(number, None)
        self._finished.discard(number)
        self._cleared.add(number)
        self.changed.add(number)

    def over(self, number: int) -> bool:
        """Whether all rows of the partition are done, or it was cleared."""
        return number in self._finished or number in self._cleared

    def exhausted(self, number: int) -> bool:
        """Whether all rows of the partition were handed out."""
        if self.over(number):
            return True
        part, size = self.partitions.get(number), self._size(number)
        return part is not None and size is not None and part.num_done + part.num_held >= size

    def num_unassigned(self, number: int) -> int:
        """Return how many rows of a partition were never leased."""
        part, size = self.partitions.get(number), self._size(number) or 0
        if part is None:
            return 0
        return max(part.queue.num_rows, size - part.num_done - part.num_held)

    # Leases

    def take(self, want: Want, *, newest_allowed: int | None) -> tuple[int, tuple[int, ...]] | None:
        """Take ready rows of the oldest partition that has any, none beyond `newest_allowed` (the staleness gate)."""
        while self._with_ready:
            number = self._with_ready[0]
            part = self.partitions.get(number)
            if part is None or not self._may_take(number, part):
                # Drop the entry; `_list` adds the partition again once it has something to give.
                heapq.heappop(self._with_ready)
                if part is not None:
                    part.listed = False
                continue
            if newest_allowed is not None and number > newest_allowed:
                return None
            if self.spec.in_order and not self.front_ready(number, want.num_rows):
                return None
            items = part.queue.pick(self.picking, want)
            count = self.isolation.together(items)
            part.queue.put_back(items[count:])
            items = items[:count]
            return number, tuple(row for item in items for row in item.rows)
        return None

    def lease(self, token: int, partition: int, rows: Iterable[int], reader: str = "") -> None:
        """Rows that were taken are in a consumer's hands; `reader` "": no consumer asked for them yet."""
        rows = tuple(rows)
        self.leases.give(token, partition, rows, reader)
        self.partition(partition).num_held += len(rows)
        self.num_deliveries += 1

    def void(self, token: int, rows: Iterable[int] | None = None) -> list[int]:
        """Take rows (None: all) out of a lease; returns them. They are not ready before the caller says so."""
        partition = self.leases.by_token[token].partition
        taken = self.leases.void(token, rows)
        self.partition(partition).num_held -= len(taken)
        return taken

    def fence(self, token: int, rows: Sequence[int], *, counts: bool) -> None:
        self.leases.fence(token, Fencing(tuple(rows), counts))

    # For those who pick rows

    @property
    def picking(self) -> Policy:
        """What chooses rows: the task's policy; in order there is nothing to choose."""
        return Fifo() if self.spec.in_order else self.spec.policy

    def rest_ready(self, number: int) -> bool:
        """Whether every row of the partition that was not handed out is ready."""
        part, size = self.partition(number), self._size(number)
        return size is not None and part.num_done + part.num_held + part.queue.num_rows >= size

    def front_ready(self, number: int, num_rows: int) -> bool:
        """Whether the first `num_rows` rows, in ascending order, that are not handed out are ready; or the rest."""
        info, rows, bit = self._rows.partitions.get(number), self._rows.rows, self.bit
        if info is None or not info.all_known or self.partition(number).queue.num_rows < num_rows:
            return self.rest_ready(number)
        held = self.leases.holders
        # This scans all rows of the partition: the price of `in_order`.
        numbers = sorted(n for n in self._rows.numbers(number) if rows[n].left & bit and n not in held)
        front = numbers[:num_rows]
        groups = {rows[n].group for n in front} if self.spec.whole_groups else set()
        front += [n for n in numbers[num_rows:] if rows[n].group in groups]
        return all(rows[n].queued & bit for n in front)

    # Private

    def _wanted(self, number: int, row: Row) -> bool:
        leases = self.leases
        return (
            row.left & self.bit != 0
            and not self.inputs & ~row.written
            and row.state is _STORED
            and number not in leases.holders
            and number not in leases.fencing
        )

    def _resurrected(self, number: int) -> TaskPartition:
        """Return the partition, reopened if it was over, since one of its rows is not done any more."""
        if number in self._finished:
            self._finished.discard(number)
            self.partition(number).num_done += self._size(number) or 0
        return self.partition(number)

    def _mark_done(self, part: TaskPartition, row: Row) -> None:
        part.queue.mark_done(row)
        part.num_done += 1
        self._list(row.partition, part)
        self.changed.add(row.partition)

    def _size(self, number: int) -> int | None:
        info = self._rows.partitions.get(number)
        return None if info is None else info.num_rows

    def _may_take(self, number: int, part: TaskPartition) -> bool:
        return part.queue.num_rows > 0 and (not self.spec.barrier or self.rest_ready(number))

    def _list(self, number: int, part: TaskPartition) -> None:
        if not part.listed and self._may_take(number, part):
            part.listed = True
            heapq.heappush(self._with_ready, number)
