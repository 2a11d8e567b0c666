"""Settings of the schedule: which groups make a step, and how old the weights may be that generate them."""

from enum import StrEnum
from typing import TYPE_CHECKING

from pydantic import Field

from asyncflow.settings import Settings

if TYPE_CHECKING:
    pass


class ScheduleMode(StrEnum):
    """Which stages overlap; see docs/schedules.md."""

    SYNC = "sync"
    PERIODIC = "periodic"
    ASYNC = "async"
    SUBSTEP = "substep"

    def may_swap(self, *, interruptible: bool, num_running: int, boundary: bool) -> bool:
        """Return whether a generating instance takes newer weights now.

        Args:
            interruptible: the engine goes on with responses that run.
            num_running: responses that run.
            boundary: the next responses are of a later step than those that run, or need newer weights.
        """
        return num_running == 0 or (interruptible and (boundary or self is ScheduleMode.SUBSTEP))


class Fill(StrEnum):
    """Which groups a step is made of; see docs/schedules.md."""

    IN_ORDER = "in_order"
    FIRST_READY = "first_ready"


class ScheduleConfig(Settings):
    """Which groups make a step, and how old the weights may be that generate them."""

    mode: ScheduleMode = ScheduleMode.ASYNC
    """`sync`: generate all, then score, then train. `periodic`: all at once, but on the newest weights only. `async`:
    steps overlap, too, within `max_staleness`; an instance takes newer weights when it begins a step. `substep`: as
    async, but instances take newer weights as soon as they exist, where the engine goes on with responses that run."""
    max_staleness: int = Field(1, ge=0)
    """Largest (s - 1) - v for a sample of step s generated with weights of version v; `sync`, `periodic`: always 0."""
    rollout_batch_size: int = Field(ge=1)
    """Groups (prompts) per step."""
    n_samples_per_prompt: int = Field(ge=1)
    """Responses per prompt: the group size G."""
    fill: Fill = Fill.IN_ORDER
    """`in_order`: a step trains the groups that were admitted for it. `first_ready`: those that are finished first: of
    later steps, too, and what is unfinished one step late; `max_staleness` still holds. Needs a `max_staleness` of 2 or
    more to have later groups ready."""

    @property
    def staleness_bound(self) -> int:
        """`max_staleness`, or 0 where a step only uses the newest weights."""
        return 0 if self.mode in (ScheduleMode.SYNC, ScheduleMode.PERIODIC) else self.max_staleness

    @property
    def lateness(self) -> int:
        """L: a group is trained at most so many steps after the one that it was admitted for."""
        return 1 if self.fill is Fill.FIRST_READY else 0

    @property
    def gate_staleness(self) -> int:
        """Bound of the gate for groups by the step that they are admitted for: L of `staleness_bound` may be added."""
        return self.staleness_bound - self.lateness

    @property
    def step_rows(self) -> int:
        """Rows per step."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def live_rows(self) -> int:
        """Rows that the schedule keeps alive at most: a step in training, whatever it is made of, and what is ahead."""
        return self.step_rows * (self.gate_staleness + 1)
