"""Leases of one task: live ones, void ones that wait for their fence, and spent ones. Pure.

given --done--> spent (remembered, so that a repeated ack is recognized)
  '--void--> fencing --Fenced--> free to be given again
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tq.policies import Item

_SPENT_REMEMBERED = 16384


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """Rows in a consumer's hands.

    Attributes:
        token: names it.
        partition: of its rows.
        granted: all its rows but those that were released.
        rows: of those, the ones that are not done.
        readers: consumers that hold it; none yet: a round's slice that no rank asked for.
    """

    token: int
    partition: int
    granted: set[int]
    rows: set[int]
    readers: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Fencing:
    """Rows of a void lease.

    Attributes:
        rows: not handed out before the fence holds.
        counts: whether this is a delivery that failed.
    """

    rows: tuple[int, ...]
    counts: bool


class Leases:
    """The leases of one task."""

    def __init__(self) -> None:
        self.by_token: dict[int, LeaseRecord] = {}
        self.holders: dict[int, int] = {}
        """Row -> token of the lease that it is in."""
        self.fencing: dict[int, int] = {}
        """Row -> token of the fence that it waits for; 0: a lost row, to be fenced where it is put again."""
        self.returns: dict[int, int] = {}
        """Row -> how often it came back after a try that failed."""
        self.some_void = False
        """Whether a consumer may still put under a lease that is not its own any more."""
        self._fences: dict[int, Fencing] = {}
        self._owned: dict[str, set[int]] = {}
        self._spent: dict[int, frozenset[int]] = {}

    def give(self, token: int, partition: int, rows: Iterable[int], reader: str = "") -> None:
        """Rows are in a lease from now on; "": no consumer asked for it yet."""
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
        """Return the lease that a row is in."""
        token = self.holders.get(row)
        return None if token is None else self.by_token[token]

    def release(self, row: int) -> bool:
        """A row is done, or gone; returns whether it was in a lease."""
        token = self.holders.pop(row, None)
        if token is None:
            return False
        lease = self.by_token[token]
        lease.rows.discard(row)
        if not lease.rows:
            self._end(lease)
        return True

    def void(self, token: int, rows: Iterable[int] | None = None) -> list[int]:
        """Take rows (default: all that are not done) out of a lease; returns them in order."""
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
        """Rows of void leases are lost: they are not leased before a fence holds where they are put again."""
        self.fencing.update(dict.fromkeys(rows, 0))

    def fence(self, token: int, fencing: Fencing) -> None:
        """Hold rows back until `fenced(token)`."""
        self._fences[token] = fencing
        for row in fencing.rows:
            self.fencing[row] = token

    def fenced(self, token: int) -> Fencing | None:
        """A fence holds; returns the rows that waited for it and no other."""
        fencing = self._fences.pop(token, None)
        if fencing is None:
            return None
        rows = tuple(row for row in fencing.rows if self.fencing.get(row) == token)
        for row in rows:
            del self.fencing[row]
        return Fencing(rows, fencing.counts)

    def returned(self, row: int) -> int:
        """A row came back after a try that failed; returns how often it has."""
        self.returns[row] = self.returns.get(row, 0) + 1
        return self.returns[row]

    def returned_before(self, row: int, times: int) -> None:
        """A unit knows that a row came back so often."""
        self.returns[row] = max(times, self.returns.get(row, 0))

    def forget(self, row: int) -> None:
        """A row is gone for good."""
        self.fencing.pop(row, None)
        self.returns.pop(row, None)

    def _end(self, lease: LeaseRecord) -> None:
        del self.by_token[lease.token]
        for owner in lease.readers:
            owned = self._owned[owner]
            owned.discard(lease.token)
            if not owned:
                del self._owned[owner]
        if lease.granted:
            self._spent[lease.token] = frozenset(lease.granted)
            if len(self._spent) > _SPENT_REMEMBERED:
                del self._spent[next(iter(self._spent))]


class PoisonIsolation:
    """Which rows of a task are handed out alone: those whose next return would put their group among the dead letters.

    A consumer that dies has many rows in hand, and all of them come back; the one that it died of is among them. So the
    last try of a row is made alone: its reader gets nothing more of the task until it is done with it, and what is
    blamed for another death is one item.

        returns, of max_deliveries 3    0, 1: together with others    2: alone    3: dead letter
    """

    def __init__(self, leases: Leases, max_deliveries: int) -> None:
        """Args:
        leases: the task's.
        max_deliveries: see `TaskSpec`.
        """
        self._leases = leases
        self._last_try = max_deliveries - 1 if max_deliveries > 1 else 0

    def holds(self, owner: str) -> bool:
        """Whether a consumer has a row in hand that is on its last try."""
        return bool(self._last_try and self._leases.returns) and any(map(self._is_last, self._leases.of(owner)))

    def together(self, items: Sequence[Item]) -> int:
        """Return how many of the items, from the first on, may be in one lease; all of them as a rule."""
        if not self._last_try or not self._leases.returns:
            return len(items)
        alone = (k for k, item in enumerate(items) if any(map(self._is_last, item.rows)))
        return max(1, next(alone, len(items)))

    def _is_last(self, row: int) -> bool:
        return self._leases.returns.get(row, 0) >= self._last_try
