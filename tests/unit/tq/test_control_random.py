"""Control state under random events: owners, units and the controller die, messages are late, fences are late."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncflow.errors import AsyncFlowError, PeerRefused, Superseded
from tq import TaskSpec
from tq.control.state import (
    Answer,
    Commit,
    ControlState,
    DeadlinePassed,
    Fence,
    FenceAll,
    Fenced,
    Lost,
    OwnerGone,
    Recovering,
    RecoveryDeadline,
    RowsFinished,
    UnitGone,
    UnitLost,
)
from tq.messages import (
    AckLost,
    FetchRound,
    FetchRows,
    GiveBack,
    Granted,
    Held,
    Join,
    NoRows,
    OpenPartition,
    OutputsWritten,
    RegisterUnit,
    RowRecords,
    RowsAccepted,
    RowsCreated,
    UnitAccepted,
)

SIZE = 2
ROWS = 8
PARTITIONS = (1, 2, 3)
TASKS = (
    TaskSpec("rollout", frozenset({"x"}), frozenset({"rollout"}), whole_groups=True),
    TaskSpec("ref", frozenset({"x", "rollout"}), frozenset({"ref"})),
    TaskSpec("train", frozenset({"rollout", "ref"}), whole_groups=True, keeps_leases=True),
)
NAMES = [task.name for task in TASKS]
OUTPUTS = {task.name: task.outputs for task in TASKS}
OWNERS = ("a", "b", "c")
UNITS = ("u0", "u1")
RANKS = (0, 1)


@dataclass
class Stored:
    """A row at a unit."""

    columns: set[str]
    commits: dict[str, int] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)


class FakeUnit:
    """What a unit must do, with the notifications that it still has to deliver."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.life = 1
        self.connected = False
        self.start()

    def start(self) -> None:
        self.rows: dict[int, Stored] = {}
        self.acks: dict[int, int] = {}
        self.unsure: dict[int, int] = {}
        self.announced: list[int] = []
        self.finished: dict[int, list[int]] = {}
        self.outbox: list[Any] = []
        self.owed: list[Fence | FenceAll] = []
        self.floors: dict[str, tuple[int, frozenset[int]]] = {}

    def inventory(self) -> RegisterUnit:
        records = [
            RowRecords(
                partition_of(row), [row], [row // SIZE], [SIZE], [1], [1], sorted(it.columns), sorted(it.commits)
            )
            for row, it in self.rows.items()
        ]
        return RegisterUnit(self.name, str(self.life), records, {p: list(rows) for p, rows in self.finished.items()})

    def commit(self, task: str, token: int, rows: list[int]) -> list[int]:
        """Store outputs; returns the rows that were not stored before."""
        floor, alive = self.floors.get(task, (0, frozenset()))
        new = []
        for row in rows:
            it = self.rows.get(row)
            if it is None:
                raise Superseded("not here")
            if it.commits.get(task) == token:
                continue
            if task in it.commits or token < it.fences.get(task, 0) or (token < floor and token not in alive):
                raise Superseded("somebody else's")
            new.append(row)
        for row in new:
            self.rows[row].commits[task] = token
            if task == "train":
                self.acks[row] = token
            self.rows[row].columns |= OUTPUTS[task]
        if self.connected:
            self.outbox.append(OutputsWritten(self.name, task, token, rows, sorted(OUTPUTS[task]), [1] * len(rows), 1))
        self.sweep()
        return new

    def fence(self, fence: Fence | FenceAll) -> None:
        if isinstance(fence, FenceAll):
            self.floors[fence.task] = (fence.token, frozenset(fence.alive))
            return
        for row in fence.rows.get(self.name, ()):
            if row in self.rows:
                self.rows[row].fences[fence.task] = max(fence.token, self.rows[row].fences.get(fence.task, 0))

    def learn(self, commits: dict[str, list[int]]) -> None:
        for task, rows in commits.items():
            for row in rows:
                if row in self.rows:
                    self.rows[row].commits.setdefault(task, -1)
        self.sweep()

    def sweep(self) -> None:
        for row in [row for row, it in self.rows.items() if len(it.commits) == len(TASKS)]:
            del self.rows[row]
            self.finished.setdefault(partition_of(row), []).append(row)


def partition_of(row: int) -> int:
    return row // ROWS + 1


class QueueMachine(RuleBasedStateMachine):
    """A controller beside two units and consumers; every message may be late, everybody may die."""

    @initialize()
    def start(self) -> None:
        self.starts = 0
        self.forgetful = False
        self.durable: dict[int, list[int]] = {}
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
        self.rounds: dict[tuple[int, int], Any] = {}
        self.ends: dict[int, int] = {}
        self.lives = dict.fromkeys((*OWNERS, "rank0", "rank1"), 0)
        self.boot(None)
        for name in UNITS:
            self.connect(name)

    # The controller

    def boot(self, recovering: Recovering | None) -> None:
        self.starts += 1
        self.requests_at_boot = self.requests
        self.met: set[str] = set()
        self.fences: list[Fence | FenceAll] = []
        self.state = ControlState(TASKS, first_token=(self.starts << 20) + 1, recovering=recovering)
        for partition in PARTITIONS:
            self.apply(OpenPartition(partition, ROWS))
        for partition, rows in self.durable.items():
            self.apply(RowsFinished(partition, tuple(rows)))

    def apply(self, event: Any, request: int = 0) -> None:
        for instruction in self.state.handle(event, request):
            match instruction:
                case Answer():
                    assert instruction.request not in self.answers, "a request was answered twice"
                    self.answers[instruction.request] = instruction.reply
                    self.answered(self.asked.get(instruction.request), instruction.reply)
                case Fence() | FenceAll():
                    self.fences.append(instruction)
                case Lost():
                    self.lost += instruction.rows
                case Commit():
                    for name, rows in instruction.rows.items():
                        try:
                            self.units[name].commit(instruction.task, instruction.token, list(rows))
                        except Superseded:
                            assert name not in self.state.units(), "the unit that has a row does not take its ack"

    def ask(self, event: Any) -> Any:
        self.requests += 1
        self.asked[self.requests] = event
        self.apply(event, self.requests)
        return self.answers.get(self.requests)

    def answered(self, event: Any, reply: Any) -> None:
        if isinstance(event, FetchRows | FetchRound) and isinstance(reply, Granted):
            self.granted(event, reply)
        elif isinstance(event, RowsCreated):
            unit = self.units[event.unit]
            if isinstance(reply, RowsAccepted):
                self.known.update(event.rows)
                unit.learn({task: [event.rows[k] for k in at] for task, at in reply.commits.items()})
            else:
                assert isinstance(reply, AsyncFlowError)
                for row in event.rows:
                    unit.rows.pop(row, None)

    def granted(self, event: Any, lease: Granted) -> None:
        again = lease.token in self.holds.setdefault(event.owner, {})
        if isinstance(event, FetchRound):
            self.check_round(event, lease)
        for row in lease.rows:
            assert event.task != "train" or row not in self.trained, "a trained row was handed out again"
            assert self.held.get((event.task, row), lease.token) == lease.token, "a row is in two hands"
            self.held[event.task, row] = lease.token
        held = Held(event.task, lease.token, lease.partition, list(lease.rows))
        if isinstance(event, FetchRound):
            held.round_index, held.rank, held.num_ranks = event.round_index, event.rank, event.num_ranks
            held.round_rows, held.last = lease.round_rows, lease.last
        else:
            assert not again and lease.rows
            if event.task == "ref":
                assert lease.rows == sorted(lease.rows), "order is not kept"
        assert all(lease.groups.count(group) <= SIZE for group in lease.groups)
        self.holds[event.owner][lease.token] = held
        self.where.setdefault(lease.token, {}).update(zip(lease.rows, lease.units, strict=True))

    def check_round(self, event: FetchRound, lease: Granted) -> None:
        key = (event.partition, event.round_index)
        assert self.rounds.setdefault(key, lease.last) == lease.last, "ranks do not agree on the last round"
        assert len(lease.rows) <= lease.round_rows
        del self.waiting[event.rank]
        self.place[event.rank] = (event.partition, event.round_index + 1)

    # Units

    def connect(self, name: str) -> None:
        unit = self.units[name]
        unit.connected = True
        for fence in unit.owed:
            unit.fence(fence)
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

    def remember(self) -> None:
        """What the shell makes durable when a unit goes."""
        for partition, rows in self.state.finished_rows().items():
            self.durable[partition] = sorted({*self.durable.get(partition, ()), *rows})

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

    def announce(self, unit: FakeUnit, rows: list[int], partition: int) -> None:
        rows = [row for row in rows if row not in unit.rows]
        if not rows:
            return
        for row in rows:
            unit.rows[row] = Stored({"x"})
        groups = [row // SIZE for row in rows]
        unit.outbox.append(RowsCreated(unit.name, partition, rows, groups, ["x"], [1] * len(rows), 1, SIZE))

    @precondition(lambda self: self.to_put and any(unit.connected for unit in self.units.values()))
    @rule(data=st.data(), late=st.booleans())
    def put(self, data: st.DataObject, late: bool) -> None:
        unit = data.draw(st.sampled_from([unit for unit in self.units.values() if unit.connected]))
        group = self.to_put.pop(data.draw(st.integers(0, min(2, len(self.to_put) - 1))))
        rows = list(range(group * SIZE, group * SIZE + SIZE))
        self.announce(unit, rows, partition_of(rows[0]))
        if not late:
            self.flush(unit.name)

    @precondition(lambda self: self.lost and any(unit.connected for unit in self.units.values()))
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from([unit for unit in self.units.values() if unit.connected]))
        row = self.lost.pop(data.draw(st.integers(0, len(self.lost) - 1)))
        if all(row not in other.rows for other in self.units.values()):
            self.announce(unit, [row], partition_of(row))

    @rule(name=st.sampled_from(UNITS))
    def deliver(self, name: str) -> None:
        if self.units[name].outbox:
            self.deliver_one(self.units[name])

    @rule(name=st.sampled_from(UNITS), dies=st.booleans())
    def break_channel(self, name: str, dies: bool) -> None:
        unit = self.units[name]
        self.forget_outbox(unit)
        if dies and name in self.met:  # else two services died at once, with what only they knew
            unit.life += 1
            self.lost += unit.announced
            for row, token in unit.acks.items():
                self.unconfirmed(row, token)
            unit.start()
        if unit.connected:
            unit.connected = False
            self.apply(UnitGone(name))
            self.remember()

    @staticmethod
    def forget_outbox(unit: FakeUnit) -> None:
        """What was not delivered is in the next inventory, and not confirmed to anybody before that."""
        for event in unit.outbox:
            if isinstance(event, RowsCreated):
                unit.announced += event.rows
            elif event.task == "train":
                unit.unsure.update(dict.fromkeys(event.rows, event.token))
        unit.outbox.clear()

    def unconfirmed(self, row: int, token: int) -> None:
        """An ack that the controller never heard of: the trainer was not told that it counts, and gives it again."""
        known = self.state._book.rows.rows.get(row)
        for holds in self.holds.values():
            if token in holds and known is not None and "train" in self.state._book.rows.tasks(known.left):
                holds[token].rows.append(row)
                self.trained.discard(row)
                self.held["train", row] = token

    @rule(name=st.sampled_from(UNITS), lost=st.booleans())
    def unit_returns(self, name: str, lost: bool) -> None:
        if lost:
            self.apply(UnitLost(name))
            self.remember()
        if not self.units[name].connected:
            self.connect(name)

    # Consumers

    def owner(self, name: str) -> str:
        return f"{name}#{self.lives[name]}"

    @rule(task=st.sampled_from(TASKS[:2]), name=st.sampled_from(OWNERS), num_rows=st.integers(1, 5))
    def fetch(self, task: TaskSpec, name: str, num_rows: int) -> None:
        self.ask(FetchRows(task.name, self.owner(name), num_rows, 0, 1))

    @rule(rank=st.sampled_from(RANKS))
    def fetch_round(self, rank: int) -> None:
        partition, index = self.place[rank]
        if rank in self.waiting:
            reply = self.answers.get(self.waiting[rank])
            if not isinstance(reply, NoRows):
                return
            del self.waiting[rank]
            assert reply.reason == "partition_done", reply
            assert self.ends.setdefault(partition, index) == index, "ranks do not agree on the number of rounds"
            if partition == PARTITIONS[-1]:
                return
            partition, index = partition + 1, 0
            self.place[rank] = (partition, index)
        self.waiting[rank] = self.requests + 1
        self.ask(FetchRound("train", self.owner(f"rank{rank}"), partition, index, 2, rank, len(RANKS), 1))

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        """A holder, dead or alive, finishes some rows of one unit."""
        leases = [(owner, held) for owner, holds in self.holds.items() for held in holds.values() if held.rows]
        if leases:
            owner, held = data.draw(st.sampled_from(leases))
            rows = data.draw(st.lists(st.sampled_from(held.rows), unique=True, min_size=1))
            self.finish(owner, held, rows)

    def finish(self, owner: str, held: Held, rows: list[int]) -> None:
        for row in rows:
            unit = self.units[self.where[held.token][row]]
            try:
                if not unit.connected:
                    raise Superseded("unreachable")  # like a TransportError here: the ack may be told to the controller
                new = unit.commit(held.task, held.token, [row])
            except Superseded:
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
                self.apply(AckLost("train", owner, held.token, [row]))
            except Superseded:
                held.rows.remove(row)
            except PeerRefused:
                pass
            else:
                assert row not in self.trained, "a row was trained twice"
                self.forgetful = True  # only this controller knows of this ack
                self.trained.add(row)
                held.rows.remove(row)
                self.held.pop(("train", row), None)
        elif owner in self.holds:
            self.apply(GiveBack(held.task, owner, held.token, [row]))
            held.rows.remove(row)

    @rule(name=st.sampled_from(OWNERS))
    def die(self, name: str) -> None:
        self.apply(OwnerGone(self.owner(name)))
        self.lives[name] += 1

    @rule(rank=st.sampled_from(RANKS))
    def rank_loses_its_channel(self, rank: int) -> None:
        """Its process lives on: it joins again with what it holds, and asks again."""
        owner = self.owner(f"rank{rank}")
        self.apply(OwnerGone(owner))
        if isinstance(self.answers.get(self.waiting.get(rank, 0)), type(None)):
            self.waiting.pop(rank, None)
        reply = self.ask(Join(owner, self.holds_of(owner)))
        assert not reply.void or self.state.recovering

    def holds_of(self, owner: str) -> list[Held]:
        """What a client vouches for: rows whose ack was not confirmed are among them."""
        holds = []
        for token, held in self.holds.get(owner, {}).items():
            unsure = [row for unit in self.units.values() for row, by in unit.unsure.items() if by == token]
            if held.rows or unsure or held.round_index >= 0:
                fields = {name: getattr(held, name) for name in Held.__struct_fields__}
                holds.append(Held(**{**fields, "rows": sorted({*held.rows, *unsure})}))
        return holds

    @rule(name=st.sampled_from(OWNERS), num_rows=st.integers(1, 4), share=st.integers(1, 3))
    def quiet_moment(self, name: str, num_rows: int, share: int) -> None:
        """Nothing dies for a while, and work goes on; without this, random events hardly get beyond the first task."""
        for unit in self.units.values():
            if not unit.connected:
                self.connect(unit.name)
            self.flush(unit.name)
        self.apply(RecoveryDeadline())
        while self.fences:
            self.carry_out(self.fences.pop())
        for group in self.to_put[:2]:
            self.announce(self.units[UNITS[group % 2]], sorted(self.to_rows([group])), partition_of(group * SIZE))
        del self.to_put[:2]
        for unit in self.units.values():
            self.flush(unit.name)
        for task in TASKS[:2]:
            self.ask(FetchRows(task.name, self.owner(name), num_rows, 0, 1))
        for rank in RANKS:
            self.fetch_round(rank)
        for owner in (self.owner(name), self.owner("rank0"), self.owner("rank1")):
            for held in list(self.holds.get(owner, {}).values()):
                self.finish(owner, held, held.rows[: -(-share * len(held.rows) // 3)])

    # Fences and restarts

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        self.carry_out(self.fences.pop(data.draw(st.integers(0, len(self.fences) - 1))))

    def carry_out(self, fence: Fence | FenceAll) -> None:
        names = fence.units if isinstance(fence, FenceAll) else tuple(fence.rows)
        for name in names:
            if self.units[name].connected:
                self.units[name].fence(fence)
                self.flush(name)
            else:
                self.units[name].owed.append(fence)
        for (task, row), token in list(self.held.items()):
            if isinstance(fence, FenceAll):
                claimed = any(token in holds and row in holds[token].rows for holds in self.holds.values())
                void = token < fence.token and not (token in fence.alive and claimed)
            else:
                void = token < fence.token and any(row in rows for rows in fence.rows.values())
            if task == fence.task and void:
                del self.held[task, row]
        self.apply(Fenced(fence.task, fence.token))

    @precondition(lambda self: self.requests > self.requests_at_boot + 12 and not self.forgetful)
    @rule(owners=st.sets(st.sampled_from((*OWNERS, "rank0", "rank1"))))
    def controller_dies(self, owners: set[str]) -> None:
        """Ranks join again always; of the others, those drawn."""
        for unit in self.units.values():
            self.forget_outbox(unit)
            unit.connected = False
        self.waiting = {rank: request for rank, request in self.waiting.items() if request in self.answers}
        here = [self.owner(name) for name in self.lives]
        self.boot(Recovering(frozenset(UNITS), frozenset(here)))
        for name in self.lives:
            if name.startswith("rank") or name in owners:
                self.ask(Join(self.owner(name), self.holds_of(self.owner(name))))

    @rule()
    def give_up(self) -> None:
        self.apply(RecoveryDeadline())

    @rule(data=st.data())
    def deadline(self, data: st.DataObject) -> None:
        request = data.draw(st.integers(0, self.requests))
        if request not in self.waiting.values():
            self.apply(DeadlinePassed(request))

    # What must hold

    @invariant()
    def counters_equal_a_recount(self) -> None:
        if not hasattr(self, "state"):
            return
        book = self.state._book
        table = book.rows
        assert table.num_bytes == sum(row.num_bytes for row in table.rows.values())
        for unit in {id(row.unit): row.unit for row in table.rows.values()}.values():
            assert unit.num_rows == sum(1 for row in table.rows.values() if row.unit is unit)
        for number, info in table.partitions.items():
            assert info.num_live == sum(1 for row in table.rows.values() if row.partition == number)
            assert info.num_live + info.num_finished <= ROWS
            assert sorted(table.numbers(number)) == sorted(
                n for n, row in table.rows.items() if row.partition == number
            )
        for task in book.tasks.values():
            rows = {number: row for number, row in table.rows.items() if row.left & task.bit}
            assert task.num_left == len(rows)
            assert task.leases.holders.keys() <= rows.keys()
            assert {row for lease in task.leases.by_token.values() for row in lease.rows} == task.leases.holders.keys()
            for number, row in rows.items():
                waits = number in task.leases.fencing or number in task.leases.stale or number in task.leases.holders
                ready = not task.inputs & ~row.written and row.available and not waits
                assert ready == bool(row.queued & task.bit)
            for number, part in task.partitions.items():
                assert part.num_held == sum(1 for row in task.leases.holders if rows[row].partition == number)
                live_done = sum(1 for row in table.rows.values() if row.partition == number and not row.left & task.bit)
                finished = table.partitions[number].num_finished
                assert part.num_done == live_done + finished, (
                    task.spec.name,
                    number,
                    part.num_done,
                    live_done,
                    finished,
                )

    def teardown(self) -> None:
        """Nothing is lost, nobody starves: once everything is up and somebody does the work, all rows are trained."""
        if not hasattr(self, "state"):
            return
        for _ in range(100):
            self.settle_everything()
            if len(self.trained) == ROWS * len(PARTITIONS) and not self.state.stats().live_rows:
                break
        assert self.trained == set(range(ROWS * len(PARTITIONS))), "rows were lost or starve"
        assert self.state.stats().live_rows == 0
        assert all(not unit.rows for unit in self.units.values())

    def settle_everything(self) -> None:
        for name in UNITS:
            if not self.units[name].connected:
                self.connect(name)
            self.flush(name)
        self.apply(RecoveryDeadline())
        while self.fences:
            self.carry_out(self.fences.pop())
        self.put_missing()
        for owner, holds in list(self.holds.items()):
            for held in list(holds.values()):
                if held.task == "train":
                    self.finish(owner, held, list(held.rows))
        for name in OWNERS:
            self.die(name)
        while self.fences:
            self.carry_out(self.fences.pop())
        for task in TASKS[:2]:
            self.lives["a"] += 1
            self.ask(FetchRows(task.name, self.owner("a"), 99, 0, 1))
            for held in self.holds.get(self.owner("a"), {}).values():
                self.finish(self.owner("a"), held, list(held.rows))
        for rank in RANKS:
            self.fetch_round(rank)
        for name in UNITS:
            self.flush(name)

    def put_missing(self) -> None:
        """The producers put what was never confirmed, or was lost."""
        unit = self.units["u0"]
        there = {
            row for one in self.units.values() for row in (*one.rows, *(r for f in one.finished.values() for r in f))
        }
        lost, self.lost = {*self.lost, *self.to_rows(self.to_put)}, []
        self.to_put = []
        lost |= set(range(ROWS * len(PARTITIONS))) - there - self.trained
        for row in sorted(lost - there):
            self.announce(unit, [row], partition_of(row))
            self.flush("u0")

    @staticmethod
    def to_rows(groups: list[int]) -> set[int]:
        return {row for group in groups for row in range(group * SIZE, group * SIZE + SIZE)}


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_random_events = QueueMachine.TestCase
