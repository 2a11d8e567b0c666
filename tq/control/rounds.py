"""The rounds of one step of one task (usually its partition): every rank of a gang gets one slice of each. Pure.

A slice is a lease from the moment its round is formed; its rank comes for it later, perhaps several times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tq.messages import Held
from tq.policies import Item


@dataclass
class RankSlice:
    """One rank's part of a round; after a restart `rows` lacks those that were done, `num_rows` counts them, too."""

    token: int
    rows: tuple[int, ...]
    num_rows: int

    @staticmethod
    def of(token: int, items: Sequence[Item]) -> "RankSlice":
        rows = tuple(row for item in items for row in item.rows)
        return RankSlice(token, rows, len(rows))


@dataclass
class Round:
    """One round."""

    # By rank; None: an earlier incarnation of the controller gave it to nobody, so it is assigned again.
    rank_slices: list[RankSlice | None]
    round_rows: int  # most rows of any slice
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

    def loads(self, num_ranks: int) -> list[int]:
        """Return `assigned`, or zeros before the first round."""
        return self.assigned or [0] * num_ranks

    @property
    def num_rows(self) -> int:
        return sum(round_.total_rows for round_ in self.formed)

    def form(self, rank_slices: Sequence[Sequence[Item]], token: Callable[[], int], *, partition: int) -> Round:
        """Add a round of what each rank gets; the caller marks the last one."""
        assigned = [RankSlice.of(token(), items) for items in rank_slices]
        tokens = [sum(item.tokens for item in items) for items in rank_slices]
        self.assigned = [before + now for before, now in zip(self.loads(len(rank_slices)), tokens, strict=True)]
        counts = [rank_slice.num_rows for rank_slice in assigned]
        self.formed.append(Round([*assigned], max(counts), False, partition, sum(counts)))
        return self.formed[-1]

    def restore(self, one: Held) -> None:
        """A rank says that it holds this slice of a round that an earlier incarnation formed."""
        self.num_ranks = max(self.num_ranks, one.num_ranks)
        while len(self.formed) <= one.round_index:
            self.formed.append(Round([None] * one.num_ranks, 0, last=False, partition=one.partition))
        known = self.formed[one.round_index]
        known.rank_slices += [None] * (one.num_ranks - len(known.rank_slices))
        known.round_rows = max(known.round_rows, one.round_rows)
        known.total_rows = max(known.total_rows, one.total_rows)
        known.last = known.last or one.last
        known.partition = one.partition
        held = known.rank_slices[one.rank]
        if held is None or held.token < one.token:
            known.rank_slices[one.rank] = RankSlice(one.token, tuple(one.rows), one.slice_rows)
