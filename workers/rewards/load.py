"""Finds the reward function that the config names. Torch-free."""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from asyncflow.errors import ConfigError
from workers.config import RewardConfig
from workers.rewards.base import ScoreFunction
from workers.rewards.digits import digits_reward
from workers.rewards.exact import exact_reward
from workers.rewards.math import math_reward
from workers.rewards.user import check_user_reward, load_user_reward

BUILT_IN: Mapping[str, ScoreFunction] = MappingProxyType(
    {"exact": exact_reward, "digits": digits_reward, "math": math_reward}
)


def load_reward(config: RewardConfig) -> ScoreFunction:
    """Return the function that scores an answer: (prompt, response, answer) -> Score.

    Raises:
        ConfigError: unknown name, or a user's module or function that cannot be imported.
    """
    check_reward(config)
    return BUILT_IN.get(config.function) or load_user_reward(config.function, config.timeout_s)


def check_reward(config: RewardConfig) -> None:
    """Check that `load_reward` will find the function, without running a user's module.

    Raises:
        ConfigError: unknown name, or no such module or function.
    """
    name = config.function
    if name in BUILT_IN:
        return
    if ":" in name:
        check_user_reward(name)
        return
    near = get_close_matches(name, BUILT_IN, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(BUILT_IN)}, or module:function"
    raise ConfigError(f"reward.function: unknown reward {name!r}; {hint}")
