"""A controller of two, with what its shell keeps for its next incarnation, for random tests to drive."""

from collections.abc import Sequence

from tq.control.events import OrderFenceRows, OrderFenceTask
from tq.control.state import ControlState, Recovering
from tq.messages import FetchRows, RowRecords
from tq.policies import TaskSpec

SERVED = {"lead": frozenset({"rollout", "train", "judge"}), "other": frozenset({"ref", "look"})}
CONTROLLER_OF = {task: name for name, tasks in SERVED.items() for task in tasks}


class Controller:
    """One incarnation after another of a control state, with what its shell makes durable."""

    def __init__(self, name: str, tasks: Sequence[TaskSpec]) -> None:
        self.name = name
        self.tasks = tasks
        self.starts = 0
        self.finished: dict[int, list[int]] = {}
        self.lost_parts: dict[int, list[RowRecords]] = {}

    def boot(self, recovering: Recovering | None) -> None:
        """Start, with what the earlier incarnation left."""
        self.starts += 1
        self.fences: list[OrderFenceRows | OrderFenceTask] = []
        self.parked: dict[int, FetchRows] = {}
        first = (self.starts << 20) + (1 if self.name == "lead" else 1 << 40)
        self.state = ControlState(self.tasks, served=SERVED[self.name], first_token=first, recovering=recovering)

    @property
    def lost(self) -> list[RowRecords]:
        """What the next incarnation is told of losses."""
        return [record for records in self.lost_parts.values() for record in records]

    def save(self, *, unit_gone: bool) -> None:
        """What the shell makes durable after an event, before anybody hears of it."""
        if unit_gone or self.state.losses_changed:
            for partition, rows in self.state.take_finished().items():
                self.finished[partition] = sorted({*self.finished.get(partition, ()), *rows})
        if self.state.losses_changed:
            self.lost_parts |= self.state.take_losses()
