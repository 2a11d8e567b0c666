"""One controller beside two units and consumers, and what must never happen to them, for random tests to drive."""

from typing import Any

from queue_model import (
    OUTPUTS,
    OWNERS,
    PARTITIONS,
    RANKS,
    ROWS,
    SIZE,
    TASKS,
    UNITS,
    FakeUnit,
    Stored,
    check_transitions,
    task_rows,
)

from asyncflow.errors import AsyncFlowError, LeaseFenced, PeerRefused
from tq.control.events import (
    Answer,
    Fenced,
    ForwardAck,
    OrderFenceRows,
    OrderFenceTask,
    PutAgain,
    RecalledFinished,
    RecalledLosses,
    TasksWrite,
)
from tq.control.state import ControlState, Recovering
from tq.messages import (
    AckLost,
    FetchRound,
    FetchRows,
    Held,
    LeaseGrant,
    OpenPartition,
    Release,
    RowRecords,
    RowsAccepted,
    RowsConfirmed,
    RowsCreated,
    UnitAccepted,
)


class ModelledQueue:
    """Carries out what the controller asks for, late; asserts that no row is in two hands, or trained twice."""

    tasks = TASKS

    def reset(self) -> None:
        self.starts = 0
        self.version = 0
        self.finished_durably: dict[int, list[int]] = {}
        self.lost_durably: dict[int, list[RowRecords]] = {}
        self.noted: dict[str, frozenset[str]] = {}
        """Which columns tasks write, in the job store."""
        self.units = {name: FakeUnit(name) for name in UNITS}
        self.requests = 0
        self.answers: dict[int, Any] = {}
        self.asked: dict[int, Any] = {}
        self.holds: dict[str, dict[int, Held]] = {}
        self.where: dict[int, dict[int, str]] = {}
        self.trained: set[int] = set()
        self.held: dict[tuple[str, int], int] = {}
        self.to_put = list(range(ROWS * len(PARTITIONS) // SIZE))
        self.known: set[int] = set()
        self.lost: list[int] = []
        self.place = dict.fromkeys(RANKS, (PARTITIONS[0], 0))
        self.waiting: dict[int, int] = {}
        self.unread: dict[int, int] = {}
        self.rounds: dict[tuple[int, int], Any] = {}
        self.ends: dict[int, int] = {}
        self.lives = dict.fromkeys((*OWNERS, "rank0", "rank1"), 0)
        self.boot(None)
        for name in UNITS:
            self.connect(name)

    def boot(self, recovering: Recovering | None) -> None:
        self.starts += 1
        self.requests_at_boot = self.requests
        self.met: set[str] = set()
        self.fences: list[OrderFenceRows | OrderFenceTask] = []
        self.state = ControlState(
            self.tasks, version=self.version, first_token=(self.starts << 20) + 1, recovering=recovering
        )
        self.state.handle(TasksWrite(self.noted))
        for partition in PARTITIONS:
            self.apply(OpenPartition(partition, ROWS))
        for partition, rows in self.finished_durably.items():
            self.apply(RecalledFinished(partition, tuple(rows)))
        self.apply(RecalledLosses(tuple(record for records in self.lost_durably.values() for record in records)))

    def apply(self, event: Any, request: int = 0) -> None:
        before = task_rows(self.state)
        instructions = self.state.handle(event, request)
        check_transitions(before, task_rows(self.state))
        if self.state.losses_changed:  # the shell makes them durable before anybody hears of them
            self.lost_durably |= self.state.take_losses()
            self.remember()
        for instruction in instructions:
            match instruction:
                case Answer():
                    assert instruction.request not in self.answers, "a request was answered twice"
                    self.answers[instruction.request] = instruction.reply
                    self.answered(self.asked.get(instruction.request), instruction.reply)
                case OrderFenceRows() | OrderFenceTask():
                    self.fences.append(instruction)
                case PutAgain():
                    self.lost += instruction.rows
                case ForwardAck():
                    for name, rows in instruction.rows.items():
                        try:
                            self.units[name].commit(instruction.task, instruction.token, list(rows))
                        except LeaseFenced:
                            assert name not in self.state.units(), "the unit that has a row does not take its ack"

    def ask(self, event: Any) -> Any:
        self.requests += 1
        self.asked[self.requests] = event
        self.apply(event, self.requests)
        return self.answers.get(self.requests)

    def answered(self, event: Any, reply: Any) -> None:
        if isinstance(event, FetchRows | FetchRound) and isinstance(reply, LeaseGrant):
            self.granted(event, reply)
        elif isinstance(event, RowsCreated):
            unit = self.units[event.unit]
            if isinstance(reply, RowsAccepted):
                self.known.update(event.rows)
                unit.journal.apply_change(event)
                unit.journal.apply_change(RowsConfirmed(event.unit, event.rows))
                unit.learn({task: [event.rows[k] for k in at] for task, at in reply.commits.items()})
            else:
                assert isinstance(reply, AsyncFlowError)
                for row in event.rows:
                    unit.rows.pop(row, None)

    def granted(self, event: Any, lease: LeaseGrant) -> None:
        again = lease.token in self.holds.setdefault(event.owner, {})
        if isinstance(event, FetchRound):
            self.check_round(event, lease)
        for row, unit in zip(lease.rows, lease.units, strict=True):
            assert event.task != "train" or row not in self.trained, "a trained row was handed out again"
            before = self.held.get((event.task, row), lease.token)
            assert before == lease.token or self.units[unit].refuses(event.task, before, row), "a row is in two hands"
            self.held[event.task, row] = lease.token
        held = Held(event.task, lease.token, lease.partition, list(lease.rows))
        if isinstance(event, FetchRound):
            held.round_index, held.rank, held.num_ranks = event.round_index, event.rank, event.num_ranks
            held.largest_slice, held.last, held.total_rows = lease.largest_slice, lease.last, lease.total_rows
            held.step, held.slice_rows = event.partition, len(lease.rows)
        else:
            assert not again and lease.rows
            if event.task == "ref":
                assert lease.rows == sorted(lease.rows), "order is not kept"
        assert all(lease.groups.count(group) <= SIZE for group in lease.groups)
        self.holds[event.owner][lease.token] = held
        self.where.setdefault(lease.token, {}).update(zip(lease.rows, lease.units, strict=True))

    def check_round(self, event: FetchRound, lease: LeaseGrant) -> None:
        key = (event.partition, event.round_index)
        assert self.rounds.setdefault(key, lease.last) == lease.last, "ranks do not agree on the last round"
        assert len(lease.rows) <= lease.largest_slice
        del self.waiting[event.rank]
        self.unread.pop(event.rank, None)
        self.place[event.rank] = (event.partition, event.round_index + 1)

    # Units

    def connect(self, name: str) -> None:
        unit = self.units[name]
        unit.connected = True
        for fence in unit.owed:
            unit.fence(fence)
        for fence in [fence for fence in self.fences if isinstance(fence, OrderFenceTask) and fence.unit == name]:
            unit.fence(fence)
            self.void(fence)
        unit.owed.clear()
        unit.unsure.clear()
        unit.announced.clear()
        reply = self.ask(unit.inventory())
        self.met.add(name)
        self.remember()
        assert isinstance(reply, UnitAccepted)
        self.known.update(unit.rows)
        for row in reply.drop:
            unit.rows.pop(row, None)
        unit.learn(reply.commits)
        unit.note_accepted()

    def remember(self) -> None:
        """What the shell makes durable when a unit goes, or losses change."""
        for partition, rows in self.state.take_finished().items():
            self.finished_durably[partition] = sorted({*self.finished_durably.get(partition, ()), *rows})

    def flush(self, name: str) -> None:
        unit = self.units[name]
        while unit.outbox:
            self.deliver_one(unit)

    def deliver_one(self, unit: FakeUnit) -> None:
        event = unit.outbox.pop(0)
        if isinstance(event, RowsCreated):
            try:
                self.ask(event)
            except PeerRefused:
                for row in event.rows:
                    unit.rows.pop(row, None)
        else:
            self.apply(event)
            unit.journal.apply_change(event)

    def announce(self, unit: FakeUnit, rows: list[int], partition: int) -> None:
        rows = [row for row in rows if row not in unit.rows]
        if not rows:
            return
        for row in rows:
            unit.rows[row] = Stored({"x"})
        groups = [row // SIZE for row in rows]
        unit.outbox.append(RowsCreated(unit.name, partition, rows, groups, ["x"], [1] * len(rows), 1, SIZE))

    @staticmethod
    def forget_outbox(unit: FakeUnit) -> None:
        """What was not delivered is in the next inventory, and not confirmed to anybody before that."""
        for event in unit.outbox:
            if isinstance(event, RowsCreated):
                unit.announced += event.rows
            elif event.task == "train":
                unit.unsure.update({row: unit.acks[row] for row in event.rows})
        unit.outbox.clear()

    def unconfirmed(self, row: int, token: int) -> None:
        """An ack that the controller never heard of: the trainer was not told that it counts, and gives it again."""
        known = self.state.table.rows.get(row)
        for holds in self.holds.values():
            open_there = known is None or "train" in self.state.table.task_names(known.open_tasks)
            if token in holds and open_there:
                holds[token].rows.append(row)
                self.trained.discard(row)
                self.held["train", row] = token

    # Consumers

    def owner(self, name: str) -> str:
        return f"{name}#{self.lives[name]}"

    def finish(self, owner: str, held: Held, rows: list[int]) -> None:
        for row in rows:
            unit = self.units[self.where[held.token][row]]
            try:
                if not unit.connected:
                    # Like a TransportError here: the ack may be told to the controller.
                    raise LeaseFenced("unreachable")
                self.noted[held.task] = OUTPUTS[held.task]
                new = unit.commit(held.task, held.token, [row])
            except LeaseFenced:
                self.not_stored(owner, held, row)
                continue
            if held.task == "train" and new:
                assert row not in self.trained, "a row was trained twice"
                self.trained.add(row)
            held.rows.remove(row)
            self.held.pop((held.task, row), None)

    def not_stored(self, owner: str, held: Held, row: int) -> None:
        if held.task == "train":
            try:
                self.apply(AckLost("train", held.token, [row]))
            except LeaseFenced:
                held.rows.remove(row)
            except PeerRefused:
                pass
            else:
                assert row not in self.trained, "a row was trained twice"
                self.trained.add(row)
                held.rows.remove(row)
                self.held.pop(("train", row), None)
        elif owner in self.holds:
            self.apply(Release(held.task, held.token, [row]))
            held.rows.remove(row)

    def holds_of(self, owner: str) -> list[Held]:
        """What a client vouches for: rows whose ack was not confirmed are among them."""
        holds = []
        for token, held in self.holds.get(owner, {}).items():
            unsure = [row for unit in self.units.values() for row, by in unit.unsure.items() if by == token]
            if held.rows or unsure or held.round_index >= 0:
                fields = {name: getattr(held, name) for name in Held.__struct_fields__}
                holds.append(Held(**{**fields, "rows": sorted({*held.rows, *unsure})}))
        return holds

    def carry_out(self, fence: OrderFenceRows | OrderFenceTask) -> None:
        unit = self.units[fence.unit]
        if unit.connected:
            unit.fence(fence)
            self.flush(unit.name)
        else:
            unit.owed.append(fence)
        self.void(fence)
        self.apply(Fenced(fence.task, fence.token))

    def void(self, fence: OrderFenceRows | OrderFenceTask) -> None:
        """Forget who held what a fence is about; of other void leases the units know (`FakeUnit.refuses`)."""
        for (task, row), token in list(self.held.items()):
            if isinstance(fence, OrderFenceTask):
                claimed = any(token in holds and row in holds[token].rows for holds in self.holds.values())
                void = token in fence.alive and not claimed
            else:
                void = row in fence.rows
            if task == fence.task and token < fence.token and void:
                del self.held[task, row]
