"""Answers fetches of the served tasks, now or when an event makes it possible. Pure.

fetch -> answered | parked --rows ready, newer weights, partition over, stop, deadline--> answered
"""

from collections.abc import Sequence
from typing import TypeVar

from asyncflow.errors import PeerRefused
from tq.control.assigner import RoundAssigner
from tq.control.events import Answer
from tq.control.row_table import RowTable
from tq.control.rows import RowState
from tq.control.task_state import TaskState
from tq.control.wait_reasons import WaitReasons
from tq.messages import FetchRound, FetchRows, LeaseGrant, NoRows, NoRowsReason
from tq.policies import Want

Fetch = FetchRows | FetchRound
K = TypeVar("K")
V = TypeVar("V")


class ParkedFetches:
    """Parked fetches by request number, in order of arrival."""

    def __init__(self) -> None:
        self._all: dict[int, Fetch] = {}
        self._rows: dict[str, dict[int, FetchRows]] = {}
        self._rounds: dict[tuple[str, int], dict[int, FetchRound]] = {}
        self._owners: dict[str, dict[int, None]] = {}
        self._counts: dict[str, int] = {}

    def add(self, request: int, fetch: Fetch) -> None:
        self._all[request] = fetch
        if isinstance(fetch, FetchRound):
            self._rounds.setdefault((fetch.task, fetch.partition), {})[request] = fetch
        else:
            self._rows.setdefault(fetch.task, {})[request] = fetch
        self._owners.setdefault(fetch.owner, {})[request] = None
        self._counts[fetch.task] = self.count(fetch.task) + 1

    def pop(self, request: int) -> Fetch | None:
        """Take out a fetch; None: it was not parked."""
        fetch = self._all.pop(request, None)
        if fetch is None:
            return None
        if isinstance(fetch, FetchRound):
            _drop(self._rounds, (fetch.task, fetch.partition), request)
        else:
            _drop(self._rows, fetch.task, request)
        _drop(self._owners, fetch.owner, request)
        self._counts[fetch.task] -= 1
        return fetch

    def waits(self, request: int) -> bool:
        return request in self._all

    def of(self, owner: str) -> list[int]:
        return list(self._owners.get(owner, ()))

    def rows(self, task: str) -> list[tuple[int, FetchRows]]:
        return list(self._rows.get(task, {}).items())

    def rounds(self, task: str, partition: int) -> list[tuple[int, FetchRound]]:
        return list(self._rounds.get((task, partition), {}).items())

    def partitions(self, task: str) -> list[int]:
        """Return the partitions with parked round fetches."""
        return [partition for name, partition in self._rounds if name == task]

    def twins(self, fetch: FetchRows) -> list[int]:
        """Return the requests of other readers for the lease that `fetch` asks for."""
        if not fetch.replica:
            return []
        key = (fetch.replica, fetch.sequence)
        return [number for number, other in self.rows(fetch.task) if (other.replica, other.sequence) == key]

    def all(self) -> list[int]:
        return list(self._all)

    def count(self, task: str) -> int:
        return self._counts.get(task, 0)


def _drop(index: "dict[K, dict[int, V]]", key: K, request: int) -> None:
    requests = index[key]
    del requests[request]
    if not requests:
        del index[key]


_REPLICA_FETCHES_REMEMBERED = 16


class Fetches:
    """Parked requests, and the gate at which they wait.

    `lineage` is that of the newest weights; consumers with weights of an earlier one get no rows of a version-gated
    task. `published`: weights of this lineage exist; otherwise those consumers wait for them.
    """

    def __init__(self, table: RowTable, reasons: WaitReasons, *, version: int, lineage: int, published: bool) -> None:
        self.parked = ParkedFetches()
        self.newest_version = version
        self._lineage = lineage
        self._published = published or lineage == 0
        self.closed = False  # all fetches are parked: the controller is recovering
        self.stopped = False
        self.drained = False  # the queue was closed for writing, and all rows that will ever exist are known
        self._table = table
        self._reasons = reasons
        self._replicas: dict[tuple[str, str], dict[int, LeaseGrant]] = {}
        self._tell_steps()

    def newest_partition(self, fetch: FetchRows) -> int | None:
        return self._task(fetch).spec.newest_step(fetch.version)

    def check(self, fetch: Fetch) -> None:
        """Raise PeerRefused for an unknown task or invalid numbers."""
        self._table.rows.bit(fetch.task)
        if fetch.task not in self._table.tasks:
            raise PeerRefused(f"{fetch.task} is served by another controller; here: {' '.join(self._table.tasks)}")
        if fetch.num_rows < 1 or fetch.token_budget < 0:
            raise PeerRefused(f"{fetch.task}: asked for {fetch.num_rows} rows; ask for at least 1")
        interval = self._task(fetch).spec.version_interval
        if isinstance(fetch, FetchRows) and fetch.version % interval:
            raise PeerRefused(
                f"{fetch.task}: asked for with weights of step {fetch.version}; only those of every {interval} steps "
                f"are of use (0, {interval}, {2 * interval}, ...)"
            )
        if isinstance(fetch, FetchRound):
            if fetch.token_budget and self._task(fetch).spec.steps is not None:
                raise PeerRefused(f"{fetch.task}: steps of several partitions have rounds of rows, not of tokens")
            if not 0 <= fetch.rank < fetch.num_ranks:
                raise PeerRefused(_other_gang(fetch))
            if not self.closed:
                self._check_round(fetch)

    def add(self, request: int, fetch: Fetch) -> None:
        """Answer a fetch that passed `check`, or park it."""
        if isinstance(fetch, FetchRound) and not self.closed and not self._assigner(fetch).over(fetch.partition):
            self._assigner(fetch).rounds(fetch.partition).num_ranks = fetch.num_ranks
        self.parked.add(request, fetch)
        if not self.closed:
            self._try(request, fetch)

    def open(self) -> None:
        """The controller has recovered: serve the parked fetches."""
        self.closed = False
        for request in self.parked.all():
            fetch = self.parked.pop(request)
            if fetch is None:
                continue  # already answered together with a twin
            # Parked before recovery, so not checked against the rounds yet.
            try:
                self.check(fetch)
            except PeerRefused as error:
                self._table.out.append(Answer(request, error))
            else:
                self.add(request, fetch)

    def stop(self) -> None:
        """Hand out nothing more, except rounds that some rank has."""
        self.stopped = True
        if not self.closed:
            for request in self.parked.all():
                fetch = self.parked.pop(request)
                if fetch is not None:
                    self.add(request, fetch)

    def drain(self) -> None:
        """No more rows will come: tasks that are done with all of them have no more work."""
        self.drained = True
        for request in self.parked.all():
            fetch = self.parked.pop(request)
            if fetch is not None:
                self.add(request, fetch)

    def publish(self, version: int) -> None:
        """Newer weights exist: answer consumers that are held back by their old ones."""
        self.newest_version = max(self.newest_version, version)
        self._published = True
        self._tell_steps()
        for name, task in self._table.tasks.items():
            if task.spec.max_staleness is None or self.closed:
                continue
            for request, fetch in self.parked.rows(name):
                self._try(request, fetch)

    def leave(self, owner: str) -> None:
        for request in self.parked.of(owner):
            self.parked.pop(request)

    def expire(self, request: int) -> None:
        fetch = self.parked.pop(request)
        if fetch is None:
            return
        gate = self.newest_partition(fetch) if isinstance(fetch, FetchRows) else None
        reason = self._reasons.of(self._table.tasks[fetch.task], fetch, gate=gate)
        answer = NoRows(NoRowsReason.DEADLINE, self.newest_version, reason.text, reason.producers_alive)
        self._table.out.append(Answer(request, answer))

    def wake(self) -> None:
        """Retry parked fetches that the last event may have made answerable."""
        if self.closed:
            return
        for name, task in self._table.tasks.items():
            if not task.changed:
                continue
            changed, task.changed = task.changed, set()
            for partition in changed if task.spec.steps is None else self.parked.partitions(name):
                for request, round_ in self.parked.rounds(name, partition):
                    self._try(request, round_)
            self._wake_rows(name, task)

    def _wake_rows(self, name: str, task: TaskState) -> None:
        if self._has_no_more(task):
            for request, _ in self.parked.rows(name):
                self.parked.pop(request)
                self._table.out.append(Answer(request, self._nothing(NoRowsReason.CLOSED)))
        if not task.has_ready:
            return
        refused = None
        for request, fetch in self.parked.rows(name):
            if (refused is not None and fetch.version <= refused) or task.isolation.holds(fetch.owner):
                continue
            if not self._try(request, fetch) and self.parked.waits(request):
                # Without a gate, no later fetch gets anything, either; with one, only those with newer weights may.
                if task.spec.max_staleness is None:
                    return
                refused = fetch.version if refused is None else max(refused, fetch.version)

    def _try(self, request: int, fetch: Fetch) -> bool:
        """Answer a parked fetch if possible; returns whether it was answered."""
        if not self.parked.waits(request):
            return False
        try:
            reply = self._round(fetch) if isinstance(fetch, FetchRound) else self._rows(fetch)
        except PeerRefused as error:  # the task's policy is broken; do not blame the sender of this event
            self.parked.pop(request)
            self._table.out.append(Answer(request, error))
            return True
        if reply is None:
            return False
        self.parked.pop(request)
        self._table.out.append(Answer(request, reply))
        if isinstance(fetch, FetchRows) and isinstance(reply, LeaseGrant):
            # Other readers of the replica wait for this very lease.
            for twin in self.parked.twins(fetch):
                other = self.parked.pop(twin)
                assert other is not None
                self._task(fetch).leases.read(reply.token, other.owner)
                self._table.out.append(Answer(twin, reply))
        return True

    def _rows(self, fetch: FetchRows) -> LeaseGrant | NoRows | None:
        again = self._grant_before(fetch)
        if again is not None:
            return again
        if self.stopped:
            return self._nothing(NoRowsReason.STOP)
        task = self._task(fetch)
        if self._has_no_more(task):
            return self._nothing(NoRowsReason.CLOSED)
        if task.isolation.holds(fetch.owner):
            return None
        newest = self.newest_partition(fetch)
        # Weights of an earlier lineage are outdated, whatever their version.
        if newest is not None and fetch.lineage < self._lineage:
            return self._gated(NoRowsReason.NEWER_VERSION, task) if self._published else None
        taken = task.take(Want(fetch.num_rows, fetch.token_budget), newest_allowed=newest)
        if taken is None:
            if newest is None or task.oldest_ready is None or task.oldest_ready <= newest:
                return None
            if task.spec.usable_version(self.newest_version) > fetch.version:
                return self._gated(NoRowsReason.NEWER_VERSION, task)
            # Rows for these weights may still come, or come back: the consumer keeps asking with them.
            return self._gated(NoRowsReason.HELD_BACK, task) if fetch.tell_held_back else None
        partition, rows = taken
        token = self._table.token()
        task.lease(token, partition, rows, fetch.owner)
        granted = self._granted(fetch.task, token, partition, rows)
        if fetch.replica:
            self._remember(fetch, granted)
        return granted

    def _round(self, fetch: FetchRound) -> LeaseGrant | NoRows | None:
        task = self._task(fetch)
        assigner = self._assigner(fetch)
        if assigner.over(fetch.partition) or (self.drained and fetch.partition not in self._table.rows.partitions):
            return self._nothing(NoRowsReason.PARTITION_DONE)
        formed = fetch.round_index < len(assigner.rounds(fetch.partition).formed)
        if not formed and assigner.exhausted(fetch.partition):
            return self._nothing(NoRowsReason.PARTITION_DONE)
        if not formed and self.stopped:
            return self._nothing(NoRowsReason.STOP)
        want = Want(fetch.num_rows * fetch.num_ranks, fetch.token_budget * fetch.num_ranks, fetch.num_ranks)
        known = assigner.round(fetch.partition, fetch.round_index, want, self._table.token)
        if known is None:
            return None
        rank_slice = known.rank_slices[fetch.rank]
        if rank_slice is None:
            return None
        lease = task.leases.by_token.get(rank_slice.token)
        rows = [row for row in rank_slice.rows if lease is not None and row in lease.rows]
        if not self._readable(rows):
            return None
        assigner.ranks[fetch.owner] = fetch.partition
        if lease is not None:
            task.leases.read(rank_slice.token, fetch.owner)
        granted = self._granted(fetch.task, rank_slice.token, known.partition, rows)
        granted.round_rows, granted.last, granted.total_rows = known.round_rows, known.last, known.total_rows
        return granted

    def _readable(self, rows: list[int]) -> bool:
        """Whether all rows of a slice can be read; lost ones must be put again."""
        all_rows = self._table.rows.rows
        away = [row for row in rows if all_rows[row].state is not RowState.STORED]
        lost = [row for row in away if all_rows[row].lost]
        # Also for a reader that holds the slice: it asks again because the unit died before it had read the rows.
        self._table.losses.look_again(lost, wanted=True)
        return not away

    def _granted(self, task: str, token: int, partition: int, rows: Sequence[int]) -> LeaseGrant:
        held = [self._table.rows.rows[row] for row in rows]
        groups = [row.group for row in held]
        units = [row.unit.name for row in held]
        tokens = [row.tokens for row in held]
        return LeaseGrant(task, token, partition, list(rows), groups, units, tokens)

    def _has_no_more(self, task: TaskState) -> bool:
        return self.drained and not task.num_left

    def _nothing(self, reason: NoRowsReason) -> NoRows:
        return NoRows(reason, self.newest_version, lineage=self._lineage)

    def _gated(self, reason: NoRowsReason, task: TaskState) -> NoRows:
        return NoRows(reason, task.spec.usable_version(self.newest_version), lineage=self._lineage)

    def _tell_steps(self) -> None:
        for assigner in self._table.assigners.values():
            assigner.published(self.newest_version)

    def _task(self, fetch: Fetch) -> TaskState:
        return self._table.tasks[fetch.task]

    def _assigner(self, fetch: Fetch) -> RoundAssigner:
        return self._table.assigners[fetch.task]

    def _grant_before(self, fetch: FetchRows) -> LeaseGrant | None:
        """Return the lease that another reader of the replica got for the same fetch, unless the lease ended."""
        known = self._replicas.get((fetch.task, fetch.replica), {}).get(fetch.sequence) if fetch.replica else None
        leases = self._task(fetch).leases
        if known is None or not leases.known(known.token):
            return None
        if known.token in leases.by_token:
            leases.read(known.token, fetch.owner)
        return known

    def _remember(self, fetch: FetchRows, granted: LeaseGrant) -> None:
        known = self._replicas.setdefault((fetch.task, fetch.replica), {})
        known[fetch.sequence] = granted
        while len(known) > _REPLICA_FETCHES_REMEMBERED:
            del known[min(known)]

    def _check_round(self, fetch: FetchRound) -> None:
        assigner = self._assigner(fetch)
        rounds = assigner.known_rounds(fetch.partition)
        if rounds is None or assigner.over(fetch.partition):
            formed = 0
        else:
            if rounds.num_ranks not in (0, fetch.num_ranks):
                raise PeerRefused(_other_gang(fetch))
            formed = len(rounds.formed)
        if not assigner.exhausted(fetch.partition) and not 0 <= fetch.round_index <= formed:
            raise PeerRefused(
                f"{fetch.task}: round {fetch.round_index} of partition {fetch.partition} was asked for, but the next "
                f"one is {formed}; a gang's ranks ask for every round"
            )


def _other_gang(fetch: FetchRound) -> str:
    return (
        f"{fetch.task}: rank {fetch.rank} of {fetch.num_ranks} asked for a round of partition "
        f"{fetch.partition}; all ranks must count the same gang"
    )
