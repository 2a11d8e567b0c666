"""The rows of the queue, as one controller knows them, and the transitions of their lives. Pure, plain tables.

`RowTable` has one `Row` per row that some task is not done with: where it is, its columns and open tasks as bits. Each
served task adds its view (`TaskState`): which rows may be handed out, and which are in whose hands. Everything that
changes a row is a method of `RowTable`, which keeps all views in step and collects the resulting instructions in `out`
for `ControlState`. A row changes its state only as `TRANSITIONS` allows.

    RowsCreated --> in the table
    RowsCreated(announced) --> announced --RowsConfirmed--> in the table
                                   '--the put failed, or the unit went--> forgotten

Where there are several controllers, each hands out rows of other tasks, and each may know of another task that was done
with a lost row before. So a put is announced first: every controller says what it knows, and a row is handed out only
when all controllers have agreed and heard what the others know.
"""

import enum
import heapq
import itertools
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from asyncflow.errors import LeaseFenced, PeerRefused, PutPending, RowsExist, one_line
from tq.control.events import (
    Answer,
    Cleared,
    Fenced,
    ForwardAck,
    GroupRemoved,
    Instruction,
    OrderFenceRows,
    OrderFenceTask,
    OrderRemoveRows,
    PutAgain,
    RowsOfPartitionRemoved,
)
from tq.messages import (
    AckLost,
    Held,
    LeaseGrant,
    LostRows,
    OutputsWritten,
    RegisterUnit,
    RemovalReason,
    RowRecords,
    RowsAccepted,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
    TaskStats,
    UnitAccepted,
    UnitLoss,
    WatchLost,
)
from tq.policies import Fifo, Item, Policy, TaskSpec, Want
from tq.refill import UNKNOWN, RemovalCause


class RowState(enum.IntEnum):
    """Where a row is in its life, as this controller knows it."""

    UNKNOWN = 0  # not in the table: not announced yet, or removed
    ANNOUNCED = 1  # at a unit, but not every controller has agreed to it
    STORED = 2  # at a unit that is up: tasks may be given it
    AWAY = 3  # at a unit whose channel ended and that may come back
    # Lost with its unit. Which tasks are done with it is still known.
    LOST = 4
    WITHHELD = 5  # its group is leaving: no task is given the row, and its unit is told to remove it
    REMOVED = 6  # it left with its group (dead letter, filtered), its partition was cleared, or its put was taken back
    # All tasks are done with it. This is remembered.
    FINISHED = 7


# State -> the states that may follow, each with its cause.
TRANSITIONS: dict[RowState, dict[RowState, str]] = {
    RowState.UNKNOWN: {
        RowState.ANNOUNCED: "a unit stored it, and several controllers must agree",
        RowState.STORED: "a unit stored it",
        RowState.AWAY: "in the inventory of a unit that is just registering",
        RowState.LOST: "another controller, an earlier incarnation, its unit's next life or a trainer that holds it "
        "reported the loss",
        RowState.WITHHELD: "a unit has it, and its group is leaving",
    },
    RowState.ANNOUNCED: {
        RowState.STORED: "every controller agreed",
        RowState.AWAY: "every controller agreed, and the unit's channel ended meanwhile",
        RowState.WITHHELD: "every controller agreed, and its group is leaving",
    },
    RowState.STORED: {
        RowState.AWAY: "its unit's channel ended",
        RowState.LOST: "its unit came back as another process, or let go of it",
        RowState.WITHHELD: "a task failed on its group too often, or has no use for it",
        RowState.REMOVED: "its unit took it out",
        RowState.FINISHED: "the last task is done with it",
    },
    RowState.AWAY: {
        RowState.STORED: "its unit is back",
        RowState.LOST: "its unit did not come back in time, or came back as another process",
        RowState.WITHHELD: "a task failed on its group too often, or has no use for it",
        RowState.REMOVED: "its unit is back without it",
        RowState.FINISHED: "the last task is done with it",
    },
    RowState.LOST: {
        RowState.STORED: "it was put again, or turns out to be at a unit",
        RowState.AWAY: "it turns out to be at a unit that is just registering",
        RowState.WITHHELD: "it was put again, and its group is leaving",
        RowState.REMOVED: "its group leaves, or its partition is cleared",
        RowState.FINISHED: "the last task is done with it: an ack of rows in hand",
    },
    RowState.WITHHELD: {
        RowState.LOST: "its unit let go of it: another controller says that it is elsewhere",
        RowState.REMOVED: "its unit took it out, or is gone",
        RowState.FINISHED: "the last task is done with it",
    },
    RowState.REMOVED: {},
    RowState.FINISHED: {},
}


class TaskRowState(enum.IntEnum):
    """Where a row in the table is, for one task."""

    WAITING = 0  # for inputs, for its group, or for its unit
    READY = 1  # it may be handed out now
    LEASED = 2  # in a consumer's hands, or assigned to a rank
    # Its lease is void; its unit may still take a late put. If it is lost, the fence follows where it is put again.
    FENCING = 3
    DONE = 4  # outputs are written, or it was acknowledged


# State -> the states that may follow, each with its cause. A row that left the table has none. A state is not stored:
# `open_tasks`, the leases and `queued` imply it. The random models compare it over every event.
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


# Enum attribute access is slow, and these values are compared for every row and task.
_STORED, _LOST, _WITHHELD = RowState.STORED, RowState.LOST, RowState.WITHHELD


@dataclass(slots=True, eq=False)
class UnitLife:
    """One life of a storage unit."""

    name: str
    incarnation: str = ""
    online: bool = True  # connected; its rows may be handed out
    lost: bool = False  # it is gone with all its rows
    # `num_rows`, `num_bytes`: live rows there.
    num_rows: int = 0
    num_bytes: int = 0

    @property
    def row_state(self) -> RowState:
        """State of a row there, unless its group is leaving."""
        if self.lost:
            return RowState.LOST
        return RowState.STORED if self.online else RowState.AWAY

    def is_life_of(self, other: "UnitLife") -> bool:
        return self.name == other.name and self.incarnation == other.incarnation


@dataclass(slots=True, eq=False)
class Row:
    """What a controller knows of a row that some task is not done with."""

    unit: UnitLife  # where it is, or was
    # `partition`, `group`, `group_size`: see `messages.PutRows`.
    partition: int
    group: int
    group_size: int
    written: int  # columns (bits)
    open_tasks: int  # tasks that are not done with it (bits)
    # `tokens`, `num_bytes`: over all its columns.
    tokens: int
    num_bytes: int
    queued: int = 0  # tasks that may be given it now (bits); written only by their `TaskPartition`
    state: RowState = RowState.UNKNOWN

    @property
    def lost(self) -> bool:
        return self.state is _LOST

    def to(self, state: RowState) -> None:
        """Change the state, or keep it; asserts that `TRANSITIONS` allows the change."""
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"a row that is {self.state.name} cannot become {state.name}"
            self.state = state


# A set of row numbers at one bit each: rows are numbered densely, and finished ones are remembered for long.

Span = tuple[int, int]  # consecutive rows: the first one, and the last one + 1

# Rows per chunk. Setting a bit copies its chunk.
_CHUNK_BITS = 256
_FULL_CHUNK = (1 << _CHUNK_BITS) - 1
_PART_CHUNKS = 256  # consecutive chunks per part
_SET_PARTS = 256


class RowSet:
    """A set of row numbers, iterated in ascending order."""

    def __init__(self, rows: Iterable[int] = ()) -> None:
        self._chunks: dict[int, int] = {}
        self.update(rows)

    def __contains__(self, row: int) -> bool:
        return bool(self._chunks.get(row // _CHUNK_BITS, 0) >> row % _CHUNK_BITS & 1)

    def __iter__(self) -> Iterator[int]:
        for first, end in self.list_spans():
            yield from range(first, end)

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __len__(self) -> int:
        return sum(bits.bit_count() for bits in self._chunks.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowSet) and self._chunks == other._chunks

    __hash__ = None  # type: ignore[assignment]  # it changes

    def copy(self) -> "RowSet":
        rows = RowSet()
        rows._chunks = dict(self._chunks)
        return rows

    def add(self, row: int) -> None:
        chunk = row // _CHUNK_BITS
        self._chunks[chunk] = self._chunks.get(chunk, 0) | 1 << row % _CHUNK_BITS

    def discard(self, row: int) -> None:
        bits = self._chunks.get(row // _CHUNK_BITS, 0) & ~(1 << row % _CHUNK_BITS)
        if bits:
            self._chunks[row // _CHUNK_BITS] = bits
        else:
            self._chunks.pop(row // _CHUNK_BITS, None)

    def update(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.add(row)

    def merge_rows(self, other: "RowSet") -> None:
        """Add all rows of another set; a whole chunk costs no more than one row."""
        for chunk, bits in other._chunks.items():
            self._chunks[chunk] = self._chunks.get(chunk, 0) | bits

    def list_spans(self) -> list[Span]:
        spans: list[Span] = []
        for chunk, bits in sorted(self._chunks.items()):
            for low, high in [(0, _CHUNK_BITS)] if bits == _FULL_CHUNK else _runs(bits):
                first, end = chunk * _CHUNK_BITS + low, chunk * _CHUNK_BITS + high
                if spans and spans[-1][1] == first:
                    first = spans.pop()[0]
                spans.append((first, end))
        return spans

    @staticmethod
    def of_spans(spans: Iterable[Span]) -> "RowSet":
        """Return the set whose `list_spans` these are."""
        rows = RowSet()
        for first, end in spans:
            for chunk in range(first // _CHUNK_BITS, -(-end // _CHUNK_BITS)):
                low, high = max(first - chunk * _CHUNK_BITS, 0), min(end - chunk * _CHUNK_BITS, _CHUNK_BITS)
                rows._chunks[chunk] = rows._chunks.get(chunk, 0) | (1 << high) - (1 << low)
        return rows

    def split_parts(self) -> "dict[int, RowSet]":
        """Return part number -> its rows: at most 256 parts of 65,536 consecutive rows each; higher rows wrap around.

        A row is in the same part of every set, so a set that is stored by parts is rewritten only where it grew.
        """
        parts: dict[int, RowSet] = {}
        for chunk, bits in self._chunks.items():
            parts.setdefault(chunk // _PART_CHUNKS % _SET_PARTS, RowSet())._chunks[chunk] = bits
        return parts


def _runs(bits: int) -> Iterator[Span]:
    position = 0
    while bits:
        zeros = (bits & -bits).bit_length() - 1
        bits >>= zeros
        ones = (~bits & bits + 1).bit_length() - 1
        bits >>= ones
        yield position + zeros, position + zeros + ones
        position += zeros + ones


@dataclass(slots=True, eq=False)
class PartitionRows:
    """A partition, as all tasks see it."""

    declared: int | None = None  # rows that it will have, with `removed`, by `OpenPartition`; None: not yet
    # Rows that it will never have (dead letter without a replacement), unless they are put again.
    removed: RowSet = field(default_factory=RowSet)
    num_live: int = 0  # rows in the table
    num_finished: int = 0
    # Rows that all tasks are done with; a producer that never heard so may put them again.
    finished: RowSet = field(default_factory=RowSet)
    # Those of the finished rows whose group is unknown (from before this controller's start).
    nameless: RowSet = field(default_factory=RowSet)
    numbers: list[int] = field(default_factory=list)  # its rows in order of arrival, including some that are gone

    @property
    def num_rows(self) -> int | None:
        """How many rows it will have; None: unknown."""
        return None if self.declared is None else self.declared - len(self.removed)

    @property
    def all_known(self) -> bool:
        """Whether no row will follow."""
        return self.declared is not None and self.num_live + self.num_finished >= self.declared - len(self.removed)

    def remove_lacking(self, rows: Iterable[int]) -> None:
        """These rows are, or were, in the queue after all."""
        for number in rows if self.removed else ():
            self.removed.discard(number)


# The rounds of one step of one task (usually its partition): every rank of a gang gets one slice of each.
#
# A slice is a lease from the moment its round is formed; its rank comes for it later, perhaps several times.


@dataclass
class RankSlice:
    """One rank's part of a round; after a restart `rows` lacks those that were done, `num_rows` counts them, too."""

    token: int
    rows: tuple[int, ...]
    num_rows: int

    @staticmethod
    def from_items(token: int, items: Sequence[Item]) -> "RankSlice":
        rows = tuple(row for item in items for row in item.rows)
        return RankSlice(token, rows, len(rows))


@dataclass
class Round:
    """One slice of a step for every rank, formed once."""

    # By rank; None: an earlier incarnation of the controller had assigned it to no rank, so it is assigned again.
    rank_slices: list[RankSlice | None]
    largest_slice: int  # most rows of any slice
    last: bool  # no rows of the step follow
    partition: int = 0
    total_rows: int = 0  # of all slices

    @property
    def missing(self) -> list[int]:
        """Ranks whose slices are assigned again."""
        return [rank for rank, rank_slice in enumerate(self.rank_slices) if rank_slice is None]


@dataclass
class Rounds:
    """The rounds of one step, in order."""

    num_ranks: int = 0  # ranks that share the rounds; 0: no rank asked yet
    formed: list[Round] = field(default_factory=list)
    # Per rank, the tokens of its slices of the rounds that were formed here.
    assigned: list[int] = field(default_factory=list)

    def rank_loads(self, num_ranks: int) -> list[int]:
        """Return `assigned`, or zeros before the first round."""
        return self.assigned or [0] * num_ranks

    @property
    def num_rows(self) -> int:
        return sum(round_.total_rows for round_ in self.formed)

    def form_round(self, rank_slices: Sequence[Sequence[Item]], token: Callable[[], int], *, partition: int) -> Round:
        """Add a round of what each rank gets; the caller marks the last one."""
        assigned = [RankSlice.from_items(token(), items) for items in rank_slices]
        tokens = [sum(item.tokens for item in items) for items in rank_slices]
        self.assigned = [before + now for before, now in zip(self.rank_loads(len(rank_slices)), tokens, strict=True)]
        counts = [rank_slice.num_rows for rank_slice in assigned]
        self.formed.append(Round([*assigned], max(counts), False, partition, sum(counts)))
        return self.formed[-1]

    def restore_slice(self, one: Held) -> None:
        """A rank says that it holds this slice of a round that an earlier incarnation formed."""
        self.num_ranks = max(self.num_ranks, one.num_ranks)
        while len(self.formed) <= one.round_index:
            self.formed.append(Round([None] * one.num_ranks, 0, last=False, partition=one.partition))
        known = self.formed[one.round_index]
        known.rank_slices += [None] * (one.num_ranks - len(known.rank_slices))
        known.largest_slice = max(known.largest_slice, one.largest_slice)
        known.total_rows = max(known.total_rows, one.total_rows)
        known.last = known.last or one.last
        known.partition = one.partition
        held = known.rank_slices[one.rank]
        if held is None or held.token < one.token:
            known.rank_slices[one.rank] = RankSlice(one.token, tuple(one.rows), one.slice_rows)


# The ready rows of one task in one partition, as items in order.
#
# offer ---> (whole groups: until all remaining rows of the group are offered) ---> item ---pick---> gone
#    ^--------------- withdraw: the row's unit went away, or the row is done ---------------'


@dataclass(slots=True)
class _Group:
    """A group of a task with whole groups."""

    num_left: int  # rows, seen or not, that the task is not done with
    offered: set[int] = field(default_factory=set)  # those of them that may be handed out
    item: tuple[int, ...] = ()  # all rows left, in order, when all of them are offered; otherwise empty


class TaskPartition:
    """A partition, as the task with this bit sees it."""

    def __init__(self, rows: dict[int, Row], bit: int, *, whole_groups: bool) -> None:
        self.rounds = Rounds()
        self.num_held = 0
        self.num_done = 0
        self.num_ready = 0  # rows in items
        self.ready_tokens = 0  # tokens of these rows
        self.listed = False  # whether `TaskState` looks here for ready rows
        self._rows = rows
        self._bit = bit
        self._whole = whole_groups
        self._ready = ReadyQueue()
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

    def recount_groups(self, numbers: Iterator[int]) -> None:
        """Complete groups: `numbers` are all rows that the partition has; the rows that groups lack are done."""
        left: dict[int, int] = {}
        for number in numbers:
            row = self._rows[number]
            if row.open_tasks & self._bit:
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
            self._ready.push(number)
            self.num_ready += 1
            self.ready_tokens += row.tokens

    def withdraw(self, number: int, row: Row) -> None:
        row.queued &= ~self._bit
        if self._whole:
            group = self._groups[row.group]
            self._unlist(group)
            group.offered.discard(number)
            self._list(group)
        else:
            self.num_ready -= 1
            self.ready_tokens -= row.tokens

    def grew(self, row: Row, tokens: int) -> None:
        if not self._whole or self._groups[row.group].item:
            self.ready_tokens += tokens

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
        except Exception as error:  # a user's class; the event that made it choose is not at fault
            raise PeerRefused(f"tq.policy: {type(policy).__name__} raised {one_line(error)}") from error
        finally:
            # Also when the policy raises: nothing that it was shown may get lost.
            self._ready.put_back([name for name in shown if name not in taken])
        for item in chosen:
            self._claim(item)
        return chosen

    def put_back(self, items: Sequence[Item]) -> None:
        for item in items:
            for number in item.rows:
                self.offer(number, self._rows[number])

    def _front(self, shown: dict[int, Item]) -> Iterator[Item]:
        """Yield items in order, and note them in `shown` by their first rows."""
        rows = self._rows
        while (number := self._ready.pop()) is not None:
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
            self._rows[number].queued &= ~self._bit
        self.num_ready -= len(item.rows)
        self.ready_tokens -= item.tokens
        if self._whole:
            group = self._groups[self._rows[item.rows[0]].group]
            group.offered.clear()
            group.item = ()

    def _list(self, group: _Group) -> None:
        if group.item or not group.offered or len(group.offered) < group.num_left:
            return
        group.item = tuple(sorted(group.offered))
        self._ready.push(group.item[0])
        self.num_ready += len(group.item)
        self.ready_tokens += sum(self._rows[number].tokens for number in group.item)

    def _unlist(self, group: _Group) -> None:
        if group.item:
            self.num_ready -= len(group.item)
            self.ready_tokens -= sum(self._rows[number].tokens for number in group.item)
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
            self._put_front_back()

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

    def _put_front_back(self) -> None:
        """Make room for an earlier bucket than the front one."""
        if self._front:
            self._buckets[self._front_bucket] = [-number for number in self._front]
            heapq.heappush(self._order, self._front_bucket)
        self._front, self._front_bucket = [], -1


# Leases of one task: live ones, void ones that wait for their fence, and spent ones.
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

    def add_lease(self, token: int, partition: int, rows: Iterable[int], reader: str = "") -> None:
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

    def find_lease(self, row: int) -> LeaseRecord | None:
        token = self.holders.get(row)
        return None if token is None else self.by_token[token]

    def release_row(self, row: int) -> bool:
        """A row is done or gone; returns whether it was in a lease."""
        token = self.holders.pop(row, None)
        if token is None:
            return False
        lease = self.by_token[token]
        lease.rows.discard(row)
        if not lease.rows:
            self._end_lease(lease)
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
            self._end_lease(lease)
        return taken

    def rows_of(self, owner: str) -> Iterator[int]:
        """Yield the rows that a consumer has in hand."""
        for token in self._owned.get(owner, ()):
            yield from self.by_token[token].rows

    def drop_owner(self, owner: str) -> list[LeaseRecord]:
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

    def fence_rows(self, token: int, fencing: Fencing) -> None:
        """Hold rows back until `confirm_fence(token)`."""
        self._fences[token] = fencing
        for row in fencing.rows:
            self.fencing[row] = token

    def confirm_fence(self, token: int) -> Fencing | None:
        """A fence holds; returns the rows that waited for this fence and no later one."""
        fencing = self._fences.pop(token, None)
        if fencing is None:
            return None
        rows = tuple(row for row in fencing.rows if self.fencing.get(row) == token)
        for row in rows:
            del self.fencing[row]
        return Fencing(rows, fencing.counts)

    def count_return(self, row: int) -> int:
        """Count a failed try of a row; returns how many there were."""
        self.returns[row] = self.returns.get(row, 0) + 1
        return self.returns[row]

    def returned_before(self, row: int, times: int) -> None:
        """Take a unit's count of how often a row came back."""
        self.returns[row] = max(times, self.returns.get(row, 0))

    def forget_row(self, row: int) -> None:
        self.fencing.pop(row, None)
        self.returns.pop(row, None)

    def _end_lease(self, lease: LeaseRecord) -> None:
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
        return bool(self._last_try and self._leases.returns) and any(map(self._is_last, self._leases.rows_of(owner)))

    def count_together(self, items: Sequence[Item]) -> int:
        """Return how many of the items, from the first on, may share a lease; normally all of them."""
        if not self._last_try or not self._leases.returns:
            return len(items)
        alone = (k for k, item in enumerate(items) if any(map(self._is_last, item.rows)))
        return max(1, next(alone, len(items)))

    def _is_last(self, row: int) -> bool:
        return self._leases.returns.get(row, 0) >= self._last_try


class TaskState:
    """One task's view of the rows: which may be handed out, which are in whose hands.

    waiting --inputs written, row stored--> ready --granted--> leased --outputs written--> done
       ^                                                          |
       '--------fence confirmed---------- fencing <--owner died or released'

    Only `refresh_row` judges whether a row is ready; everything that could change that ends by calling it.
    """

    def __init__(self, spec: TaskSpec, table: "RowTable") -> None:
        self.spec = spec
        self.bit = table.bits[spec.name]
        self.inputs = table.column_bits(spec.inputs)
        self.leases = Leases()
        self.isolation = PoisonIsolation(self.leases, spec.max_deliveries)
        self.partitions: dict[int, TaskPartition] = {}
        self.changed: set[int] = set()  # partitions whose parked rounds may have become answerable since the last look
        self.num_left = 0
        self.num_acked = 0
        self.num_deliveries = 0
        self.num_released = 0
        self._table = table
        self.ready_partitions: list[int] = []  # a heap; these may have rows to take
        self._finished: set[int] = set()
        self._cleared: set[int] = set()

    # Rows

    def refresh_row(self, number: int, row: Row) -> None:
        """Offer a row when it may be handed out; withdraw it otherwise."""
        wanted = self._is_row_wanted(number, row)
        if wanted == bool(row.queued & self.bit):
            return
        part = self.partition(row.partition)
        if wanted:
            part.offer(number, row)
            self._list_partition(row.partition, part)
        else:
            part.withdraw(number, row)
        self.changed.add(row.partition)

    def rows_created(self, partition: int, rows: Sequence[tuple[int, Row]]) -> None:
        """Take new rows of a partition; the task may be done with some already."""
        self._cleared.discard(partition)
        part, bit = self.partition(partition), self.bit
        for number, row in rows:
            part.expect(row)
            if row.open_tasks & bit:
                self.num_left += 1
                if self._is_row_wanted(number, row):
                    part.offer(number, row)
            else:
                part.mark_done(row)
                part.num_done += 1
        self._list_partition(partition, part)
        self.changed.add(partition)

    def row_done(self, number: int, row: Row) -> None:
        """The task is done with a row, whoever held it; its bit in `open_tasks` was just cleared."""
        part = self.partition(row.partition)
        if row.queued & self.bit:
            part.withdraw(number, row)
        part.num_held -= self.leases.release_row(number)
        self.leases.forget_row(number)
        self.num_left -= 1
        self.num_acked += 1
        part.num_done += 1
        self._row_of_group_done(part, row)

    def row_reopened(self, number: int, row: Row) -> None:
        """The task's outputs were lost: it is no longer done with this row; its bit in `open_tasks` was just set."""
        part = self._reopen_partition(row.partition)
        part.num_done -= 1
        part.expect_again(row)
        self.num_left += 1
        self.refresh_row(number, row)

    def row_removed(self, number: int, row: Row, *, may_return: bool = False) -> None:
        """A row leaves the table before all tasks are done with it; `may_return`: it may be put anew."""
        part = self._reopen_partition(row.partition)
        if row.queued & self.bit:
            part.withdraw(number, row)
        token = self.leases.holders.get(number)
        if token is not None:
            part.num_held -= len(self.leases.void(token, [number]))
        self.leases.forget_row(number)
        if token is not None and may_return:
            self.leases.owe_fence([number])
        if row.open_tasks & self.bit:
            self.num_left -= 1
        else:
            part.num_done -= 1
            part.expect_again(row)
        self.changed.add(row.partition)

    def finished_before(self, partition: int, num_rows: int) -> None:
        self.partition(partition).num_done += num_rows
        self.changed.add(partition)

    def done_before(self, row: Row) -> None:
        """The group of a row that was finished before a restart is known now."""
        part = self.partition(row.partition)
        part.expect(row)
        self._row_of_group_done(part, row)

    # Partitions

    def partition(self, number: int) -> TaskPartition:
        part = self.partitions.get(number)
        if part is None:
            part = TaskPartition(self._table.rows, self.bit, whole_groups=self.spec.whole_groups)
            self.partitions[number] = part
        return part

    def partition_sized(self, number: int) -> None:
        """The partition's number of rows became known, or changed."""
        self._cleared.discard(number)
        if number in self._finished:
            return
        self._list_partition(number, self.partition(number))
        self.changed.add(number)
        self.drop_finished(number)

    def drop_finished(self, number: int) -> None:
        """Forget a partition that the task is done with."""
        part = self.partitions.get(number)
        size = self._get_partition_size(number)
        if part is not None and size is not None and part.num_done >= size:
            del self.partitions[number]
            self._finished.add(number)
            self.changed.add(number)

    def clear_partition(self, number: int) -> None:
        """Forget a partition without rows; a rank that asks for its rounds hears that it is over."""
        self.partitions.pop(number, None)
        self._finished.discard(number)
        self._cleared.add(number)
        self.changed.add(number)

    def is_partition_over(self, number: int) -> bool:
        """Whether all rows of the partition are done, or it was cleared."""
        return number in self._finished or number in self._cleared

    def is_partition_exhausted(self, number: int) -> bool:
        """Whether all rows of the partition were handed out."""
        if self.is_partition_over(number):
            return True
        part, size = self.partitions.get(number), self._get_partition_size(number)
        return part is not None and size is not None and part.num_done + part.num_held >= size

    def num_unassigned(self, number: int) -> int:
        """Return how many rows of a partition were never leased."""
        part, size = self.partitions.get(number), self._get_partition_size(number) or 0
        if part is None:
            return 0
        return max(part.num_ready, size - part.num_done - part.num_held)

    # Leases

    def take_ready(self, want: Want, *, newest_allowed: int | None) -> tuple[int, tuple[int, ...]] | None:
        """Take ready rows of the oldest partition that has any, none beyond `newest_allowed` (the staleness gate)."""
        while self.ready_partitions:
            number = self.ready_partitions[0]
            part = self.partitions.get(number)
            if part is None or not self._may_take(number, part):
                # Drop the entry; `_list` adds the partition again once it has something to give.
                heapq.heappop(self.ready_partitions)
                if part is not None:
                    part.listed = False
                continue
            if newest_allowed is not None and number > newest_allowed:
                return None
            if self.spec.in_order and not self.front_ready(number, want.num_rows):
                return None
            items = part.pick(self.picking, want)
            count = self.isolation.count_together(items)
            part.put_back(items[count:])
            return number, tuple(row for item in items[:count] for row in item.rows)
        return None

    def lease_rows(self, token: int, partition: int, rows: Iterable[int], reader: str = "") -> None:
        """Rows that were taken are in a consumer's hands; `reader` "": no consumer asked for them yet."""
        rows = tuple(rows)
        self.leases.add_lease(token, partition, rows, reader)
        self.partition(partition).num_held += len(rows)
        self.num_deliveries += 1

    def void_rows(self, token: int, rows: Iterable[int] | None = None) -> list[int]:
        """Take rows (None: all) out of a lease; returns them. They are not ready before the caller says so."""
        partition = self.leases.by_token[token].partition
        taken = self.leases.void(token, rows)
        self.partition(partition).num_held -= len(taken)
        return taken

    # For those who pick rows

    @property
    def picking(self) -> Policy:
        """What chooses rows: the task's policy; in order there is nothing to choose."""
        return Fifo() if self.spec.in_order else self.spec.policy

    def rest_ready(self, number: int) -> bool:
        """Whether every row of the partition that was not handed out is ready."""
        part, size = self.partition(number), self._get_partition_size(number)
        return size is not None and part.num_done + part.num_held + part.num_ready >= size

    def front_ready(self, number: int, num_rows: int) -> bool:
        """Whether the first `num_rows` rows, in ascending order, that are not handed out are ready; or the rest."""
        info, rows, bit = self._table.partitions.get(number), self._table.rows, self.bit
        if info is None or not info.all_known or self.partition(number).num_ready < num_rows:
            return self.rest_ready(number)
        held = self.leases.holders
        # This scans all rows of the partition: the price of `in_order`.
        numbers = sorted(n for n in self._table.numbers(number) if rows[n].open_tasks & bit and n not in held)
        front = numbers[:num_rows]
        groups = {rows[n].group for n in front} if self.spec.whole_groups else set()
        front += [n for n in numbers[num_rows:] if rows[n].group in groups]
        return all(rows[n].queued & bit for n in front)

    def stats(self, parked: int) -> TaskStats:
        ready = sum(part.num_ready for part in self.partitions.values())
        leased = len(self.leases.holders)
        return TaskStats(
            task=self.spec.name,
            waiting=self.num_left - ready - leased,
            ready=ready,
            leased=leased,
            done=sum(part.num_done for part in self.partitions.values()),
            parked_requests=parked,
            acked=self.num_acked,
            deliveries=self.num_deliveries,
            released=self.num_released,
        )

    def _is_row_wanted(self, number: int, row: Row) -> bool:
        leases = self.leases
        return (
            row.open_tasks & self.bit != 0
            and not self.inputs & ~row.written
            and row.state is _STORED
            and number not in leases.holders
            and number not in leases.fencing
        )

    def _reopen_partition(self, number: int) -> TaskPartition:
        """Return the partition, reopened if it was over, since one of its rows is not done any more."""
        if number in self._finished:
            self._finished.discard(number)
            self.partition(number).num_done += self._get_partition_size(number) or 0
        return self.partition(number)

    def _row_of_group_done(self, part: TaskPartition, row: Row) -> None:
        part.mark_done(row)
        self._list_partition(row.partition, part)
        self.changed.add(row.partition)

    def _get_partition_size(self, number: int) -> int | None:
        info = self._table.partitions.get(number)
        return None if info is None else info.num_rows

    def _may_take(self, number: int, part: TaskPartition) -> bool:
        return part.num_ready > 0 and (not self.spec.barrier or self.rest_ready(number))

    def _list_partition(self, number: int, part: TaskPartition) -> None:
        if not part.listed and self._may_take(number, part):
            part.listed = True
            heapq.heappush(self.ready_partitions, number)


# Rows whose unit is gone: which must be put again, which clients hear of them, what must be made durable, and which
# tasks stay done with a row that is put again.
#
# lose 5, 9000          undecided: 5, 9000     changed: parts 0, 2
# report_rows 5         watchers are told of 5, under a sequence number
# take_changed_parts    {0: [5], 2: [9000]}    the store holds both
# note_put_again 5      changed: -, the record stays: the unit may not know yet which tasks were done with the row
# end 5                 changed: part 0        take_changed_parts -> {0: []}: the store forgets the part

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

    def note_put_again(self, number: int) -> None:
        """A row was put again; losing it once more counts as another loss."""
        self.lost.get(_part(number), set()).discard(number)
        self._reported.pop(number, None)

    def end(self, number: int) -> None:
        """Forget a row that was finished or removed."""
        self.note_put_again(number)
        self.acked.get(_part(number), set()).discard(number)
        if number in self._noted.get(_part(number), ()):
            self.changed.add(_part(number))

    # Clients that are told

    def take_undecided(self) -> dict[int, bool]:
        undecided, self.undecided = self.undecided, {}
        return undecided

    def report_rows(self, rows: Iterable[int]) -> list[int]:
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

    def take_changed_parts(self) -> dict[int, list[int]]:
        """Return, for each part that changed since the last call, the rows that its record must hold."""
        changed, self.changed = self.changed, set()
        for part in changed:
            self._noted[part] = self.lost.get(part, set()) | self.acked.get(part, set())
        return {part: sorted(self._noted[part]) for part in sorted(changed)}


def _part(number: int) -> int:
    return number // _ROWS % _PARTS


class TaskGraph:
    """All tasks of the queue; tasks and columns are bits."""

    def __init__(self, tasks: Sequence[TaskSpec], table: "RowTable") -> None:
        self._table = table
        self._declared = {table.task_bit(spec.name): table.column_bits(spec.outputs) for spec in tasks}
        self._inputs = {table.task_bit(spec.name): table.column_bits(spec.inputs) for spec in tasks}
        self.known = dict(self._declared)  # task -> columns that it declares, or was seen to write for some row

    def learn_outputs(self, task: str, columns: Iterable[str]) -> None:
        self.known[self._table.task_bit(task)] |= self._table.column_bits(columns)

    def outputs_of(self, tasks: int) -> int:
        mask = 0
        for task, outputs in self.known.items():
            mask |= outputs if tasks & task else 0
        return mask

    def upstream_of(self, task: int) -> int:
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
        done = self._table.every_task & ~row.open_tasks
        for task, outputs in self.known.items():
            # A task must have its declared outputs back, plus any undeclared ones that it wrote into this row.
            if (self._declared[task] | outputs & row.written) & ~put.written:
                done &= ~task
        return done


_PARTITIONS_REMEMBERED = 64
_NONE = RowSet()
Marks = dict[str, list[int]]  # task -> rows, or positions of rows, that it is done with


class RowTable:
    """All rows, with their units, partitions and totals, and the served tasks' views; see `ControlState` for arguments.

    Columns and tasks are bits.
    """

    def __init__(
        self, tasks: Sequence[TaskSpec], *, served: Collection[str] | None, first_token: int, refill: bool
    ) -> None:
        self.bits = {spec.name: 1 << k for k, spec in enumerate(tasks)}
        self.every_task = (1 << len(tasks)) - 1
        self.rows: dict[int, Row] = {}
        self.announced: dict[int, Row] = {}
        self.num_bytes = 0
        self.announced_bytes = 0
        self.units: dict[str, UnitLife] = {}
        self.partitions: dict[int, PartitionRows] = {}
        self.num_dead_letters = 0  # groups removed because a task failed on them
        self.num_filtered = 0  # groups removed because they were filtered out
        self.out: list[Instruction] = []
        self._columns: dict[str, int] = {}
        self.tasks = {spec.name: TaskState(spec, self) for spec in tasks if served is None or spec.name in served}
        self.losses = Losses(first_token)
        self.graph = TaskGraph(tasks, self)
        # With `refill`, admission replaces groups that leave, so partitions keep their size; otherwise they shrink.
        self._refill = refill
        self._leaving: dict[tuple[int, int], RemovalCause] = {}  # (partition, group) -> why the group leaves
        self._reported: set[tuple[int, int]] = set()  # of these groups, those with a row that left
        # Announced rows that another unit had and dropped in their favour: lost if the announcement comes to nothing.
        self._let_go: dict[int, Row] = {}
        self._lives: set[tuple[str, str]] = set()  # (name, incarnation) of the units' lives that this controller met
        self._dead_units: list[UnitLife] = []
        self._nowhere = UnitLife("", online=False, lost=True)  # of lost rows whose unit is unknown
        self._newly_finished: dict[int, RowSet] = {}
        self._tokens = itertools.count(first_token)

    # Questions

    @property
    def num_lost(self) -> int:
        self._dead_units = [unit for unit in self._dead_units if unit.num_rows]
        return self._nowhere.num_rows + sum(unit.num_rows for unit in self._dead_units)

    def column_bits(self, columns: Iterable[str]) -> int:
        bits = 0
        for name in columns:
            bits |= self._columns.setdefault(name, 1 << len(self._columns))
        return bits

    def column_names(self, bits: int) -> list[str]:
        return [name for name, bit in self._columns.items() if bits & bit]

    def task_bit(self, task: str) -> int:
        """Return a task's bit; raises PeerRefused if there is no such task."""
        bit = self.bits.get(task)
        if bit is None:
            raise PeerRefused(f"no task is named {task!r}; known: {' '.join(self.bits)}")
        return bit

    def task_names(self, bits: int) -> list[str]:
        return [name for name, bit in self.bits.items() if bits & bit]

    def finished(self, partition: int) -> RowSet:
        info = self.partitions.get(partition)
        return _NONE if info is None else info.finished

    def is_finished(self, number: int, partition: int) -> bool:
        return number in self.finished(partition)

    def numbers(self, partition: int) -> Iterator[int]:
        """Return the rows of a partition that are in the table, each once."""
        info = self.partitions.get(partition)
        for number in dict.fromkeys(info.numbers) if info is not None else ():
            row = self.rows.get(number)
            if row is not None and row.partition == partition:
                yield number

    def take_finished(self) -> dict[int, RowSet]:
        newly, self._newly_finished = self._newly_finished, {}
        return newly

    # Rows come

    def new_rows(self, event: RowsCreated) -> int:
        """Return how many rows of a put are new, and were not lost either.

        Raises:
            RowsExist: a row is at another unit, and no unit has announced one.
            PutPending: another unit announced a row, which may come to nothing.
            PeerRefused: it is malformed.
        """
        count = len(event.rows)
        if len(event.groups) != count or len(event.tokens) != count or len(set(event.rows)) != count:
            raise PeerRefused(
                f"{count} rows with {len(event.groups)} groups and {len(event.tokens)} lengths: one each, named once"
            )
        for task, positions in event.commits.items():
            self.task_bit(task)
            if any(not 0 <= k < count for k in positions):
                raise PeerRefused(f"{event.unit}: commits of {task} name rows beyond the put's {count}")
        for number in event.rows if self.announced else ():
            coming = self.announced.get(number)
            if coming is not None and coming.unit.name != event.unit and not coming.unit.lost:
                raise PutPending(
                    f"row {number} is just being put, at {coming.unit.name}; put it again once that put has ended"
                )
        num_new = 0
        finished = self.finished(event.partition)
        for number in event.rows:
            row = self.announced.get(number) or self.rows.get(number)
            if row is None:
                num_new += number not in finished
            elif row.unit.name != event.unit and not row.lost:
                raise RowsExist(
                    f"row {number} exists already, at {row.unit.name}; row indices are never reused in a run"
                )
        return num_new

    def lose_abandoned_units(self, event: RowsCreated) -> None:
        """Lose units that are away and whose rows are now put elsewhere: their producer knows that the unit died."""
        # The put may have reached this controller but not another one, which then could never report the rows as lost.
        known = [self.announced.get(number) or self.rows.get(number) for number in event.rows]
        for unit in dict.fromkeys(row.unit for row in known if row is not None):
            if unit.name != event.unit and not unit.online and not unit.lost:
                self.lose_unit(unit)

    def create_rows(self, event: RowsCreated) -> RowsAccepted:
        """Take new rows, and lost ones that were put again; `new_rows` must have passed."""
        accepted: Marks = {}
        finished = self.finished(event.partition)
        new = []
        for k, (number, row) in enumerate(self._rows_put(event)):
            if not event.announced and number not in self.rows and number not in finished:
                new.append((number, row))
                continue
            kept = self._announce(number, row) if event.announced else self._place(number, row)
            for name in self.task_names(kept):
                accepted.setdefault(name, []).append(k)
        if new:
            self._add(event.partition, new)
        if not event.announced:
            self._came([event.partition], event.rows)
        return RowsAccepted(accepted)

    def confirm_rows(self, event: RowsConfirmed) -> RowsAccepted:
        """Every controller has agreed to these rows. The reply says what was learned since."""
        accepted: Marks = {}
        done = self._done_by_position(event.commits)
        partitions = set()
        for k, number in enumerate(event.rows):
            row = self.announced.get(number)
            if row is not None and row.unit.name == event.unit:
                self._forget_announced(number)  # first: what is known of it counts for the row that is placed
                row.open_tasks &= ~done[k]
                partitions.add(row.partition)
                for name in self.task_names(self._place(number, row) & row.open_tasks):
                    accepted.setdefault(name, []).append(k)
            for name in self.task_names(done[k]):
                self.mark_done(name, [number])
        self._came(partitions, event.rows)
        return RowsAccepted(accepted)

    def forget_announced(self, unit: str, rows: set[int] | None = None) -> None:
        """Drop a unit's announcements (with rows: of those), which will not be confirmed."""
        for number in [number for number, row in self.announced.items() if row.unit.name == unit]:
            if rows is None or number in rows:
                self._forget_announced(number)

    def add_lost(self, number: int, row: Row) -> None:
        """Add a row that no unit has, unless the row is here or finished; a unit may still turn up with it."""
        if number in self.rows or self.is_finished(number, row.partition):
            return
        if self._is_leaving(row):
            self._shrink(row.partition, [number])
            return
        row.unit = self._nowhere
        self._add(row.partition, [(number, row)])
        self.losses.lose([number])

    def add_lost_records(self, records: Iterable[RowRecords]) -> None:
        """Take rows that an earlier incarnation, or another controller, knew to be lost with their unit."""
        for record in records:
            for number, row in self._rows_of(record, UnitLife("")):
                self.add_lost(number, row)

    def _announce(self, number: int, row: Row) -> int:
        """A row is somewhere, but not confirmed; returns the tasks (bits) that are known to be done with it."""
        self._pop_announced(number)
        known = self.rows.get(number)
        if known is not None and not known.lost:
            return self.every_task & ~known.open_tasks  # announced twice
        row.to(RowState.ANNOUNCED)
        self.announced[number] = row
        self.announced_bytes += row.num_bytes
        if known is not None:
            return self.graph.still_done(known, row)
        return self.every_task if self.is_finished(number, row.partition) else 0

    def _pop_announced(self, number: int) -> None:
        row = self.announced.pop(number, None)
        if row is not None:
            self.announced_bytes -= row.num_bytes

    def _forget_announced(self, number: int) -> None:
        self._pop_announced(number)
        row = self._let_go.pop(number, None)
        if row is not None:
            self.add_lost(number, row)

    def _place(self, number: int, row: Row, *, values_kept: bool = False) -> int:
        """A row is at a unit; returns the tasks (bits) known to be done with it; see `_revive`."""
        known = self.rows.get(number)
        if self.is_finished(number, row.partition):
            self._finished_again(number, row)
            return self.every_task
        if known is None:
            self._add(row.partition, [(number, row)])
            return 0
        if known.lost:
            return self._revive(number, known, row, values_kept=values_kept)
        return 0  # an inventory brought it already

    def _add(self, partition: int, rows: Sequence[tuple[int, Row]]) -> None:
        """Add rows of one partition that were unknown so far, all at one unit."""
        unit = rows[0][1].unit
        state = unit.row_state
        some_leave = self._leaving and state is not _LOST
        for _, row in rows:
            row.to(_WITHHELD if some_leave and self._is_leaving(row) else state)
        self.rows.update(rows)
        info = self.partition(partition)
        info.num_live += len(rows)
        info.remove_lacking(number for number, _ in rows)
        info.numbers += [number for number, _ in rows]
        num_bytes = sum([row.num_bytes for _, row in rows])
        self.num_bytes += num_bytes
        unit.num_rows += len(rows)
        unit.num_bytes += num_bytes
        for task in self.tasks.values():
            task.rows_created(partition, rows)
            for number, row in rows if task.leases.fencing else ():
                if number in task.leases.fencing and row.open_tasks & task.bit:
                    self._fence_rows(task, [number], counts=False)
        for number in [number for number, row in rows if not row.open_tasks]:
            self._finish_row(number)

    def _revive(self, number: int, row: Row, put: Row, *, values_kept: bool) -> int:
        """A lost row is somewhere again, as `put` describes; returns the tasks (bits) that stay done with it.

        `values_kept`: the row came back with everything that was written into it.
        """
        done = self.every_task & ~row.open_tasks if values_kept else self.graph.still_done(row, put)
        reopened = self.every_task & ~row.open_tasks & ~done
        newly = row.open_tasks & ~put.open_tasks
        row.open_tasks |= reopened
        if row.group < 0:  # known only from a trainer's lease
            for task in self.tasks.values():
                if row.open_tasks & task.bit & ~reopened:
                    task.partition(row.partition).expect_again(put)
        row.group, row.group_size, row.written, row.tokens = put.group, put.group_size, put.written, put.tokens
        self._move(row, put.unit, put.num_bytes)
        row.to(_WITHHELD if self._is_leaving(row) else put.unit.row_state)
        self.losses.note_put_again(number)
        for task in self.tasks.values():
            if reopened & task.bit:
                task.row_reopened(number, row)
        for name in self.task_names(newly):
            self._finish_task(name, number, row)
        # The last task may just have finished it.
        if number in self.rows:
            self._resume_leases(number, row)
        return done

    def _resume_leases(self, number: int, row: Row) -> None:
        for task in self.tasks.values():
            lease = task.leases.find_lease(number)
            # This holder read the lost values, and cannot continue with the new ones: void its lease behind a fence.
            if lease is not None and lease.readers and not task.spec.keeps_leases:
                task.void_rows(lease.token, [number])
                task.leases.owe_fence([number])
            if number in task.leases.fencing:
                self._fence_rows(task, [number], counts=False)
            task.refresh_row(number, row)
            task.changed.add(row.partition)

    def _finished_again(self, number: int, row: Row) -> None:
        # The row stays done.
        info = self.partition(row.partition)
        if number not in info.nameless:
            return
        # The row was finished before this start, so its group was unknown until now.
        info.nameless.discard(number)
        for task in self.tasks.values():
            if not task.is_partition_over(row.partition):
                task.done_before(row)

    def _rows_put(self, event: RowsCreated) -> list[tuple[int, Row]]:
        unit, written = self.units.setdefault(event.unit, UnitLife(event.unit)), self.column_bits(event.columns)
        sizes = Counter(event.groups)
        done = self._done_by_position(event.commits)
        size, rest = divmod(event.num_bytes, max(1, len(event.rows)))
        return [
            (
                number,
                Row(
                    unit, event.partition, event.groups[k], event.group_size or sizes[event.groups[k]], written,
                    self.every_task & ~done[k], event.tokens[k], size + (k < rest),
                ),
            )
            for k, number in enumerate(event.rows)
        ]  # fmt: skip

    def _done_by_position(self, commits: Marks) -> Counter[int]:
        """Return position -> tasks (bits) that are done with the row."""
        done: Counter[int] = Counter()
        for task, positions in commits.items():
            bit = self.task_bit(task)
            for k in positions:
                done[k] |= bit
        return done

    def _came(self, partitions: Iterable[int], rows: Iterable[int]) -> None:
        if self._leaving:
            self._keep_out(rows)
        # The partitions may be complete now.
        for partition in partitions:
            self.drop_finished(partition)
            self._recount_groups(partition)

    # Tasks work on them

    def lease_rows(self, task: TaskState, partition: int, rows: Sequence[int], reader: str) -> LeaseGrant:
        """Lease rows that were taken from a task's partition to a consumer."""
        token = self.new_token()
        task.lease_rows(token, partition, rows, reader)
        return self.grant(task, token, partition, rows)

    def grant(self, task: TaskState, token: int, partition: int, rows: Sequence[int]) -> LeaseGrant:
        """Describe the rows of a lease to a consumer."""
        held = [self.rows[row] for row in rows]
        groups = [row.group for row in held]
        units = [row.unit.name for row in held]
        tokens = [row.tokens for row in held]
        return LeaseGrant(task.spec.name, token, partition, list(rows), groups, units, tokens)

    def write_outputs(self, event: OutputsWritten) -> None:
        """Take in a task's outputs for some rows; a repeated notification changes nothing."""
        bit = self.task_bit(event.task)
        if event.tokens and len(event.tokens) != len(event.rows):
            raise PeerRefused(f"{event.unit}: {len(event.rows)} rows with {len(event.tokens)} lengths")
        written = self.column_bits(event.columns)
        if written & ~self.graph.known[bit]:
            self.graph.learn_outputs(event.task, event.columns)
        grown = event.num_bytes // max(1, len(event.rows))
        partitions = set()
        for k, number in enumerate(event.rows):
            row = self.rows.get(number)
            if row is None or not row.open_tasks & bit or row.unit.name != event.unit or row.state is _LOST:
                continue
            self._grow(row, written, event.tokens[k] if event.tokens else 0, grown)
            self._finish_task(event.task, number, row)
            partitions.add(row.partition)
            if row.open_tasks:
                for task in self.tasks.values():
                    if task.inputs & written:
                        task.refresh_row(number, row)
        self._drop_finished_of(event.task, partitions)
        # A holder of a lost row may put its outputs where the row is put again, before that was confirmed.
        for k, number in enumerate(event.rows) if self.announced else ():
            row = self.announced.get(number)
            if row is not None and row.unit.name == event.unit and row.open_tasks & bit:
                row.open_tasks &= ~bit
                row.written |= written
                row.tokens += event.tokens[k] if event.tokens else 0
                row.num_bytes += grown
                self.announced_bytes += grown

    def mark_done(self, task: str, numbers: Iterable[int]) -> None:
        partitions = set()
        for number in numbers:
            row = self.rows.get(number)
            if row is not None and row.open_tasks & self.bits[task]:
                self._finish_task(task, number, row)
                partitions.add(row.partition)
        self._drop_finished_of(task, partitions)

    def mark_lost_done(self, task: str, numbers: Iterable[int]) -> None:
        """Mark lost rows done on the word of another controller."""
        bit, outputs = self.task_bit(task), self.graph.outputs_of(self.task_bit(task))
        # Rows that were put again in the meantime are judged by what was put.
        lost = [n for n in numbers if n in self.rows and self.rows[n].lost and self.rows[n].open_tasks & bit]
        for number in lost:
            # What the task wrote was lost with the row; this controller may never have heard of it.
            self.rows[number].written |= outputs
        self.mark_done(task, lost)

    def ack_lost(self, event: AckLost, *, promised: bool = False) -> None:
        """Count an ack that no unit could take, because the rows were lost while the consumer had them in hand.

        Units that hold rows put again since then hear of it by a `ForwardAck`. The controller that serves the task
        judges the ack; the others are told afterwards, and may not know of the loss yet. `promised`: the consumer was
        told that the ack counts, so it counts even if the rows turn out to be at a unit.

        Raises:
            LeaseFenced: another consumer has the rows; nothing changed.
            PeerRefused: the rows are not lost; nothing changed.
        """
        open_rows = self._under_lease(event)
        task = self.tasks.get(event.task)
        for number in open_rows:
            row = self.rows[number]
            if task is not None and not (row.lost or promised or task.spec.keeps_leases):
                raise PeerRefused(f"row {number} is not lost: {row.unit.name} has it; ack it there")
        where = self._by_unit(open_rows)
        for number in open_rows:
            if not self.rows[number].lost:
                self.losses.ack_elsewhere(number)
        self.mark_done(event.task, open_rows)
        if where and task is not None:
            self.out.append(ForwardAck(event.task, event.token, where))

    def _under_lease(self, event: AckLost) -> list[int]:
        """Return the rows that are not done yet. Only the controller that serves the task can check the lease."""
        bit, task = self.task_bit(event.task), self.tasks.get(event.task)
        open_rows = []
        for number in event.rows:
            row = self.rows.get(number)
            is_open = row is not None and bool(row.open_tasks & bit)
            if task is not None and not is_open and not task.leases.was_done(event.token, number):
                raise LeaseFenced(f"row {number}: the lease {event.token} of {event.task} is void")
            if task is not None and is_open and task.leases.holders.get(number) != event.token:
                raise LeaseFenced(
                    f"row {number}: the lease {event.token} of {event.task} was given to another consumer"
                )
            if is_open:
                open_rows.append(number)
        return open_rows

    def _grow(self, row: Row, columns: int, tokens: int, num_bytes: int) -> None:
        for task in self.tasks.values() if tokens else ():
            if row.queued & task.bit:
                task.partition(row.partition).grew(row, tokens)
        row.written |= columns
        row.tokens += tokens
        row.num_bytes += num_bytes
        row.unit.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _finish_task(self, name: str, number: int, row: Row) -> None:
        row.open_tasks &= ~self.bits[name]
        if row.state is _LOST:
            self.losses.ack(number)
        task = self.tasks.get(name)
        if task is not None:
            task.row_done(number, row)
        if not row.open_tasks:
            self._finish_row(number)

    def _finish_row(self, number: int) -> None:
        row = self._drop_row(number, RowState.FINISHED)
        self._note_finished(row.partition, [number])

    def _note_finished(self, partition: int, numbers: Collection[int]) -> PartitionRows:
        """Note that all tasks are done with rows that were neither finished before nor in the table."""
        info = self.partition(partition)
        info.num_finished += len(numbers)
        info.finished.update(numbers)
        info.remove_lacking(numbers)
        self._newly_finished.setdefault(partition, RowSet()).update(numbers)
        return info

    # Leases end

    def new_token(self) -> int:
        return next(self._tokens)

    def release_rows(
        self, task: TaskState, token: int, rows: Iterable[int] | None = None, *, counts: bool = True
    ) -> None:
        """Return rows (None: all) of a lease once the units refuse late puts; `counts`: as a failed try."""
        taken = task.void_rows(token, rows)
        lost = [number for number in taken if self.rows[number].lost]
        task.leases.owe_fence(lost)
        self.losses.look_again(lost)
        here = [number for number in taken if not self.rows[number].lost]
        if here:
            self._fence_rows(task, here, counts=counts)

    def fence_holds(self, event: Fenced) -> None:
        """A unit refuses late puts: the fence's rows are ready again, in their old place in the order."""
        task = self.tasks.get(event.task)
        fencing = None if task is None else task.leases.confirm_fence(event.token)
        if task is None or fencing is None:
            return
        for number in fencing.rows:
            row = self.rows.get(number)
            if row is None or not row.open_tasks & task.bit:
                continue  # the last put under the lease came before the fence
            if row.lost:
                task.leases.owe_fence([number])
            if fencing.counts:
                task.num_released += 1
                times = task.leases.count_return(number)
                if 0 < task.spec.max_deliveries <= times:
                    self._withhold_group(row, RemovalCause(event.task, times))
            task.refresh_row(number, row)

    def fence_void_leases(self, task: TaskState, units: Iterable[str]) -> dict[int, str]:
        """Make units refuse puts under every lease so far except the live ones; returns fence token -> unit."""
        alive = tuple(sorted(task.leases.by_token))
        fences = {self.new_token(): unit for unit in sorted(units)}
        self.out += [OrderFenceTask(task.spec.name, token, unit, alive) for token, unit in fences.items()]
        return fences

    def _fence_rows(self, task: TaskState, numbers: Sequence[int], *, counts: bool) -> None:
        # One fence per unit, so that a stopped unit does not hold back the rows of the others.
        for unit, rows in self._by_unit(numbers).items():
            token = self.new_token()
            task.leases.fence_rows(token, Fencing(rows, counts))
            self.out.append(OrderFenceRows(task.spec.name, token, unit, rows))

    # Rows leave: with their groups (dead letter, filtered), cleared, or taken back
    #
    # The rows of a group that leaves are withheld, and the units are told (OrderRemoveRows). Each reports its rows
    # removed. `GroupRemoved` follows once, with the first of them.

    def give_up_groups(self, task: TaskState, token: int, rows: Iterable[int], *, failures: int = 0) -> None:
        """Remove the groups of some leased rows: their holder failed on them, or (`failures` 0) filters them out."""
        for number in task.leases.by_token[token].rows.intersection(rows):
            row = self.rows.get(number)
            if row is not None:
                self._withhold_group(row, RemovalCause(task.spec.name, failures, filtered=not failures))

    def remove_rows(self, event: RowsRemoved) -> None:
        """A unit dropped rows."""
        self.forget_announced(event.unit, set(event.rows))
        at_unit = [number for number in event.rows if number in self.rows and self.rows[number].unit.name == event.unit]
        here = [number for number in at_unit if not self.rows[number].lost]  # lost ones were in an earlier life
        if event.reason is RemovalReason.GROUP_LEFT:
            self._remove_with_group(here, event.cause)
        elif event.reason is RemovalReason.DROPPED:
            self._misplace(here)
        else:
            for number in here:
                self._remove(number, may_return=True)
            if event.reason is RemovalReason.CLEARED:
                self.clear_if_empty(event.partition)

    def clear_if_empty(self, partition: int) -> None:
        """Forget a cleared partition once no unit has rows of it."""
        numbers = list(self.numbers(partition))
        if any(not self.rows[number].lost for number in numbers):
            return
        for number in numbers:
            self._remove(number)
        self._forget_partition(partition)
        for task in self.tasks.values():
            task.clear_partition(partition)
        self._leaving = {key: cause for key, cause in self._leaving.items() if key[0] != partition}
        self._reported = {key for key in self._reported if key[0] != partition}
        self.out.append(Cleared(partition))

    def _is_leaving(self, row: Row) -> bool:
        return (row.partition, row.group) in self._leaving

    def _withhold_group(self, row: Row, cause: RemovalCause) -> None:
        """Withhold the rows of this row's group from consumers, and have the units remove them."""
        if self._is_leaving(row):
            return
        members = self._withhold(row, cause)
        where = self._by_unit(members)
        self._remove_with_group(number for number in members if self.rows[number].lost)
        if where:
            self.out.append(OrderRemoveRows(where, cause))

    def _withhold(self, row: Row, cause: RemovalCause) -> list[int]:
        """Stop handing out the row's group; returns the rows of the group."""
        self._leaving[row.partition, row.group] = cause
        members = [number for number in self.numbers(row.partition) if self.rows[number].group == row.group]
        for number in members:
            member = self.rows[number]
            if not member.lost:
                member.to(_WITHHELD)
                self._refresh(number, member)
        return members

    def _keep_out(self, numbers: Iterable[int]) -> None:
        """Remove new rows at once if their group is leaving."""
        members: dict[RemovalCause, list[int]] = {}
        for number in numbers:
            row = self.rows.get(number)
            if row is not None and row.state is _WITHHELD:
                members.setdefault(self._leaving[row.partition, row.group], []).append(number)
        for cause, withheld in members.items():
            self.out.append(OrderRemoveRows(self._by_unit(withheld), cause))

    def _remove_with_group(self, numbers: Iterable[int], cause: RemovalCause = UNKNOWN) -> None:
        """Rows left the queue with their groups, for `cause` as the originator of the removal named it."""
        removed: dict[int, list[int]] = {}
        leaving = deque(numbers)
        while leaving:
            number = leaving.popleft()
            row = self.rows[number]
            if not self._is_leaving(row):
                # Another controller removed the group. Its lost rows leave here and now: no unit will report them.
                leaving += [member for member in self._withhold(row, cause) if self.rows[member].lost]
            self._report_group(row)
            self._remove(number)
            for task in self.tasks.values():
                task.partition(row.partition).forget_group(row.group)
            removed.setdefault(row.partition, []).append(number)
        for partition, gone in removed.items():
            self._shrink(partition, gone)
            for task in self.tasks.values():
                task.partition_sized(partition)

    def _report_group(self, row: Row) -> None:
        key = (row.partition, row.group)
        if key not in self._reported:
            self._reported.add(key)
            cause = self._leaving[key]
            self.num_filtered += cause.filtered
            self.num_dead_letters += not cause.filtered
            self.out.append(GroupRemoved(row.partition, row.group, row.group_size, cause))

    def _shrink(self, partition: int, numbers: Iterable[int]) -> None:
        """Shrink a partition by rows that are not in the table, unless admission replaces their groups."""
        if not self._refill:
            self.partition(partition).removed.update(numbers)
            self.out.append(RowsOfPartitionRemoved(partition))

    def _remove(self, number: int, *, may_return: bool = False) -> None:
        """Drop a row before all tasks are done with it; `may_return`: leases on it are void if it is put anew."""
        row = self.rows[number]
        for task in self.tasks.values():
            task.row_removed(number, row, may_return=may_return)
        self._drop_row(number, RowState.REMOVED)

    def _drop_row(self, number: int, state: RowState) -> Row:
        """Take a finished or removed row out of the table."""
        if self.losses.lost or self.losses.acked:  # skip the lookups as long as nothing was ever lost
            self.losses.end(number)
        row = self.rows.pop(number)
        row.to(state)
        info = self.partitions[row.partition]
        info.num_live -= 1
        # Compact once more than half of the list is gone rows: constant cost per removal on average.
        if len(info.numbers) > 2 * info.num_live + 64:
            info.numbers = list(self.numbers(row.partition))
        self.num_bytes -= row.num_bytes
        row.unit.num_rows -= 1
        row.unit.num_bytes -= row.num_bytes
        return row

    # Units come and go
    #
    # What a unit says when it meets a controller, or meets it again, against what the controller knows:
    #
    # never seen             its rows are new, or were lost elsewhere; its tombstones count as done
    # same life as before    its rows are available again; the inventory makes up for lost messages
    # another life           it started empty: what is not in the inventory is lost
    # a life that is over    reported by the next life. If the controller met it, it knew every row. If not, no
    #                        controller of that time may have survived: its rows are lost unless put again since, and
    #                        what was finished stays finished

    def register_unit(self, event: RegisterUnit) -> UnitAccepted:
        """Take in a unit's inventory."""
        self.forget_announced(event.unit)
        is_new = (event.unit, event.incarnation) not in self._lives
        unit, old = self._life_of(event)
        reply = UnitAccepted(list(self.bits), [])
        listed = set()
        for record in event.records:
            for k, (number, row) in enumerate(self._rows_of(record, unit)):
                listed.add(number)
                kept = self._take_listed(number, row, reply, announced=record.announced)
                for name in self.task_names(kept & row.open_tasks):
                    reply.commits.setdefault(name, []).append(number)
                for name, times in record.deliveries.items():
                    if times[k] and name in self.tasks and number in self.rows:
                        self.tasks[name].leases.returned_before(number, times[k])
        self._take_tombstones(event, [unit] if old is None else [unit, old], listed)
        self.set_online(unit, online=True)
        self._keep_out(sorted(listed))
        unmet = [one for one in event.earlier if (one.unit, one.incarnation) not in self._lives]
        for life in reversed(unmet):  # newest first: of a row that was in two lives, the later one knows more
            self._take_life(life)
        if is_new and any(self.losses):  # lost rows may be put at this unit, which knows no fences
            for task in self.tasks.values():
                self.fence_void_leases(task, [event.unit] if task.leases.some_void else ())
        for told in [event, *unmet]:
            partitions = {record.partition for record in told.records} | told.finished.keys()
            for partition in partitions | {group.partition for group in told.removed_groups}:
                self.drop_finished(partition)
                self._recount_groups(partition)
        return reply

    def set_online(self, unit: UnitLife, *, online: bool) -> None:
        """A unit's channel ended or is back: hand out its rows, or not."""
        unit.online = online
        for number in self._at_unit(unit):
            row = self.rows[number]
            if row.state is not _WITHHELD:
                row.to(unit.row_state)
            self._note_moved(number, row)

    def lose_unit(self, unit: UnitLife) -> None:
        """A unit is gone, with its announcements and rows; look again at ranks that wait for a slice with some."""
        self.forget_announced(unit.name)
        unit.online, unit.lost = False, True
        self._dead_units.append(unit)
        if self.units.get(unit.name) is unit:
            del self.units[unit.name]
        numbers = self._at_unit(unit)
        self.losses.lose(numbers)
        for number in numbers:
            row = self.rows[number]
            if row.state is _WITHHELD:
                self._remove_with_group([number])
                continue
            row.to(_LOST)
            self._note_moved(number, row)

    def count_finished(self, partition: int, rows: Iterable[int]) -> None:
        """Count rows that were finished before this controller met their unit, or before it started."""
        known = self.finished(partition)
        new = [number for number in rows if number not in known]
        if not new:
            return
        self._note_finished(partition, new).nameless.update(new)
        for task in self.tasks.values():
            task.finished_before(partition, len(new))

    def _life_of(self, event: RegisterUnit) -> tuple[UnitLife, UnitLife | None]:
        """Return this life of the unit, and the same life if it was given up before."""
        known = self.units.get(event.unit)
        if known is not None and known.incarnation in ("", event.incarnation):
            known.incarnation = event.incarnation
            return known, None
        if known is not None:
            self.lose_unit(known)
        unit = self.units[event.unit] = UnitLife(event.unit, event.incarnation, online=False)
        return unit, next((dead for dead in self._dead_units if dead.is_life_of(unit)), None)

    def _rows_of(self, record: RowRecords, unit: UnitLife) -> Iterator[tuple[int, Row]]:
        written = self.column_bits(record.columns)
        done = sum(self.bits.get(task, 0) for task in set(record.done))
        for k, number in enumerate(record.rows):
            yield number, Row(
                unit, record.partition, record.groups[k], record.group_sizes[k], written,
                self.every_task & ~done, record.tokens[k], record.num_bytes[k],
            )  # fmt: skip

    def _take_listed(self, number: int, row: Row, reply: UnitAccepted, *, announced: bool) -> int:
        """Take one row of an inventory; returns the tasks (bits) that are known to be done with it."""
        known, coming = self.rows.get(number), self.announced.get(number)
        elsewhere = known is not None and not known.lost and known.unit is not row.unit
        if elsewhere or (coming is not None and coming.unit.online):
            reply.drop.append(number)
            if not announced and known is None:
                self._let_go[number] = row
            return 0
        if known is None or known.lost:
            if announced:
                return self._announce(number, row)
            return self._place(number, row, values_kept=known is not None and known.unit.is_life_of(row.unit))
        done = self.every_task & ~known.open_tasks
        self._grow(known, row.written, row.tokens - known.tokens, row.num_bytes - known.num_bytes)
        for name in self.task_names(known.open_tasks & ~row.open_tasks):
            self.mark_done(name, [number])
        if number in self.rows:
            self._refresh(number, known)
        return done

    def _take_life(self, life: RegisterUnit) -> None:
        """Account for a life that ended before this controller met it: its rows were put again, or are lost."""
        self._take_finished(life, [])
        for record in life.records:
            for number, row in self._rows_of(record, UnitLife("")):
                known = self.rows.get(number)
                if known is None and not row.open_tasks:
                    self.count_finished(record.partition, [number])
                elif known is None:
                    self.add_lost(number, row)
                elif known.lost:  # an earlier incarnation reported it; what was done then stays done
                    known.written |= row.written
                    for name in self.task_names(known.open_tasks & ~row.open_tasks):
                        self.mark_done(name, [number])
                else:  # put again by a producer who knew of the loss: judged by what was put
                    done = self.task_names(self.graph.still_done(row, known) & known.open_tasks)
                    if done:
                        self.losses.ack_elsewhere(number)
                    for name in done:
                        self.out.append(ForwardAck(name, self.new_token(), self._by_unit([number])))
                    for name in done:
                        self.mark_done(name, [number])

    def _take_finished(self, event: RegisterUnit, lives: list[UnitLife]) -> None:
        first_time = (event.unit, event.incarnation) not in self._lives
        self._lives.add((event.unit, event.incarnation))
        for partition, rows in event.finished.items():
            known = [number for number in rows if number in self.rows]
            for number in known:
                row = self.rows[number]
                self._finish_everywhere(number, row, here=row.unit in lives or row.lost)
            if first_time:
                self.count_finished(partition, set(rows).difference(known))
        for gone in event.removed_groups if first_time else ():
            finished = self.finished(gone.partition)
            unknown = [number for number in gone.rows if number not in self.rows and number not in finished]
            if unknown:  # an earlier incarnation, or another controller, knew of them
                self._shrink(gone.partition, unknown)

    def _finish_everywhere(self, number: int, row: Row, *, here: bool) -> None:
        """Mark a row done for all tasks; with `here` False, also tell the unit that has it again by now."""
        for name in self.task_names(row.open_tasks):
            if not here and name in self.tasks:
                self.out.append(ForwardAck(name, self.new_token(), self._by_unit([number])))
            self.mark_done(name, [number])

    def _take_tombstones(self, event: RegisterUnit, lives: list[UnitLife], listed: set[int]) -> None:
        self._take_finished(event, lives)
        removed = {number: gone.cause for gone in event.removed_groups for number in gone.rows}
        for number in [number for unit in lives for number in self._at_unit(unit)]:
            if number in listed or number not in self.rows:
                continue
            if number in removed:  # another controller removed it
                self._remove_with_group([number], removed[number])
            elif self.rows[number].state is _WITHHELD:
                self._remove_with_group([number])
            else:  # cleared, or the put was undone, while the unit was away
                self._remove(number)

    def _misplace(self, numbers: Sequence[int]) -> None:
        """A unit dropped rows that another controller says are elsewhere; word of where may follow."""
        for number in numbers:
            row = self.rows[number]
            self._move(row, self._nowhere, row.num_bytes)
            row.to(_LOST)
            self._note_moved(number, row)
        self.losses.lose(numbers)

    def _move(self, row: Row, unit: UnitLife, num_bytes: int) -> None:
        """Place a row that was lost, or that its unit let go of, at `unit` with `num_bytes`."""
        row.unit.num_rows -= 1
        row.unit.num_bytes -= row.num_bytes
        self.num_bytes += num_bytes - row.num_bytes
        row.unit, row.num_bytes = unit, num_bytes
        unit.num_rows += 1
        unit.num_bytes += num_bytes

    def _note_moved(self, number: int, row: Row) -> None:
        """Where a row is changed: refresh it for the tasks, and for a rank that waits for a slice with it."""
        self._refresh(number, row)
        for task in self.tasks.values():
            if number in task.leases.holders:
                task.changed.add(row.partition)

    def _refresh(self, number: int, row: Row) -> None:
        for task in self.tasks.values():
            task.refresh_row(number, row)

    def _at_unit(self, unit: UnitLife) -> list[int]:
        """Return the rows of a unit's life; scans all rows, which is rare enough."""
        return [number for number, row in self.rows.items() if row.unit is unit] if unit.num_rows else []

    def _by_unit(self, numbers: Iterable[int]) -> dict[str, tuple[int, ...]]:
        """Return unit -> rows in ascending order, without lost ones."""
        units: dict[str, list[int]] = {}
        for number in sorted(numbers):
            row = self.rows[number]
            if not row.lost:
                units.setdefault(row.unit.name, []).append(number)
        return {unit: tuple(there) for unit, there in units.items()}

    # Lost rows: which must be put again, and who is done with them

    def report_losses(self) -> None:
        """Have the recently lost rows put again that some task still needs."""
        new = self.losses.report_rows(self._needed())
        if new:  # their unit's fences were lost with it
            units = {self.rows[number].unit.name for number in new} - {""} | self.units.keys()
            for task in self.tasks.values():
                self.fence_void_leases(task, units if task.leases.some_void else ())
            self.out.append(PutAgain(tuple(new)))
            self.tell_watchers()

    def tell_watchers(self) -> None:
        """Send watchers the losses that they have not seen."""
        self.out += [Answer(*told) for told in self.losses.take_answers(self.rows)]

    def losses_by_life(self) -> list[UnitLoss]:
        """Return the rows that were lost with their unit, grouped by the unit's life."""
        lives: dict[tuple[str, str], list[int]] = {}
        for number in self.losses:
            unit = self.rows[number].unit
            lives.setdefault((unit.name, unit.incarnation), []).append(number)
        return [UnitLoss(*life, self._records_of(rows)) for life, rows in sorted(lives.items())]

    def take_changed_losses(self) -> dict[int, list[RowRecords]]:
        """Return, for each part that changed since the last call, the rows that its durable record must hold."""
        return {part: self._records_of(rows) for part, rows in self.losses.take_changed_parts().items()}

    def adopt_losses(self, losses: Iterable[UnitLoss]) -> None:
        """Take over another controller's losses, for lives of units that this one never met."""
        # If this controller met the life, it knew every row of it: a row that it no longer knows is done.
        for loss in losses:
            if loss.incarnation and (loss.unit, loss.incarnation) not in self._lives:
                self.add_lost_records(loss.records)

    def done_with(self, losses: Iterable[UnitLoss]) -> Marks:
        """Return task -> positions (counting all rows of `losses`) of rows that the task is known to be done with."""
        known: Marks = {}
        told = [(number, record.partition) for loss in losses for record in loss.records for number in record.rows]
        for k, (number, partition) in enumerate(told):
            row = self.rows.get(number)
            finished = self.every_task if self.is_finished(number, partition) else 0
            for name in self.task_names(finished if row is None else self.every_task & ~row.open_tasks):
                known.setdefault(name, []).append(k)
        return known

    def _needed(self) -> Iterator[int]:
        """Take the recently lost rows that must be put again."""
        for number, wanted in self.losses.take_undecided().items():
            row = self.rows.get(number)
            if row is None or not row.lost:
                continue
            if wanted or any(self._needs_row(name, number) for name in self.task_names(row.open_tasks)):
                yield number

    def _needs_row(self, name: str, number: int) -> bool:
        task = self.tasks.get(name)
        lease = None if task is None else task.leases.find_lease(number)
        # Not needed: a row whose only open tasks are trainers that have already read it.
        return task is None or lease is None or not task.spec.keeps_leases or not lease.readers

    def _records_of(self, rows: Iterable[int]) -> list[RowRecords]:
        records: dict[tuple[int, int, int], RowRecords] = {}
        for number in sorted(rows):
            row = self.rows[number]
            key = (row.partition, row.written, row.open_tasks)
            if key not in records:
                done = self.task_names(self.every_task & ~row.open_tasks)
                records[key] = RowRecords(row.partition, [], [], [], [], [], self.column_names(row.written), done)
            records[key].append(
                number, group=row.group, group_size=row.group_size, tokens=row.tokens, num_bytes=row.num_bytes
            )
        return list(records.values())

    # Partitions

    def partition(self, number: int) -> PartitionRows:
        """Return a partition; creates it when new."""
        info = self.partitions.get(number)
        if info is None:
            for old in sorted(self.partitions)[:-_PARTITIONS_REMEMBERED]:
                if self.partitions[old].num_live == 0 and self.partitions[old].all_known:
                    self._forget_partition(old)
            info = self.partitions[number] = PartitionRows()
        return info

    def open_partition(self, number: int, num_rows: int) -> None:
        """Declare how many rows a partition has, counting those that it lacks."""
        self.partition(number).declared = num_rows
        self._recount_groups(number)
        for task in self.tasks.values():
            task.partition_sized(number)

    def drop_finished(self, partition: int) -> None:
        """Forget a partition in every served task that is done with it."""
        for task in self.tasks.values():
            task.drop_finished(partition)

    def _drop_finished_of(self, name: str, partitions: Iterable[int]) -> None:
        for partition in partitions if name in self.tasks else ():
            self.tasks[name].drop_finished(partition)

    def _recount_groups(self, partition: int) -> None:
        """After a restart, once all rows are known: complete the groups that lack only rows finished before."""
        info = self.partitions.get(partition)
        if info is None or not info.nameless or not info.all_known:
            return
        info.nameless = RowSet()
        for task in self.tasks.values():
            if task.spec.whole_groups and not task.is_partition_over(partition):
                task.partition(partition).recount_groups(self.numbers(partition))
                task.partition_sized(partition)

    def _forget_partition(self, partition: int) -> None:
        """Forget a partition without rows in the table; it may begin anew."""
        self.partitions.pop(partition, None)
        self._newly_finished.pop(partition, None)
