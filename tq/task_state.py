"""One task's view of the rows: which are ready, leased, done. Pure: no clock, no sockets, no threads.

waiting --all inputs written--> ready --granted--> leased --outputs written--> done
                                  ^                  |
                                  '-- given back ----'   (owner died; the unit was fenced first)
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from tq.policies import Parcel, deal_round


@dataclass(frozen=True)
class TaskSpec:
    """What a controller must know of a task.

    Attributes:
        name: unique.
        inputs: columns that must be written before a row is ready.
        whole_groups: a group is handed out only when all its rows are ready, and never split.
        gated: rows depend on the consumer's weight version (the staleness rule).
        barrier: rows of a partition are handed out only when all of them are ready (`sync`).
        keeps_leases: leases survive a lost channel; they end only with the whole gang (the trainer).
    """

    name: str
    inputs: frozenset[str]
    whole_groups: bool = False
    gated: bool = False
    barrier: bool = False
    keeps_leases: bool = False


@dataclass
class Lease:
    """Rows in somebody's hands."""

    token: int
    owner: str
    partition: int
    rows: set[int]


@dataclass(frozen=True)
class Share:
    """One rank's part of a round."""

    rows: Parcel
    round_rows: int
    last: bool


@dataclass
class PartitionState:
    """One partition of one task."""

    num_rows: int | None = None
    num_ranks: int | None = None
    ready: list[Parcel] = field(default_factory=list)
    num_ready_ever: int = 0
    num_ready: int = 0
    num_done: int = 0
    rounds: list[list[Share]] = field(default_factory=list)
    half_groups: dict[int, list[int]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every row that the partition will have became ready."""
        return self.num_rows is not None and self.num_ready_ever >= self.num_rows


class TaskState:
    """Readiness, leases and rounds of one task."""

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec
        self.partitions: dict[int, PartitionState] = {}
        self.leases: dict[int, Lease] = {}
        self._holders: dict[int, int] = {}
        self._finished: set[int] = set()

    def partition(self, number: int) -> PartitionState:
        """Return the partition, created when new."""
        return self.partitions.setdefault(number, PartitionState())

    def lease(self, lease: Lease) -> None:
        """Rows are in a consumer's hands from now on, and in nobody else's."""
        for row in lease.rows:
            self._release(row)
            self._holders[row] = lease.token
        self.leases[lease.token] = lease

    def end_lease(self, lease: Lease) -> None:
        """The consumer is gone; its rows wait for `give_back`."""
        del self.leases[lease.token]
        for row in lease.rows:
            del self._holders[row]

    def row_ready(self, row: int, *, partition: int, group: int, group_size: int) -> None:
        """All inputs of a row are written."""
        state = self.partition(partition)
        state.num_ready_ever += 1
        if not self.spec.whole_groups:
            self._push(state, (row,))
            return
        rows = state.half_groups.setdefault(group, [])
        rows.append(row)
        if len(rows) == group_size:
            del state.half_groups[group]
            self._push(state, tuple(sorted(rows)))

    def give_back(self, partition: int, parcels: Iterable[Parcel]) -> None:
        """Rows of a void lease are ready again, in their old place in the order.

        Args:
            partition: of the rows.
            parcels: what is left of each group.
        """
        for parcel in parcels:
            state = self.partition(partition)
            if self.spec.whole_groups:
                self._push(state, parcel)
            else:
                for row in parcel:
                    self._push(state, (row,))

    def take(self, num_rows: int, *, newest_allowed: int | None) -> tuple[int, Parcel] | None:
        """Take ready parcels of the oldest partition that has any; at least one, and up to `num_rows` rows.

        Args:
            num_rows: wanted.
            newest_allowed: partitions beyond this are held back (the staleness gate); None: no gate.

        Returns:
            (partition, rows), or None when nothing may be handed out.
        """
        for number in sorted(self.partitions):
            state = self.partitions[number]
            if newest_allowed is not None and number > newest_allowed:
                return None
            if state.ready and (state.complete or not self.spec.barrier):
                return number, tuple(row for parcel in self._pop(state, num_rows) for row in parcel)
        return None

    def share(self, partition: int, round_index: int, rank: int, *, num_rows: int, num_ranks: int) -> Share | None:
        """Return a rank's share of a round, forming the round when it can be full or the partition's rest is ready."""
        state = self.partition(partition)
        if round_index < len(state.rounds):
            return state.rounds[round_index][rank]
        assert round_index == len(state.rounds), "the caller checks that no round is skipped"
        enough = state.num_ready >= num_rows * num_ranks and not self.spec.barrier
        if not state.ready or not (enough or state.complete):
            return None
        shares = deal_round(self._pop(state, num_rows * num_ranks), num_ranks)
        rows = [tuple(row for parcel in parcels for row in parcel) for parcels in shares]
        last = state.complete and not state.ready
        most = max(len(parcel) for parcel in rows)
        state.rounds.append([Share(parcel, most, last) for parcel in rows])
        return state.rounds[-1][rank]

    def join_rounds(self, partition: int, num_ranks: int) -> bool:
        """Note how many ranks share the partition's rounds; False when an earlier request said otherwise."""
        if partition in self._finished:
            return True
        state = self.partition(partition)
        if state.num_ranks is None:
            state.num_ranks = num_ranks
        return state.num_ranks == num_ranks

    def num_rounds(self, partition: int) -> int:
        """Return how many rounds of the partition were formed."""
        state = self.partitions.get(partition)
        return len(state.rounds) if state is not None else 0

    def exhausted(self, partition: int) -> bool:
        """Whether all rows of the partition were handed out."""
        if partition in self._finished:
            return True
        state = self.partitions.get(partition)
        return state is not None and state.complete and not state.ready

    def done(self, partition: int, row: int) -> None:
        """A row's outputs are written: it leaves whatever lease it is in."""
        self.partition(partition).num_done += 1
        self._release(row)

    def drop_finished(self, partition: int) -> None:
        """Forget a partition whose rows are all done."""
        state = self.partitions.get(partition)
        if state is not None and state.num_rows is not None and state.num_done >= state.num_rows:
            del self.partitions[partition]
            self._finished.add(partition)

    def counts(self) -> tuple[int, int, int]:
        """Return rows (ready, leased, done) of the partitions still held."""
        ready = sum(state.num_ready for state in self.partitions.values())
        leased = sum(len(lease.rows) for lease in self.leases.values())
        return ready, leased, sum(state.num_done for state in self.partitions.values())

    def _release(self, row: int) -> None:
        token = self._holders.pop(row, None)
        if token is not None:
            lease = self.leases[token]
            lease.rows.discard(row)
            if not lease.rows:
                del self.leases[token]

    @staticmethod
    def _push(state: PartitionState, parcel: Parcel) -> None:
        heapq.heappush(state.ready, parcel)
        state.num_ready += len(parcel)

    @staticmethod
    def _pop(state: PartitionState, num_rows: int) -> list[Parcel]:
        parcels = [heapq.heappop(state.ready)]
        total = len(parcels[0])
        while state.ready and total + len(state.ready[0]) <= num_rows:
            parcels.append(heapq.heappop(state.ready))
            total += len(parcels[-1])
        state.num_ready -= total
        return parcels
