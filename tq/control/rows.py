"""Rows that some task is not done with, as a controller knows them: where, which columns, for whom. Pure, plain tables.

Built for a million rows: a row is one object of numbers; columns and tasks are bits. The table decides nothing, but it
refuses the impossible: a row changes its state only as `TRANSITIONS` allows.
"""

import enum
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from asyncflow.errors import PeerRefused

# A set of row numbers at one bit each: rows are numbered densely, and finished ones are remembered for long. Pure.

Span = tuple[int, int]  # consecutive rows: the first one, and the last one + 1

# Rows per chunk. Setting a bit copies its chunk.
_BITS = 256
_FULL = (1 << _BITS) - 1
_CHUNKS = 256  # consecutive chunks per part
_PARTS = 256


class RowSet:
    """A set of row numbers, iterated in ascending order."""

    def __init__(self, rows: Iterable[int] = ()) -> None:
        self._chunks: dict[int, int] = {}
        self.update(rows)

    def __contains__(self, row: int) -> bool:
        return bool(self._chunks.get(row // _BITS, 0) >> row % _BITS & 1)

    def __iter__(self) -> Iterator[int]:
        for first, end in self.spans():
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
        chunk = row // _BITS
        self._chunks[chunk] = self._chunks.get(chunk, 0) | 1 << row % _BITS

    def discard(self, row: int) -> None:
        bits = self._chunks.get(row // _BITS, 0) & ~(1 << row % _BITS)
        if bits:
            self._chunks[row // _BITS] = bits
        else:
            self._chunks.pop(row // _BITS, None)

    def update(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.add(row)

    def merge(self, other: "RowSet") -> None:
        """Add all rows of another set; a whole chunk costs no more than one row."""
        for chunk, bits in other._chunks.items():
            self._chunks[chunk] = self._chunks.get(chunk, 0) | bits

    def spans(self) -> list[Span]:
        spans: list[Span] = []
        for chunk, bits in sorted(self._chunks.items()):
            for low, high in [(0, _BITS)] if bits == _FULL else _runs(bits):
                first, end = chunk * _BITS + low, chunk * _BITS + high
                if spans and spans[-1][1] == first:
                    first = spans.pop()[0]
                spans.append((first, end))
        return spans

    @staticmethod
    def of_spans(spans: Iterable[Span]) -> "RowSet":
        """Undo `spans`."""
        rows = RowSet()
        for first, end in spans:
            for chunk in range(first // _BITS, -(-end // _BITS)):
                low, high = max(first - chunk * _BITS, 0), min(end - chunk * _BITS, _BITS)
                rows._chunks[chunk] = rows._chunks.get(chunk, 0) | (1 << high) - (1 << low)
        return rows

    def parts(self) -> "dict[int, RowSet]":
        """Return part number -> its rows: at most 256 parts of 65,536 consecutive rows each; higher rows wrap around.

        A row is in the same part of every set, so a set that is stored by parts is rewritten only where it grew.
        """
        parts: dict[int, RowSet] = {}
        for chunk, bits in self._chunks.items():
            parts.setdefault(chunk // _CHUNKS % _PARTS, RowSet())._chunks[chunk] = bits
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


_PARTITIONS_REMEMBERED = 64
_NONE = RowSet()


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
        "told of the loss",
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


@dataclass(slots=True, eq=False)
class Row:
    """A row."""

    unit: UnitLife  # where it is, or was
    # `partition`, `group`, `group_size`: see `messages.PutRows`.
    partition: int
    group: int
    group_size: int
    written: int  # columns (bits)
    left: int  # tasks that are not done with it (bits)
    # `tokens`, `num_bytes`: over all its columns.
    tokens: int
    num_bytes: int
    queued: int = 0  # tasks that may be given it now (bits); written only by their `PartitionQueue`
    state: RowState = RowState.UNKNOWN

    @property
    def lost(self) -> bool:
        return self.state is RowState.LOST

    def to(self, state: RowState) -> None:
        """Change the state, or keep it; asserts that `TRANSITIONS` allows the change."""
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"a row that is {self.state.name} cannot become {state.name}"
            self.state = state

    def done(self, tasks: int) -> None:
        self.left &= ~tasks

    def reopen(self, tasks: int) -> None:
        self.left |= tasks

    def wrote(self, columns: int, tokens: int = 0) -> None:
        self.written |= columns
        self.tokens += tokens

    def became(self, put: "Row") -> None:
        """Take over what a repeated put of a lost row says; `Rows.move` sets its place and size."""
        self.group, self.group_size, self.written, self.tokens = put.group, put.group_size, put.written, put.tokens


@dataclass(slots=True, eq=False)
class PartitionRows:
    """A partition, as all tasks see it."""

    declared: int | None = None  # by `OpenPartition`; None: not yet
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

    def declare(self, num_rows: int) -> None:
        """Set how many rows it will have, counting those that it lacks."""
        self.declared = num_rows

    def lack(self, rows: RowSet) -> None:
        """Note rows that it will never have."""
        self.removed.merge(rows)

    def has(self, rows: Iterable[int]) -> None:
        """Undo `lack` for these rows."""
        for number in rows if self.removed else ():
            self.removed.discard(number)


class Rows:
    """The table, with its totals, for all tasks of the queue."""

    def __init__(self, tasks: Sequence[str]) -> None:
        self.bits = {task: 1 << k for k, task in enumerate(tasks)}
        self.every_task = (1 << len(tasks)) - 1
        self.rows: dict[int, Row] = {}
        self.units: dict[str, UnitLife] = {}
        self.dead_units: list[UnitLife] = []
        self.partitions: dict[int, PartitionRows] = {}
        self.num_bytes = 0
        self._columns: dict[str, int] = {}
        self._newly_finished: dict[int, RowSet] = {}

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_lost(self) -> int:
        self.dead_units = [unit for unit in self.dead_units if unit.num_rows]
        return sum(unit.num_rows for unit in self.dead_units)

    def mask(self, columns: Iterable[str]) -> int:
        bits = 0
        for name in columns:
            bits |= self._columns.setdefault(name, 1 << len(self._columns))
        return bits

    def columns(self, mask: int) -> list[str]:
        return [name for name, bit in self._columns.items() if mask & bit]

    def bit(self, task: str) -> int:
        """Return a task's bit; raises PeerRefused if there is no such task."""
        bit = self.bits.get(task)
        if bit is None:
            raise PeerRefused(f"no task is named {task!r}; known: {' '.join(self.bits)}")
        return bit

    def tasks(self, mask: int) -> list[str]:
        return [name for name, bit in self.bits.items() if mask & bit]

    def unit(self, name: str) -> UnitLife:
        """Return a unit that is up; creates it when new."""
        return self.units.setdefault(name, UnitLife(name))

    def partition(self, number: int) -> PartitionRows:
        """Return a partition; creates it when new."""
        info = self.partitions.get(number)
        if info is None:
            self._forget_old()
            info = self.partitions[number] = PartitionRows()
        return info

    def finished(self, partition: int) -> RowSet:
        info = self.partitions.get(partition)
        return _NONE if info is None else info.finished

    def is_finished(self, number: int, partition: int) -> bool:
        return number in self.finished(partition)

    def take_finished(self) -> dict[int, RowSet]:
        newly, self._newly_finished = self._newly_finished, {}
        return newly

    def known_rows(self) -> dict[int, list[int]]:
        """Return partition -> rows in the table, and finished ones."""
        known = {number: list(info.finished) for number, info in self.partitions.items()}
        for number, row in self.rows.items():
            known.setdefault(row.partition, []).append(number)
        return known

    def finish(self, partition: int, numbers: Collection[int], *, nameless: bool = False) -> None:
        """Note that all tasks are done with rows that were neither finished before nor in the table."""
        info = self.partition(partition)
        info.num_finished += len(numbers)
        info.finished.update(numbers)
        info.has(numbers)
        # Their groups are unknown.
        if nameless:
            info.nameless.update(numbers)
        self._newly_finished.setdefault(partition, RowSet()).update(numbers)

    def forget(self, partition: int) -> None:
        """Forget a partition without rows in the table; it may begin anew."""
        self.partitions.pop(partition, None)
        self._newly_finished.pop(partition, None)

    def add(self, partition: int, rows: Sequence[tuple[int, Row]]) -> None:
        """Add new rows of a partition, all at one unit."""
        self.rows.update(rows)
        info = self.partition(partition)
        info.num_live += len(rows)
        info.has(number for number, _ in rows)
        info.numbers += [number for number, _ in rows]
        num_bytes = sum([row.num_bytes for _, row in rows])
        self.num_bytes += num_bytes
        unit = rows[0][1].unit
        unit.num_rows += len(rows)
        unit.num_bytes += num_bytes

    def remove(self, number: int, state: RowState) -> Row:
        """Take a finished or removed row out of the table."""
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

    def grow(self, row: Row, num_bytes: int) -> None:
        row.num_bytes += num_bytes
        row.unit.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def move(self, row: Row, unit: UnitLife, num_bytes: int) -> None:
        """Place a row that was lost, or only announced, at `unit` with `num_bytes`."""
        row.unit.num_rows -= 1
        row.unit.num_bytes -= row.num_bytes
        self.num_bytes += num_bytes - row.num_bytes
        row.unit, row.num_bytes = unit, num_bytes
        unit.num_rows += 1
        unit.num_bytes += num_bytes

    def numbers(self, partition: int) -> Iterator[int]:
        """Return the rows of a partition that are in the table, each once."""
        info = self.partitions.get(partition)
        for number in dict.fromkeys(info.numbers) if info is not None else ():
            row = self.rows.get(number)
            if row is not None and row.partition == partition:
                yield number

    def at_unit(self, unit: UnitLife) -> list[int]:
        """Return the rows of a unit's life; scans all rows, which is rare enough."""
        return [number for number, row in self.rows.items() if row.unit is unit] if unit.num_rows else []

    def by_unit(self, numbers: Iterable[int]) -> dict[str, tuple[int, ...]]:
        """Return unit -> rows in ascending order, without lost ones."""
        units: dict[str, list[int]] = {}
        for number in sorted(numbers):
            row = self.rows[number]
            if not row.lost:
                units.setdefault(row.unit.name, []).append(number)
        return {unit: tuple(there) for unit, there in units.items()}

    def _forget_old(self) -> None:
        for number in sorted(self.partitions)[:-_PARTITIONS_REMEMBERED]:
            if self.partitions[number].num_live == 0 and self.partitions[number].all_known:
                self.forget(number)
