"""A user's reward: any Python callable, named `module:function`. Torch-free until the user's own module is imported."""

from asyncflow.errors import UserCodeFailed
from workers.rewards.base import RewardFunction, Score
from workers.user_function import call, check_function, excerpt, load_function

FIELD = "reward.function"
ARGUMENTS = ("prompt", "response", "answer")
_LARGEST = 3.4028234e38
"""Of float32, rounded down."""


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
            UserCodeFailed: it raised, hung, or returned neither a number that float32 holds nor a Score of one.
        """
        value = call(
            self._function, prompt, response, answer,
            what=f"reward.function: {self._name}", limit="reward.timeout_s", timeout_s=self._timeout_s,
            response=response,
        )  # fmt: skip
        return self._as_score(value, response)

    def _as_score(self, value: object, response: str) -> Score:
        given = value.reward if isinstance(value, Score) else value
        try:
            number = float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError) as error:
            raise UserCodeFailed(
                f"reward.function: {self._name} returned {value!r} instead of a number or a Score"
            ) from error
        if not abs(number) <= _LARGEST:
            raise UserCodeFailed(
                f"reward.function: {self._name} returned {number:g} on response {excerpt(response)}; a reward must be "
                f"a number that float32 holds"
            )
        return Score(number, value.correct if isinstance(value, Score) else number >= 1.0)


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
