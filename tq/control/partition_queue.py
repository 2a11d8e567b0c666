"""The rows of one partition that one task may be given now, as items in order. Pure.

offer ---> (whole groups: until all rows of the group that are left are offered) ---> item ---pick---> gone
   ^--------------- withdraw: the row's unit went away, or the row is done ---------------'
"""

import heapq
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from asyncflow.errors import PeerRefused
from tq.control.rows import Row, Rows
from tq.policies import Item, Policy, Want


@dataclass(slots=True)
class _Group:
    """A group of a task with whole groups.

    Attributes:
        num_left: rows, seen or not, that the task is not done with.
        offered: of those, rows that may be handed out.
        item: all that is left, in order, when all of it is offered; else empty.
    """

    num_left: int
    offered: set[int] = field(default_factory=set)
    item: tuple[int, ...] = ()


class PartitionQueue:
    """Owned by `TaskState`."""

    def __init__(self, rows: Rows, bit: int, *, whole_groups: bool) -> None:
        """Args:
        rows: the table.
        bit: the task's.
        whole_groups: see `TaskSpec`.
        """
        self.num_rows = 0
        """Rows in items."""
        self.num_tokens = 0
        """Tokens of those."""
        self._rows = rows
        self._bit = bit
        self._whole = whole_groups
        self._queue = ReadyQueue()
        self._groups: dict[int, _Group] = {}

    def expect(self, row: Row) -> None:
        """A row that the task is not done with came to be; its group may wait for it."""
        if self._whole and row.group not in self._groups:
            self._groups[row.group] = _Group(row.group_size)

    def expect_again(self, row: Row) -> None:
        """The task was done with this row, and is not any more."""
        if self._whole:
            group = self._groups.setdefault(row.group, _Group(0))
            self._unlist(group)
            group.num_left += 1

    def mark_done(self, row: Row) -> None:
        """The task is done with a row, which is not offered any more."""
        if not self._whole or row.group not in self._groups:
            return
        group = self._groups[row.group]
        group.num_left -= 1
        if group.num_left > 0:
            self._list(group)
        else:
            del self._groups[row.group]

    def recount(self, numbers: Iterator[int]) -> None:
        """These are all rows that the partition has: what groups miss is done for."""
        left: dict[int, int] = {}
        for number in numbers:
            row = self._rows.rows[number]
            if row.left & self._bit:
                left[row.group] = left.get(row.group, 0) + 1
        for name in list(self._groups):
            group = self._groups[name]
            group.num_left = left.get(name, 0)
            if group.num_left:
                self._list(group)
            else:
                del self._groups[name]

    def forget_group(self, group: int) -> None:
        """A dead-letter group will not be completed."""
        self._groups.pop(group, None)

    def offer(self, number: int, row: Row) -> None:
        """A row may be handed out."""
        row.queued |= self._bit
        if self._whole:
            group = self._groups[row.group]
            self._unlist(group)
            group.offered.add(number)
            self._list(group)
        else:
            self._queue.push(number)
            self.num_rows += 1
            self.num_tokens += row.tokens

    def withdraw(self, number: int, row: Row) -> None:
        """A row may not be handed out any more."""
        row.queued &= ~self._bit
        if self._whole:
            group = self._groups[row.group]
            self._unlist(group)
            group.offered.discard(number)
            self._list(group)
        else:
            self.num_rows -= 1
            self.num_tokens -= row.tokens

    def grew(self, row: Row, tokens: int) -> None:
        """An offered row got more tokens."""
        if not self._whole or self._groups[row.group].item:
            self.num_tokens += tokens

    def pick(self, policy: Policy, want: Want) -> list[Item]:
        """Take the items that a policy chooses.

        Raises:
            PeerRefused: the policy does not keep its promises; nothing was taken.
        """
        shown: dict[int, Item] = {}
        taken: set[int] = set()
        try:
            chosen = policy.pick(self._front(shown), want)
            names = {item.rows[0] for item in chosen}
            unknown = any(shown.get(item.rows[0]) != item for item in chosen)
            if (shown and not names) or len(names) != len(chosen) or unknown:
                raise PeerRefused(f"{policy!r} chose items that it was not shown, or the same one twice, or none")
            num_rows = sum(len(item.rows) for item in chosen)
            if len(chosen) > 1 and num_rows > want.num_rows:
                raise PeerRefused(f"{policy!r} chose {num_rows} rows where {want.num_rows} were wanted")
            taken = names
        finally:
            self._queue.put_back([name for name in shown if name not in taken])
        for item in chosen:
            self._claim(item)
        return chosen

    def put_back(self, items: Sequence[Item]) -> None:
        """Return items that were picked: they may be handed out again."""
        for item in items:
            for number in item.rows:
                self.offer(number, self._rows.rows[number])

    def _front(self, shown: dict[int, Item]) -> Iterator[Item]:
        """Yield items in order, and note them by their first rows."""
        rows = self._rows.rows
        while (number := self._queue.pop()) is not None:
            row = rows.get(number)
            if row is None or not row.queued & self._bit:
                continue  # withdrawn since
            if self._whole:
                members = self._groups[row.group].item
                if not members or members[0] != number:
                    continue  # its group was listed anew
                item = Item(members, sum(rows[member].tokens for member in members))
            else:
                item = Item((number,), row.tokens)
            shown[number] = item
            yield item

    def _claim(self, item: Item) -> None:
        for number in item.rows:
            self._rows.rows[number].queued &= ~self._bit
        self.num_rows -= len(item.rows)
        self.num_tokens -= item.tokens
        if self._whole:
            group = self._groups[self._rows.rows[item.rows[0]].group]
            group.offered.clear()
            group.item = ()

    def _list(self, group: _Group) -> None:
        if group.item or not group.offered or len(group.offered) < group.num_left:
            return
        group.item = tuple(sorted(group.offered))
        self._queue.push(group.item[0])
        self.num_rows += len(group.item)
        self.num_tokens += sum(self._rows.rows[number].tokens for number in group.item)

    def _unlist(self, group: _Group) -> None:
        if group.item:
            self.num_rows -= len(group.item)
            self.num_tokens -= sum(self._rows.rows[number].tokens for number in group.item)
            group.item = ()


_BUCKET_BITS = 10


class ReadyQueue:
    """Row numbers in ascending order. A number may be here twice or be out of date: the caller checks what it pops.

    Cost does not grow with the number of rows that wait: neighbouring numbers share a bucket, and only the bucket in
    front is kept sorted. So a million rows cost a heap of a thousand buckets, in whatever order they become ready.
    """

    def __init__(self) -> None:
        self._front: list[int] = []
        """Negated, so that the smallest number is last."""
        self._front_bucket = -1
        self._buckets: dict[int, list[int]] = {}
        self._order: list[int] = []

    def push(self, number: int) -> None:
        """Add a number."""
        bucket = number >> _BUCKET_BITS
        if bucket == self._front_bucket:
            insort(self._front, -number)
            return
        members = self._buckets.get(bucket)
        if members is not None:
            members.append(number)
            return
        self._buckets[bucket] = [number]
        heapq.heappush(self._order, bucket)
        if bucket < self._front_bucket:
            self._retreat()

    def pop(self) -> int | None:
        """Take the smallest number; None: there is none. A number that was pushed twice comes once."""
        if not self._front:
            if not self._order:
                return None
            self._front_bucket = heapq.heappop(self._order)
            self._front = sorted(-number for number in self._buckets.pop(self._front_bucket))
        number = -self._front.pop()
        while self._front and self._front[-1] == -number:
            self._front.pop()
        return number

    def put_back(self, numbers: Sequence[int]) -> None:
        """Return numbers that were popped."""
        for number in reversed(numbers):
            self.push(number)

    def _retreat(self) -> None:
        """A bucket that comes earlier exists."""
        if self._front:
            self._buckets[self._front_bucket] = [-number for number in self._front]
            heapq.heappush(self._order, self._front_bucket)
        self._front, self._front_bucket = [], -1
