"""What a storage unit knows of one row, of a commit, of a partition. Plain data; `UnitState` keeps it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from asyncflow.errors import PeerRefused
from tq.refill import RemovalCause
from tq.unit.block import Block, Part, Place


@dataclass(frozen=True)
class Commit:
    """One put of outputs; shared by all its rows.

    Attributes:
        task, token: whose, under which lease; below 0 where only the fact is known.
        names: columns that it wrote.
    """

    task: str
    token: int
    names: frozenset[str]


_NONE: Mapping[str, int] = MappingProxyType({})


def _none() -> Mapping[str, int]:
    """Most rows are never fenced, so they share this."""
    return _NONE


KNOWN_ELSEWHERE = -1
"""Token of a commit that a controller told of."""
PUT_WITH_ROW = -2
"""Token of a commit that came with the row, out of a snapshot."""


@dataclass(slots=True, eq=False)
class Row:
    """A row that is here.

    Attributes:
        partition, group, group_size: see `messages.PutRows`.
        tokens, num_bytes: over all its columns.
        places: column -> where its value is.
        commits: task -> its commit.
        fences: task -> lowest token that is not void.
        returns: task -> how often a lease on it was released.
        pending: the controllers have not confirmed yet that it exists.
        retained: every task is done with it; it waits for a checkpoint.
    """

    partition: int
    group: int
    group_size: int
    tokens: int = 0
    num_bytes: int = 0
    places: dict[str, Place] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    fences: Mapping[str, int] = field(default_factory=_none)
    returns: Mapping[str, int] = field(default_factory=_none)
    pending: bool = True
    retained: bool = False

    def cut(self, number: int, forget: frozenset[str]) -> "CutRow":
        """Return it as it is now, without what tasks of `forget` put."""
        gone = {name for task, commit in self.commits.items() if task in forget for name in commit.names}
        places = {name: place for name, place in self.places.items() if name not in gone}
        commits = tuple(sorted(self.commits.keys() - forget))
        return CutRow(number, self.partition, self.group, self.group_size, places, commits)

    def belongs_with(self, other: "Row") -> bool:
        """Whether both belong to the same group of the same size, of the same partition."""
        mine, theirs = ((row.partition, row.group, row.group_size) for row in (self, other))
        return mine == theirs


@dataclass
class Partition:
    """Rows of one partition.

    Attributes:
        rows: that are here.
        finished: that were here, and went when every task was done with them.
        removed: that were here, and went with their group among the dead letters.
    """

    rows: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    removed: dict[int, RemovalCause] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to remember."""
        return not (self.rows or self.finished or self.removed)


@dataclass(frozen=True)
class CutRow:
    """A row as it was at a cut."""

    number: int
    partition: int
    group: int
    group_size: int
    places: Mapping[str, Place]
    commits: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """What a unit held at one moment; its blocks are pinned until `BlockAccounting.unpin`."""

    rows: list[CutRow]
    blocks: list[Block]


@dataclass(frozen=True)
class Repeated:
    """A put whose rows are all here already: the same one again, or another one that must be refused.

    Attributes:
        pairs: (earlier block, position there, position in the put); the blocks stay pinned until they are compared.
        refusal: of a put that differs.
    """

    pairs: list[tuple[Block, int, int]]
    refusal: PeerRefused

    @property
    def blocks(self) -> list[Block]:
        """The earlier blocks."""
        return list({block: None for block, _, _ in self.pairs})


def parts_of(numbers: Sequence[int], rows: Sequence[Row], name: str) -> list[Part]:
    """Return where a column of rows is, in order; neighbours in a block are one range.

    Raises:
        PeerRefused: the column is not written in one of them.
    """
    try:
        places = [row.places[name] for row in rows]
    except KeyError:
        number = next(number for number, row in zip(numbers, rows, strict=True) if name not in row.places)
        raise PeerRefused(f"row {number}: column {name!r} is not written") from None
    parts: list[tuple[Block, list[int]]] = []
    last: Block | None = None
    for block, position in places:
        if block is not last:
            found: list[int] = []
            parts.append((block, found))
            last = block
        found.append(position)
    return [(block, _as_range(positions)) for block, positions in parts]


def _as_range(positions: list[int]) -> Sequence[int]:
    neighbours = range(positions[0], positions[0] + len(positions))
    return neighbours if positions == list(neighbours) else positions


def check_distinct(rows: Sequence[int]) -> None:
    """Raise PeerRefused when a put names a row twice."""
    if len(set(rows)) != len(rows):
        raise PeerRefused(f"a put names a row twice: {list(rows)}")
