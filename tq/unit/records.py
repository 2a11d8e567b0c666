"""What a storage unit knows of one row, of a commit, of a partition. Plain data; `UnitState` keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from asyncflow.errors import PeerRefused
from tq.refill import QuarantineCause
from tq.unit.block import Block

Place = tuple[Block, int]


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
        returns: task -> how often a lease on it was given back.
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
        quarantined: that were here, and went with their group into quarantine.
    """

    rows: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    quarantined: dict[int, QuarantineCause] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to remember."""
        return not (self.rows or self.finished or self.quarantined)


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
    """What a unit held at one moment; its blocks are pinned until `BlockBooks.unpin`."""

    rows: list[CutRow]
    blocks: list[Block]


@dataclass(frozen=True)
class Repeated:
    """A put whose rows are all here already: the same one again, or another one that must be refused.

    Attributes:
        pairs: (earlier block, position there, position in the put); the blocks are pinned until `BlockBooks.unpin`.
        refusal: of a put that differs.
    """

    pairs: list[tuple[Block, int, int]]
    refusal: PeerRefused

    @property
    def blocks(self) -> list[Block]:
        """The earlier blocks."""
        return list({block: None for block, _, _ in self.pairs})
