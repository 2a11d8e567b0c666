"""Finds the reward function that the configuration names, and contains the simplest ones. Torch-free."""

from workers.calls.user_function import check_function, load_function
from workers.rewards.base import Response, Reward, Score
from workers.rewards.math import check_installed
from workers.rewards.pooled import FIELD, GROUP_FIELD, PooledReward, RemoteReward, check_url, compile_pattern, is_url
from workers.settings.rewards import ISOLATED, REWARDS, RewardConfig


def exact_reward(prompt: str, response: str, ground_truth: str) -> Score:
    """Return 1 if response and ground truth are equal up to surrounding space, else 0."""
    correct = response.strip() == ground_truth.strip()
    return Score(float(correct), correct)


def digits_reward(prompt: str, response: str, ground_truth: str) -> Score:
    """Return half for the exact ground truth plus half for the share of correct characters at their positions.

    This gives a model that is rarely right a slope to climb. A missing or surplus character counts as wrong: for ground
    truth 12, response 1 scores 0.25, 13 scores 0.25, 12 scores 1.
    """
    response, ground_truth = response.strip(), ground_truth.strip()
    correct = response == ground_truth
    num_right = sum(given == wanted for given, wanted in zip(response, ground_truth, strict=False))
    share = num_right / max(len(response), len(ground_truth), 1)
    return Score(0.5 * float(correct) + 0.5 * (1.0 if correct else share), correct)


def load_reward(config: RewardConfig) -> Reward:
    """Raises ConfigError if a user's function cannot be imported."""
    check_reward(config)
    if config.function in REWARDS.built_in and config.function not in ISOLATED:
        function = load_function(REWARDS.locate_class(config.function), field=FIELD, arguments=None)

        def score(one: Response) -> Score:
            scored: Score = function(one.prompt, one.response, one.ground_truth)
            return scored

        return score
    if is_url(config.function):
        return RemoteReward(config)
    reward = PooledReward(config)
    if config.function not in ISOLATED:
        reward.until_ready()
    return reward


def check_reward(config: RewardConfig) -> None:
    """Raise ConfigError if `load_reward` would not find the function, or settings do not fit it; runs no user
    module."""
    name = config.function
    if config.group_function is not None:
        check_function(config.group_function, field=GROUP_FIELD)
    if name == "regex":
        compile_pattern(config.pattern)
    elif name == "math_verify":
        check_installed()
    elif is_url(name):
        check_url(name)
    elif ":" in name:
        check_function(name, field=FIELD)
