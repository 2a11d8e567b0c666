"""The rows of one partition that one task may be given now, as items in order. Pure.

offer ---> (whole groups: until all remaining rows of the group are offered) ---> item ---pick---> gone
   ^--------------- withdraw: the row's unit went away, or the row is done ---------------'
"""

import heapq
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from asyncflow.errors import PeerRefused, one_line
from tq.control.rows import Row, Rows
from tq.policies import Item, Policy, Want


@dataclass(slots=True)
class _Group:
    """A group of a task with whole groups."""

    num_left: int  # rows, seen or not, that the task is not done with
    offered: set[int] = field(default_factory=set)  # those of them that may be handed out
    item: tuple[int, ...] = ()  # all rows left, in order, when all of them are offered; otherwise empty


class PartitionQueue:
    """The ready rows of a `TaskPartition`, for the task with this bit."""

    def __init__(self, rows: Rows, bit: int, *, whole_groups: bool) -> None:
        self.num_rows = 0  # rows in items
        self.num_tokens = 0  # tokens of these rows
        self._rows = rows
        self._bit = bit
        self._whole = whole_groups
        self._queue = ReadyQueue()
        self._groups: dict[int, _Group] = {}

    def expect(self, row: Row) -> None:
        """A new row that the task is not done with: its group may have to wait for it."""
        if self._whole and row.group not in self._groups:
            self._groups[row.group] = _Group(row.group_size)

    def expect_again(self, row: Row) -> None:
        """The task is no longer done with this row."""
        if self._whole:
            group = self._groups.setdefault(row.group, _Group(0))
            self._unlist(group)
            group.num_left += 1

    def mark_done(self, row: Row) -> None:
        """The task is done with a row, which must not be on offer any more."""
        if not self._whole or row.group not in self._groups:
            return
        group = self._groups[row.group]
        group.num_left -= 1
        if group.num_left > 0:
            self._list(group)
        else:
            del self._groups[row.group]

    def recount(self, numbers: Iterator[int]) -> None:
        """Complete groups: `numbers` are all rows that the partition has; the rows that groups lack are done."""
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
        self._groups.pop(group, None)

    def offer(self, number: int, row: Row) -> None:
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
        if not self._whole or self._groups[row.group].item:
            self.num_tokens += tokens

    def pick(self, policy: Policy, want: Want) -> list[Item]:
        """Take the items that a policy chooses.

        Raises PeerRefused, and takes nothing, if the policy raises or breaks its contract.
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
        except PeerRefused:
            raise
        except Exception as error:  # a user's class; whoever's event made it choose is not to blame
            raise PeerRefused(f"tq.policy: {type(policy).__name__} raised {one_line(error)}") from error
        finally:
            # Also when the policy raises: nothing that it was shown may get lost.
            self._queue.put_back([name for name in shown if name not in taken])
        for item in chosen:
            self._claim(item)
        return chosen

    def put_back(self, items: Sequence[Item]) -> None:
        for item in items:
            for number in item.rows:
                self.offer(number, self._rows.rows[number])

    def _front(self, shown: dict[int, Item]) -> Iterator[Item]:
        """Yield items in order, and note them in `shown` by their first rows."""
        rows = self._rows.rows
        while (number := self._queue.pop()) is not None:
            row = rows.get(number)
            if row is None or not row.queued & self._bit:
                continue  # withdrawn in the meantime
            if self._whole:
                members = self._groups[row.group].item
                if not members or members[0] != number:
                    continue  # outdated: the group was listed again
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
    """Row numbers in ascending order. A number may be here twice or be out of date: the caller checks what it pops."""

    def __init__(self) -> None:
        # Neighbouring numbers share a bucket, and only the front bucket is kept sorted, so the cost does not grow with
        # the rows that wait: a million rows cost a heap of a thousand buckets, in whatever order they become ready.
        self._front: list[int] = []  # negated, so that the smallest number is last
        self._front_bucket = -1
        self._buckets: dict[int, list[int]] = {}
        self._order: list[int] = []

    def push(self, number: int) -> None:
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
        """Take the smallest number, once even if it was pushed twice; None: there is none."""
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
        for number in reversed(numbers):
            self.push(number)

    def _retreat(self) -> None:
        """Make room for an earlier bucket than the front one."""
        if self._front:
            self._buckets[self._front_bucket] = [-number for number in self._front]
            heapq.heappush(self._order, self._front_bucket)
        self._front, self._front_bucket = [], -1


# Leases of one task: live ones, void ones that wait for their fence, and spent ones. Pure.
#
# given --done--> spent (remembered, so that a repeated ack is recognized)
#   '--void--> fencing --Fenced--> free to be given again

_SPENT_REMEMBERED = 16384


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """Rows in a consumer's hands."""

    token: int
    partition: int
    granted: set[int]  # all its rows except those that were released
    rows: set[int]  # those of them that are not done
    # Consumers that hold it; none yet: a round's slice that no rank asked for.
    readers: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Fencing:
    """Rows of a void lease, held back until the fence holds; `counts`: as a failed delivery."""

    rows: tuple[int, ...]
    counts: bool


class Leases:
    """The leases of one task."""

    def __init__(self) -> None:
        self.by_token: dict[int, LeaseRecord] = {}
        self.holders: dict[int, int] = {}  # row -> token of the lease that it is in
        # Row -> token of the fence that it waits for; 0: a lost row, to be fenced where it is put again.
        self.fencing: dict[int, int] = {}
        self.returns: dict[int, int] = {}  # row -> how often it came back after a failed try
        self.some_void = False  # whether a consumer may still put under a lease that is no longer its own
        self._fences: dict[int, Fencing] = {}
        self._owned: dict[str, set[int]] = {}
        self._spent: dict[int, frozenset[int]] = {}

    def give(self, token: int, partition: int, rows: Iterable[int], reader: str = "") -> None:
        """Put rows into a new lease; `reader` "": no consumer asked for it yet."""
        lease = self.by_token[token] = LeaseRecord(token, partition, set(rows), set(rows))
        for row in lease.rows:
            assert row not in self.holders, "a row is in one lease at a time"
            self.holders[row] = token
        if reader:
            self.read(token, reader)

    def read(self, token: int, owner: str) -> None:
        """`owner` holds this lease, too."""
        self.by_token[token].readers.add(owner)
        self._owned.setdefault(owner, set()).add(token)

    def holder(self, row: int) -> LeaseRecord | None:
        token = self.holders.get(row)
        return None if token is None else self.by_token[token]

    def release(self, row: int) -> bool:
        """A row is done or gone; returns whether it was in a lease."""
        token = self.holders.pop(row, None)
        if token is None:
            return False
        lease = self.by_token[token]
        lease.rows.discard(row)
        if not lease.rows:
            self._end(lease)
        return True

    def void(self, token: int, rows: Iterable[int] | None = None) -> list[int]:
        """Take rows (None: all that are not done) out of a lease; returns them in order."""
        self.some_void = True
        lease = self.by_token[token]
        taken = sorted(lease.rows if rows is None else lease.rows.intersection(rows))
        for row in taken:
            del self.holders[row]
        lease.rows.difference_update(taken)
        lease.granted.difference_update(taken)
        if not lease.rows:
            self._end(lease)
        return taken

    def of(self, owner: str) -> Iterator[int]:
        """Yield the rows that a consumer has in hand."""
        for token in self._owned.get(owner, ()):
            yield from self.by_token[token].rows

    def leave(self, owner: str) -> list[LeaseRecord]:
        """A consumer is gone; returns the leases without a holder."""
        ended = []
        for token in sorted(self._owned.pop(owner, ())):
            lease = self.by_token[token]
            lease.readers.discard(owner)
            if not lease.readers:
                ended.append(lease)
        return ended

    def was_done(self, token: int, row: int) -> bool:
        """Whether a row was done under this lease."""
        lease = self.by_token.get(token)
        if lease is not None:
            return row in lease.granted and row not in lease.rows
        return row in self._spent.get(token, ())

    def known(self, token: int) -> bool:
        """Whether this is a lease, or was one until all its rows were done."""
        return token in self.by_token or token in self._spent

    def owe_fence(self, rows: Iterable[int]) -> None:
        """Rows of void leases are lost: do not lease them before a fence holds where they are put again."""
        self.fencing.update(dict.fromkeys(rows, 0))

    def fence(self, token: int, fencing: Fencing) -> None:
        """Hold rows back until `fenced(token)`."""
        self._fences[token] = fencing
        for row in fencing.rows:
            self.fencing[row] = token

    def fenced(self, token: int) -> Fencing | None:
        """A fence holds; returns the rows that waited for this fence and no later one."""
        fencing = self._fences.pop(token, None)
        if fencing is None:
            return None
        rows = tuple(row for row in fencing.rows if self.fencing.get(row) == token)
        for row in rows:
            del self.fencing[row]
        return Fencing(rows, fencing.counts)

    def returned(self, row: int) -> int:
        """Count a failed try of a row; returns how many there were."""
        self.returns[row] = self.returns.get(row, 0) + 1
        return self.returns[row]

    def returned_before(self, row: int, times: int) -> None:
        """Take a unit's count of how often a row came back."""
        self.returns[row] = max(times, self.returns.get(row, 0))

    def forget(self, row: int) -> None:
        self.fencing.pop(row, None)
        self.returns.pop(row, None)

    def _end(self, lease: LeaseRecord) -> None:
        del self.by_token[lease.token]
        for owner in lease.readers:
            owned = self._owned[owner]
            owned.discard(lease.token)
            if not owned:
                del self._owned[owner]
        # Remember the rows, so that a repeated ack is recognized.
        if lease.granted:
            self._spent[lease.token] = frozenset(lease.granted)
            if len(self._spent) > _SPENT_REMEMBERED:
                del self._spent[next(iter(self._spent))]


class PoisonIsolation:
    """Which rows of a task are handed out alone: those whose next return would make their group a dead letter.

        returns, of max_deliveries 3    0, 1: together with others    2: alone    3: dead letter

    A consumer that dies returns all the rows it had in hand, and one of them may have killed it. So the last try of a
    row is made alone: its reader gets nothing else of the task until it is done with it, and one item at most is blamed
    for another death.
    """

    def __init__(self, leases: Leases, max_deliveries: int) -> None:
        self._leases = leases
        self._last_try = max_deliveries - 1 if max_deliveries > 1 else 0

    def holds(self, owner: str) -> bool:
        """Whether a consumer has a row in hand that is on its last try."""
        return bool(self._last_try and self._leases.returns) and any(map(self._is_last, self._leases.of(owner)))

    def together(self, items: Sequence[Item]) -> int:
        """Return how many of the items, from the first on, may share a lease; normally all of them."""
        if not self._last_try or not self._leases.returns:
            return len(items)
        alone = (k for k, item in enumerate(items) if any(map(self._is_last, item.rows)))
        return max(1, next(alone, len(items)))

    def _is_last(self, row: int) -> bool:
        return self._leases.returns.get(row, 0) >= self._last_try
