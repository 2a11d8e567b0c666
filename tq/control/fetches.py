"""Answers fetches of the served tasks, now or when an event makes it possible; what a fetch waits for. Pure.

fetch -> answered | parked --rows ready, newer weights, partition over, stop, deadline--> answered
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from asyncflow.errors import PeerRefused
from tq.control.events import Answer
from tq.control.row_table import RankSlice, Round, Rounds, Row, RowState, RowTable, TaskState
from tq.messages import NEW_ROWS, FetchRound, FetchRows, Held, LeaseGrant, NoRows, NoRowsReason
from tq.policies import Fifo, Offer, Want, choose

Fetch = FetchRows | FetchRound
K = TypeVar("K")
V = TypeVar("V")


class ParkedFetches:
    """Parked fetches by request number, in order of arrival."""

    def __init__(self) -> None:
        self._all: dict[int, Fetch] = {}
        self._rows: dict[str, dict[int, FetchRows]] = {}
        self._rounds: dict[tuple[str, int], dict[int, FetchRound]] = {}

    def park_fetch(self, request: int, fetch: Fetch) -> None:
        self._all[request] = fetch
        if isinstance(fetch, FetchRound):
            self._rounds.setdefault((fetch.task, fetch.partition), {})[request] = fetch
        else:
            self._rows.setdefault(fetch.task, {})[request] = fetch

    def pop(self, request: int) -> Fetch | None:
        """Take out a fetch; None: it was not parked."""
        fetch = self._all.pop(request, None)
        if fetch is None:
            return None
        if isinstance(fetch, FetchRound):
            _drop(self._rounds, (fetch.task, fetch.partition), request)
        else:
            _drop(self._rows, fetch.task, request)
        return fetch

    def is_parked(self, request: int) -> bool:
        return request in self._all

    def requests_of(self, owner: str) -> list[int]:
        return [request for request, fetch in self._all.items() if fetch.owner == owner]

    def rows(self, task: str) -> list[tuple[int, FetchRows]]:
        return list(self._rows.get(task, {}).items())

    def round_fetches(self, task: str, partition: int) -> list[tuple[int, FetchRound]]:
        return list(self._rounds.get((task, partition), {}).items())

    def partitions(self, task: str) -> list[int]:
        """Return the partitions with parked round fetches."""
        return [partition for name, partition in self._rounds if name == task]

    def twin_requests(self, fetch: FetchRows) -> list[int]:
        """Return the requests of other readers for the lease that `fetch` asks for."""
        if not fetch.replica:
            return []
        key = (fetch.replica, fetch.sequence)
        return [number for number, other in self.rows(fetch.task) if (other.replica, other.sequence) == key]

    def all(self) -> list[int]:
        return list(self._all)

    def count(self, task: str) -> int:
        return sum(fetch.task == task for fetch in self._all.values())


def _drop(index: "dict[K, dict[int, V]]", key: K, request: int) -> None:
    requests = index[key]
    del requests[request]
    if not requests:
        del index[key]


# Which rows the ranks of a gang get, round by round.


class RoundAssigner:
    """Assigns the rounds of one task to the ranks of a gang.

    A step is a partition, unless the task's steps take rows of several partitions (`TaskSpec.steps`). A round has rows
    of one partition. It is chosen once; all ranks get the same round, however often they ask. After a restart of the
    controller the ranks say what they hold: the step and round, and how large that round was. Slices that no rank holds
    are assigned again before anything new is.
    """

    def __init__(self, task: TaskState, new_token: Callable[[], int]) -> None:
        self.ranks: dict[str, int] = {}  # consumer -> the newest step of which it got a slice
        self._task = task
        self._new_token = new_token  # of a lease
        self._spec = task.spec.steps
        self._version = 0
        self._steps: dict[int, Rounds] = {}
        self._restored = False  # whether slices of an earlier incarnation may be missing

    def note_version(self, version: int) -> None:
        """Weights of step `version` exist, so that step is over."""
        self._version = max(self._version, version)
        for step in [step for step in self._steps if step <= self._version]:
            del self._steps[step]
        if self._spec is not None:
            self._task.changed.add(version)  # wake ranks that wait for its rounds: it is over

    def is_step_over(self, step: int) -> bool:
        """Whether the step was trained, or all rows of the partition are done."""
        return self._task.is_partition_over(step) if self._spec is None else step <= self._version

    def is_step_exhausted(self, step: int) -> bool:
        """Whether all rows of the step were handed out."""
        if self._spec is None:
            return self._task.is_partition_exhausted(step)
        return self.is_step_over(step) or (step in self._steps and self._steps[step].num_rows >= self._spec.num_rows)

    def get_rounds(self, step: int) -> Rounds:
        return self._task.partition(step).rounds if self._spec is None else self._steps.setdefault(step, Rounds())

    def known_rounds(self, step: int) -> Rounds | None:
        """Return the step's rounds, or None if nothing is known of the step."""
        if self._spec is not None:
            return self._steps.get(step)
        part = self._task.partitions.get(step)
        return None if part is None else part.rounds

    def restore_slice(self, one: Held, owner: str) -> None:
        """A rank says that it holds a slice that an earlier incarnation assigned."""
        self.ranks[owner] = max(one.step, self.ranks.get(owner, one.step))
        step = one.partition if self._spec is None else one.step
        if not self.is_step_over(step):
            self.get_rounds(step).restore_slice(one)
            self._restored = True

    def keeps_leases(self, owner: str) -> bool:
        """Whether a consumer's leases, or its slices of an unfinished step, outlive its channel."""
        if not self._task.spec.keeps_leases:
            return False
        step = self.ranks.get(owner)
        held = next(self._task.leases.rows_of(owner), None)
        return held is not None or (step is not None and not self.is_step_over(step))

    def get_round(self, step: int, index: int, want: Want) -> Round | None:
        """Return round `index`, at most one beyond the formed ones; None: it can neither be full nor hold the rest yet.

        `want` is that of all ranks together.
        """
        rounds = self.get_rounds(step)
        assert index <= len(rounds.formed), "the caller checks that no round is skipped"
        whole = not self._restored or self._assign_missing()
        if index < len(rounds.formed):
            return rounds.formed[index]
        if not whole:
            return None
        if self._spec is None:
            return self._round_of_partition(step, rounds, want)
        chosen = choose(self._spec, step, rounds.num_rows, self._list_offers(), want.num_rows)
        if chosen is None:
            return None
        formed = self._form_round(rounds, chosen.partition, Want(chosen.num_ready, 0, want.num_ranks))
        formed.last = rounds.num_rows >= self._spec.num_rows
        return formed

    def _round_of_partition(self, number: int, rounds: Rounds, want: Want) -> Round | None:
        task, part = self._task, self._task.partition(number)
        rest = task.rest_ready(number)
        full = part.num_ready >= want.num_rows or 0 < want.token_budget <= part.ready_tokens
        if not part.num_ready or not (rest or (full and not task.spec.barrier)):
            return None
        if task.spec.in_order and not task.front_ready(number, want.num_rows):
            return None
        formed = self._form_round(rounds, number, want)
        formed.last = rest and not part.num_ready
        return formed

    def _form_round(self, rounds: Rounds, partition: int, want: Want) -> Round:
        """Add a round of what a partition has ready."""
        items = self._task.partition(partition).pick(self._task.picking, want)
        rank_slices = self._task.spec.policy.assign(items, rounds.rank_loads(want.num_ranks))
        formed = rounds.form_round(rank_slices, self._new_token, partition=partition)
        for rank_slice in formed.rank_slices:
            self._hold_slice(rank_slice, partition)
        return formed

    def _hold_slice(self, rank_slice: RankSlice | None, partition: int) -> None:
        if rank_slice is not None and rank_slice.rows:
            self._task.lease_rows(rank_slice.token, partition, rank_slice.rows)

    def _list_offers(self) -> list[Offer]:
        """Return what partitions have to give, oldest first."""
        assert self._spec is not None
        offers = []
        trained = self._version - self._spec.lateness
        for number, part in sorted(self._task.partitions.items()):
            ready = part.num_ready
            # Of old partitions only ready rows count: a restarted controller may have forgotten that the others were
            # trained.
            left = ready if number <= trained else self._task.num_unassigned(number)
            if left:
                offers.append(Offer(number, ready, left))
        return offers

    def _assign_missing(self) -> bool:
        """Complete the rounds of an earlier incarnation, the oldest first; returns whether all are complete."""
        steps = self._steps if self._spec is not None else {k: part.rounds for k, part in self._task.partitions.items()}
        waiting: set[int] = set()  # partitions whose rows an older round waits for
        for _, rounds in sorted(steps.items()):
            for known in rounds.formed:
                if known.missing and (known.partition in waiting or not self._assign_round(known)):
                    waiting.add(known.partition)
        self._restored = bool(waiting)
        return not waiting

    def _assign_round(self, known: Round) -> bool:
        """Assign the missing slices of a round once its rows are ready again; returns whether none is missing."""
        part, missing = self._task.partition(known.partition), known.missing
        left = known.total_rows - sum(rank_slice.num_rows for rank_slice in known.rank_slices if rank_slice is not None)
        if part.num_ready < left:
            if not self._task.rest_ready(known.partition):
                return False
            left = part.num_ready  # the other rows left the partition with their group
        for position, rank in enumerate(missing):
            size = -(-left // (len(missing) - position))
            rank_slice = RankSlice.from_items(self._new_token(), part.pick(Fifo(), Want(size)) if size > 0 else [])
            left -= rank_slice.num_rows
            known.rank_slices[rank] = rank_slice
            known.largest_slice = max(known.largest_slice, rank_slice.num_rows)
            self._hold_slice(rank_slice, known.partition)
        self._task.changed.add(known.partition)  # a rank that is a round ahead waits for this
        return True


# What a fetch waits for, as text for people, and whether anybody is connected who could bring it.

_LOOKED_AT = 4096


@dataclass(frozen=True)
class Reason:
    text: str
    producers_alive: bool = True


class WaitReasons:
    """Finds what is missing, and knows who writes what."""

    def __init__(self, table: RowTable) -> None:
        self.recovering = ""  # what a restarted controller waits for; "": it serves
        self._table = table
        self._writers: dict[str, frozenset[str]] = {}

    def note_writer(self, owner: str, columns: tuple[str, ...]) -> None:
        """A connected consumer puts these columns."""
        self._writers[owner] = frozenset(columns)

    def drop_owner(self, owner: str) -> None:
        self._writers.pop(owner, None)

    def reason_for(self, task: TaskState, fetch: FetchRows | FetchRound, *, gate: int | None) -> Reason:
        """Return why a fetch got nothing; `gate`: newest partition that the consumer's weights allow."""
        if self.recovering:
            return Reason(f"the controller was restarted and waits for {self.recovering}")
        if isinstance(fetch, FetchRows) and task.isolation.holds(fetch.owner):
            return Reason("this consumer holds rows that failed too often to be handed out with others")
        number = (
            fetch.partition
            if isinstance(fetch, FetchRound) and task.spec.steps is None
            else self._oldest_partition(task)
        )
        if number is None:
            leased = len(task.leases.holders)
            others = f"{leased} are leased" if leased else "none was put"
            return Reason(f"no row waits for this task; {others}", self._have_writers({NEW_ROWS}))
        if isinstance(fetch, FetchRows) and gate is not None and number > gate:
            return Reason(f"partition {number} waits for newer weights than version {fetch.version}")
        return self._in_partition(task, number)

    def find_blocking_task(self) -> str:
        """Return which task keeps the oldest partition alive: what a put without room waits for."""
        table = self._table
        for number in sorted(table.partitions):
            first = next(table.numbers(number), None)
            if first is None:
                continue
            for name in table.task_names(table.rows[first].open_tasks):
                task = table.tasks.get(name)
                if task is None:
                    return f"partition {number} waits for task {name}"
                part = task.partition(number)
                state = f"{part.num_held} rows leased" if part.num_held else f"{part.num_ready} rows ready"
                return f"partition {number} waits for task {name}: {state}"
        return "nothing is alive"

    def _oldest_partition(self, task: TaskState) -> int | None:
        for number in sorted(self._table.partitions):
            if not task.is_partition_over(number) and self._count_outstanding(task, number)[1] > 0:
                return number
        return None

    def _count_outstanding(self, task: TaskState, number: int) -> tuple[int, int]:
        """Return (rows that the partition has or will have, those of them that are in no lease)."""
        info = self._table.partitions[number]
        part = task.partition(number)
        size = info.num_rows if info.num_rows is not None else info.num_live + info.num_finished
        return size, size - part.num_done - part.num_held

    def _in_partition(self, task: TaskState, number: int) -> Reason:
        info = self._table.partitions.get(number)
        if info is None:
            return Reason(f"partition {number} was not opened, and has no rows", self._have_writers({NEW_ROWS}))
        size, waiting = self._count_outstanding(task, number)
        absent = size - info.num_live - info.num_finished
        rows = [self._table.rows[row] for row in self._waiting(task, number)]
        causes = []
        missing = 0
        for row in rows:
            missing |= task.inputs & ~row.written
        sources = set(self._table.column_names(missing))
        if missing:
            count = sum(1 for row in rows if task.inputs & ~row.written)
            what = "column" if len(sources) == 1 else "columns"
            causes.append(f"{count} of {size} rows wait for {what} {' '.join(sorted(sources))}")
        if absent > 0:
            causes.append(f"{absent} of {size} rows were not put yet")
            sources.add(NEW_ROWS)
        causes += self._explain_away(rows)
        if not causes and waiting > 0:
            causes.append(f"{waiting} of {size} rows are ready, which is not enough, or return from a lease that ended")
        if info.num_rows is None:
            causes.append("the partition was not opened, so its end is not known")
        return Reason(
            f"partition {number}: " + ("; ".join(causes) or "all rows are leased"), self._have_writers(sources)
        )

    def _waiting(self, task: TaskState, number: int) -> list[int]:
        numbers = []
        for looked, row in enumerate(self._table.numbers(number)):
            # Bounded: this runs for every fetch whose deadline passes.
            if looked >= _LOOKED_AT:
                break
            if self._table.rows[row].open_tasks & task.bit and row not in task.leases.holders:
                numbers.append(row)
        return numbers

    def _explain_away(self, rows: list[Row]) -> list[str]:
        lost = sum(1 for row in rows if row.lost)
        away = sorted({row.unit.name for row in rows if row.state is RowState.AWAY})
        causes = [f"{lost} rows were lost with their unit and not put again"] if lost else []
        return causes + ([f"{' '.join(away)} is away with rows"] if away else [])

    def _have_writers(self, sources: set[str]) -> bool:
        return all(any(source in writes for writes in self._writers.values()) for source in sources)


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
        self.assigners = {name: RoundAssigner(task, table.new_token) for name, task in table.tasks.items()}
        self._replicas: dict[tuple[str, str], dict[int, LeaseGrant]] = {}
        self._tell_steps()

    def newest_partition(self, fetch: FetchRows) -> int | None:
        return self._get_task(fetch).spec.newest_step(fetch.version)

    def check(self, fetch: Fetch) -> None:
        """Raise PeerRefused for an unknown task or invalid numbers."""
        self._table.task_bit(fetch.task)
        if fetch.task not in self._table.tasks:
            raise PeerRefused(f"{fetch.task} is served by another controller; here: {' '.join(self._table.tasks)}")
        if fetch.num_rows < 1 or fetch.token_budget < 0:
            raise PeerRefused(f"{fetch.task}: asked for {fetch.num_rows} rows; ask for at least 1")
        interval = self._get_task(fetch).spec.version_interval
        if isinstance(fetch, FetchRows) and fetch.version % interval:
            raise PeerRefused(
                f"{fetch.task}: asked for with weights of step {fetch.version}; only those of every {interval} steps "
                f"are of use (0, {interval}, {2 * interval}, ...)"
            )
        if isinstance(fetch, FetchRound):
            if fetch.token_budget and self._get_task(fetch).spec.steps is not None:
                raise PeerRefused(f"{fetch.task}: steps of several partitions have rounds of rows, not of tokens")
            if not 0 <= fetch.rank < fetch.num_ranks:
                raise PeerRefused(_other_gang(fetch))
            if not self.closed:
                self._check_round(fetch)

    def add_fetch(self, request: int, fetch: Fetch) -> None:
        """Answer a fetch that passed `check`, or park it."""
        if (
            isinstance(fetch, FetchRound)
            and not self.closed
            and not self._get_assigner(fetch).is_step_over(fetch.partition)
        ):
            self._get_assigner(fetch).get_rounds(fetch.partition).num_ranks = fetch.num_ranks
        self.parked.park_fetch(request, fetch)
        if not self.closed:
            self._try_fetch(request, fetch)

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
                self.add_fetch(request, fetch)

    def stop(self) -> None:
        """Hand out nothing more, except rounds that some rank has."""
        self.stopped = True
        if not self.closed:
            self._retry_all()

    def drain_tasks(self) -> None:
        """No more rows will come: tasks that are done with all of them have no more work."""
        self.drained = True
        self._retry_all()

    def publish(self, version: int) -> None:
        """Newer weights exist: answer consumers that are held back by their old ones."""
        self.newest_version = max(self.newest_version, version)
        self._published = True
        self._tell_steps()
        for name, task in self._table.tasks.items():
            if task.spec.max_staleness is None or self.closed:
                continue
            for request, fetch in self.parked.rows(name):
                self._try_fetch(request, fetch)

    def drop_owner(self, owner: str) -> None:
        for request in self.parked.requests_of(owner):
            self.parked.pop(request)

    def expire_request(self, request: int) -> None:
        fetch = self.parked.pop(request)
        if fetch is None:
            return
        gate = self.newest_partition(fetch) if isinstance(fetch, FetchRows) else None
        reason = self._reasons.reason_for(self._table.tasks[fetch.task], fetch, gate=gate)
        answer = NoRows(NoRowsReason.DEADLINE, self.newest_version, reason.text, reason.producers_alive)
        self._table.out.append(Answer(request, answer))

    def retry_parked(self) -> None:
        """Retry parked fetches that the last event may have made answerable."""
        if self.closed:
            return
        for name, task in self._table.tasks.items():
            if not task.changed:
                continue
            changed, task.changed = task.changed, set()
            for partition in changed if task.spec.steps is None else self.parked.partitions(name):
                for request, round_ in self.parked.round_fetches(name, partition):
                    self._try_fetch(request, round_)
            self._wake_rows(name, task)

    def _retry_all(self) -> None:
        for request in self.parked.all():
            fetch = self.parked.pop(request)
            if fetch is not None:  # otherwise answered together with a twin
                self.add_fetch(request, fetch)

    def _wake_rows(self, name: str, task: TaskState) -> None:
        if self._has_no_more(task):
            for request, _ in self.parked.rows(name):
                self.parked.pop(request)
                self._table.out.append(Answer(request, self._make_no_rows(NoRowsReason.CLOSED)))
        if not task.ready_partitions:
            return
        refused = None
        for request, fetch in self.parked.rows(name):
            if (refused is not None and fetch.version <= refused) or task.isolation.holds(fetch.owner):
                continue
            if not self._try_fetch(request, fetch) and self.parked.is_parked(request):
                # Without a gate, no later fetch gets anything, either; with one, only those with newer weights may.
                if task.spec.max_staleness is None:
                    return
                refused = fetch.version if refused is None else max(refused, fetch.version)

    def _try_fetch(self, request: int, fetch: Fetch) -> bool:
        """Answer a parked fetch if possible; returns whether it was answered."""
        if not self.parked.is_parked(request):
            return False
        try:
            reply = self._answer_round_fetch(fetch) if isinstance(fetch, FetchRound) else self._answer_row_fetch(fetch)
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
            for twin in self.parked.twin_requests(fetch):
                other = self.parked.pop(twin)
                assert other is not None
                self._get_task(fetch).leases.read(reply.token, other.owner)
                self._table.out.append(Answer(twin, reply))
        return True

    def _answer_row_fetch(self, fetch: FetchRows) -> LeaseGrant | NoRows | None:
        again = self._grant_before(fetch)
        if again is not None:
            return again
        if self.stopped:
            return self._make_no_rows(NoRowsReason.STOP)
        task = self._get_task(fetch)
        if self._has_no_more(task):
            return self._make_no_rows(NoRowsReason.CLOSED)
        newest = self.newest_partition(fetch)
        if task.isolation.holds(fetch.owner):
            return None
        # Weights of an earlier lineage are outdated, whatever their version.
        if newest is not None and fetch.lineage < self._lineage:
            return self._make_gated(NoRowsReason.NEWER_VERSION, task) if self._published else None
        taken = task.take_ready(Want(fetch.num_rows, fetch.token_budget), newest_allowed=newest)
        if taken is None:
            if newest is None or not task.ready_partitions or task.ready_partitions[0] <= newest:
                return None
            if task.spec.usable_version(self.newest_version) > fetch.version:
                return self._make_gated(NoRowsReason.NEWER_VERSION, task)
            # Rows for these weights may still come, or come back: the consumer keeps asking with them.
            return self._make_gated(NoRowsReason.HELD_BACK, task) if fetch.tell_held_back else None
        partition, rows = taken
        granted = self._table.lease_rows(task, partition, rows, fetch.owner)
        if fetch.replica:
            self._remember_grant(fetch, granted)
        return granted

    def _answer_round_fetch(self, fetch: FetchRound) -> LeaseGrant | NoRows | None:
        task = self._get_task(fetch)
        assigner = self._get_assigner(fetch)
        if assigner.is_step_over(fetch.partition) or (self.drained and fetch.partition not in self._table.partitions):
            return self._make_no_rows(NoRowsReason.PARTITION_DONE)
        formed = fetch.round_index < len(assigner.get_rounds(fetch.partition).formed)
        if not formed and assigner.is_step_exhausted(fetch.partition):
            return self._make_no_rows(NoRowsReason.PARTITION_DONE)
        if not formed and self.stopped:
            return self._make_no_rows(NoRowsReason.STOP)
        want = Want(fetch.num_rows * fetch.num_ranks, fetch.token_budget * fetch.num_ranks, fetch.num_ranks)
        known = assigner.get_round(fetch.partition, fetch.round_index, want)
        if known is None:
            return None
        rank_slice = known.rank_slices[fetch.rank]
        if rank_slice is None:
            return None
        lease = task.leases.by_token.get(rank_slice.token)
        rows = [row for row in rank_slice.rows if lease is not None and row in lease.rows]
        if not self._are_rows_readable(rows):
            return None
        assigner.ranks[fetch.owner] = fetch.partition
        if lease is not None:
            task.leases.read(rank_slice.token, fetch.owner)
        granted = self._table.grant(task, rank_slice.token, known.partition, rows)
        granted.largest_slice, granted.last, granted.total_rows = known.largest_slice, known.last, known.total_rows
        return granted

    def _are_rows_readable(self, rows: list[int]) -> bool:
        """Whether all rows of a slice can be read; lost ones must be put again."""
        away = [row for row in rows if self._table.rows[row].state is not RowState.STORED]
        lost = [row for row in away if self._table.rows[row].lost]
        # Also for a reader that holds the slice: it asks again because the unit died before it had read the rows.
        self._table.losses.look_again(lost, wanted=True)
        return not away

    def _has_no_more(self, task: TaskState) -> bool:
        return self.drained and not task.num_left

    def _make_no_rows(self, reason: NoRowsReason) -> NoRows:
        return NoRows(reason, self.newest_version, lineage=self._lineage)

    def _make_gated(self, reason: NoRowsReason, task: TaskState) -> NoRows:
        return NoRows(reason, task.spec.usable_version(self.newest_version), lineage=self._lineage)

    def _tell_steps(self) -> None:
        for assigner in self.assigners.values():
            assigner.note_version(self.newest_version)

    def _get_task(self, fetch: Fetch) -> TaskState:
        return self._table.tasks[fetch.task]

    def _get_assigner(self, fetch: Fetch) -> RoundAssigner:
        return self.assigners[fetch.task]

    def _grant_before(self, fetch: FetchRows) -> LeaseGrant | None:
        """Return the lease that another reader of the replica got for the same fetch, unless the lease ended."""
        known = self._replicas.get((fetch.task, fetch.replica), {}).get(fetch.sequence) if fetch.replica else None
        leases = self._get_task(fetch).leases
        if known is None or not leases.known(known.token):
            return None
        if known.token in leases.by_token:
            leases.read(known.token, fetch.owner)
        return known

    def _remember_grant(self, fetch: FetchRows, granted: LeaseGrant) -> None:
        known = self._replicas.setdefault((fetch.task, fetch.replica), {})
        known[fetch.sequence] = granted
        while len(known) > _REPLICA_FETCHES_REMEMBERED:
            del known[min(known)]

    def _check_round(self, fetch: FetchRound) -> None:
        assigner = self._get_assigner(fetch)
        rounds = assigner.known_rounds(fetch.partition)
        if rounds is None or assigner.is_step_over(fetch.partition):
            formed = 0
        else:
            if rounds.num_ranks not in (0, fetch.num_ranks):
                raise PeerRefused(_other_gang(fetch))
            formed = len(rounds.formed)
        if not assigner.is_step_exhausted(fetch.partition) and not 0 <= fetch.round_index <= formed:
            raise PeerRefused(
                f"{fetch.task}: round {fetch.round_index} of partition {fetch.partition} was asked for, but the next "
                f"one is {formed}; a gang's ranks ask for every round"
            )


def _other_gang(fetch: FetchRound) -> str:
    return (
        f"{fetch.task}: rank {fetch.rank} of {fetch.num_ranks} asked for a round of partition "
        f"{fetch.partition}; all ranks must count the same gang"
    )
