"""Settings of the queue and of the schedule that its admission enforces."""

from enum import StrEnum

from pydantic import Field

from asyncflow.settings import Settings


class ScheduleMode(StrEnum):
    """Which stages overlap; see docs/architecture.md."""

    SYNC = "sync"
    ASYNC = "async"


class ScheduleConfig(Settings):
    """Which groups make a step, and how old the weights may be that generate them."""

    mode: ScheduleMode = ScheduleMode.ASYNC
    """`sync`: generate all, then score, then train. `async`: everything overlaps, within `max_staleness`."""
    max_staleness: int = Field(1, ge=0)
    """Largest (s - 1) - v for a sample of step s generated with weights of version v. `sync` requires 0."""
    rollout_batch_size: int = Field(ge=1)
    """Groups (prompts) per step."""
    n_samples_per_prompt: int = Field(ge=1)
    """Answers per prompt: the group size G."""

    @property
    def staleness_bound(self) -> int:
        """`max_staleness`, or 0 in `sync` mode."""
        return 0 if self.mode is ScheduleMode.SYNC else self.max_staleness


class QueueConfig(Settings):
    """TransferQueue."""

    num_storage_units: int = Field(2, ge=1)
    """Storage processes; rows are spread over them."""
    request_timeout_s: float = Field(60.0, gt=0)
    """Deadline of one request to a storage unit, and how long a fetch parks before it is asked again (s)."""
    max_message_bytes: int = Field(2**31, ge=2**20)
    """Largest message that a process accepts (bytes); a larger one is refused and its channel dropped."""
    max_clients: int = Field(1024, ge=1)
    """Channels that one service accepts at a time."""
