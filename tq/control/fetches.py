"""Answers fetches of the served tasks, now or when an event makes it possible. Pure.

fetch -> answered | parked --rows ready, newer weights, partition over, stop, deadline--> answered
"""

from collections.abc import Sequence

from asyncflow.errors import PeerRefused
from tq.control.events import Answer
from tq.control.parked import Fetch, ParkedFetches
from tq.control.row_book import RowBook
from tq.control.task_state import TaskState
from tq.control.wait_reasons import WaitReasons
from tq.messages import FetchRound, FetchRows, Granted, NoRows, NoRowsReason
from tq.policies import Want

_REPLICA_FETCHES_REMEMBERED = 16


class Fetches:
    """Parked requests, and the gate that they wait at."""

    def __init__(self, book: RowBook, reasons: WaitReasons, *, version: int, lineage: int, published: bool) -> None:
        """Args:
        book: rows and tasks.
        reasons: words for those who wait too long.
        version: newest weights.
        lineage: of these; consumers with weights of an earlier one get none of a version-gated task's rows.
        published: there are weights of this lineage; else those consumers wait for them.
        """
        self.parked = ParkedFetches()
        self.newest_version = version
        self._lineage = lineage
        self._published = published or lineage == 0
        self.closed = False
        """Everybody is parked: the controller is recovering."""
        self.stopped = False
        self.drained = False
        """The queue was closed for writing, and all rows that will ever be are known."""
        self._book = book
        self._reasons = reasons
        self._replicas: dict[tuple[str, str], dict[int, Granted]] = {}
        self._tell_steps()

    def newest_partition(self, fetch: FetchRows) -> int | None:
        """Return the newest step that a consumer's weights allow, by (s - 1) - v <= max_staleness; None: any."""
        bound = self._task(fetch).spec.max_staleness
        return None if bound is None else fetch.version + 1 + bound

    def check(self, fetch: Fetch) -> None:
        """Refuse what cannot be.

        Raises:
            PeerRefused: unknown task, or nonsense; nothing changed.
        """
        self._book.bit(fetch.task)
        if fetch.task not in self._book.tasks:
            raise PeerRefused(f"{fetch.task} is served by another controller; here: {' '.join(self._book.tasks)}")
        if fetch.num_rows < 1 or fetch.token_budget < 0:
            raise PeerRefused(f"{fetch.task}: asked for {fetch.num_rows} rows; ask for at least 1")
        if isinstance(fetch, FetchRound):
            if fetch.token_budget and self._task(fetch).steps is not None:
                raise PeerRefused(f"{fetch.task}: steps of several partitions have rounds of rows, not of tokens")
            if not 0 <= fetch.rank < fetch.num_ranks:
                raise PeerRefused(_other_gang(fetch))
            if not self.closed:
                self._check_round(fetch)

    def add(self, request: int, fetch: Fetch) -> None:
        """Answer a fetch that `check` found nothing wrong with, or park it."""
        if isinstance(fetch, FetchRound) and not self.closed and not self._task(fetch).dealer.over(fetch.partition):
            self._task(fetch).dealer.rounds(fetch.partition).num_ranks = fetch.num_ranks
        self.parked.add(request, fetch)
        if not self.closed:
            self._try(request, fetch)

    def open(self) -> None:
        """The controller has recovered: everybody is served."""
        self.closed = False
        for request in self.parked.all():
            fetch = self.parked.pop(request)
            if fetch is None:
                continue  # answered with a twin
            try:
                self.check(fetch)
            except PeerRefused as error:
                self._book.out.append(Answer(request, error))
            else:
                self.add(request, fetch)

    def stop(self) -> None:
        """Nothing more is handed out, except rounds that some rank has."""
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
        """Newer weights exist: consumers that are held back by their old ones hear of it."""
        self.newest_version = max(self.newest_version, version)
        self._published = True
        self._tell_steps()
        for name, task in self._book.tasks.items():
            if task.spec.max_staleness is None or self.closed:
                continue
            for request, fetch in self.parked.rows(name):
                self._try(request, fetch)

    def leave(self, owner: str) -> None:
        """A consumer is gone: its requests are dropped."""
        for request in self.parked.of(owner):
            self.parked.pop(request)

    def expire(self, request: int) -> None:
        """A request waited long enough."""
        fetch = self.parked.pop(request)
        if fetch is None:
            return
        gate = self.newest_partition(fetch) if isinstance(fetch, FetchRows) else None
        reason = self._reasons.of(self._book.tasks[fetch.task], fetch, gate=gate)
        answer = NoRows(NoRowsReason.DEADLINE, self.newest_version, reason.text, reason.producers_alive)
        self._book.out.append(Answer(request, answer))

    def wake(self) -> None:
        """Look again at those whom the last event may have helped."""
        if self.closed:
            return
        for name, task in self._book.tasks.items():
            if not task.changed:
                continue
            changed, task.changed = task.changed, set()
            for partition in changed if task.steps is None else self.parked.partitions(name):
                for request, round_ in self.parked.rounds(name, partition):
                    self._try(request, round_)
            self._wake_rows(name, task)

    def _wake_rows(self, name: str, task: TaskState) -> None:
        if self._has_no_more(task):
            for request, _ in self.parked.rows(name):
                self.parked.pop(request)
                self._book.out.append(Answer(request, self._nothing(NoRowsReason.CLOSED)))
        if not task.has_ready:
            return
        refused = None
        for request, fetch in self.parked.rows(name):
            if (refused is not None and fetch.version <= refused) or task.trials.holds(fetch.owner):
                continue
            if not self._try(request, fetch) and self.parked.waits(request):
                if task.spec.max_staleness is None:
                    return
                refused = fetch.version if refused is None else max(refused, fetch.version)

    def _try(self, request: int, fetch: Fetch) -> bool:
        """Answer a parked fetch if that is possible."""
        if not self.parked.waits(request):
            return False
        try:
            reply = self._round(fetch) if isinstance(fetch, FetchRound) else self._rows(fetch)
        except PeerRefused as error:  # the task's policy is broken; whoever caused this event is not to blame
            self.parked.pop(request)
            self._book.out.append(Answer(request, error))
            return True
        if reply is None:
            return False
        self.parked.pop(request)
        self._book.out.append(Answer(request, reply))
        if isinstance(fetch, FetchRows) and isinstance(reply, Granted):
            for twin in self.parked.twins(fetch):
                other = self.parked.pop(twin)
                assert other is not None
                self._task(fetch).leases.read(reply.token, other.owner)
                self._book.out.append(Answer(twin, reply))
        return True

    def _rows(self, fetch: FetchRows) -> Granted | NoRows | None:
        again = self._granted_before(fetch)
        if again is not None:
            return again
        if self.stopped:
            return self._nothing(NoRowsReason.STOP)
        task = self._task(fetch)
        if self._has_no_more(task):
            return self._nothing(NoRowsReason.CLOSED)
        if task.trials.holds(fetch.owner):
            return None
        newest = self.newest_partition(fetch)
        if newest is not None and fetch.lineage < self._lineage:
            return self._nothing(NoRowsReason.NEWER_VERSION) if self._published else None
        taken = task.take(Want(fetch.num_rows, fetch.token_budget), newest_allowed=newest)
        if taken is None:
            outdated = newest is not None and task.has_ready and self.newest_version > fetch.version
            return self._nothing(NoRowsReason.NEWER_VERSION) if outdated else None
        partition, rows = taken
        token = self._book.token()
        task.lease(token, partition, rows, fetch.owner)
        granted = self._granted(fetch.task, token, partition, rows)
        if fetch.replica:
            self._remember(fetch, granted)
        return granted

    def _round(self, fetch: FetchRound) -> Granted | NoRows | None:
        task = self._task(fetch)
        dealer = task.dealer
        if dealer.over(fetch.partition) or (self.drained and fetch.partition not in self._book.rows.partitions):
            return self._nothing(NoRowsReason.PARTITION_DONE)
        formed = fetch.round_index < len(dealer.rounds(fetch.partition).formed)
        if not formed and dealer.exhausted(fetch.partition):
            return self._nothing(NoRowsReason.PARTITION_DONE)
        if not formed and self.stopped:
            return self._nothing(NoRowsReason.STOP)
        want = Want(fetch.num_rows * fetch.num_ranks, fetch.token_budget * fetch.num_ranks, fetch.num_ranks)
        known = dealer.round(fetch.partition, fetch.round_index, want, self._book.token)
        if known is None:
            return None
        if known.shares[fetch.rank] is None:
            dealer.deal_again(fetch.partition, fetch.round_index, fetch.num_rows, self._book.token)
        share = known.shares[fetch.rank]
        if share is None:
            return None
        lease = task.leases.by_token.get(share.token)
        rows = [row for row in share.rows if lease is not None and row in lease.rows]
        if not self._at_hand(rows):
            return None
        task.ranks[fetch.owner] = fetch.partition
        if lease is not None:
            task.leases.read(share.token, fetch.owner)
        granted = self._granted(fetch.task, share.token, known.partition, rows)
        granted.round_rows, granted.last, granted.total_rows = known.round_rows, known.last, known.total_rows
        return granted

    def _at_hand(self, rows: list[int]) -> bool:
        """Whether all rows of a share can be read; lost ones must be put again.

        Also for a reader that holds the share: if it asks once more, the unit died before it had read them.
        """
        table = self._book.rows.rows
        away = [row for row in rows if not table[row].available]
        lost = [row for row in away if table[row].unit.lost]
        self._book.lost_now += lost
        self._book.wanted.update(lost)
        return not away

    def _granted(self, task: str, token: int, partition: int, rows: Sequence[int]) -> Granted:
        held = [self._book.rows.rows[row] for row in rows]
        groups = [row.group for row in held]
        units = [row.unit.name for row in held]
        tokens = [row.tokens for row in held]
        return Granted(task, token, partition, list(rows), groups, units, tokens)

    def _has_no_more(self, task: TaskState) -> bool:
        return self.drained and not task.num_left

    def _nothing(self, reason: NoRowsReason) -> NoRows:
        return NoRows(reason, self.newest_version, lineage=self._lineage)

    def _tell_steps(self) -> None:
        for task in self._book.tasks.values():
            if task.steps is not None:
                task.steps.published(self.newest_version)

    def _task(self, fetch: Fetch) -> TaskState:
        return self._book.tasks[fetch.task]

    def _granted_before(self, fetch: FetchRows) -> Granted | None:
        """Return the lease that another reader of the replica got for the same fetch, unless it ended."""
        known = self._replicas.get((fetch.task, fetch.replica), {}).get(fetch.sequence) if fetch.replica else None
        leases = self._task(fetch).leases
        if known is None or not leases.known(known.token):
            return None
        if known.token in leases.by_token:
            leases.read(known.token, fetch.owner)
        return known

    def _remember(self, fetch: FetchRows, granted: Granted) -> None:
        known = self._replicas.setdefault((fetch.task, fetch.replica), {})
        known[fetch.sequence] = granted
        while len(known) > _REPLICA_FETCHES_REMEMBERED:
            del known[min(known)]

    def _check_round(self, fetch: FetchRound) -> None:
        dealer = self._task(fetch).dealer
        rounds = dealer.known_rounds(fetch.partition)
        if rounds is None or dealer.over(fetch.partition):
            formed = 0
        else:
            if rounds.num_ranks not in (0, fetch.num_ranks):
                raise PeerRefused(_other_gang(fetch))
            formed = len(rounds.formed)
        if not dealer.exhausted(fetch.partition) and not 0 <= fetch.round_index <= formed:
            raise PeerRefused(
                f"{fetch.task}: round {fetch.round_index} of partition {fetch.partition} was asked for, but the next "
                f"one is {formed}; a gang's ranks ask for every round"
            )


def _other_gang(fetch: FetchRound) -> str:
    return (
        f"{fetch.task}: rank {fetch.rank} of {fetch.num_ranks} asked for a round of partition "
        f"{fetch.partition}; all ranks must count the same gang"
    )
