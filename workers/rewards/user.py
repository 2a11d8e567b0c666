"""A user's reward: any Python callable, named `module:function`. Torch-free until the user's own module is imported."""

import math

from asyncflow.errors import AsyncFlowError
from workers.rewards.base import RewardFunction, Score
from workers.user_function import call, check_function, excerpt, load_function

FIELD = "reward.function"
ARGUMENTS = ("prompt", "response", "answer")


class UserReward:
    """Calls a user's function with a deadline and turns what it returns into a score.

    Every call runs in a thread of its own, which is left behind when it passes the deadline.
    """

    def __init__(self, function: RewardFunction, *, name: str, timeout_s: float) -> None:
        self._function = function
        self._name = name
        self._timeout_s = timeout_s

    def __call__(self, prompt: str, response: str, answer: str, /) -> Score:
        """Score one answer.

        Raises:
            AsyncFlowError: the function raised, hung, or returned something else than a finite number or a Score.
        """
        value = call(
            self._function, prompt, response, answer,
            what=f"reward.function: {self._name}", limit="reward.timeout_s", timeout_s=self._timeout_s,
            response=response,
        )  # fmt: skip
        return self._as_score(value, response)

    def _as_score(self, value: object, response: str) -> Score:
        if isinstance(value, Score):
            score = value
        else:
            try:
                number = float(value)  # type: ignore[arg-type]
            except (TypeError, ValueError) as error:
                raise AsyncFlowError(
                    f"reward.function: {self._name} returned {value!r} instead of a number or a Score"
                ) from error
            score = Score(number, number >= 1.0)
        if not math.isfinite(score.reward):
            raise AsyncFlowError(
                f"reward.function: {self._name} returned {score.reward} on response {excerpt(response)}"
            )
        return score


def load_user_reward(name: str, timeout_s: float) -> UserReward:
    """Import `module:function`.

    Raises:
        ConfigError: there is no such module or function, or importing it fails.
    """
    return UserReward(load_function(name, field=FIELD, arguments=ARGUMENTS), name=name, timeout_s=timeout_s)


def check_user_reward(name: str) -> None:
    """Check that `load_user_reward` will find the function, without running the module.

    Raises:
        ConfigError: it will not.
    """
    check_function(name, field=FIELD, arguments=ARGUMENTS)
