"""The control plane's state over all tasks: events in, instructions out. Pure: no clock, no sockets, no threads.

Events are the messages of `tq.messages` (those that carry a question come with a request number) and those of
`tq.control.events`. A request that cannot be answered is parked; the event that makes it answerable returns its
`Answer`. A controller knows all rows of the queue, and hands out those of the tasks that it serves.

    handle(RowsCreated(...), request=6) -> [Answer(6, RowsAccepted())]   or [] (parked: the queue is full)
    handle(FetchRows(...), request=7)   -> [Answer(7, LeaseGrant(...))]     or [] (parked: no rows)
    handle(OutputsWritten(...))         -> [Answer(8, LeaseGrant(...))]     of a fetch that waited for it
    handle(OwnerGone("a"))              -> [Fence("ref", 9, "storage-0", (3, 4))], and after Fenced("ref", 9) ...
"""

import contextlib
from collections.abc import Collection, Iterable, Sequence

from asyncflow.errors import LeaseFenced, PeerRefused
from tq.control.events import (
    Answer,
    DeadlinePassed,
    DoneElsewhere,
    Event,
    Fenced,
    Instruction,
    Lost,
    OwnerGone,
    OwnerWrites,
    RecoveryDeadline,
    RowsFinished,
    RowsLacking,
    RowsLost,
    TasksWrite,
    UnitGone,
    UnitLost,
)
from tq.control.fetches import Fetches
from tq.control.puts import Arrivals, Backpressure, PutQueue
from tq.control.recovery import Recovering, Recovery, fence_void_leases
from tq.control.row_set import RowSet
from tq.control.row_table import RowTable
from tq.control.rows import RowState
from tq.control.stats import count_rows
from tq.control.unit_registry import UnitRegistry
from tq.control.wait_reasons import WaitReasons
from tq.lease_tokens import first_token as first_lease_token
from tq.messages import (
    AckLost,
    ClearPartition,
    CloseWriting,
    FetchRound,
    FetchRows,
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
from tq.task_spec import TaskSpec


class ControlState:
    """Rows, tasks, leases, units, and requests that wait."""

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
        """Args:
        tasks: every task that must be done with a row before it is finished.
        served: names of the tasks whose rows are handed out here; None: all.
        version: newest weights at the start.
        lineage: of the queue and of these weights: how often the queue began anew.
        published: consumers can get such weights already.
        first_token: lease tokens count up from here; a restarted controller starts above all earlier ones.
        row_limit, byte_limit: live rows and bytes beyond which puts wait; 0: none.
        refill: admission replaces dead-letter groups; else their partition gets smaller.
        recovering: whom a restarted controller waits for; None: a first start.
        """
        self.table = RowTable(tasks, served=served, first_token=first_token, refill=refill)
        """Others only read it: `handle` changes it."""
        self._reasons = WaitReasons(self.table)
        self._fetches = Fetches(self.table, self._reasons, version=version, lineage=lineage, published=published)
        self._oldest_token = first_lease_token(lineage)
        self._backpressure = Backpressure(row_limit=row_limit, byte_limit=byte_limit)
        self._arrivals = Arrivals(self.table)
        self._puts = PutQueue(self.table, self._arrivals, self._backpressure)
        self._registry = UnitRegistry(self.table, self._arrivals, [spec.name for spec in tasks])
        self._recovery: Recovery | None = None
        self._missing_units = set[str]() if recovering is None else set(recovering.units)
        """Of an earlier incarnation, not heard of since, whose rows are not known: recovery waits for them, not for
        ever."""
        if recovering is not None and (recovering.units or recovering.owners):
            self._recovery = Recovery(self.table, recovering)
            self._fetches.closed = True
            self._reasons.recovering = self._recovery.waiting_for

    @property
    def newest_version(self) -> int:
        """Newest published weights."""
        return self._fetches.newest_version

    @property
    def recovering(self) -> bool:
        """Whether a restarted controller does not hand out rows yet."""
        return self._recovery is not None

    def handle(self, event: Event, request: int = 0) -> list[Instruction]:
        """Apply one event.

        Args:
            event: what happened.
            request: number of a request, unique among those that wait; names it in its `Answer`.

        Raises:
            PeerRefused: the event names what does not exist, or asks for what cannot be; nothing changed. Its children
                say that rows exist already, or that the queue is too small.
            LeaseFenced: a lease is void; nothing changed.
        """
        self._apply(event, request)
        self._puts.admit()
        self._recover()
        self._drain()
        self._fetches.wake()
        self._report_losses()
        out, self.table.out = self.table.out, []
        return out

    def keeps_leases(self, owner: str) -> bool:
        """Whether a consumer that is gone has leases, or slices of a step that is not over, for when it comes back."""
        if self._recovery is not None and self._recovery.keeps_leases(owner):
            return True
        return any(assigner.keeps_leases(owner) for assigner in self.table.assigners.values())

    def units(self) -> dict[str, int]:
        """Return the units that are up, with the bytes of live rows that they hold."""
        return {name: unit.num_bytes for name, unit in self.table.rows.units.items() if unit.online}

    def away(self) -> list[str]:
        """Return the units that are not up but may come back with their rows."""
        known = {name for name, unit in self.table.rows.units.items() if not unit.online}
        return sorted(known | self._missing_units)

    def known_rows(self) -> dict[int, list[int]]:
        """Return partition -> rows that are somewhere, or finished."""
        return self.table.rows.known_rows()

    def take_finished(self) -> dict[int, RowSet]:
        """Return partition -> rows that were finished since the last call.

        Units remember them, too, but not beyond their death, nor for ever: before they forget, the shell makes this
        durable, so that a later incarnation (`RowsFinished`) still counts right, and nobody works on such a row that is
        put again.
        """
        return self.table.rows.take_finished()

    def any_away(self, rows: Iterable[int]) -> bool:
        """Whether some are lost, or count as lost once they are put again: then it matters what tasks write."""
        all_rows = self.table.rows.rows
        return any(number in all_rows and all_rows[number].state in (RowState.AWAY, RowState.LOST) for number in rows)

    def removed_rows(self, partition: int) -> RowSet:
        """Return the rows that a partition will never have."""
        info = self.table.rows.partitions.get(partition)
        return RowSet() if info is None else info.removed.copy()

    @property
    def losses_changed(self) -> bool:
        """Whether `take_losses` would return something."""
        return bool(self.table.losses.changed)

    def take_losses(self) -> dict[int, list[RowRecords]]:
        """Return part -> which of its rows went with a unit, and who was done with them, where that changed.

        No unit remembers them: the shell makes this durable, part by part, so that a later incarnation (`RowsLost`)
        asks for them and nobody works on them twice.
        """
        return {part: self._registry.lost_records(rows) for part, rows in self.table.losses.take().items()}

    def losses(self) -> list[UnitLoss]:
        """Return the rows that went with units, by life of the unit: the contents of `TellLost`."""
        return self._registry.losses()

    def stats(self, admitted_groups: int = 0) -> QueueStats:
        """Count rows per task; the caller adds connections and times."""
        return count_rows(self.table, self._fetches, self._backpressure, admitted_groups, self.units())

    def _apply(self, event: Event, request: int) -> None:
        match event:
            case RowsCreated():
                self._puts.create(event, request)
            case RowsConfirmed():
                self.table.out.append(Answer(request, self._arrivals.confirm(event)))
            case OutputsWritten():
                self.table.write(event)
                self._arrivals.write(event)
            case RowsRemoved():
                self._puts.cancel(event.unit, set(event.rows))
                self._registry.remove(event)
            case ClearPartition():
                self.table.clear_if_empty(event.partition)
                if self._recovery is not None:
                    self._recovery.cleared(event.partition)
            case FetchRows() | FetchRound():
                self._fetches.check(event)
                self._fetches.add(request, event)
            case Release() | AckLost():
                self.table.rows.bit(event.task)
                if self._recovery is not None and self._recovery.collecting:
                    self._recovery.defer(event)
                else:
                    self._end_lease(event)
            case OpenPartition():
                self._open(event)
            case RowsLacking():
                self.table.rows.partition(event.partition).lack(event.rows)
            case WatchLost():
                self.table.losses.watchers[request] = event
                self.table.tell_watchers()
            case PublishVersion():
                self._fetches.publish(event.step)
            case Stop():
                self._fetches.stop()
            case CloseWriting():
                self._puts.closed = True
            case DeadlinePassed():
                self._expire(event.request)
            case RowsFinished():
                self._registry.count_finished(event.partition, event.rows)
                self.table.drop_finished(event.partition)
            case RowsLost():
                self._registry.take_lost(event.records)
            case TellLost():
                if self._recovery is None:  # else a unit may just not have come back yet
                    self._registry.adopt(event.losses)
                self.table.out.append(Answer(request, RowsAccepted(self._registry.done_of(event.losses))))
            case DoneElsewhere():
                for name, rows in event.commits.items():
                    self.table.mark_lost_done(name, rows)
            case TasksWrite():
                for name, columns in event.outputs.items():
                    self.table.graph.learn(name, columns)
            case Fenced():
                self.table.fenced(event)
                if self._recovery is not None:
                    self._recovery.fenced(event.token)
            case _:
                self._meet(event, request)

    def _meet(
        self,
        event: RegisterUnit | Join | OwnerGone | OwnerWrites | UnitGone | UnitLost | RecoveryDeadline,
        request: int,
    ) -> None:
        """A client or unit came or went."""
        match event:
            case RegisterUnit():
                self._puts.cancel(event.unit)
                reply = self._registry.register(event)
                self._missing_units.discard(event.unit)
                self.table.out.append(Answer(request, reply))
                if self._recovery is not None:
                    self._recovery.registered(event.unit)
            case Join():
                self._join(event, request)
            case OwnerGone():
                self._leave(event.owner)
            case OwnerWrites():
                self._reasons.writes(event.owner, event.columns)
            case UnitGone():
                self._puts.cancel(event.unit)
                if event.unit in self.table.rows.units:
                    self.table.set_online(self.table.rows.units[event.unit], online=False)
            case UnitLost():
                unit = self.table.rows.units.get(event.unit)
                if unit is not None and not unit.online:
                    self._puts.lose(unit)
            case RecoveryDeadline():
                self._rebuild()
        if self._recovery is not None and self._recovery.collected:
            self._rebuild()

    # Rows

    def _drain(self) -> None:
        """Closed for writing, once the last puts are in: partitions have the rows that are there, tasks no others."""
        if self._fetches.drained or self._recovery is not None or self._missing_units or not self._puts.drained:
            return
        for number, info in self.table.rows.partitions.items():
            if info.declared is None:
                num_rows = info.num_live + info.num_finished + len(info.removed)
                self._open(OpenPartition(number, num_rows))
        self._fetches.drain()

    def _open(self, event: OpenPartition) -> None:
        if self._fetches.stopped:
            return  # else ranks of one gang could disagree on whether the partition is over
        self.table.rows.partition(event.partition).declare(event.num_rows)
        self.table.recount(event.partition)
        for task in self.table.tasks.values():
            task.sized(event.partition)

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
            self.table.removals.give_up(task, event.token, event.rows, failures=event.failures)
        else:
            self.table.release(task, event.token, event.rows, counts=not event.fenced)

    def _join(self, event: Join, request: int) -> None:
        void = [held.token for held in event.holds if held.token < self._oldest_token]
        event.holds = [held for held in event.holds if held.token >= self._oldest_token]
        if self._recovery is not None and self._recovery.collecting:
            self._recovery.joined(event.owner, event.holds)
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

    def _leave(self, owner: str) -> None:
        self._fetches.leave(owner)
        self._reasons.leave(owner)
        if self._recovery is not None and self._recovery.collecting:
            self._recovery.gone(owner)
        for task in self.table.tasks.values():
            if not task.spec.keeps_leases:
                for lease in task.leases.leave(owner):
                    self.table.release(task, lease.token)

    # Waiting

    def _expire(self, request: int) -> None:
        if self._puts.expire(request, self._reasons.blocking):
            return
        if self.table.losses.watchers.pop(request, None) is not None:
            self.table.out.append(Answer(request, NoRows(NoRowsReason.DEADLINE, self.newest_version)))
        else:
            self._fetches.expire(request)

    def _report_losses(self) -> None:
        if not self.table.losses.undecided or (self._recovery is not None and self._recovery.collecting):
            return
        new = self.table.losses.report(self.table.needed())
        if new:  # the fences of their unit are lost with it
            units = {self.table.rows.rows[number].unit.name for number in new} - {""} | self.table.rows.units.keys()
            for task in self.table.tasks.values():
                fence_void_leases(self.table, task, units if task.leases.some_void else ())
            self.table.out.append(Lost(tuple(new)))
            self.table.tell_watchers()

    def _rebuild(self) -> None:
        if self._recovery is None or not self._recovery.collecting:
            return
        self._recovery.rebuild()
        for event in self._recovery.deferred():
            with contextlib.suppress(PeerRefused, LeaseFenced):  # it was void, as its sender finds out by itself
                self._end_lease(event, promised=True)

    def _recover(self) -> None:
        if self._recovery is None:
            return
        self._reasons.recovering = self._recovery.waiting_for
        if self._recovery.over:
            self._recovery = None
            self._reasons.recovering = ""
            self._fetches.open()
