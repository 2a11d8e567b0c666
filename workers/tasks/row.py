"""What a user's task is called with, and how its child calls it. Torch-free."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncflow.errors import UserCodeFailed
from workers.calls.user_function import Callee, load_function
from workers.rewards.base import as_number

ARGUMENTS = ("row",)
"""What a task's function takes."""


@dataclass(frozen=True)
class TaskRow:
    """One rollout. What is not among the task's inputs is empty.

    Attributes:
        prompt, response: decoded, without special tokens; the response is all that the policy drew, of every turn.
        ground_truth: of the data row.
        columns: the other inputs, a number each, by name; truth values are 0 and 1.
    """

    prompt: str = ""
    response: str = ""
    ground_truth: str = ""
    columns: Mapping[str, float] = field(default_factory=dict)


def task_function(what: str, function: str, field_name: str) -> Callee:
    """Import the function of a task, in a child: it takes the fields of a row and gives a number.

    Args:
        what: begins a message.
        function: `module:function`.
        field_name: of the configuration.

    Raises:
        ConfigError: there is no such function.
    """

    def number(value: Any, _: Sequence[Any]) -> float:
        try:
            return as_number(value)
        except Exception as error:  # the boundary to the user's objects
            raise UserCodeFailed(f"{what} returned {reprlib.repr(value)} instead of a number") from error

    users = load_function(function, field=field_name, arguments=ARGUMENTS)
    return Callee(users, takes=lambda fields: [TaskRow(*fields)], gives=number)
