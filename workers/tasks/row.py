"""The argument of a user's task function, and how the child process calls it. Torch-free."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncflow.errors import UserCodeFailed
from workers.calls.user_function import Callee, load_function
from workers.rewards.base import as_number

# Arguments of a task's function.
ARGUMENTS = ("row",)


@dataclass(frozen=True)
class TaskRow:
    """One rollout. Fields that are not among the task's inputs are empty.

    Attributes:
        prompt, response: decoded, without special tokens; the response holds all drawn tokens, of every turn.
            Of SFT the prompt is the whole row, and the response what is trained of it.
        ground_truth: of the data row; SFT's have none.
        columns: the other inputs, one number each, by name; booleans are 0 and 1.
    """

    prompt: str = ""
    response: str = ""
    ground_truth: str = ""
    columns: Mapping[str, float] = field(default_factory=dict)


def task_function(what: str, function: str, field_name: str) -> Callee:
    """Import a task's function in the child; it takes the fields of a row and returns a number. Raises ConfigError if
    there is no such function. `what` starts error messages, `field_name` is the setting that names it."""

    def number(value: Any, _: Sequence[Any]) -> float:
        try:
            return as_number(value)
        except Exception as error:  # converting a user's object may raise anything
            raise UserCodeFailed(f"{what} returned {reprlib.repr(value)} instead of a number") from error

    users = load_function(function, field=field_name, arguments=ARGUMENTS)
    return Callee(users, takes=lambda fields: [TaskRow(*fields)], gives=number)
