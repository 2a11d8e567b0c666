"""What the child of a pooled reward calls (`workers.rewards.pooled`): entries of `workers.calls`. Torch-free."""

from workers.calls.callee import Callee
from workers.calls.user_function import load_function
from workers.rewards.base import Score, as_score
from workers.rewards.math_verify import VerifiedMath
from workers.rewards.regex import LastMatch

FIELD = "reward.function"
ARGUMENTS = ("prompt", "response", "answer")


def user_reward(name: str) -> Callee:
    """Import a user's function.

    Raises:
        ConfigError: there is no such module or function, or importing it fails.
    """
    function = load_function(name, field=FIELD, arguments=ARGUMENTS)
    return Callee(function, gives=lambda value, texts: as_score(value, what=f"{FIELD}: {name}", response=texts[1]))


def last_match(pattern: str) -> Callee:
    """Compare what a regular expression finds, which may backtrack for ever."""
    return _comparison(LastMatch(pattern))


def verified_math() -> Callee:
    """Compare formulas, which may compute for ever."""
    return _comparison(VerifiedMath())


def _comparison(compare: LastMatch | VerifiedMath) -> Callee:
    """Of response and reference answer."""
    return Callee(compare, takes=lambda texts: texts[1:], gives=lambda right, _: Score(float(right), right))
