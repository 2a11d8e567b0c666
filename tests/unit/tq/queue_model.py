"""What random tests know of a queue: its tasks, a unit that does what it must, counters that can be recounted."""

from dataclasses import dataclass, field, replace
from typing import Any

from asyncflow.errors import LeaseFenced
from tq import TaskSpec
from tq.control.events import OrderFenceRows, OrderFenceTask
from tq.control.row_table import TASK_TRANSITIONS, Row, RowState, TaskRowState, TaskState
from tq.control.state import ControlState
from tq.messages import OutputsWritten, RegisterUnit, RowRecords
from tq.policies import StepSpec
from tq.unit.row_journal import Life, confirmation

SIZE = 2
ROWS = 8
PARTITIONS = (1, 2, 3)
TASKS = (
    TaskSpec("rollout", frozenset({"x"}), frozenset({"rollout"}), whole_groups=True),
    TaskSpec("ref", frozenset({"x", "rollout"}), frozenset({"ref"})),
    TaskSpec("train", frozenset({"rollout", "ref"}), whole_groups=True, keeps_leases=True),
)
STEP_TASKS = (*TASKS[:2], replace(TASKS[2], steps=StepSpec(ROWS, lateness=1)))
"""The same with steps of several partitions."""
BY_INPUTS = tuple(replace(task, outputs=frozenset()) for task in TASKS)
"""The same as `TASKS`; what they write is only seen."""
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
        self.earlier: list[RegisterUnit] = []
        self.start()

    def start(self) -> None:
        self.rows: dict[int, Stored] = {}
        self.acks: dict[int, int] = {}
        self.unsure: dict[int, int] = {}
        self.announced: list[int] = []
        self.finished: dict[int, list[int]] = {}
        self.outbox: list[Any] = []
        self.owed: list[OrderFenceRows | OrderFenceTask] = []
        self.floors: dict[str, tuple[int, frozenset[int]]] = {}
        self.journal = Life(RegisterUnit(self.name, str(self.life), [], {}))

    def die(self) -> None:
        """Begin another life; what the last one had told is in its journal."""
        if not self.journal.empty:
            self.earlier.append(self.journal.inventory())
        self.life += 1
        self.start()

    def note_accepted(self) -> None:
        """The controller has taken an inventory, and knows of all that is in it."""
        self.earlier = []
        self.journal = Life(self.inventory())

    def inventory(self) -> RegisterUnit:
        records = [
            RowRecords(
                partition_of(row), [row], [row // SIZE], [SIZE], [1], [1], sorted(it.columns), sorted(it.commits)
            )
            for row, it in self.rows.items()
        ]
        finished = {partition: list(rows) for partition, rows in self.finished.items()}
        return RegisterUnit(self.name, str(self.life), records, finished, earlier=list(self.earlier))

    def commit(self, task: str, token: int, rows: list[int]) -> list[int]:
        """Store outputs; returns the rows that were not stored before."""
        new = []
        for row in rows:
            it = self.rows.get(row)
            if it is None:
                raise LeaseFenced("not here")
            if it.commits.get(task) == token:
                continue
            if task in it.commits or self.refuses(task, token, row):
                raise LeaseFenced("somebody else's")
            new.append(row)
        for row in new:
            self.rows[row].commits[task] = token
            if task == "train":
                self.acks[row] = token
            self.rows[row].columns |= OUTPUTS[task]
        if self.connected:
            self.outbox.append(OutputsWritten(self.name, task, rows, sorted(OUTPUTS[task]), [1] * len(rows), 1))
        self.sweep()
        return new

    def refuses(self, task: str, token: int, row: int) -> bool:
        """Whether a lease is void here."""
        floor, alive = self.floors.get(task, (0, frozenset()))
        fence = self.rows[row].fences.get(task, 0) if row in self.rows else 0
        return token < fence or (token < floor and token not in alive)

    def fence(self, fence: OrderFenceRows | OrderFenceTask) -> None:
        if isinstance(fence, OrderFenceTask):
            self.floors[fence.task] = (fence.token, frozenset(fence.alive))
            return
        for row in fence.rows:
            if row in self.rows:
                self.rows[row].fences[fence.task] = max(fence.token, self.rows[row].fences.get(fence.task, 0))

    def learn(self, commits: dict[str, list[int]]) -> None:
        for task, rows in commits.items():
            for row in rows:
                if row in self.rows:
                    self.rows[row].commits.setdefault(task, -1)
        if commits:
            self.journal.apply_change(confirmation(self.name, commits))
        self.sweep()

    def sweep(self) -> None:
        for row in [row for row, it in self.rows.items() if len(it.commits) == len(TASKS)]:
            del self.rows[row]
            self.finished.setdefault(partition_of(row), []).append(row)


def partition_of(row: int) -> int:
    return row // ROWS + 1


TaskRows = dict[tuple[str, int], tuple[TaskRowState, int | None]]
"""(Task, row) -> where it is, and the lease that it is in."""


def task_state_of(task: TaskState, number: int, row: Row) -> TaskRowState:
    """Return where a row of the table is, for one task."""
    if not row.open_tasks & task.bit:
        return TaskRowState.DONE
    if number in task.leases.holders:
        return TaskRowState.LEASED
    if number in task.leases.fencing:
        return TaskRowState.FENCING
    return TaskRowState.READY if row.queued & task.bit else TaskRowState.WAITING


def task_rows(state: ControlState) -> TaskRows:
    table = state.table
    return {
        (name, number): (task_state_of(task, number, row), task.leases.holders.get(number))
        for name, task in table.tasks.items()
        for number, row in table.rows.items()
    }


def check_transitions(before: TaskRows, after: TaskRows) -> None:
    """What one event did to rows in the table is a way through `TASK_TRANSITIONS`, and no lease followed another."""
    for key, (new, token) in after.items():
        if key not in before or before[key] == (new, token):
            continue
        old, old_token = before[key]
        assert None in (token, old_token) or token == old_token, f"{key} went from one lease to another without a fence"
        seen, reached = {old}, {old}
        while reached and new not in seen:
            reached = {state for one in reached for state in TASK_TRANSITIONS[one]} - seen
            reached -= {TaskRowState.FENCING, TaskRowState.DONE} - {new}  # each ends an event
            seen |= reached
        assert new in seen, f"{key}: {old.name} became {new.name}"


def check_counters(state: ControlState) -> None:
    """What a controller counts equals a recount."""
    table = state.table
    all_rows = table.rows
    assert table.num_bytes == sum(row.num_bytes for row in all_rows.values())
    for unit in {id(row.unit): row.unit for row in all_rows.values()}.values():
        assert unit.num_rows == sum(1 for row in all_rows.values() if row.unit is unit)
    for number, info in table.partitions.items():
        assert info.num_live == sum(1 for row in all_rows.values() if row.partition == number)
        assert info.num_live + info.num_finished <= ROWS
        assert sorted(table.numbers(number)) == sorted(n for n, row in all_rows.items() if row.partition == number)
    for task in table.tasks.values():
        rows = {number: row for number, row in all_rows.items() if row.open_tasks & task.bit}
        assert task.num_left == len(rows)
        assert task.leases.holders.keys() <= rows.keys()
        assert {row for lease in task.leases.by_token.values() for row in lease.rows} == task.leases.holders.keys()
        for number, row in rows.items():
            waits = number in task.leases.fencing or number in task.leases.holders
            ready = not task.inputs & ~row.written and row.state is RowState.STORED and not waits
            assert ready == bool(row.queued & task.bit)
        for number, part in task.partitions.items():
            assert part.num_held == sum(1 for row in task.leases.holders if rows[row].partition == number)
            live_done = sum(1 for row in all_rows.values() if row.partition == number and not row.open_tasks & task.bit)
            finished = table.partitions[number].num_finished
            assert part.num_done == live_done + finished, (
                task.spec.name,
                number,
                part.num_done,
                live_done,
                finished,
            )
