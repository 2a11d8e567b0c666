"""Settings of the schedule: which groups make up a step, and how old the weights that generate them may be."""

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
            interruptible: the engine can continue running responses with newer weights.
            boundary: the next responses belong to a later step than the running ones, or need newer weights.
        """
        return num_running == 0 or (interruptible and (boundary or self is ScheduleMode.SUBSTEP))


class Fill(StrEnum):
    """Which groups make up a step; see docs/schedules.md."""

    IN_ORDER = "in_order"
    FIRST_READY = "first_ready"


class ScheduleConfig(Settings):
    """Which groups make up a step, and how old the weights that generate them may be."""

    mode: ScheduleMode = ScheduleMode.ASYNC
    """`sync`: generate all, then score, then train. `periodic`: these overlap, but on the newest weights only. `async`:
    steps overlap as well, within `max_staleness`; an instance takes newer weights when it begins a step. `substep`:
    like async, but instances take newer weights as soon as they exist, if the engine can continue running responses."""
    max_staleness: int = Field(1, ge=0)
    """Largest (s - 1) - v for a sample of step s generated with weights of version v; `sync`, `periodic`: always 0."""
    rollout_batch_size: int = Field(ge=1)
    """Groups (prompts) per step."""
    n_samples_per_prompt: int = Field(ge=1)
    """Responses per prompt: the group size G."""
    fill: Fill = Fill.IN_ORDER
    """`in_order`: a step trains the groups that were admitted for it. `first_ready`: it trains those that finish first,
    including groups of later steps, and unfinished groups follow one step late; `max_staleness` still holds. Needs a
    `max_staleness` of at least 2 to have later groups ready."""

    @property
    def staleness_bound(self) -> int:
        """`max_staleness`, or 0 if a step uses only the newest weights."""
        return 0 if self.mode in (ScheduleMode.SYNC, ScheduleMode.PERIODIC) else self.max_staleness

    @property
    def lateness(self) -> int:
        """L: a group is trained at most this many steps after the one that it was admitted for."""
        return 1 if self.fill is Fill.FIRST_READY else 0

    @property
    def gate_staleness(self) -> int:
        """The gate's bound for the step that a group is admitted for; training may add L, up to `staleness_bound`."""
        return self.staleness_bound - self.lateness

    @property
    def step_rows(self) -> int:
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def live_rows(self) -> int:
        """Most rows alive at a time: a step in training, whatever it consists of, and the steps ahead."""
        return self.step_rows * (self.gate_staleness + 1)
