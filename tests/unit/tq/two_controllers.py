"""Two controllers that serve different tasks, beside units, producers and consumers, for random tests to drive."""

from collections.abc import Iterable
from typing import Any

from held_unit import ALL_TASKS, NAMES, Change, HeldUnit, outputs_of
from modelled_controller import CONTROLLER_OF, SERVED, Controller
from queue_model import PARTITIONS, ROWS, SIZE, UNITS, partition_of

from asyncflow.errors import LeaseFenced, PeerRefused, RowsExist
from tq.control.events import (
    Answer,
    DoneElsewhere,
    Fenced,
    ForwardAck,
    OrderFenceRows,
    OrderFenceTask,
    OwnerGone,
    PutAgain,
    RecalledFinished,
    RecalledLosses,
    RecoveryDeadline,
    TasksWrite,
    UnitGone,
)
from tq.control.state import Recovering
from tq.messages import (
    AckLost,
    FetchRows,
    Held,
    Join,
    LeaseGrant,
    OpenPartition,
    RegisterUnit,
    Release,
    RowsCreated,
    TellLost,
    UnitAccepted,
)

OWNERS = ("a", "b", "trainer")
ALL_ROWS = range(ROWS * len(PARTITIONS))


class TwoControllers:
    """Asserts that nobody gets what another holds, or what was acked."""

    tasks = ALL_TASKS

    def reset(self) -> None:
        self.noted: dict[str, set[str]] = {}
        """Which columns tasks write, in the job store."""
        self.controllers = {name: Controller(name, self.tasks) for name in SERVED}
        self.units = {name: HeldUnit(name, tuple(SERVED)) for name in UNITS}
        self.requests = 0
        self.answers: dict[int, Any] = {}
        self.leases: dict[tuple[str, int], Held] = {}
        self.where: dict[tuple[int, int], str] = {}
        self.held: dict[tuple[str, int], int] = {}
        self.acked: set[tuple[str, int]] = set()
        self.worked_on: set[tuple[str, int]] = set()
        """Stored at a unit or acked; a consumer may never hear that its ack counted."""
        self.to_put: set[int] = set(ALL_ROWS)
        """Of which no producer knows that they are in the queue."""
        self.acks_to_tell: list[tuple[str, AckLost]] = []
        self.lives = dict.fromkeys(OWNERS, 0)
        for name in SERVED:
            self.boot(name, None)
        for unit in UNITS:
            for name in SERVED:
                self.connect(unit, name)

    # Controllers

    def ask_lead(self) -> None:
        """The other controller tells of what it lost, and hears who was done with it."""
        losses = self.controllers["other"].state.list_losses()
        reply = self.apply("lead", TellLost(losses))
        rows = [row for loss in losses for record in loss.records for row in record.rows]
        done = {task: [rows[k] for k in places] for task, places in reply.commits.items()}
        self.apply("other", DoneElsewhere(done))

    def boot(self, name: str, recovering: Recovering | None) -> None:
        controller = self.controllers[name]
        controller.boot(recovering)
        controller.state.handle(TasksWrite(self.noted))
        for partition in PARTITIONS:
            self.apply(name, OpenPartition(partition, ROWS))
        for partition, rows in controller.finished.items():
            self.apply(name, RecalledFinished(partition, tuple(rows)))
        self.apply(name, RecalledLosses(tuple(controller.lost)))

    def apply(self, name: str, event: Any) -> Any:
        """Tell a controller; returns the answer of a request, if it has one already."""
        controller = self.controllers[name]
        self.requests += 1
        request = self.requests
        if isinstance(event, FetchRows):
            controller.parked[request] = event
        putting = isinstance(event, RowsCreated) and controller.state.any_away(event.rows)
        if putting or isinstance(event, RegisterUnit | DoneElsewhere):
            controller.state.handle(TasksWrite(self.noted))
        instructions = controller.state.handle(event, request)
        controller.save(unit_gone=isinstance(event, UnitGone))
        for instruction in instructions:
            match instruction:
                case Answer():
                    assert instruction.request not in self.answers, "a request was answered twice"
                    self.answers[instruction.request] = instruction.reply
                    fetch = controller.parked.pop(instruction.request, None)
                    if fetch is not None and isinstance(instruction.reply, LeaseGrant):
                        self.granted(fetch, instruction.reply)
                case OrderFenceRows() | OrderFenceTask():
                    controller.fences.append(instruction)
                case PutAgain() if name == "lead":
                    self.to_put.update(instruction.rows)
                case ForwardAck():
                    self.pass_on(instruction)
        return self.answers.get(request)

    def pass_on(self, order: ForwardAck) -> None:
        for unit, rows in order.rows.items():
            for row in rows:
                try:
                    self.units[unit].commit(order.task, order.token, row)
                except LeaseFenced:
                    assert row not in self.units[unit].rows or order.task in self.units[unit].rows[row].commits

    def carry_out(self, name: str, fence: OrderFenceRows | OrderFenceTask) -> None:
        """A unit carries out a fence, and confirms when the controller knows what it had stored."""
        controller = self.controllers[name]
        controller.fences.remove(fence)
        link = self.units[fence.unit].links[name]
        if link.connected:
            self.units[fence.unit].fence(fence)
            self.flush(fence.unit, name)
        else:
            link.owed.append(fence)
        self.void(fence)
        self.apply(name, Fenced(fence.task, fence.token))

    def void(self, fence: OrderFenceRows | OrderFenceTask) -> None:
        """Forget who held what a fence is about; of other void leases the units know (`HeldUnit.refuses`)."""
        for (task, row), token in list(self.held.items()):
            if isinstance(fence, OrderFenceTask):
                void = token in fence.alive and not self.claimed(task, row, token)
            else:
                void = row in fence.rows
            if task == fence.task and token < fence.token and void:
                del self.held[task, row]

    def claimed(self, task: str, row: int, token: int) -> bool:
        return any(it.task == task and it.token == token and row in it.rows for it in self.leases.values())

    # Units

    def connect(self, unit: str, name: str) -> None:
        """A unit registers, after it heard what it missed."""
        held_unit, link = self.units[unit], self.units[unit].links[name]
        if not link.noticed:
            self.notice(unit, name)
        for fence in link.owed:
            held_unit.fence(fence)
        for fence in [fence for fence in self.controllers[name].fences if fence.unit == unit]:
            if isinstance(fence, OrderFenceTask):
                held_unit.fence(fence)
                self.void(fence)
        link.owed.clear()
        link.connected = True
        reply = self.apply(name, held_unit.inventory())
        assert isinstance(reply, UnitAccepted)
        held_unit.note_accepted(name, reply)
        self.hear(held_unit)

    def notice(self, unit: str, name: str) -> None:
        """A controller sees the end of a channel."""
        self.units[unit].links[name].noticed = True
        self.apply(name, UnitGone(unit))

    def break_link(self, unit: str, name: str) -> None:
        link = self.units[unit].links[name]
        link.outbox.clear()
        link.connected, link.noticed = False, not link.connected and link.noticed

    def flush(self, unit: str, name: str) -> None:
        while self.units[unit].links[name].outbox:
            self.deliver(unit, name)

    def deliver(self, unit: str, name: str, *, answer_arrives: bool = True) -> None:
        """A controller hears the oldest message of a link."""
        message, change = self.units[unit].links[name].outbox.pop(0)
        try:
            reply = self.apply(name, message)
        except PeerRefused as error:
            reply = error
        assert reply is not None or not isinstance(message, RowsCreated), "nothing limits the queue"
        if answer_arrives:
            self.units[unit].answered(name, change, reply)
            self.hear(self.units[unit])

    def hear(self, unit: HeldUnit) -> None:
        """Clients hear the outcome of their puts."""
        for change in unit.was_done:
            if change.kind == "commit":
                self.commit_counts(change)
        for change in unit.failed:
            if change.kind in ("create", "confirm") and not change.orphan:
                self.not_put(change.rows, exist=change.exist)
        unit.was_done.clear()
        unit.failed.clear()

    def commit_counts(self, change: Change) -> None:
        (row,) = change.rows
        for lease in self.leases.values():
            if (lease.task, lease.token) == (change.task, change.token) and row in lease.rows:
                lease.rows.remove(row)
                self.count(change.task, row)

    def unit_dies(self, unit: str) -> None:
        """It starts again, empty: acks that were not confirmed are given again, new rows are put again."""
        for change in self.units[unit].changes:
            if change.kind == "commit" and outputs_of(change.task, change.rows[0]):  # made again, by whomever
                self.held.pop((change.task, change.rows[0]), None)
        self.forget_void(unit)
        self.units[unit].start()
        self.hear(self.units[unit])
        for name in SERVED:
            self.break_link(unit, name)

    def forget_void(self, unit: str) -> None:
        """A unit dies: leases that it refuses stay void, as with `void`, though its next life knows of no fence."""
        it = self.units[unit]
        for (task, row), token in list(self.held.items()):
            if row in it.rows and it.refuses(task, token, row):
                del self.held[task, row]

    # Consumers

    def owner(self, name: str) -> str:
        return f"{name}#{self.lives[name]}"

    def granted(self, fetch: FetchRows, lease: LeaseGrant) -> None:
        for row, unit in zip(lease.rows, lease.units, strict=True):
            if outputs_of(fetch.task, row) and not self.values_exist(fetch.task, row):
                self.acked.discard((fetch.task, row))
            assert (fetch.task, row) not in self.acked, f"row {row} was acked by {fetch.task}, and is handed out again"
            before = self.held.get((fetch.task, row))
            void = before is None or self.units[unit].refuses(fetch.task, before, row)
            assert void, f"row {row} is in two hands of {fetch.task}"
            self.held[fetch.task, row] = lease.token
            self.where[lease.token, row] = unit
        self.leases[fetch.owner, lease.token] = Held(fetch.task, lease.token, lease.partition, list(lease.rows))

    def values_exist(self, task: str, row: int) -> bool:
        columns = outputs_of(task, row)
        return any(row in unit.rows and columns <= unit.rows[row].columns for unit in self.units.values())

    def count(self, task: str, row: int) -> None:
        """A consumer is told that its ack counts."""
        assert (task, row) not in self.acked, f"row {row} was acked twice by {task}"
        self.acked.add((task, row))
        self.worked_on.add((task, row))
        self.held.pop((task, row), None)

    def fetch(self, task: str, num_rows: int, name: str) -> None:
        owner = self.owner("trainer" if task == "train" else name)
        self.apply(CONTROLLER_OF[task], FetchRows(task, owner, num_rows, 0, 1))

    def finish(self, owner: str, lease: Held, row: int, *, told: str = "all") -> None:
        """A holder, dead or alive, is done with a row. `told`: who hears of an ack of a lost row, now or later."""
        # A unit does, before it stores them.
        self.noted.setdefault(lease.task, set()).update(outputs_of(lease.task, row))
        unit = self.where[lease.token, row]  # or its next life: consumers know units by name
        try:
            self.units[unit].commit(lease.task, lease.token, row)
            self.worked_on.add((lease.task, row))
            self.hear(self.units[unit])
        except LeaseFenced:
            if not outputs_of(lease.task, row):
                self.ack_lost(owner, lease, row, told)
            else:
                self.drop(lease, row)

    def drop(self, lease: Held, row: int) -> None:
        """The holder heard that the lease is void."""
        self.apply(CONTROLLER_OF[lease.task], Release(lease.task, lease.token, [row], fenced=True))
        lease.rows.remove(row)

    def release(self, lease: Held, rows: list[int]) -> None:
        """A holder returns rows that it put nothing for."""
        told = {
            row
            for unit in self.units.values()
            for change in unit.changes
            if (change.task, change.token) == (lease.task, lease.token)
            for row in change.rows
        }
        rows = [row for row in rows if row not in told]
        self.apply(CONTROLLER_OF[lease.task], Release(lease.task, lease.token, rows))
        lease.rows = [row for row in lease.rows if row not in rows]

    def ack_lost(self, owner: str, lease: Held, row: int, told: str) -> None:
        ack = AckLost(lease.task, lease.token, [row])
        first, second = sorted(SERVED, key=lambda name: name != CONTROLLER_OF[lease.task])
        try:
            self.apply(first, ack)
        except LeaseFenced:
            self.drop(lease, row)
        except PeerRefused:
            pass  # again later
        else:
            lease.rows.remove(row)
            self.count(lease.task, row)
            if told == "all":
                self.apply(second, ack)
            elif told == "later":
                self.acks_to_tell.append((second, ack))

    def holds_of(self, owner: str) -> list[Held]:
        return [
            Held(lease.task, lease.token, lease.partition, sorted(lease.rows))
            for (holder, _), lease in self.leases.items()
            if holder == owner and lease.rows
        ]

    def consumer_dies(self, name: str) -> None:
        for controller in SERVED:
            self.apply(controller, OwnerGone(self.owner(name)))
        self.lives[name] += 1

    def controller_dies(self, name: str) -> None:
        """All its channels end with it; consumers join the next incarnation."""
        for unit in UNITS:
            self.break_link(unit, name)
            self.units[unit].links[name].noticed = True
        owners = [self.owner(owner) for owner in OWNERS]
        self.boot(name, Recovering(frozenset(UNITS), frozenset(owners)))
        for owner in owners:
            self.apply(name, Join(owner, self.holds_of(owner)))

    # Producers

    def put(self, unit: str, rows: list[int]) -> None:
        """A client puts rows of one partition; it hears the outcome later."""
        self.to_put.difference_update(rows)
        try:
            self.units[unit].create(rows)
        except PeerRefused as error:
            self.not_put(rows, exist=isinstance(error, RowsExist))

    def not_put(self, rows: list[int], *, exist: bool) -> None:
        """A put failed. Of a single row that exists its producer knows enough; of several some may not exist."""
        if len(rows) > 1 or not exist:
            self.to_put.update(rows)

    def producers_die(self) -> None:
        """Nobody hears the end of their puts; the next ones put those rows again."""
        for change in [change for unit in self.units.values() for change in unit.changes]:
            if change.kind in ("create", "confirm"):
                change.orphan = True
                self.to_put.update(change.rows)

    def at_a_unit(self, row: int) -> bool:
        return any(row in unit.rows or row in unit.finished for unit in self.units.values())

    def missing(self) -> list[int]:
        """Return rows that somebody wants to put and that are at no unit."""
        return sorted(row for row in self.to_put if not self.at_a_unit(row))

    # Quiet

    def everybody_talks(self) -> None:
        for unit in UNITS:
            for name in SERVED:
                if not self.units[unit].links[name].connected:
                    self.connect(unit, name)
        while any(link.outbox for unit in self.units.values() for link in unit.links.values()):
            for unit in UNITS:
                for name in SERVED:
                    self.flush(unit, name)
        for name, controller in self.controllers.items():
            while controller.fences:
                self.carry_out(name, controller.fences[0])

    def finish_everything(self, rows: Iterable[int]) -> None:
        """Once everything is up and somebody does the work, all of it is done, and both controllers know."""
        work = {(task, row) for task in NAMES for row in rows}
        for _ in range(40):
            self.drain()
            if work <= self.worked_on and not any(it.state.stats().live_rows for it in self.controllers.values()):
                break
        assert work <= self.worked_on, f"rows were lost, or starve: {sorted(work - self.worked_on)}"
        left = {name: sorted(it.state.known_rows().items()) for name, it in self.controllers.items()}
        assert [it.state.stats().live_rows for it in self.controllers.values()] == [0, 0], f"rows stay: {left}"
        assert not any(unit.rows for unit in self.units.values())

    def drain(self) -> None:
        self.everybody_talks()
        for name in SERVED:
            self.apply(name, RecoveryDeadline())
        while self.acks_to_tell:
            self.apply(*self.acks_to_tell.pop(0))
        self.ask_lead()
        for rows in groups(self.missing()):
            self.put("u0", rows)
        for row in sorted(self.to_put):
            self.put("u0", [row])
        self.everybody_talks()
        for name in ("a", "b"):
            self.consumer_dies(name)
        self.everybody_talks()
        for task in NAMES:
            self.fetch(task, 99, "a")
            for (owner, _), lease in list(self.leases.items()):
                for row in list(lease.rows):
                    self.finish(owner, lease, row)
            self.everybody_talks()


def groups(rows: list[int]) -> list[list[int]]:
    """Sort rows by group."""
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(row // SIZE, []).append(row)
    assert all(partition_of(members[0]) == partition_of(members[-1]) for members in found.values())
    return list(found.values())
