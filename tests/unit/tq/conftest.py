"""A `ControlState` with the bookkeeping that tests need: requests are numbered, answers are collected."""

from collections.abc import Iterable, Sequence

import pytest

from tq.control import Answer, ControlState, Event, Fence, Fenced, Free, Instruction
from tq.messages import FetchRound, FetchRows, Granted, NoRows, OpenPartition, OutputsWritten, RowsCreated
from tq.task_state import TaskSpec


class ControlWorld:
    """Drives a `ControlState`; fences are held until `confirm_fences`."""

    def __init__(self, *tasks: TaskSpec, max_staleness: int = 0) -> None:
        self.state = ControlState(tasks, max_staleness=max_staleness)
        self.answers: dict[int, Granted | NoRows] = {}
        self.freed: list[int] = []
        self.fences: list[Fence] = []
        self._requests = 0

    def handle(self, event: Event, request: int = 0) -> list[Instruction]:
        """Apply an event and sort what it returns."""
        instructions = self.state.handle(event, request)
        for instruction in instructions:
            if isinstance(instruction, Answer):
                assert instruction.request not in self.answers, "a request was answered twice"
                self.answers[instruction.request] = instruction.reply
            elif isinstance(instruction, Free):
                self.freed.extend(instruction.rows)
            else:
                self.fences.append(instruction)
        return instructions

    def create(
        self, rows: Iterable[int], *, size: int = 1, partition: int = 1, columns: Sequence[str] = ("x",)
    ) -> None:
        """Create rows in groups of `size`, on two units."""
        rows = list(rows)
        for unit in range(2):
            part = [row for row in rows if (row // size) % 2 == unit]
            if part:
                groups = [row // size for row in part]
                self.handle(RowsCreated(f"storage-{unit}", partition, part, groups, list(columns)))

    def open(self, num_rows: int, partition: int = 1) -> None:
        """Declare a partition."""
        self.handle(OpenPartition(partition, num_rows))

    def ask(self, task: str, num_rows: int = 1, *, owner: str = "a", version: int = 0) -> int:
        """Fetch; returns the request's number."""
        self._requests += 1
        self.handle(FetchRows(task, owner, num_rows, version, 60), self._requests)
        return self._requests

    def ask_round(
        self, task: str, index: int, rank: int, *, num_rows: int = 1, num_ranks: int = 2, partition: int = 1
    ) -> int:
        """Fetch a rank's share of a round; returns the request's number."""
        self._requests += 1
        event = FetchRound(task, f"rank-{rank}", partition, index, num_rows, rank, num_ranks, 60)
        self.handle(event, self._requests)
        return self._requests

    def granted(self, request: int) -> Granted:
        """Return a request's lease."""
        answer = self.answers[request]
        assert isinstance(answer, Granted), answer
        return answer

    def refused(self, request: int) -> str:
        """Return why a request got no rows."""
        answer = self.answers[request]
        assert isinstance(answer, NoRows), answer
        return answer.reason.value

    def write(
        self, task: str, granted: Granted, rows: Sequence[int] | None = None, columns: Sequence[str] = ()
    ) -> None:
        """A unit reports outputs."""
        self.handle(OutputsWritten(task, granted.token, list(granted.rows if rows is None else rows), list(columns)))

    def confirm_fences(self) -> None:
        """The units carried out every fence."""
        fences, self.fences = self.fences, []
        for fence in fences:
            self.handle(Fenced(fence.task, fence.token))


@pytest.fixture(scope="session")
def make_world() -> type[ControlWorld]:
    """Return the class; tests declare its tasks."""
    return ControlWorld
