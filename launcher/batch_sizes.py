"""How a step's samples divide over actor ranks and micro-batches, and which numbers would fit if they do not. Pure."""

from asyncflow.errors import ConfigError
from workers.config import RunConfig

MIN_GROUP_SIZE = {"grpo": 2}
"""GRPO compares the answers of one prompt with each other."""


def check_batch_sizes(config: RunConfig) -> None:
    """Check that whole groups divide over actor ranks, mini-batches and micro-batches.

    Raises:
        ConfigError: they do not; names numbers that fit.
    """
    groups, group_size = config.schedule.rollout_batch_size, config.schedule.n_samples_per_prompt
    ranks = config.roles["actor"]
    smallest = MIN_GROUP_SIZE.get(config.algorithm.name, 1)
    if group_size < smallest and config.actor.engine != "sim":
        raise ConfigError(
            f"schedule.n_samples_per_prompt: {group_size} answer per prompt cannot be compared by "
            f"{config.algorithm.name}; give {smallest} or more"
        )
    if groups % ranks:
        fits = _either(groups - groups % ranks, groups - groups % ranks + ranks)
        raise ConfigError(
            f"schedule.rollout_batch_size: {groups} groups do not divide over actor:{ranks}; use {fits} groups, "
            f"or {_either(*_nearest(ranks, _divisors(groups)))} actor ranks"
        )
    _check_updates(config, groups // ranks)
    _check_micro_batches(config, groups // ranks // config.actor.num_updates_per_step * group_size)


def _check_updates(config: RunConfig, groups: int) -> None:
    """Check that a rank's groups of a step divide over mini-batches."""
    updates = config.actor.num_updates_per_step
    if groups % updates:
        raise ConfigError(
            f"actor.num_updates_per_step: {updates} mini-batches do not divide a rank's {groups} groups per step "
            f"({config.schedule.rollout_batch_size} groups over actor:{config.roles['actor']}); "
            f"use {_either(*_nearest(updates, _divisors(groups)))}"
        )


def _check_micro_batches(config: RunConfig, samples: int) -> None:
    """Check that a rank's samples of a mini-batch divide over micro-batches."""
    micro, updates = config.actor.micro_batch_size, config.actor.num_updates_per_step
    groups, group_size = config.schedule.rollout_batch_size, config.schedule.n_samples_per_prompt
    fitting = [size for size in _divisors(samples) if size % group_size == 0 or group_size % size == 0]
    if micro not in fitting:
        per = "per step" if updates == 1 else f"per update, {updates} a step"
        raise ConfigError(
            f"actor.micro_batch_size: {micro} does not divide a rank's {samples} samples {per} ({groups} groups x "
            f"{group_size} answers over actor:{config.roles['actor']}) into whole or equally cut groups; "
            f"use {_either(*_nearest(micro, fitting))}"
        )


def num_micro_batches(config: RunConfig) -> int:
    """Return the micro-batches of one actor rank in one pass over a step."""
    schedule = config.schedule
    samples = schedule.rollout_batch_size * schedule.n_samples_per_prompt
    return samples // (config.roles["actor"] * config.actor.micro_batch_size)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _nearest(wanted: int, candidates: list[int]) -> tuple[int, int]:
    """Return the nearest candidates below and above `wanted`; the same twice at an end."""
    below = [size for size in candidates if size <= wanted] or candidates[:1]
    above = [size for size in candidates if size >= wanted] or candidates[-1:]
    return below[-1], above[0]


def _either(low: int, high: int) -> str:
    options = [str(number) for number in dict.fromkeys((low, high)) if number > 0]
    return " or ".join(options)
