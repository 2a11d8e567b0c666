"""The rounds of one partition of one task: every rank of a gang gets one share of each. Pure.

A share is a lease from the moment its round is formed; its rank comes for it later, perhaps several times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tq.policies import Parcel


@dataclass
class Share:
    """One rank's part of a round."""

    token: int
    rows: tuple[int, ...]


@dataclass
class Round:
    """One round.

    Attributes:
        shares: by rank; None: given by an earlier incarnation of the controller to nobody, so it is dealt again.
        round_rows: most rows of any share.
        last: no rows of the partition follow.
    """

    shares: list[Share | None]
    round_rows: int
    last: bool


@dataclass
class Rounds:
    """Of one partition.

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

    def form(self, shares: Sequence[Sequence[Parcel]], token: Callable[[], int], *, last: bool) -> Round:
        """Add a round from what each rank gets."""
        dealt: list[Share | None] = [
            Share(token(), tuple(row for parcel in parcels for row in parcel.rows)) for parcels in shares
        ]
        tokens = [sum(parcel.tokens for parcel in parcels) for parcels in shares]
        self.dealt = [before + now for before, now in zip(self.loads(len(shares)), tokens, strict=True)]
        most = max(len(share.rows) for share in dealt if share is not None)
        self.formed.append(Round(dealt, most, last))
        return self.formed[-1]

    def restore(self, index: int, rank: int, num_ranks: int, share: Share, *, round_rows: int, last: bool) -> None:
        """A rank says that it holds this share of a round that an earlier incarnation formed."""
        self.num_ranks = max(self.num_ranks, num_ranks)
        while len(self.formed) <= index:
            self.formed.append(Round([None] * num_ranks, 0, last=False))
        known = self.formed[index]
        known.shares += [None] * (num_ranks - len(known.shares))
        known.round_rows = max(known.round_rows, round_rows)
        known.last = known.last or last
        held = known.shares[rank]
        if held is None or held.token < share.token:
            known.shares[rank] = share
