"""What the child of a pooled reward calls (`workers.rewards.pooled`): entries of `workers.calls`. Torch-free."""

import contextlib
import inspect
import json
import re
from collections.abc import Callable

from asyncflow.errors import ConfigError
from workers.calls.user_function import Callee, load_function
from workers.rewards.base import Score, as_rewards, as_score
from workers.rewards.math_verify import VerifiedMath

FIELD = "reward.function"
ARGUMENTS = ("prompt", "response", "ground_truth")
GROUP_FIELD = "reward.group_function"
GROUP_ARGUMENTS = ("task", "members")


class LastMatch:
    """Whether what a regular expression finds in a response is the ground truth: the last match, its first group if
    it has one, else all of it.

    reward: {function: regex, pattern: '<answer>(.*?)</answer>'}
    """

    def __init__(self, pattern: str) -> None:
        """Compile; `.` matches line ends, too."""
        self._pattern = compile_pattern(pattern)

    def __call__(self, response: str, ground_truth: str) -> bool:
        """Return whether it is there, and equal to the ground truth but for space around both."""
        matches = list(self._pattern.finditer(response))
        if not matches:
            return False
        found = matches[-1]
        text = found.group(1) if self._pattern.groups else found.group()
        return text is not None and text.strip() == ground_truth.strip()


def compile_pattern(pattern: str | None) -> re.Pattern[str]:
    """Compile `reward.pattern`.

    Raises:
        ConfigError: it is missing, or no regular expression.
    """
    if pattern is None:
        raise ConfigError(
            "reward.pattern: missing; reward.function regex compares what it finds: set it to an expression"
        )
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward.pattern: {pattern!r} is no regular expression: {error}; correct it") from error


def user_reward(name: str) -> Callee:
    """Import a user's function.

    Raises:
        ConfigError: there is no such module or function, or importing it fails.
    """
    wants_task = _has_task(load_function(name, field=FIELD, arguments=None))
    function = load_function(name, field=FIELD, arguments=(*ARGUMENTS, "task") if wants_task else ARGUMENTS)
    return Callee(
        function,
        takes=lambda sent: (*sent[:3], json.loads(sent[3])) if wants_task else sent[:3],
        gives=lambda value, sent: as_score(value, what=f"{FIELD}: {name}", response=sent[1]),
    )


def _has_task(function: Callable[..., object]) -> bool:
    with contextlib.suppress(TypeError, ValueError):  # functions of C may say nothing
        return list(inspect.signature(function).parameters)[3:4] == ["task"]
    return False


def group_reward(name: str) -> Callee:
    """Import a user's function of whole groups. Raises as `user_reward` does."""
    function = load_function(name, field=GROUP_FIELD, arguments=GROUP_ARGUMENTS)
    return Callee(
        function,
        takes=lambda sent: (json.loads(sent[0]), sent[1]),
        gives=lambda value, sent: as_rewards(value, len(sent[1]), what=f"{GROUP_FIELD}: {name}"),
    )


def last_match(pattern: str) -> Callee:
    """Compare what a regular expression finds, which may backtrack for ever."""
    return _comparison(LastMatch(pattern))


def verified_math() -> Callee:
    """Compare formulas, which may compute for ever."""
    return _comparison(VerifiedMath())


def _comparison(compare: LastMatch | VerifiedMath) -> Callee:
    """Of response and ground truth."""
    return Callee(compare, takes=lambda sent: sent[1:3], gives=lambda right, _: Score(float(right), right))
