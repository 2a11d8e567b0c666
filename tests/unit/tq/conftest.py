"""A `ControlState` with the bookkeeping that tests need: requests are numbered, answers are collected."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests import the models of random tests by name

from asyncflow.errors import AsyncFlowError
from tq.control.events import (
    Answer,
    Event,
    Fenced,
    ForwardAck,
    GroupRemoved,
    Instruction,
    OrderFenceRows,
    OrderFenceTask,
    OrderRemoveRows,
    PutAgain,
    UnitGone,
    UnitLost,
)
from tq.control.state import ControlState
from tq.messages import (
    AckLost,
    FetchRound,
    FetchRows,
    Held,
    Join,
    Joined,
    LeaseGrant,
    NoRows,
    OpenPartition,
    OutputsWritten,
    RegisterUnit,
    Release,
    RemovalReason,
    RowRecords,
    RowsAccepted,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
    UnitAccepted,
    WatchLost,
)
from tq.policies import TaskSpec


class ControlWorld:
    """Drives a `ControlState`; fences are held until `confirm_fences`."""

    def __init__(self, *tasks: TaskSpec, **settings: Any) -> None:
        self.state = ControlState(tasks, **settings)
        self.answers: dict[int, Any] = {}
        self.fences: list[OrderFenceRows | OrderFenceTask] = []
        self.removals: list[OrderRemoveRows] = []
        self.removed_groups: list[GroupRemoved] = []
        self.lost: list[int] = []
        self.commits: list[ForwardAck] = []
        self.unit_of: dict[int, str] = {}
        self._requests = 0
        self._lost_durably: dict[int, list[RowRecords]] = {}

    @property
    def freed(self) -> list[int]:
        """Rows that were created and that every task is done with."""
        return sorted(self.unit_of.keys() - self.state.table.rows.keys())

    def handle(self, event: Event, request: int = 0) -> list[Instruction]:
        """Apply an event and sort what it returns."""
        instructions = self.state.handle(event, request)
        for instruction in instructions:
            match instruction:
                case Answer():
                    assert instruction.request not in self.answers, "a request was answered twice"
                    self.answers[instruction.request] = instruction.reply
                case OrderFenceRows() | OrderFenceTask():
                    self.fences.append(instruction)
                case OrderRemoveRows():
                    self.removals.append(instruction)
                case GroupRemoved():
                    self.removed_groups.append(instruction)
                case PutAgain():
                    self.lost.extend(instruction.rows)
                case ForwardAck():
                    self.commits.append(instruction)
        return instructions

    def lost_rows(self) -> list[RowRecords]:
        """Make the losses durable, as the shell does; returns what the next incarnation is told of."""
        self._lost_durably |= self.state.take_losses()
        return [record for records in self._lost_durably.values() for record in records]

    def request(self, event: Event) -> int:
        """Apply an event that is a request; returns its number."""
        self._requests += 1
        self.handle(event, self._requests)
        return self._requests

    def put(
        self,
        rows: Iterable[int],
        unit: str = "storage-0",
        *,
        size: int = 1,
        partition: int = 1,
        columns: Sequence[str] = ("x",),
        tokens: int = 1,
        num_bytes: int = 0,
        commits: dict[str, list[int]] | None = None,
        group_size: int = 0,
        announced: bool = False,
    ) -> int:
        """A unit announces rows in groups of `size`; returns the request's number. Held ones wait for `confirm`."""
        rows = list(rows)
        groups = [row // size for row in rows]
        lengths = [tokens] * len(rows)
        event = RowsCreated(
            unit, partition, rows, groups, list(columns), lengths, num_bytes, group_size, 60, commits or {}, announced
        )
        request = self.request(event)
        if isinstance(self.answers.get(request), RowsAccepted) and not announced:
            self.unit_of.update(dict.fromkeys(rows, unit))
        return request

    def confirm(
        self, rows: Iterable[int], unit: str = "storage-0", *, commits: dict[str, list[int]] | None = None
    ) -> RowsAccepted:
        """Every controller agreed to the rows of an announced put."""
        rows = list(rows)
        reply = self.answers[self.request(RowsConfirmed(unit, rows, commits or {}))]
        assert isinstance(reply, RowsAccepted)
        self.unit_of.update(dict.fromkeys(rows, unit))
        return reply

    def create(
        self, rows: Iterable[int], *, size: int = 1, partition: int = 1, columns: Sequence[str] = ("x",)
    ) -> None:
        """Create rows in groups of `size`, on two units."""
        rows = list(rows)
        for unit in range(2):
            part = [row for row in rows if (row // size) % 2 == unit]
            if part:
                self.put(part, f"storage-{unit}", size=size, partition=partition, columns=columns)

    def register(
        self,
        unit: str,
        rows: Iterable[int] = (),
        *,
        incarnation: str = "1",
        partition: int = 1,
        size: int = 1,
        columns: Sequence[str] = ("x",),
        done: Sequence[str] = (),
        finished: Sequence[int] = (),
        deliveries: dict[str, list[int]] | None = None,
        announced: bool = False,
    ) -> UnitAccepted:
        """A unit registers with rows that are all alike."""
        rows = list(rows)
        ones = [1] * len(rows)
        groups = [row // size for row in rows]
        record = RowRecords(
            partition,
            rows,
            groups,
            [size] * len(rows),
            ones,
            ones,
            list(columns),
            list(done),
            deliveries or {},
            announced,
        )
        records = [record] if rows else []
        request = self.request(
            RegisterUnit(unit, incarnation, records, {partition: list(finished)} if finished else {})
        )
        if not announced:
            self.unit_of.update(dict.fromkeys(rows, unit))
        reply = self.answers[request]
        assert isinstance(reply, UnitAccepted)
        return reply

    def join(self, owner: str, *holds: Held) -> Joined:
        """A consumer joins."""
        reply = self.answers[self.request(Join(owner, list(holds)))]
        assert isinstance(reply, Joined)
        return reply

    def open(self, num_rows: int, partition: int = 1) -> None:
        """Declare a partition."""
        self.handle(OpenPartition(partition, num_rows))

    def ask(self, task: str, num_rows: int = 1, *, owner: str = "a", version: int = 0, **options: Any) -> int:
        """Fetch; returns the request's number."""
        return self.request(FetchRows(task, owner, num_rows, version, 60, **options))

    def ask_round(
        self,
        task: str,
        index: int,
        rank: int,
        *,
        num_rows: int = 1,
        num_ranks: int = 2,
        partition: int = 1,
        owner: str = "",
        token_budget: int = 0,
    ) -> int:
        """Fetch a rank's slice of a round; returns the request's number."""
        owner = owner or f"rank-{rank}"
        return self.request(
            FetchRound(task, owner, partition, index, num_rows, rank, num_ranks, 60, token_budget=token_budget)
        )

    def granted(self, request: int) -> LeaseGrant:
        """Return a request's lease."""
        answer = self.answers[request]
        assert isinstance(answer, LeaseGrant), answer
        return answer

    def refused(self, request: int) -> str:
        """Return why a request got no rows."""
        answer = self.answers[request]
        assert isinstance(answer, NoRows), answer
        return answer.reason.value

    def error(self, request: int) -> AsyncFlowError:
        """Return a request's refusal."""
        answer = self.answers[request]
        assert isinstance(answer, AsyncFlowError), answer
        return answer

    def write(
        self, task: str, granted: LeaseGrant, rows: Sequence[int] | None = None, columns: Sequence[str] = ()
    ) -> None:
        """The units report outputs."""
        rows = list(granted.rows if rows is None else rows)
        for unit in sorted({self.unit_of[row] for row in rows}):
            there = [row for row in rows if self.unit_of[row] == unit]
            self.handle(OutputsWritten(unit, task, there, list(columns), [], 0))

    def ack_lost(self, task: str, granted: LeaseGrant) -> None:
        """A consumer acks rows whose unit is gone."""
        self.handle(AckLost(task, granted.token, granted.rows))

    def release(self, task: str, granted: LeaseGrant, rows: Sequence[int] | None = None) -> None:
        """A consumer returns rows."""
        self.handle(Release(task, granted.token, list(granted.rows if rows is None else rows)))

    def remove(self, rows: Iterable[int], *, reason: str = "cleared", partition: int = 1) -> list[Instruction]:
        """The units report that rows left."""
        caused = []
        for unit in sorted({self.unit_of[row] for row in rows}):
            there = [row for row in rows if self.unit_of[row] == unit]
            caused += self.handle(RowsRemoved(unit, partition, there, RemovalReason(reason)))
        return caused

    def lose(self, unit: str) -> None:
        """A unit goes and is given up."""
        self.handle(UnitGone(unit))
        self.handle(UnitLost(unit))

    def watch(self, after: int = 0) -> int:
        """Watch for lost rows; returns the request's number."""
        return self.request(WatchLost(after, 60))

    def confirm_fences(self) -> None:
        """The units carried out every fence."""
        fences, self.fences = self.fences, []
        for fence in fences:
            self.handle(Fenced(fence.task, fence.token))

    def task(self, name: str) -> Any:
        """Return a task's counts."""
        return next(task for task in self.state.stats().tasks if task.task == name)


@pytest.fixture(scope="session")
def make_world() -> type[ControlWorld]:
    """Return the class; tests declare its tasks."""
    return ControlWorld
