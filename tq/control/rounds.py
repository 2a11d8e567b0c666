"""The rounds of one step of one task (mostly its partition): every rank of a gang gets one share of each. Pure.

A share is a lease from the moment its round is formed; its rank comes for it later, perhaps several times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tq.messages import Held
from tq.policies import Parcel


@dataclass
class Share:
    """One rank's part of a round.

    Attributes:
        token: of its lease.
        rows: as they were dealt; after a restart without those that were done.
        num_rows: how many were dealt.
    """

    token: int
    rows: tuple[int, ...]
    num_rows: int

    @staticmethod
    def of(token: int, parcels: Sequence[Parcel]) -> "Share":
        """Return a share of whole parcels."""
        rows = tuple(row for parcel in parcels for row in parcel.rows)
        return Share(token, rows, len(rows))


@dataclass
class Round:
    """One round.

    Attributes:
        shares: by rank; None: given by an earlier incarnation of the controller to nobody, so it is dealt again.
        round_rows: most rows of any share.
        last: no rows of the step follow.
        partition: of its rows.
        total_rows: of all shares.
    """

    shares: list[Share | None]
    round_rows: int
    last: bool
    partition: int = 0
    total_rows: int = 0

    @property
    def missing(self) -> list[int]:
        """Ranks whose shares are dealt again."""
        return [rank for rank, share in enumerate(self.shares) if share is None]


@dataclass
class Rounds:
    """Of one step.

    Attributes:
        num_ranks: who shares them; 0: nobody asked yet.
        dealt: per rank, the tokens of its shares of the rounds that were formed here.
        formed: in order.
    """

    num_ranks: int = 0
    formed: list[Round] = field(default_factory=list)
    dealt: list[int] = field(default_factory=list)

    def loads(self, num_ranks: int) -> list[int]:
        """Return `dealt` of so many ranks."""
        return self.dealt or [0] * num_ranks

    @property
    def num_rows(self) -> int:
        """Rows in all rounds."""
        return sum(round_.total_rows for round_ in self.formed)

    def form(self, shares: Sequence[Sequence[Parcel]], token: Callable[[], int], *, partition: int) -> Round:
        """Add a round from what each rank gets; it is not the last one unless the caller says so."""
        dealt = [Share.of(token(), parcels) for parcels in shares]
        tokens = [sum(parcel.tokens for parcel in parcels) for parcels in shares]
        self.dealt = [before + now for before, now in zip(self.loads(len(shares)), tokens, strict=True)]
        counts = [share.num_rows for share in dealt]
        self.formed.append(Round([*dealt], max(counts), False, partition, sum(counts)))
        return self.formed[-1]

    def restore(self, one: Held) -> None:
        """A rank says that it holds this share of a round that an earlier incarnation formed."""
        self.num_ranks = max(self.num_ranks, one.num_ranks)
        while len(self.formed) <= one.round_index:
            self.formed.append(Round([None] * one.num_ranks, 0, last=False, partition=one.partition))
        known = self.formed[one.round_index]
        known.shares += [None] * (one.num_ranks - len(known.shares))
        known.round_rows = max(known.round_rows, one.round_rows)
        known.total_rows = max(known.total_rows, one.total_rows)
        known.last = known.last or one.last
        known.partition = one.partition
        held = known.shares[one.rank]
        if held is None or held.token < one.token:
            known.shares[one.rank] = Share(one.token, tuple(one.rows), one.share_rows)
