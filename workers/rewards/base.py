"""What a reward is: a function of one finished answer. Torch-free."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


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


ScoreFunction = Callable[[str, str, str], Score]
"""(prompt, response, answer) -> score: what `load_reward` returns."""
