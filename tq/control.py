"""The control plane's state over all tasks: events in, instructions out. Pure: no clock, no sockets, no threads.

Events are the messages of `tq.messages` (those that carry a question come with a request number) and the few below.
A fetch that cannot be answered is parked; the event that makes it answerable returns its `Answer`.

    handle(RowsCreated(...))            -> []
    handle(FetchRows(...), request=7)   -> [Answer(7, Granted(...))]  or [] (parked)
    handle(OutputsWritten(...))         -> [Answer(8, ...), Free("storage-0", (3, 4))]
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from asyncflow.errors import PeerRefused
from tq.messages import (
    FetchRound,
    FetchRows,
    Granted,
    NoRows,
    NoRowsReason,
    OpenPartition,
    OutputsWritten,
    PublishVersion,
    QueueStats,
    RowsCreated,
    Stop,
    TaskStats,
)
from tq.task_state import Lease, TaskSpec, TaskState


@dataclass(frozen=True)
class OwnerGone:
    """A consumer's channel ended."""

    owner: str


@dataclass(frozen=True)
class Fenced:
    """The units confirmed that the void lease's late puts will be refused; its rows may be handed out again."""

    task: str
    token: int


@dataclass(frozen=True)
class DeadlinePassed:
    """A parked request waited long enough."""

    request: int


@dataclass(frozen=True)
class Answer:
    """Reply to a request."""

    request: int
    reply: Granted | NoRows


@dataclass(frozen=True)
class Fence:
    """Tell the units that leases of `rows` older than `token` are void, then report `Fenced`."""

    task: str
    token: int
    rows: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Free:
    """All tasks are done with these rows of a unit."""

    unit: str
    rows: tuple[int, ...]


Instruction = Answer | Fence | Free
Fetch = FetchRows | FetchRound
Event = (
    RowsCreated | OutputsWritten | OpenPartition | Fetch | PublishVersion | Stop | OwnerGone | Fenced | DeadlinePassed
)


@dataclass
class _Row:
    unit: str
    partition: int
    group: int
    group_size: int
    written: set[str]
    tasks_left: set[str]
    ready_for: set[str] = field(default_factory=set)


class ControlState:
    """Rows, tasks, leases and parked requests."""

    def __init__(
        self, tasks: Sequence[TaskSpec], *, max_staleness: int = 0, version: int = 0, first_token: int = 1
    ) -> None:
        """Args:
        tasks: every task that must be done with a row before it is freed.
        max_staleness: bound of the gate; see `newest_partition`.
        version: newest weights at the start.
        first_token: lease tokens count up from here; a restarted controller starts above all earlier ones.
        """
        self.newest_version = version
        self._max_staleness = max_staleness
        self._tasks = {spec.name: TaskState(spec) for spec in tasks}
        self._rows: dict[int, _Row] = {}
        self._parked: dict[int, Fetch] = {}
        self._fencing: dict[int, Lease] = {}
        self._tokens = itertools.count(first_token)
        self._stopped = False

    def newest_partition(self, version: int) -> int:
        """Return the newest step that may start on weights of `version`: (s - 1) - version <= max_staleness."""
        return version + 1 + self._max_staleness

    def handle(self, event: Event, request: int = 0) -> list[Instruction]:
        """Apply one event.

        Args:
            event: what happened.
            request: number of a fetch, unique among parked ones; names it in its `Answer`.

        Raises:
            PeerRefused: the event names a task that does not exist or a row that does, or asks for what cannot be;
                nothing changed.
        """
        match event:
            case RowsCreated():
                return self._create(event)
            case OutputsWritten():
                return self._write(event)
            case OpenPartition():
                if self._stopped:
                    return []  # else ranks of one gang could disagree on whether the partition is over
                for task in self._tasks.values():
                    task.partition(event.partition).num_rows = event.num_rows
                return self._retry()
            case FetchRows() | FetchRound():
                self._check(event)
                self._parked[request] = event
                return self._retry_one(request)
            case PublishVersion():
                self.newest_version = max(self.newest_version, event.step)
                return self._retry()
            case Stop():
                self._stopped = True
                return self._retry()
            case OwnerGone():
                return self._give_back(event.owner)
            case Fenced():
                return self._fenced(event)
            case DeadlinePassed():
                if self._parked.pop(event.request, None) is None:
                    return []
                return [self._nothing(event.request, NoRowsReason.DEADLINE)]

    def stats(self, admitted_groups: int = 0) -> QueueStats:
        """Count rows per task."""
        tasks = []
        for name, task in self._tasks.items():
            ready, leased, done = task.counts()
            waiting = sum(1 for row in self._rows.values() if name not in row.ready_for)
            parked = sum(1 for fetch in self._parked.values() if fetch.task == name)
            tasks.append(TaskStats(name, waiting, ready, leased, done, parked))
        return QueueStats(tasks, len(self._rows), self.newest_version, admitted_groups)

    def _check(self, fetch: Fetch) -> None:
        task = self._task(fetch.task)
        if fetch.num_rows < 1:
            raise PeerRefused(f"{fetch.task}: asked for {fetch.num_rows} rows; ask for at least 1")
        if not isinstance(fetch, FetchRound):
            return
        if not 0 <= fetch.rank < fetch.num_ranks or not task.join_rounds(fetch.partition, fetch.num_ranks):
            raise PeerRefused(
                f"{fetch.task}: rank {fetch.rank} of {fetch.num_ranks} asked for a round of partition "
                f"{fetch.partition}; all ranks must count the same gang"
            )
        formed = task.num_rounds(fetch.partition)
        if not task.exhausted(fetch.partition) and not 0 <= fetch.round_index <= formed:
            raise PeerRefused(
                f"{fetch.task}: round {fetch.round_index} of partition {fetch.partition} was asked for, but the next "
                f"one is {formed}; a gang's ranks ask for every round"
            )

    def _create(self, event: RowsCreated) -> list[Instruction]:
        if len(event.rows) != len(event.groups) or len(set(event.rows)) != len(event.rows):
            raise PeerRefused(f"{len(event.rows)} rows with {len(event.groups)} groups, each row must be named once")
        for row in event.rows:
            if row in self._rows:
                raise PeerRefused(f"row {row} exists already; row indices are never reused in a run")
        sizes = Counter(event.groups)
        for row, group in zip(event.rows, event.groups, strict=True):
            written = set(event.columns)
            self._rows[row] = _Row(event.unit, event.partition, group, sizes[group], written, set(self._tasks))
            self._mark_ready(row)
        return self._retry()

    def _write(self, event: OutputsWritten) -> list[Instruction]:
        task = self._task(event.task)
        freed: dict[str, list[int]] = {}
        touched = set()
        for number in event.rows:
            row = self._rows.get(number)
            if row is None or event.task not in row.tasks_left:
                continue  # a unit repeats a notification whose confirmation was lost
            row.written.update(event.columns)
            row.tasks_left.remove(event.task)
            task.done(row.partition, number)
            touched.add(row.partition)
            if not row.tasks_left:
                freed.setdefault(row.unit, []).append(number)
                del self._rows[number]
            else:
                self._mark_ready(number)
        for partition in touched:
            task.drop_finished(partition)
        return [*self._retry(), *(Free(unit, tuple(rows)) for unit, rows in freed.items())]

    def _mark_ready(self, number: int) -> None:
        row = self._rows[number]
        for name, task in self._tasks.items():
            if name not in row.ready_for and task.spec.inputs <= row.written:
                row.ready_for.add(name)
                task.row_ready(number, partition=row.partition, group=row.group, group_size=row.group_size)

    def _give_back(self, owner: str) -> list[Instruction]:
        for request in [number for number, fetch in self._parked.items() if fetch.owner == owner]:
            del self._parked[request]
        instructions: list[Instruction] = []
        for name, task in self._tasks.items():
            if task.spec.keeps_leases:
                continue
            for lease in [lease for lease in task.leases.values() if lease.owner == owner]:
                task.end_lease(lease)
                token = next(self._tokens)
                self._fencing[token] = lease
                instructions.append(Fence(name, token, self._by_unit(lease.rows)))
        return instructions

    def _fenced(self, event: Fenced) -> list[Instruction]:
        task = self._task(event.task)
        lease = self._fencing.pop(event.token)
        groups: dict[int, list[int]] = {}
        for number in sorted(lease.rows):
            row = self._rows.get(number)
            if row is not None and event.task in row.tasks_left:  # else its last put came before the fence
                groups.setdefault(row.group, []).append(number)
        task.give_back(lease.partition, [tuple(rows) for rows in groups.values()])
        return self._retry()

    def _retry(self) -> list[Instruction]:
        return [instruction for request in list(self._parked) for instruction in self._retry_one(request)]

    def _retry_one(self, request: int) -> list[Instruction]:
        fetch = self._parked[request]
        answer = self._answer_round(request, fetch) if isinstance(fetch, FetchRound) else self._answer(request, fetch)
        if answer is None:
            return []
        del self._parked[request]
        return [answer]

    def _answer(self, request: int, fetch: FetchRows) -> Answer | None:
        if self._stopped:
            return self._nothing(request, NoRowsReason.STOP)
        task = self._task(fetch.task)
        newest = self.newest_partition(fetch.version) if task.spec.gated else None
        taken = task.take(fetch.num_rows, newest_allowed=newest)
        if taken is not None:
            return self._grant(request, fetch, *taken)
        if task.spec.gated and self.newest_version > fetch.version:
            return self._nothing(request, NoRowsReason.NEWER_VERSION)
        return None

    def _answer_round(self, request: int, fetch: FetchRound) -> Answer | None:
        task = self._task(fetch.task)
        formed = fetch.round_index < task.num_rounds(fetch.partition)
        if not formed and task.exhausted(fetch.partition):
            return self._nothing(request, NoRowsReason.PARTITION_DONE)
        if not formed and self._stopped:
            return self._nothing(request, NoRowsReason.STOP)
        share = task.share(
            fetch.partition, fetch.round_index, fetch.rank, num_rows=fetch.num_rows, num_ranks=fetch.num_ranks
        )
        if share is None:
            return None
        return self._grant(request, fetch, fetch.partition, share.rows, share.round_rows, share.last)

    def _grant(
        self,
        request: int,
        fetch: Fetch,
        partition: int,
        rows: tuple[int, ...],
        round_rows: int = 0,
        last: bool = False,
    ) -> Answer:
        token = next(self._tokens)
        task = self._task(fetch.task)
        rows = tuple(row for row in rows if row in self._rows and fetch.task in self._rows[row].tasks_left)
        if rows:
            task.lease(Lease(token, fetch.owner, partition, set(rows)))
        held = [self._rows[row] for row in rows]
        groups = [row.group for row in held]
        units = [row.unit for row in held]
        return Answer(request, Granted(token, partition, list(rows), groups, units, round_rows, last))

    def _nothing(self, request: int, reason: NoRowsReason) -> Answer:
        return Answer(request, NoRows(reason, self.newest_version))

    def _by_unit(self, rows: Iterable[int]) -> dict[str, tuple[int, ...]]:
        units: dict[str, list[int]] = {}
        for row in sorted(rows):
            units.setdefault(self._rows[row].unit, []).append(row)
        return {unit: tuple(numbers) for unit, numbers in units.items()}

    def _task(self, name: str) -> TaskState:
        task = self._tasks.get(name)
        if task is None:
            raise PeerRefused(f"no task is named {name!r}; known: {' '.join(self._tasks)}")
        return task
