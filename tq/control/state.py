"""The control plane's state over all tasks: events in, instructions out. Pure: no clock, no sockets, no threads.

Events are the messages of `tq.messages` (questions come with a request number) and those of `tq.control.events`. A
request that cannot be answered yet is parked; the event that makes it answerable returns its `Answer`. Every controller
knows all rows of the queue, and hands out those of the tasks that it serves.

    handle(RowsCreated(...), request=6) -> [Answer(6, RowsAccepted())]   or [] (parked: the queue is full)
    handle(FetchRows(...), request=7)   -> [Answer(7, LeaseGrant(...))]     or [] (parked: no rows)
    handle(OutputsWritten(...))         -> [Answer(8, LeaseGrant(...))]     of a fetch that waited for it
    handle(OwnerGone("a"))              -> [Fence("ref", 9, "storage-0", (3, 4))], and after Fenced("ref", 9) ...
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from asyncflow.errors import LeaseFenced, PeerRefused
from tq.control.events import (
    Answer,
    Commit,
    DeadlinePassed,
    DoneElsewhere,
    Event,
    FenceAll,
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
from tq.control.row_table import RowTable
from tq.control.rows import Row, RowSet, RowState, UnitLife
from tq.control.stats import count_rows
from tq.control.task_state import TaskState
from tq.control.wait_reasons import WaitReasons
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
    RemovalReason,
    RowRecords,
    RowsAccepted,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
    Stop,
    TellLost,
    UnitAccepted,
    UnitLoss,
    WatchLost,
)
from tq.policies import TaskSpec
from tq.refill import first_token as first_lease_token

# How a restarted controller finds out where everything stands, before it hands out anything. Pure.
#
# collecting --every known unit registered, every known consumer joined, or the deadline passed--> rebuild leases
# fencing    --FenceAll per served task confirmed by the units that are up--> over

_GROUP_UNKNOWN = -1


@dataclass(frozen=True)
class Recovering:
    """Units and consumers that an earlier incarnation of the controller knew."""

    units: frozenset[str]
    owners: frozenset[str]


def fence_void_leases(table: RowTable, task: TaskState, units: Iterable[str]) -> dict[int, str]:
    """Make units refuse puts under every lease so far except the live ones; returns fence token -> unit."""
    alive = tuple(sorted(task.leases.by_token))
    fences = {table.token(): unit for unit in sorted(units)}
    table.out += [FenceAll(task.spec.name, token, unit, alive) for token, unit in fences.items()]
    return fences


class Recovery:
    """How a restarted controller learns where everything stands before it hands out rows."""

    def __init__(self, table: RowTable, expected: Recovering) -> None:
        self._table = table
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

    def registered(self, unit: str) -> None:
        self._units.discard(unit)
        self._all_units.add(unit)

    def joined(self, owner: str, holds: list[Held]) -> None:
        """Take in a consumer's leases, and stop waiting for the consumer."""
        self._owners.discard(owner)
        earlier = {(one.task, one.token): one for one in self._holds.get(owner, ())}
        for one in holds:
            before = earlier.pop((one.task, one.token), None)
            if before is not None:  # it joined before; acks that it sent since then may not have arrived
                one.rows = sorted({*one.rows, *before.rows})
        self._holds[owner] = [*holds, *earlier.values()]

    def defer(self, event: AckLost | Release) -> None:
        """Keep an ack or release until the leases are rebuilt.

        Raises:
            PeerRefused: an ack cannot be promised, since its lease may have ended in the meantime.
        """
        task = self._table.tasks.get(event.task)
        if isinstance(event, AckLost) and task is not None and not task.spec.keeps_leases:
            raise PeerRefused(f"the controller was restarted and waits for {self.waiting_for}; ack again")
        self._later.append(event)

    def deferred(self) -> list[AckLost | Release]:
        later, self._later = self._later, []
        return later

    def gone(self, owner: str) -> None:
        """Drop what a departed consumer held; trainers keep their leases."""
        self._owners.discard(owner)
        holds = self._holds.pop(owner, ())
        kept = [one for one in holds if one.task in self._table.tasks and self._table.tasks[one.task].spec.keeps_leases]
        if kept:
            self._holds[owner] = kept

    def keeps_leases(self, owner: str) -> bool:
        """Whether a departed consumer is a trainer with leases; other consumers lose theirs."""
        return bool(self._holds.get(owner))

    def cleared(self, partition: int) -> None:
        """Forget holds of a cleared partition's rows."""
        for owner, holds in self._holds.items():
            self._holds[owner] = [one for one in holds if one.partition != partition]

    def rebuild(self) -> None:
        """Stop waiting: restore leases and rounds, and fence all other leases."""
        self._collecting = False
        for name, task in self._table.tasks.items():
            held = [(owner, one) for owner, holds in self._holds.items() for one in holds if one.task == name]
            self._restore(task, held)
            # Any lease of the earlier incarnation that nobody claimed may still have a writer.
            task.leases.some_void = True
            self._fences |= fence_void_leases(self._table, task, self._all_units)
        self._holds.clear()

    def fenced(self, token: int) -> None:
        self._fences.pop(token, None)

    @property
    def _fencing(self) -> set[str]:
        units = self._table.rows.units
        return {unit for unit in self._fences.values() if unit in units and units[unit].online}

    def _restore(self, task: TaskState, held: list[tuple[str, Held]]) -> None:
        """Give each row to the consumer with the newest token for it."""
        newest: dict[int, int] = {}
        for _, one in held:
            if task.spec.keeps_leases:
                self._remember_unknown(task, one)
            else:
                # The lease may be alive for its other rows; a row that is unknown now may be put later.
                task.leases.owe_fence(number for number in one.rows if number not in self._table.rows.rows)
            for number in one.rows:
                newest[number] = max(one.token, newest.get(number, 0))
        for owner, one in sorted(held, key=lambda item: item[1].token):
            rows = [number for number in one.rows if newest[number] == one.token and self._undone(task, number)]
            if one.token in task.leases.by_token:
                task.leases.read(one.token, owner)
            elif rows:
                self._hold(task, one, owner, rows)
            if one.round_index >= 0:
                self._table.assigners[task.spec.name].restore(one, owner)

    def _hold(self, task: TaskState, one: Held, owner: str, rows: Iterable[int]) -> None:
        all_rows = self._table.rows.rows
        for number in rows:
            if all_rows[number].queued & task.bit:
                task.partition(one.partition).queue.withdraw(number, all_rows[number])
        task.lease(one.token, one.partition, rows, owner)

    def _undone(self, task: TaskState, number: int) -> bool:
        row = self._table.rows.rows.get(number)
        return row is not None and bool(row.left & task.bit)

    def _remember_unknown(self, task: TaskState, one: Held) -> None:
        """A trainer holds rows that no unit has: they were lost, and must not be trained again."""
        # Whatever wrote the trainer's inputs was done with these rows, and its outputs are lost like the trainer's.
        upstream = self._table.graph.upstream(task.bit)
        left, written = self._table.rows.every_task & ~upstream, task.inputs | self._table.graph.outputs(upstream)
        for number in one.rows:
            row = Row(UnitLife(""), one.partition, _GROUP_UNKNOWN, 1, written, left, tokens=0, num_bytes=0)
            self._table.add_lost(number, row)


# What a unit says when it meets a controller, or meets it again, against what the controller knows. Pure.
#
# never seen             its rows are new, or were lost elsewhere; its tombstones count as done
# same life as before    its rows are available again; the inventory makes up for lost messages
# another life           it started empty: what is not in the inventory is lost
# a life that is over    reported by the next life. If the controller met it, it knew every row. If not, no controller
#                        of that time may have survived: its rows are lost unless put again since, and what was
#                        finished stays finished


class UnitRegistry:
    """Merges units' inventories into the table; `tasks` names all tasks of the queue."""

    def __init__(self, table: RowTable, arrivals: Arrivals, tasks: list[str]) -> None:
        self._table = table
        self._arrivals = arrivals
        self._tasks = tasks
        self._lives: set[tuple[str, str]] = set()

    def register(self, event: RegisterUnit) -> UnitAccepted:
        self._arrivals.forget(event.unit)
        is_new = (event.unit, event.incarnation) not in self._lives
        unit, old = self._unit(event)
        reply = UnitAccepted(self._tasks, [])
        listed = set()
        for record, number, row, returns in self._records(event, unit):
            listed.add(number)
            kept = self._merge(number, row, reply, pending=record.pending)
            for task in self._table.rows.tasks(kept & row.left):
                reply.commits.setdefault(task, []).append(number)
            for name, times in returns.items():
                task_state = self._table.tasks.get(name)
                if task_state is not None and times and number in self._table.rows.rows:
                    task_state.leases.returned_before(number, times)
        self._take_tombstones(event, [unit] if old is None else [unit, old], listed)
        self._table.set_online(unit, online=True)
        self._table.removals.keep_out(sorted(listed))
        unmet = [one for one in event.earlier if (one.unit, one.incarnation) not in self._lives]
        for life in reversed(unmet):  # newest first: of a row that was in two lives, the later one knows more
            self._take_life(life)
        if is_new and any(self._table.losses):  # lost rows may be put at this unit, which knows no fences
            for served in self._table.tasks.values():
                fence_void_leases(self._table, served, [event.unit] if served.leases.some_void else ())
        for told in [event, *unmet]:
            partitions = {record.partition for record in told.records} | told.finished.keys()
            for partition in partitions | {group.partition for group in told.removed_groups}:
                self._table.drop_finished(partition)
                self._table.recount(partition)
        return reply

    def remove(self, event: RowsRemoved) -> None:
        """A unit dropped rows."""
        self._arrivals.forget(event.unit, set(event.rows))
        all_rows = self._table.rows.rows
        at_unit = [number for number in event.rows if number in all_rows and all_rows[number].unit.name == event.unit]
        here = [number for number in at_unit if not all_rows[number].lost]  # lost ones were in an earlier life
        if event.reason is RemovalReason.GROUP_LEFT:
            self._table.removals.remove(here, event.cause)
            return
        if event.reason is RemovalReason.DROPPED:
            self._table.misplace(here)
            return
        for number in here:
            self._table.remove(number, may_return=True)
        if event.reason is RemovalReason.CLEARED:
            self._table.clear_if_empty(event.partition)

    def lost_records(self, rows: Iterable[int]) -> list[RowRecords]:
        all_rows = self._table.rows
        records: dict[tuple[int, int, int], RowRecords] = {}
        for number in sorted(rows):
            row = all_rows.rows[number]
            key = (row.partition, row.written, row.left)
            if key not in records:
                done = all_rows.tasks(all_rows.every_task & ~row.left)
                records[key] = RowRecords(row.partition, [], [], [], [], [], all_rows.columns(row.written), done)
            records[key].append(
                number, group=row.group, group_size=row.group_size, tokens=row.tokens, num_bytes=row.num_bytes
            )
        return list(records.values())

    def losses(self) -> list[UnitLoss]:
        """Return the rows that were lost with their unit, grouped by the unit's life."""
        lives: dict[tuple[str, str], list[int]] = {}
        for number in self._table.losses:
            unit = self._table.rows.rows[number].unit
            lives.setdefault((unit.name, unit.incarnation), []).append(number)
        return [UnitLoss(*life, self.lost_records(rows)) for life, rows in sorted(lives.items())]

    def adopt(self, losses: Iterable[UnitLoss]) -> None:
        """Take over another controller's losses, for lives of units that this one never met."""
        # If this controller met the life, it knew every row of it: a row that it no longer knows is done.
        for loss in losses:
            if loss.incarnation and (loss.unit, loss.incarnation) not in self._lives:
                self.take_lost(loss.records)

    def done_of(self, losses: Iterable[UnitLoss]) -> dict[str, list[int]]:
        """Return task -> positions (counting all rows of `losses`) of rows that the task is known to be done with."""
        all_rows = self._table.rows
        known: dict[str, list[int]] = {}
        told = [(number, record.partition) for loss in losses for record in loss.records for number in record.rows]
        for k, (number, partition) in enumerate(told):
            row = all_rows.rows.get(number)
            finished = all_rows.every_task if all_rows.is_finished(number, partition) else 0
            for name in all_rows.tasks(finished if row is None else all_rows.every_task & ~row.left):
                known.setdefault(name, []).append(k)
        return known

    def take_lost(self, records: Iterable[RowRecords]) -> None:
        """Take rows that an earlier incarnation knew to be lost with their unit."""
        for record in records:
            for number, row in self._rows(record, UnitLife("")):
                self._table.add_lost(number, row)

    def count_finished(self, partition: int, rows: Iterable[int]) -> None:
        """Count rows that were finished before this controller met their unit, or before it started."""
        known = self._table.rows.finished(partition)
        new = [number for number in rows if number not in known]
        if not new:
            return
        self._table.rows.finish(partition, new, nameless=True)
        for task in self._table.tasks.values():
            task.finished_before(partition, len(new))

    def _finish(self, number: int, *, here: bool) -> None:
        """Mark a row done for all tasks; with `here` False, also tell the unit that has it again by now."""
        table = self._table
        for name in table.rows.tasks(table.rows.rows[number].left):
            if not here and name in table.tasks:
                table.out.append(Commit(name, table.token(), table.rows.by_unit([number])))
            table.mark_done(name, [number])

    def _unit(self, event: RegisterUnit) -> tuple[UnitLife, UnitLife | None]:
        """Return this life of the unit, and the same life if it was given up before."""
        units = self._table.rows.units
        known = units.get(event.unit)
        if known is not None and known.incarnation in ("", event.incarnation):
            known.incarnation = event.incarnation
            return known, None
        if known is not None:
            self._table.lose(known)
        unit = units[event.unit] = UnitLife(event.unit, event.incarnation, online=False)
        return unit, next((dead for dead in self._table.rows.dead_units if _same(dead, unit)), None)

    def _records(self, event: RegisterUnit, unit: UnitLife) -> Iterator[tuple[RowRecords, int, Row, dict[str, int]]]:
        for record in event.records:
            for k, (number, row) in enumerate(self._rows(record, unit)):
                yield record, number, row, {task: times[k] for task, times in record.deliveries.items()}

    def _rows(self, record: RowRecords, unit: UnitLife) -> Iterator[tuple[int, Row]]:
        all_rows = self._table.rows
        written = all_rows.mask(record.columns)
        done = sum(all_rows.bits.get(task, 0) for task in set(record.done))
        for k, number in enumerate(record.rows):
            yield number, Row(
                unit, record.partition, record.groups[k], record.group_sizes[k], written,
                all_rows.every_task & ~done, record.tokens[k], record.num_bytes[k],
            )  # fmt: skip

    def _merge(self, number: int, row: Row, reply: UnitAccepted, *, pending: bool) -> int:
        """Take one row of an inventory; returns the tasks (bits) that are known to be done with it."""
        table = self._table
        known = table.rows.rows.get(number)
        elsewhere = known is not None and not known.lost and known.unit is not row.unit
        if elsewhere or self._arrivals.expects(number):
            reply.drop.append(number)
            if not pending:
                self._arrivals.let_go(number, row)
            return 0
        if known is None or known.lost:
            if pending:
                return self._arrivals.announce(number, row)
            return self._arrivals.merge(number, row, values_kept=known is not None and _same(known.unit, row.unit))
        done = table.rows.every_task & ~known.left
        table.grow(known, row.written, row.tokens - known.tokens, row.num_bytes - known.num_bytes)
        for name in table.rows.tasks(known.left & ~row.left):
            table.mark_done(name, [number])
        table.refresh(number)
        return done

    def _take_life(self, life: RegisterUnit) -> None:
        """Account for a life that ended before this controller met it: its rows were put again, or are lost."""
        table, all_rows = self._table, self._table.rows.rows
        self._take_finished(life, [])
        for record in life.records:
            for number, row in self._rows(record, UnitLife("")):
                known = all_rows.get(number)
                if known is None and not row.left:
                    self.count_finished(record.partition, [number])
                elif known is None:
                    table.add_lost(number, row)
                elif known.lost:  # an earlier incarnation reported it; what was done then stays done
                    known.wrote(row.written)
                    for name in table.rows.tasks(known.left & ~row.left):
                        table.mark_done(name, [number])
                else:  # put again by a producer who knew of the loss: judged by what was put
                    done = table.rows.tasks(table.graph.still_done(row, known) & known.left)
                    if done:
                        table.losses.ack_elsewhere(number)
                    for name in done:
                        table.out.append(Commit(name, table.token(), table.rows.by_unit([number])))
                    for name in done:
                        table.mark_done(name, [number])

    def _take_finished(self, event: RegisterUnit, lives: list[UnitLife]) -> None:
        table, all_rows = self._table, self._table.rows.rows
        first_time = (event.unit, event.incarnation) not in self._lives
        self._lives.add((event.unit, event.incarnation))
        for partition, rows in event.finished.items():
            known = [number for number in rows if number in all_rows]
            for number in known:
                self._finish(number, here=all_rows[number].unit in lives or all_rows[number].lost)
            if first_time:
                self.count_finished(partition, set(rows).difference(known))
        for gone in event.removed_groups if first_time else ():
            finished = table.rows.finished(gone.partition)
            unknown = [number for number in gone.rows if number not in all_rows and number not in finished]
            if unknown:  # an earlier incarnation, or another controller, knew of them
                table.removals.lack(gone.partition, unknown)

    def _take_tombstones(self, event: RegisterUnit, lives: list[UnitLife], listed: set[int]) -> None:
        table, all_rows = self._table, self._table.rows.rows
        self._take_finished(event, lives)
        removed = {number: gone.cause for gone in event.removed_groups for number in gone.rows}
        for number in [number for unit in lives for number in table.rows.at_unit(unit)]:
            if number in listed or number not in all_rows:
                continue
            if number in removed:  # another controller removed it
                table.removals.remove([number], removed[number])
            elif all_rows[number].state is RowState.WITHHELD:
                table.removals.remove([number])
            else:  # cleared, or the put was undone, while the unit was away
                table.remove(number)


def _same(one: UnitLife, other: UnitLife) -> bool:
    return one.name == other.name and one.incarnation == other.incarnation


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
        self._backpressure = Backpressure(row_limit=row_limit, byte_limit=byte_limit)
        self._arrivals = Arrivals(self.table)
        self._puts = PutQueue(self.table, self._arrivals, self._backpressure)
        self._registry = UnitRegistry(self.table, self._arrivals, [spec.name for spec in tasks])
        self._recovery: Recovery | None = None
        # Units of an earlier incarnation that have not registered yet, so their rows are unknown; recovery gives up on
        # them at its deadline.
        self._missing_units = set[str]() if recovering is None else set(recovering.units)
        if recovering is not None and (recovering.units or recovering.owners):
            self._recovery = Recovery(self.table, recovering)
            self._fetches.closed = True
            self._reasons.recovering = self._recovery.waiting_for

    @property
    def newest_version(self) -> int:
        return self._fetches.newest_version

    @property
    def recovering(self) -> bool:
        return self._recovery is not None

    def handle(self, event: Event, request: int = 0) -> list[Instruction]:
        """Apply one event. `request` names the request in its `Answer`; it is unique among those that wait.

        Raises:
            PeerRefused: the event names something unknown, or asks for the impossible. Subclasses: the rows exist, or
                will never fit into the queue.
            LeaseFenced: a lease is void. After any error nothing has changed.
        """
        self._apply(event, request)
        # The order matters: draining needs the last puts and the end of recovery, and `wake` serves what these opened.
        self._puts.admit()
        self._recover()
        self._drain()
        self._fetches.wake()
        self._report_losses()
        out, self.table.out = self.table.out, []
        return out

    def keeps_leases(self, owner: str) -> bool:
        """Whether a departed consumer has leases, or slices of an unfinished step, that await its return."""
        if self._recovery is not None and self._recovery.keeps_leases(owner):
            return True
        return any(assigner.keeps_leases(owner) for assigner in self.table.assigners.values())

    def units(self) -> dict[str, int]:
        """Return the units that are up -> bytes of live rows that they hold."""
        return {name: unit.num_bytes for name, unit in self.table.rows.units.items() if unit.online}

    def away(self) -> list[str]:
        """Return the units that are down but may come back with their rows."""
        known = {name for name, unit in self.table.rows.units.items() if not unit.online}
        return sorted(known | self._missing_units)

    def known_rows(self) -> dict[int, list[int]]:
        """Return partition -> rows that exist or are finished."""
        return self.table.rows.known_rows()

    def take_finished(self) -> dict[int, RowSet]:
        """Return partition -> rows that were finished since the last call, for the shell to make durable.

        Units remember finished rows only for a while, and not beyond their death. A later incarnation needs them to
        count right (`RowsFinished`), and so that nobody works on such a row when it is put again.
        """
        return self.table.rows.take_finished()

    def any_away(self, rows: Iterable[int]) -> bool:
        """Whether some rows are lost, or would count as lost when put again: then it matters what tasks write."""
        all_rows = self.table.rows.rows
        return any(number in all_rows and all_rows[number].state in (RowState.AWAY, RowState.LOST) for number in rows)

    def removed_rows(self, partition: int) -> RowSet:
        """Return the rows that a partition will never have."""
        info = self.table.rows.partitions.get(partition)
        return RowSet() if info is None else info.removed.copy()

    @property
    def losses_changed(self) -> bool:
        return bool(self.table.losses.changed)

    def take_losses(self) -> dict[int, list[RowRecords]]:
        """Return, for each part that changed, its lost rows and the tasks done with them; the shell makes it durable.

        No unit remembers these rows: a later incarnation (`RowsLost`) asks for them, so that nobody works on them
        twice.
        """
        return {part: self._registry.lost_records(rows) for part, rows in self.table.losses.take().items()}

    def losses(self) -> list[UnitLoss]:
        """Return the content of `TellLost`: lost rows by life of their unit."""
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
                if self._recovery is None:  # during recovery the unit may only be late
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
        """Closed for writing and the last puts are in: size the open partitions by the rows that are there."""
        if self._fetches.drained or self._recovery is not None or self._missing_units or not self._puts.drained:
            return
        for number, info in self.table.rows.partitions.items():
            if info.declared is None:
                num_rows = info.num_live + info.num_finished + len(info.removed)
                self._open(OpenPartition(number, num_rows))
        self._fetches.drain()

    def _open(self, event: OpenPartition) -> None:
        if self._fetches.stopped:
            return  # otherwise ranks of a gang could disagree on whether it is over
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
        if new:  # their unit's fences were lost with it
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
            with contextlib.suppress(PeerRefused, LeaseFenced):  # void: its sender finds out on its own
                self._end_lease(event, promised=True)

    def _recover(self) -> None:
        if self._recovery is None:
            return
        self._reasons.recovering = self._recovery.waiting_for
        if self._recovery.over:
            self._recovery = None
            self._reasons.recovering = ""
            self._fetches.open()
