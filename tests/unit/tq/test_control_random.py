"""Control state under random events: owners, units and the controller die, messages are late, fences are late."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from modelled_queue import ModelledQueue
from queue_model import (
    BY_INPUTS,
    OWNERS,
    PARTITIONS,
    RANKS,
    ROWS,
    SIZE,
    STEP_TASKS,
    TASKS,
    UNITS,
    check_counters,
    partition_of,
)

from tq import TaskSpec
from tq.control.events import DeadlinePassed, OwnerGone, RecoveryDeadline, UnitGone, UnitLost
from tq.control.state import Recovering
from tq.messages import FetchRound, FetchRows, Join, LeaseGrant, NoRows, PublishVersion


class QueueMachine(ModelledQueue, RuleBasedStateMachine):
    """A controller beside two units and consumers; every message may be late, everybody may die."""

    @initialize()
    def start(self) -> None:
        self.reset()

    # Units

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
        if dies:  # perhaps together with a controller, whose successor never met it
            self.lost += unit.announced
            for row, token in unit.unsure.items():
                self.unconfirmed(row, token)
            unit.die()
        if unit.connected:
            unit.connected = False
            self.apply(UnitGone(name))
            self.remember()

    @rule(name=st.sampled_from(UNITS), lost=st.booleans())
    def unit_returns(self, name: str, lost: bool) -> None:
        if lost:
            self.apply(UnitLost(name))
            self.remember()
        if not self.units[name].connected:
            self.connect(name)

    # Consumers

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

    @rule(rank=st.sampled_from(RANKS), name=st.sampled_from(UNITS), lost=st.booleans())
    def unit_dies_before_a_rank_has_read(self, rank: int, name: str, lost: bool) -> None:
        """The rank asks for its slice once more, and can ack nothing of it before."""
        self.calm_down(num_groups=3)
        for task in TASKS[:2]:
            self.ask(FetchRows(task.name, self.owner("a"), 99, 0, 1))
            for held in [one for one in self.holds.get(self.owner("a"), {}).values() if one.task == task.name]:
                self.finish(self.owner("a"), held, list(held.rows))
            for unit in UNITS:
                self.flush(unit)
        self.fetch_round(rank)
        step, index = self.place[rank]
        holds = self.holds.get(self.owner(f"rank{rank}"), {}).values()
        rank_slice = next((one for one in holds if (one.step, one.round_index) == (step, index - 1)), None)
        if rank in self.waiting or rank_slice is None or len(rank_slice.rows) < rank_slice.slice_rows:
            return
        if name in [self.where[rank_slice.token][row] for row in rank_slice.rows]:
            self.break_channel(name, dies=True)
            if lost:
                self.unit_returns(name, lost=True)
            self.place[rank] = (step, index - 1)
            self.unread[rank] = rank_slice.token
            self.fetch_round(rank)

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        """A holder, dead or alive, finishes some rows of one unit."""
        unread = self.unread.values()
        leases = [
            (owner, held)
            for owner, holds in self.holds.items()
            for held in holds.values()
            if held.rows and held.token not in unread
        ]
        if leases:
            owner, held = data.draw(st.sampled_from(leases))
            rows = data.draw(st.lists(st.sampled_from(held.rows), unique=True, min_size=1))
            self.finish(owner, held, rows)

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

    @rule(name=st.sampled_from(OWNERS), num_rows=st.integers(1, 4), rank_slice=st.integers(1, 3))
    def quiet_moment(self, name: str, num_rows: int, rank_slice: int) -> None:
        """Nothing dies for a while, and work goes on; without this, random events hardly get beyond the first task."""
        self.calm_down(num_groups=2)
        for task in TASKS[:2]:
            self.ask(FetchRows(task.name, self.owner(name), num_rows, 0, 1))
        for rank in RANKS:
            self.fetch_round(rank)
        for owner in (self.owner(name), self.owner("rank0"), self.owner("rank1")):
            for held in list(self.holds.get(owner, {}).values()):
                if held.token not in self.unread.values():
                    self.finish(owner, held, held.rows[: -(-rank_slice * len(held.rows) // 3)])

    def calm_down(self, *, num_groups: int) -> None:
        """Everybody is up, no fence is open, and some groups are put."""
        for unit in self.units.values():
            if not unit.connected:
                self.connect(unit.name)
            self.flush(unit.name)
        self.apply(RecoveryDeadline())
        while self.fences:
            self.carry_out(self.fences.pop())
        for group in self.to_put[:num_groups]:
            self.announce(self.units[UNITS[group % 2]], sorted(self.to_rows([group])), partition_of(group * SIZE))
        del self.to_put[:num_groups]
        for unit in self.units.values():
            self.flush(unit.name)

    # Fences and restarts

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        self.carry_out(self.fences.pop(data.draw(st.integers(0, len(self.fences) - 1))))

    @precondition(lambda self: self.requests > self.requests_at_boot + 12)
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
        if hasattr(self, "state"):
            check_counters(self.state)

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
                if held.task == "train" and held.token not in self.unread.values():
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
        """The producers put what is not in yet, or what the controller said was lost: it knows of all other rows."""
        unit = self.units["u0"]
        there = {
            row for one in self.units.values() for row in (*one.rows, *(r for f in one.finished.values() for r in f))
        }
        lost, self.lost = {*self.lost, *self.to_rows(self.to_put)}, []
        self.to_put = []
        known = {row for rows in self.state.known_rows().values() for row in rows}
        assert known | lost == set(range(ROWS * len(PARTITIONS))), "confirmed rows are missing"
        for row in sorted(lost - there):
            self.announce(unit, [row], partition_of(row))
            self.flush("u0")

    @staticmethod
    def to_rows(groups: list[int]) -> set[int]:
        return {row for group in groups for row in range(group * SIZE, group * SIZE + SIZE)}


class TasksByInputsMachine(QueueMachine):
    """The same with tasks that declare no outputs: what they write is learnt, and known after a restart."""

    tasks = BY_INPUTS


class StepMachine(QueueMachine):
    """The same with steps that take rows of several partitions: every step is full, nothing is later than allowed."""

    tasks = STEP_TASKS

    @initialize()
    def start(self) -> None:
        self.step_rows: dict[int, dict[tuple[int, int], int]] = {}
        self.partition_of_round: dict[tuple[int, int], int] = {}
        super().start()
        self.to_put.sort(key=lambda group: group % (ROWS // SIZE))  # partitions grow side by side

    def check_round(self, event: FetchRound, lease: LeaseGrant) -> None:
        super().check_round(event, lease)
        key = (event.partition, event.round_index)
        assert self.partition_of_round.setdefault(key, lease.partition) == lease.partition, "ranks disagree"
        assert all(partition_of(row) == lease.partition for row in lease.rows)
        assert event.partition - lease.partition <= 1, "a row is trained too late"
        self.step_rows.setdefault(event.partition, {})[event.rank, event.round_index] = len(lease.rows)

    @rule(order=st.permutations(OWNERS * 2), left=st.integers(0, 4), rank=st.sampled_from(RANKS))
    def finish_out_of_order(self, order: list[str], left: int, rank: int) -> None:
        """Nothing dies for a while: groups are finished in any order, some are left; a rank is behind the other."""
        self.calm_down(num_groups=5)
        for name in OWNERS * 2:
            self.ask(FetchRows("rollout", self.owner(name), SIZE, 0, 1))
        for name in order[left:]:
            held = next((held for held in self.holds.get(self.owner(name), {}).values() if held.rows), None)
            if held is not None:
                self.finish(self.owner(name), held, list(held.rows))
            self.ask(FetchRows("ref", self.owner("c"), 99, 0, 1))
            for ref in [one for one in self.holds.get(self.owner("c"), {}).values() if one.task == "ref"]:
                self.finish(self.owner("c"), ref, list(ref.rows))
            self.fetch_round(rank)
        for one in (1 - rank, rank) * 2:
            self.fetch_round(one)

    @precondition(lambda self: min(step for step, _ in self.place.values()) > self.version + 1)
    @rule()
    def publish(self) -> None:
        """All ranks are beyond a step: its weights exist, though acks may still be missing."""
        self.version += 1
        self.apply(PublishVersion(self.version))

    def teardown(self) -> None:
        super().teardown()
        totals = {step: sum(rank_slices.values()) for step, rank_slices in getattr(self, "step_rows", {}).items()}
        assert totals in ({}, dict.fromkeys(PARTITIONS, ROWS)), "a step is not full"


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TasksByInputsMachine.TestCase.settings = QueueMachine.TestCase.settings
StepMachine.TestCase.settings = QueueMachine.TestCase.settings
test_random_events = QueueMachine.TestCase
test_random_events_with_tasks_that_declare_inputs_only = TasksByInputsMachine.TestCase
test_random_events_with_steps_of_several_partitions = StepMachine.TestCase
