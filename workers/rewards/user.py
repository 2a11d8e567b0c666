"""A user's reward: any Python callable, named `module:function`. Torch-free until the user's own module is imported."""

from workers.rewards.base import RewardFunction, Score, as_score
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
            UserCodeFailed: it raised, hung, or returned neither a number that float32 holds nor a Score of one.
        """
        value = call(
            self._function, prompt, response, answer,
            what=f"reward.function: {self._name}", limit="reward.timeout_s", timeout_s=self._timeout_s,
            on=f"response {excerpt(response)}",
        )  # fmt: skip
        return as_score(value, what=f"reward.function: {self._name}", response=response)


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
