"""Settings of users' own tasks. Torch-free: launcher and queue read them."""

from typing import Annotated, Literal

from pydantic import Field

from asyncflow.settings import Settings

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class UserTaskConfig(Settings):
    """A task of your own: reads columns of every response and writes a number."""

    name: Name
    """Name of the task: lower-case letters, digits, `_`."""
    role: Name | None = None
    """Role that runs it when launched (`--roles ...,safety:2`: two processes); null: named after the task. Several
    tasks may share a role."""
    function: str
    """`module:function`: takes a `workers.tasks.row.TaskRow` and returns a number."""
    inputs: tuple[str, ...] = Field(("prompts", "responses"), min_length=1)
    """What it reads: `prompts`, `responses` (the drawn tokens as text), `ground_truth`, or columns with one number per
    response (`rewards`, outputs of other tasks ...)."""
    output: Name
    """Column that it writes: `loss_weights` (0 to 1: the weight of the response's loss), or a column that another task
    reads."""
    timeout_s: float = Field(10.0, gt=0, le=86400)
    """Deadline of one call (s)."""
    concurrency: int = Field(1, ge=1, le=1024)
    """Concurrent calls in each process that runs the task: the number of child processes or, for an `async def`, of
    calls in one."""
    seconds_per_row: float = Field(0.0, ge=0)
    """Approximate time of a call (s), used only by `asyncflow plan`; 0: the planner ignores it."""
    host: Literal["actor"] = "actor"
    """Role that runs the task if its own was not launched."""

    @property
    def own_role(self) -> str:
        return self.name if self.role is None else self.role
