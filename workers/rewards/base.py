"""What a reward is: a function of one finished answer. Torch-free."""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from asyncflow.errors import UserCodeFailed
from workers.user_function import excerpt

LARGEST_REWARD = 3.4028234e38
"""Of float32, rounded down."""


@dataclass(frozen=True)
class Score:
    """How good one answer is.

    Attributes:
        reward: what training maximises; finite.
        correct: exactly right; the run's accuracy counts these.
    """

    reward: float
    correct: bool


class RewardFunction(Protocol):
    """What a user writes. A plain number counts as correct from 1.0 on."""

    def __call__(self, prompt: str, response: str, answer: str, /) -> float | Score:
        """Score `response`, the decoded text without special tokens, against `answer`, the data's reference."""


def as_score(value: object, *, what: str, response: str) -> Score:
    """Turn what somebody else's reward gave into a score; a plain number counts as correct from 1.0 on.

    Args:
        value: a number or a `Score`.
        what: begins a message.
        response: that it is about.

    Raises:
        UserCodeFailed: it is neither, or no number that float32 holds.
    """
    given = value.reward if isinstance(value, Score) else value
    try:
        number = as_number(given)
        correct = bool(value.correct) if isinstance(value, Score) else number >= 1.0
    except Exception as error:  # the boundary to somebody else's objects: arrays, tensors, anything
        raise UserCodeFailed(f"{what} returned {reprlib.repr(value)} instead of a number or a Score") from error
    if not abs(number) <= LARGEST_REWARD:
        raise UserCodeFailed(
            f"{what} returned {number:g} on response {excerpt(response)}; a reward must be a number that float32 holds"
        )
    return Score(number, correct)


def as_number(value: object) -> float:
    """Return a number of any library as ours.

    Raises:
        Exception: it is none, text that looks like one included; whatever its class raises.
    """
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError("text is no number")
    return float(value)  # type: ignore[arg-type]


ScoreFunction = Callable[[str, str, str], Score]
"""(prompt, response, answer) -> score: what `load_reward` returns."""
