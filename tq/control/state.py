"""The control plane's state over all tasks: events in, instructions out. Pure: no clock, no sockets, no threads.

Events are the messages of `tq.messages` (questions come with a request number) and those of `tq.control.events`. A
request that cannot be answered yet is parked; the event that makes it answerable returns its `Answer`. Every controller
knows all rows of the queue, and hands out those of the tasks that it serves.

    handle(RowsCreated(...), request=6) -> [Answer(6, RowsAccepted())]   or [] (parked: the queue is full)
    handle(FetchRows(...), request=7)   -> [Answer(7, LeaseGrant(...))]     or [] (parked: no rows)
    handle(OutputsWritten(...))         -> [Answer(8, LeaseGrant(...))]     of a fetch that waited for it
    handle(OwnerGone("a"))              -> [OrderFenceRows("ref", 9, "storage-0", (3, 4))]; after Fenced("ref", 9) ...
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from asyncflow.errors import LeaseFenced, PeerRefused, PutPending, QueueFull
from tq.control.events import (
    Answer,
    DeadlinePassed,
    DoneElsewhere,
    Event,
    Fenced,
    Instruction,
    OwnerGone,
    OwnerWrites,
    RecalledFinished,
    RecalledLosses,
    RecalledRemoved,
    RecoveryDeadline,
    TasksWrite,
    UnitGone,
    UnitLost,
)
from tq.control.fetches import Fetches, RoundAssigner, WaitReasons
from tq.control.row_table import Row, RowSet, RowState, RowTable, TaskState, UnitLife
from tq.messages import (
    AckLost,
    ClearPartition,
    CloseWriting,
    FetchRound,
    FetchRows,
    Held,
    Join,
    Joined,
    NoRows,
    NoRowsReason,
    OpenPartition,
    OutputsWritten,
    PublishVersion,
    QueueStats,
    RegisterUnit,
    Release,
    RowRecords,
    RowsAccepted,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
    Stop,
    TellLost,
    UnitLoss,
    WatchLost,
)
from tq.policies import TaskSpec
from tq.refill import first_token as first_lease_token


@dataclass(frozen=True)
class Recovering:
    """Units and consumers that an earlier incarnation of the controller knew."""

    units: frozenset[str]
    owners: frozenset[str]


class ControlState:
    """Rows, tasks, leases, units, and parked requests.

    Args:
        tasks: every task that must be done with a row before the row is finished.
        served: names of the tasks whose rows this controller hands out; None: all.
        version: newest weights at the start.
        lineage: how often the queue (and with it these weights) began anew.
        published: whether consumers can already get the weights of `version`.
        first_token: lease tokens count up from here; a restarted controller starts above all earlier tokens.
        row_limit, byte_limit: live rows and bytes beyond which puts wait; 0: no limit.
        refill: admission replaces dead-letter groups; otherwise their partition shrinks.
        recovering: the peers that a restarted controller waits for; None: a first start.
    """

    def __init__(
        self,
        tasks: Sequence[TaskSpec],
        *,
        served: Collection[str] | None = None,
        version: int = 0,
        lineage: int = 0,
        published: bool = True,
        first_token: int = 1,
        row_limit: int = 0,
        byte_limit: int = 0,
        refill: bool = False,
        recovering: Recovering | None = None,
    ) -> None:
        # Read-only for others: only `handle` changes it.
        self.table = RowTable(tasks, served=served, first_token=first_token, refill=refill)
        self._reasons = WaitReasons(self.table)
        self._fetches = Fetches(self.table, self._reasons, version=version, lineage=lineage, published=published)
        self._oldest_token = first_lease_token(lineage)
        self._puts = PutQueue(self.table, row_limit=row_limit, byte_limit=byte_limit)
        self._recovery: Recovery | None = None
        # Units of an earlier incarnation that have not registered yet, so their rows are unknown; recovery gives up on
        # them at its deadline.
        self._missing_units = set[str]() if recovering is None else set(recovering.units)
        if recovering is not None and (recovering.units or recovering.owners):
            self._recovery = Recovery(self.table, self._fetches.assigners, recovering)
            self._fetches.closed = True
            self._reasons.recovering = self._recovery.waiting_for

    def handle(self, event: Event, request: int = 0) -> list[Instruction]:
        """Apply one event. `request` names the request in its `Answer`; it is unique among those that wait.

        Raises:
            PeerRefused: the event names something unknown, or asks for the impossible. Subclasses: the rows exist, or
                will never fit into the queue.
            LeaseFenced: a lease is void. After any error nothing has changed.
        """
        self._apply_event(event, request)
        # The order matters: draining needs the last puts and the end of recovery, and `retry_parked` serves what these
        # opened.
        self._puts.admit_waiting()
        self._end_recovery()
        self._drain_partitions()
        self._fetches.retry_parked()
        if self.table.losses.undecided and (self._recovery is None or not self._recovery.collecting):
            self.table.report_losses()
        out, self.table.out = self.table.out, []
        return out

    def _apply_event(self, event: Event, request: int) -> None:
        table = self.table
        match event:
            case RowsCreated():
                self._puts.create_rows(event, request)
            case RowsConfirmed():
                table.out.append(Answer(request, table.confirm_rows(event)))
            case OutputsWritten():
                table.write_outputs(event)
            case RowsRemoved():
                self._puts.cancel_puts(event.unit, set(event.rows))
                table.remove_rows(event)
            case ClearPartition():
                table.clear_if_empty(event.partition)
                if self._recovery is not None:
                    self._recovery.clear_partition(event.partition)
            case FetchRows() | FetchRound():
                self._fetches.check(event)
                self._fetches.add_fetch(request, event)
            case Release() | AckLost():
                table.task_bit(event.task)
                if self._recovery is not None and self._recovery.collecting:
                    self._recovery.defer_event(event)
                else:
                    self._end_lease(event)
            case OpenPartition():
                if not self._fetches.stopped:  # otherwise ranks of a gang could disagree on whether it is over
                    table.open_partition(event.partition, event.num_rows)
            case RecalledRemoved():
                table.partition(event.partition).removed.update(event.rows)
            case WatchLost():
                table.losses.watchers[request] = event
                table.tell_watchers()
            case PublishVersion():
                self._fetches.publish(event.step)
            case Stop():
                self._fetches.stop()
            case CloseWriting():
                self._puts.closed = True
            case DeadlinePassed():
                self._expire_request(event.request)
            case RecalledFinished():
                table.count_finished(event.partition, event.rows)
                table.drop_finished(event.partition)
            case RecalledLosses():
                table.add_lost_records(event.records)
            case TellLost():
                if self._recovery is None:  # during recovery the unit may only be late
                    table.adopt_losses(event.losses)
                table.out.append(Answer(request, RowsAccepted(table.done_with(event.losses))))
            case DoneElsewhere():
                for name, rows in event.commits.items():
                    table.mark_lost_done(name, rows)
            case TasksWrite():
                for name, columns in event.outputs.items():
                    table.graph.learn_outputs(name, columns)
            case Fenced():
                table.fence_holds(event)
                if self._recovery is not None:
                    self._recovery.confirm_fence(event.token)
            case _:
                self._handle_peer_event(event, request)

    def _handle_peer_event(
        self,
        event: RegisterUnit | Join | OwnerGone | OwnerWrites | UnitGone | UnitLost | RecoveryDeadline,
        request: int,
    ) -> None:
        """Units and consumers come and go."""
        match event:
            case RegisterUnit():
                self._puts.cancel_puts(event.unit)
                reply = self.table.register_unit(event)
                self._missing_units.discard(event.unit)
                self.table.out.append(Answer(request, reply))
                if self._recovery is not None:
                    self._recovery.note_registered(event.unit)
            case Join():
                self._join_owner(event, request)
            case OwnerGone():
                self._drop_owner(event.owner)
            case OwnerWrites():
                self._reasons.note_writer(event.owner, event.columns)
            case UnitGone():
                self._puts.cancel_puts(event.unit)
                if event.unit in self.table.units:
                    self.table.set_online(self.table.units[event.unit], online=False)
            case UnitLost():
                unit = self.table.units.get(event.unit)
                if unit is not None and not unit.online:
                    self.table.lose_unit(unit)
            case RecoveryDeadline():
                self._rebuild_leases()
        if self._recovery is not None and self._recovery.collected:
            self._rebuild_leases()

    # Questions

    @property
    def newest_version(self) -> int:
        return self._fetches.newest_version

    @property
    def recovering(self) -> bool:
        return self._recovery is not None

    def keeps_leases(self, owner: str) -> bool:
        """Whether a departed consumer has leases, or slices of an unfinished step, that await its return."""
        if self._recovery is not None and self._recovery.keeps_leases(owner):
            return True
        return any(assigner.keeps_leases(owner) for assigner in self._fetches.assigners.values())

    def units(self) -> dict[str, int]:
        """Return the units that are up -> bytes of live rows that they hold."""
        return {name: unit.num_bytes for name, unit in self.table.units.items() if unit.online}

    def list_away_units(self) -> list[str]:
        """Return the units that are down but may come back with their rows."""
        known = {name for name, unit in self.table.units.items() if not unit.online}
        return sorted(known | self._missing_units)

    def known_rows(self) -> dict[int, list[int]]:
        """Return partition -> rows that exist or are finished."""
        known = {number: list(info.finished) for number, info in self.table.partitions.items()}
        for number, row in self.table.rows.items():
            known.setdefault(row.partition, []).append(number)
        return known

    def any_away(self, rows: Iterable[int]) -> bool:
        """Whether some rows are lost, or would count as lost when put again: then it matters what tasks write."""
        here = self.table.rows
        return any(number in here and here[number].state in (RowState.AWAY, RowState.LOST) for number in rows)

    def stats(self, admitted_groups: int = 0) -> QueueStats:
        """Count rows per task, from counters: nothing here looks at single rows. The caller adds connections, times."""
        table = self.table
        return QueueStats(
            tasks=[task.stats(self._fetches.parked.count(name)) for name, task in table.tasks.items()],
            live_rows=len(table.rows),
            newest_version=self.newest_version,
            admitted_groups=admitted_groups,
            units=self.units(),
            live_bytes=table.num_bytes,
            row_limit=self._puts.row_limit,
            byte_limit=self._puts.byte_limit,
            waiting_puts=len(self._puts.waiting),
            lost_rows=table.num_lost,
            dead_letter_groups=table.num_dead_letters,
            filtered_groups=table.num_filtered,
        )

    # What the shell makes durable

    def take_finished(self) -> dict[int, RowSet]:
        """Return partition -> rows that were finished since the last call, for the shell to make durable.

        Units remember finished rows only for a while, and not beyond their death. A later incarnation needs them to
        count right (`RecalledFinished`), and so that nobody works on such a row when it is put again.
        """
        return self.table.take_finished()

    def removed_rows(self, partition: int) -> RowSet:
        """Return the rows that a partition will never have."""
        info = self.table.partitions.get(partition)
        return RowSet() if info is None else info.removed.copy()

    @property
    def losses_changed(self) -> bool:
        return bool(self.table.losses.changed)

    def take_losses(self) -> dict[int, list[RowRecords]]:
        """Return, for each part that changed, its lost rows and the tasks done with them; the shell makes it durable.

        No unit remembers these rows: a later incarnation (`RecalledLosses`) asks for them, so that nobody works on them
        twice.
        """
        return self.table.take_changed_losses()

    def list_losses(self) -> list[UnitLoss]:
        """Return the content of `TellLost`: lost rows by life of their unit."""
        return self.table.losses_by_life()

    # Consumers

    def _end_lease(self, event: Release | AckLost, *, promised: bool = False) -> None:
        if isinstance(event, AckLost):
            self.table.ack_lost(event, promised=promised)
            return
        task = self.table.tasks.get(event.task)
        if task is None:
            raise PeerRefused(f"{event.task} is served by another controller")
        if event.token not in task.leases.by_token or (event.fenced and task.spec.keeps_leases):
            return
        if event.filtered or event.failures:
            self.table.give_up_groups(task, event.token, event.rows, failures=event.failures)
        else:
            self.table.release_rows(task, event.token, event.rows, counts=not event.fenced)

    def _join_owner(self, event: Join, request: int) -> None:
        void = [held.token for held in event.holds if held.token < self._oldest_token]
        event.holds = [held for held in event.holds if held.token >= self._oldest_token]
        if self._recovery is not None and self._recovery.collecting:
            self._recovery.note_joined(event.owner, event.holds)
        else:
            for held in event.holds:
                task = self.table.tasks.get(held.task)
                if task is None:
                    continue
                if held.token in task.leases.by_token:
                    task.leases.read(held.token, event.owner)
                elif held.rows and not all(task.leases.was_done(held.token, row) for row in held.rows):
                    void.append(held.token)
        self.table.out.append(Answer(request, Joined(void)))

    def _drop_owner(self, owner: str) -> None:
        self._fetches.drop_owner(owner)
        self._reasons.drop_owner(owner)
        if self._recovery is not None and self._recovery.collecting:
            self._recovery.drop_owner(owner)
        for task in self.table.tasks.values():
            if not task.spec.keeps_leases:
                for lease in task.leases.drop_owner(owner):
                    self.table.release_rows(task, lease.token)

    # Waiting

    def _expire_request(self, request: int) -> None:
        if self._puts.expire_put(request, self._reasons.find_blocking_task):
            return
        if self.table.losses.watchers.pop(request, None) is not None:
            self.table.out.append(Answer(request, NoRows(NoRowsReason.DEADLINE, self.newest_version)))
        else:
            self._fetches.expire_request(request)

    def _drain_partitions(self) -> None:
        """Closed for writing and the last puts are in: size the open partitions by the rows that are there."""
        if self._fetches.drained or self._recovery is not None or self._missing_units or not self._puts.drained:
            return
        for number, info in self.table.partitions.items():
            if info.declared is None and not self._fetches.stopped:
                self.table.open_partition(number, info.num_live + info.num_finished + len(info.removed))
        self._fetches.drain_tasks()

    # Recovery

    def _rebuild_leases(self) -> None:
        if self._recovery is None or not self._recovery.collecting:
            return
        self._recovery.rebuild_leases()
        for event in self._recovery.take_deferred():
            with contextlib.suppress(PeerRefused, LeaseFenced):  # void: its sender finds out on its own
                self._end_lease(event, promised=True)

    def _end_recovery(self) -> None:
        if self._recovery is None:
            return
        self._reasons.recovering = self._recovery.waiting_for
        if self._recovery.over:
            self._recovery = None
            self._reasons.recovering = ""
            self._fetches.open()


class PutQueue:
    """Answers puts, or parks them, in order, until there is room.

    RowsCreated --room--> `RowTable`
          '--no room--> parked --room--> `RowTable`
                             '--deadline--> refused, or its unit went: forgotten

    Args:
        row_limit, byte_limit: how many rows and bytes may be alive; 0: no limit.
    """

    def __init__(self, table: RowTable, *, row_limit: int, byte_limit: int) -> None:
        self.row_limit = row_limit
        self.byte_limit = byte_limit
        self.waiting: dict[int, RowsCreated] = {}  # request -> put, in order of arrival
        self.closed = False  # closed for writing: only known rows may come, that is lost ones and repeated puts
        self._table = table

    @property
    def drained(self) -> bool:
        """Whether no unknown row can come any more."""
        return self.closed and not self.waiting and not self._table.announced

    def create_rows(self, event: RowsCreated, request: int) -> None:
        """Answer a put, or park it; raises PeerRefused (malformed), RowsExist or QueueFull (will never fit)."""
        table = self._table
        if self.closed and any(
            row not in table.rows and not table.is_finished(row, event.partition) for row in event.rows
        ):
            raise PeerRefused("the queue was closed for writing: it takes no new rows")
        table.lose_abandoned_units(event)
        # Lost rows that are put again, and rows restored from a snapshot, do not wait for room.
        if table.new_rows(event) and not event.commits:
            if 0 < self.row_limit < len(event.rows):
                raise QueueFull(
                    f"a put of {len(event.rows)} rows is larger than the queue ({self.row_limit} live rows)"
                )
            if 0 < self.byte_limit < event.num_bytes:
                raise QueueFull(
                    f"a put of {event.num_bytes} bytes is larger than the queue ({self.byte_limit} live bytes)"
                )
            if self.waiting or self._lacks(event):
                self.waiting[request] = event
                return
        table.out.append(Answer(request, table.create_rows(event)))

    def admit_waiting(self) -> None:
        """Take the puts that there is room for now, the oldest first."""
        while self.waiting and not self._lacks(self.waiting[first := next(iter(self.waiting))]):
            event = self.waiting.pop(first)
            try:
                self._table.new_rows(event)
            except PeerRefused as error:  # another producer put these rows in the meantime
                self._table.out.append(Answer(first, error))
            else:
                self._table.out.append(Answer(first, self._table.create_rows(event)))

    def expire_put(self, request: int, because: Callable[[], str]) -> bool:
        """Refuse a put that waited long enough; returns whether there was one."""
        put = self.waiting.pop(request, None)
        if put is not None:
            what = ", ".join(self._lacks(put)) or "earlier puts wait, too"
            error = QueueFull(f"no room for {len(put.rows)} rows: {what}; {because()}")
            self._table.out.append(Answer(request, error))
        return put is not None

    def cancel_puts(self, unit: str, rows: set[int] | None = None) -> None:
        """Drop parked puts of a unit (with rows: those that name one): they will be told again, or were taken back."""
        for request, put in list(self.waiting.items()):
            if put.unit == unit and (rows is None or not rows.isdisjoint(put.rows)):
                del self.waiting[request]
                error = PutPending(f"{unit}: a put no longer waits for room; put again")
                self._table.out.append(Answer(request, error))

    def _lacks(self, put: RowsCreated) -> list[str]:
        """Return the limits that a put exceeds, as text; announced rows count."""
        num_rows = len(self._table.rows) + len(self._table.announced)
        num_bytes = self._table.num_bytes + self._table.announced_bytes
        full = []
        if self.row_limit and num_rows + len(put.rows) > self.row_limit:
            full.append(f"live rows {num_rows} of {self.row_limit}")
        if self.byte_limit and num_bytes + put.num_bytes > self.byte_limit:
            full.append(f"live bytes {num_bytes} of {self.byte_limit}")
        return full


# How a restarted controller finds out where everything stands, before it hands out anything.
#
# collecting --every known unit registered, every known consumer joined, or the deadline passed--> rebuild leases
# fencing    --OrderFenceTask per served task confirmed by the units that are up--> over

_GROUP_UNKNOWN = -1


class Recovery:
    """How a restarted controller learns where everything stands before it hands out rows."""

    def __init__(self, table: RowTable, assigners: dict[str, RoundAssigner], expected: Recovering) -> None:
        self._table = table
        self._assigners = assigners
        self._units = set(expected.units)
        self._all_units = set(expected.units)
        self._owners = set(expected.owners)
        self._holds: dict[str, list[Held]] = {}
        # Token -> unit that has not confirmed the fence yet. A unit that is away hears of it when it registers.
        self._fences: dict[int, str] = {}
        self._collecting = True
        self._later: list[AckLost | Release] = []

    @property
    def collected(self) -> bool:
        return not self._units and not self._owners

    @property
    def collecting(self) -> bool:
        """Whether the leases are yet to be rebuilt."""
        return self._collecting

    @property
    def over(self) -> bool:
        return not self._collecting and not self._fencing

    @property
    def waiting_for(self) -> str:
        """The awaited peers, as text for a message."""
        if self._collecting:
            return " ".join(sorted(self._units | self._owners))
        return f"fences at {' '.join(sorted(self._fencing))}"

    def note_registered(self, unit: str) -> None:
        self._units.discard(unit)
        self._all_units.add(unit)

    def note_joined(self, owner: str, holds: list[Held]) -> None:
        """Take in a consumer's leases, and stop waiting for the consumer."""
        self._owners.discard(owner)
        earlier = {(one.task, one.token): one for one in self._holds.get(owner, ())}
        for one in holds:
            before = earlier.pop((one.task, one.token), None)
            if before is not None:  # it joined before; acks that it sent since then may not have arrived
                one.rows = sorted({*one.rows, *before.rows})
        self._holds[owner] = [*holds, *earlier.values()]

    def defer_event(self, event: AckLost | Release) -> None:
        """Keep an ack or release until the leases are rebuilt.

        Raises:
            PeerRefused: an ack cannot be promised, since its lease may have ended in the meantime.
        """
        task = self._table.tasks.get(event.task)
        if isinstance(event, AckLost) and task is not None and not task.spec.keeps_leases:
            raise PeerRefused(f"the controller was restarted and waits for {self.waiting_for}; ack again")
        self._later.append(event)

    def take_deferred(self) -> list[AckLost | Release]:
        later, self._later = self._later, []
        return later

    def drop_owner(self, owner: str) -> None:
        """Drop what a departed consumer held; trainers keep their leases."""
        self._owners.discard(owner)
        holds = self._holds.pop(owner, ())
        kept = [one for one in holds if one.task in self._table.tasks and self._table.tasks[one.task].spec.keeps_leases]
        if kept:
            self._holds[owner] = kept

    def keeps_leases(self, owner: str) -> bool:
        """Whether a departed consumer is a trainer with leases; other consumers lose theirs."""
        return bool(self._holds.get(owner))

    def clear_partition(self, partition: int) -> None:
        """Forget holds of a cleared partition's rows."""
        for owner, holds in self._holds.items():
            self._holds[owner] = [one for one in holds if one.partition != partition]

    def rebuild_leases(self) -> None:
        """Stop waiting: restore leases and rounds, and fence all other leases."""
        self._collecting = False
        for name, task in self._table.tasks.items():
            held = [(owner, one) for owner, holds in self._holds.items() for one in holds if one.task == name]
            self._restore_leases(task, held)
            # Any lease of the earlier incarnation that nobody claimed may still have a writer.
            task.leases.some_void = True
            self._fences |= self._table.fence_void_leases(task, self._all_units)
        self._holds.clear()

    def confirm_fence(self, token: int) -> None:
        self._fences.pop(token, None)

    @property
    def _fencing(self) -> set[str]:
        units = self._table.units
        return {unit for unit in self._fences.values() if unit in units and units[unit].online}

    def _restore_leases(self, task: TaskState, held: list[tuple[str, Held]]) -> None:
        """Give each row to the consumer with the newest token for it."""
        newest: dict[int, int] = {}
        for _, one in held:
            if task.spec.keeps_leases:
                self._remember_unknown(task, one)
            else:
                # The lease may be alive for its other rows; a row that is unknown now may be put later.
                task.leases.owe_fence(number for number in one.rows if number not in self._table.rows)
            for number in one.rows:
                newest[number] = max(one.token, newest.get(number, 0))
        for owner, one in sorted(held, key=lambda item: item[1].token):
            rows = [number for number in one.rows if newest[number] == one.token and self._is_undone(task, number)]
            if one.token in task.leases.by_token:
                task.leases.read(one.token, owner)
            elif rows:
                self._hold_rows(task, one, owner, rows)
            if one.round_index >= 0:
                self._assigners[task.spec.name].restore_slice(one, owner)

    def _hold_rows(self, task: TaskState, one: Held, owner: str, rows: Iterable[int]) -> None:
        for number in rows:
            row = self._table.rows[number]
            if row.queued & task.bit:
                task.partition(one.partition).withdraw(number, row)
        task.lease_rows(one.token, one.partition, rows, owner)

    def _is_undone(self, task: TaskState, number: int) -> bool:
        row = self._table.rows.get(number)
        return row is not None and bool(row.open_tasks & task.bit)

    def _remember_unknown(self, task: TaskState, one: Held) -> None:
        """A trainer holds rows that no unit has: they were lost, and must not be trained again."""
        # Whatever wrote the trainer's inputs was done with these rows, and its outputs are lost like the trainer's.
        upstream = self._table.graph.upstream_of(task.bit)
        left, written = self._table.every_task & ~upstream, task.inputs | self._table.graph.outputs_of(upstream)
        for number in one.rows:
            row = Row(UnitLife(""), one.partition, _GROUP_UNKNOWN, 1, written, left, tokens=0, num_bytes=0)
            self._table.add_lost(number, row)
