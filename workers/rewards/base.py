"""What a reward is: a function of one finished response. Torch-free."""

import math
import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from asyncflow.errors import UserCodeFailed
from workers.calls.user_function import excerpt

RUNS_OWN_METRICS = ("turns", "tool_s", "cpu_s", "bridge_failures")
"""Metrics of each multi-turn rollout, whose names users may not use."""
_WINDOW = 1000
_FEW = 100
LARGEST_REWARD = 3.4028234e38
"""float32's maximum, rounded down."""


@dataclass(frozen=True)
class Score:
    """How good one response is.

    Attributes:
        reward: what training maximizes; finite. From a function, also one number per turn, whose sum it becomes.
        correct: exactly right; the run's accuracy counts these.
        parts: components of the reward by name; metrics show their means.
        turn_rewards: of each turn, in order; empty: there is one reward. Not for functions.
    """

    reward: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float] = ()


NO_FIELDS = "{}"
"""A data row (JSON) of which only prompt and ground truth are known."""


@dataclass(frozen=True)
class Response:
    """One response to be scored: everything that a reward may know.

    Attributes:
        task: the data row, JSON.
        num_tokens: drawn by the policy in all turns.
        truncated: it was cut off, or a budget ended it.
        token_ids: int32 as bytes, for functions that ask for them.
        turns: of each turn in order, the messages that were new to the policy, and its reply as the last one.
    """

    prompt: str
    response: str
    ground_truth: str
    task: str = NO_FIELDS
    num_tokens: int = 0
    truncated: bool = False
    token_ids: bytes = b""
    turns: Sequence[Sequence[Mapping[str, Any]]] = ()


Reward = Callable[[Response], Score]
"""What `load_reward` returns. Raises UserCodeFailed if there is no score that float32 can hold."""


class FailedShare:
    """Whether more than the share `most` (0 to 1) failed lately: of the last 1,000, or of one step if that has more.
    With fewer than a hundred, as many may fail as of a hundred: one bad prompt is a quarter of a step with four."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._steps: deque[tuple[int, int]] = deque()

    def add_step(self, failed: int, number: int) -> str:
        """Count a step; return how much failed lately, in words, if that is too much, else ""."""
        self._steps.append((failed, number))
        while sum(number for _, number in self._steps) - self._steps[0][1] >= _WINDOW:
            self._steps.popleft()
        failed, number = (sum(each) for each in zip(*self._steps, strict=True))
        if failed <= self._most * max(number, _FEW):
            return ""
        return f"{failed:,} of the last {number:,}"


def as_score(value: object, *, what: str, response: str, num_turns: int | None = None) -> Score:
    """Convert the result of a user's reward to a score; a plain number counts as correct from 1.0 on.

    `value` is a number, a `Score`, or a dict with `score`, optionally `correct`, and the reward's parts; with
    `num_turns`, the number may be as many in a list. Otherwise, or if float32 cannot hold a number, this raises
    UserCodeFailed. `what` begins messages.
    """
    if isinstance(value, Score) and tuple(value.turn_rewards):
        raise UserCodeFailed(f"{what} returned a Score with turn_rewards; give the rewards of turns as its reward")
    try:
        numbers, correct, parts = _given(value, in_turns=num_turns is not None)
    except Exception as error:  # boundary to user objects: arrays, tensors, anything
        raise UserCodeFailed(
            f"{what} returned {reprlib.repr(value)} instead of a number, a Score or a dict with `score`"
        ) from error
    number, turns = (numbers, []) if isinstance(numbers, float) else (summed(numbers), numbers)
    if turns and len(turns) != num_turns:
        raise UserCodeFailed(
            f"{what} returned {len(turns)} rewards on response {excerpt(response)}, which has {num_turns} turns; "
            f"return one for each of `turns`, or a single number"
        )
    if not all(abs(each) <= LARGEST_REWARD for each in (number, *turns)):
        shown = f"{number:g}" if not turns else reprlib.repr(turns)
        raise UserCodeFailed(
            f"{what} returned {shown} on response {excerpt(response)}; a reward must be a number that float32 holds"
        )
    return Score(number, number >= 1.0 if correct is None else correct, parts, tuple(turns))


def as_rewards(value: Any, number: int, *, what: str) -> list[float]:
    """Convert the result of a user's group function to `number` rewards; raises UserCodeFailed if that is
    impossible."""
    try:
        rewards = [as_number(each) for each in value]
    except Exception:  # noqa: BLE001  the boundary to a user's objects
        rewards = []
    if len(rewards) != number or not all(abs(reward) <= LARGEST_REWARD for reward in rewards):
        wanted = f"a list of {number} numbers that float32 holds, in the members' order"
        raise UserCodeFailed(f"{what} returned {reprlib.repr(value)} for {number} responses; return {wanted}")
    return rewards


def _given(value: object, *, in_turns: bool) -> tuple[float | list[float], bool | None, Mapping[str, float]]:
    """Return (reward, or one per turn; correct, or None; parts); raises whatever the value's class does if it holds no
    number."""
    convert = as_numbers if in_turns else as_number
    if isinstance(value, Score):
        return convert(value.reward), bool(value.correct), _parts(value.parts)
    if not isinstance(value, Mapping):
        return convert(value), None, {}
    correct = bool(value["correct"]) if "correct" in value else None
    parts = _parts({name: part for name, part in value.items() if name not in ("score", "correct")})
    return convert(value["score"]), correct, parts


def _parts(given: Mapping[Any, Any]) -> Mapping[str, float]:
    """Return the parts that are finite numbers with a name."""
    parts = {}
    # Verl's rewards return texts next to numbers: skip these.
    for name, value in given.items():
        try:
            number = as_number(value)
        except Exception:  # noqa: BLE001  a user's object that is not a number
            continue
        if isinstance(name, str) and math.isfinite(number):
            parts[name] = number
    return parts


def as_number(value: object) -> float:
    """Return a number of any library as a float; raises anything for other values, including numeric text."""
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError("text is not a number")
    return float(value)  # type: ignore[arg-type]


def as_numbers(value: object) -> float | list[float]:
    """Return a number as `as_number` does, or several, at least one, in an order; raises anything otherwise."""
    try:
        return as_number(value)
    except Exception:
        if isinstance(value, (str, bytes, bytearray, Mapping, Set)) or not isinstance(value, Iterable):
            raise
        numbers = [as_number(each) for each in value]
        if not numbers:
            raise
        return numbers


def summed(numbers: Sequence[float]) -> float:
    """Return the sum, added from left to right in every version of Python."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def finite(name: str, value: object) -> float:
    """Return a rollout's reward or metric as a float. Raises UserCodeFailed unless it is a number between
    -`LARGEST_REWARD` and `LARGEST_REWARD`."""
    try:
        number = as_number(value)
    except Exception:  # noqa: BLE001  the boundary to a user's objects
        number = math.nan
    if not abs(number) <= LARGEST_REWARD:
        raise UserCodeFailed(f"{name} is {reprlib.repr(value)}; give a number of at most {LARGEST_REWARD:g}")
    return number


def metrics_of(numbers: Mapping[Any, object]) -> dict[str, float]:
    """Return a rollout's metrics, checked. Raises UserCodeFailed if a value is not a finite number, or a name is the
    run's own or not printable."""
    for name in map(str, numbers):
        if name in RUNS_OWN_METRICS or not (name and name.isprintable()):
            raise UserCodeFailed(f"metric {name!r}: the name is the run's own or not printable; choose another one")
    return {str(name): finite(f"metric {name}", value) for name, value in numbers.items()}


def rewards_of(value: object) -> float | list[float]:
    """Return a rollout's reward, or those of its turns; raises UserCodeFailed unless all are numbers as `finite` wants
    them, and so is their sum."""
    try:
        numbers = as_numbers(value)
    except Exception:  # noqa: BLE001  the boundary to a user's objects
        return finite("the reward", value)  # which says what is wrong with it
    if isinstance(numbers, float):
        return finite("the reward", numbers)
    turns = [finite(f"the reward of turn {place} of {len(numbers)}", each) for place, each in enumerate(numbers, 1)]
    finite("the sum of the turns' rewards", summed(turns))
    return turns


def reward_of(returned: object) -> tuple[float | list[float] | None, dict[str, float]]:
    """Return (reward, or one per turn; metrics) of an agent's result: a number, several, `{"reward": ..., more}`, or
    None; else raise UserCodeFailed."""
    metrics: dict[str, float] = {}
    if isinstance(returned, Mapping):
        # A misspelt `reward` would otherwise become a metric.
        if "reward" not in returned:
            advice = "give one, or null, and reward.function scores the last reply"
            raise UserCodeFailed(f"the result {reprlib.repr(dict(returned))} has no `reward`; {advice}")
        metrics = metrics_of({name: value for name, value in returned.items() if name != "reward"})
        returned = returned["reward"]
    return None if returned is None else rewards_of(returned), metrics
