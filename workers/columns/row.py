"""What a user's task is called with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ARGUMENTS = ("row",)
"""What a task's function takes."""


@dataclass(frozen=True)
class TaskRow:
    """One answer. What is not among the task's inputs is empty.

    Attributes:
        prompt, response: decoded, without special tokens.
        answer: the data's reference answer.
        columns: the other inputs, a number each, by name; truth values are 0 and 1.
    """

    prompt: str = ""
    response: str = ""
    answer: str = ""
    columns: Mapping[str, float] = field(default_factory=dict)
