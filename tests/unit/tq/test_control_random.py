"""Control state under random events: owners die, fences are late, notifications repeat."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncflow.errors import Superseded
from tq import TaskSpec
from tq.control import Answer, ControlState, DeadlinePassed, Fence, Fenced, Free, OwnerGone
from tq.messages import FetchRows, Granted, OpenPartition, OutputsWritten, RowsCreated
from tq.unit_state import UnitState

SIZE = 2
TASKS = (
    TaskSpec("rollout", frozenset({"x"}), whole_groups=True),
    TaskSpec("ref", frozenset({"x", "rollout"})),
    TaskSpec("train", frozenset({"rollout", "ref"}), whole_groups=True, keeps_leases=True),
)
OWNERS = ("a", "b", "c")


class QueueMachine(RuleBasedStateMachine):
    """The controller's state beside one unit's state, with messages between them that arrive late."""

    @initialize()
    def start(self) -> None:
        self.state = ControlState(TASKS)
        self.unit = UnitState()
        self.rows: list[int] = []
        self.requests = 0
        self.answers: dict[int, Any] = {}
        self.owner_of: dict[int, str] = {}
        self.leases: list[tuple[str, str, Granted]] = []
        self.fences: list[Fence] = []
        self.held: dict[tuple[str, int], str] = {}
        self.done: dict[tuple[str, int], int] = {}
        self.freed: list[int] = []
        self.lives = dict.fromkeys(OWNERS, 0)

    def owner(self, name: str) -> str:
        return f"{name}#{self.lives[name]}"

    def apply(self, event: Any, request: int = 0) -> None:
        for instruction in self.state.handle(event, request):
            match instruction:
                case Answer():
                    assert instruction.request not in self.answers
                    self.answers[instruction.request] = instruction.reply
                    if isinstance(instruction.reply, Granted):
                        self.granted(self.owner_of[instruction.request], instruction.reply)
                case Fence():
                    self.fences.append(instruction)
                case Free():
                    self.freed.extend(instruction.rows)
                    self.unit.drop(instruction.rows)

    def granted(self, task_and_owner: str, lease: Granted) -> None:
        task, owner = task_and_owner.split("/")
        for row in lease.rows:
            assert (task, row) not in self.done, "a row that is done was handed out again"
            assert (task, row) not in self.held, "a row is in two hands"
            self.held[task, row] = owner
        self.leases.append((task, owner, lease))

    @rule(num_groups=st.integers(1, 3), partition=st.integers(1, 3))
    def create(self, num_groups: int, partition: int) -> None:
        first = len(self.rows)
        rows = list(range(first, first + num_groups * SIZE))
        self.rows += rows
        self.unit.create(rows, {})
        self.apply(RowsCreated("unit", partition, rows, [row // SIZE for row in rows], ["x"]))

    @rule(task=st.sampled_from(TASKS), owner=st.sampled_from(OWNERS), num_rows=st.integers(1, 5))
    def fetch(self, task: TaskSpec, owner: str, num_rows: int) -> None:
        self.requests += 1
        self.owner_of[self.requests] = f"{task.name}/{self.owner(owner)}"
        self.apply(FetchRows(task.name, self.owner(owner), num_rows, 0, 1), self.requests)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), repeat=st.booleans())
    def put(self, data: st.DataObject, repeat: bool) -> None:
        """The holder, dead or alive, puts some rows; the unit notifies, perhaps twice."""
        k = data.draw(st.integers(0, len(self.leases) - 1))
        task, owner, lease = self.leases[k]
        rows = data.draw(st.lists(st.sampled_from(lease.rows), unique=True, min_size=1))
        rows = [row for row in rows if (task, row) not in self.done or self.done[task, row] != lease.token]
        if not rows:
            return
        try:
            self.unit.commit(task, lease.token, rows, {})
        except Superseded:
            assert any(self.held.get((task, row)) != owner for row in rows), "the holder's own put was refused"
            return
        for row in rows:
            assert (task, row) not in self.done, "two puts of one row were accepted"
            self.done[task, row] = lease.token
            self.held.pop((task, row), None)
        for _ in range(1 + repeat):
            self.apply(OutputsWritten(task, lease.token, rows, [task]))

    @rule(owner=st.sampled_from(OWNERS))
    def die(self, owner: str) -> None:
        before = len(self.fences)
        self.apply(OwnerGone(self.owner(owner)))
        for fence in self.fences[before:]:
            assert fence.task != "train", "a trainer's lease ended with its channel"
        self.lives[owner] += 1

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        fence = self.fences.pop(data.draw(st.integers(0, len(self.fences) - 1)))
        for rows in fence.rows.values():
            self.unit.fence(fence.task, fence.token, rows)
            for row in rows:
                self.held.pop((fence.task, row), None)
        self.apply(Fenced(fence.task, fence.token))

    @rule(data=st.data())
    def deadline(self, data: st.DataObject) -> None:
        self.apply(DeadlinePassed(data.draw(st.integers(0, self.requests))))

    @rule(partition=st.integers(1, 3))
    def open(self, partition: int) -> None:
        self.apply(OpenPartition(partition, 10**6))

    @invariant()
    def free_only_after_all_tasks(self) -> None:
        assert len(set(self.freed)) == len(self.freed)
        finished = {row for row in self.rows if all((task.name, row) in self.done for task in TASKS)}
        assert finished == set(self.freed)
        assert len(self.unit) == len(self.rows) - len(self.freed)

    @invariant()
    def whole_groups_are_not_split(self) -> None:
        for task, _, lease in self.leases:
            if task == "train":
                assert all(lease.groups.count(group) == SIZE for group in lease.groups)

    def teardown(self) -> None:
        """Nothing is lost: when everybody dies and somebody does all the work, every row gets through."""
        for owner in OWNERS:
            self.die(owner)
        while self.fences:
            fence = self.fences.pop()
            for rows in fence.rows.values():
                self.unit.fence(fence.task, fence.token, rows)
                for row in rows:
                    self.held.pop((fence.task, row), None)
            self.apply(Fenced(fence.task, fence.token))
        for task in TASKS:
            kept = [lease for name, _, lease in self.leases if name == task.name and task.keeps_leases]
            while True:
                for lease in kept:
                    rows = [row for row in lease.rows if (task.name, row) not in self.done]
                    if rows:
                        self.unit.commit(task.name, lease.token, rows, {})
                        for row in rows:
                            self.done[task.name, row] = lease.token
                            self.held.pop((task.name, row), None)
                        self.apply(OutputsWritten(task.name, lease.token, rows, [task.name]))
                self.requests += 1
                self.owner_of[self.requests] = f"{task.name}/last"
                self.apply(FetchRows(task.name, "last", 4, 0, 1), self.requests)
                answer = self.answers.get(self.requests)
                if not isinstance(answer, Granted):
                    break
                kept = [answer]
        self.free_only_after_all_tasks()
        assert sorted(self.freed) == self.rows, "rows were lost"


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_random_events = QueueMachine.TestCase
