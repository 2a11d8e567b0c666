"""How a step's samples divide over actor ranks and micro-batches, and which numbers would fit if they do not. Pure."""

from asyncflow.errors import ConfigError
from tq.policies import policy_name
from workers.settings.run import RunConfig


def check_batch_sizes(config: RunConfig) -> None:
    """Check that whole groups divide over actor ranks, mini-batches and micro-batches.

    Raises:
        ConfigError: they do not; names numbers that fit.
    """
    groups, group_size = config.schedule.rollout_batch_size, config.schedule.n_samples_per_prompt
    ranks = config.actor.num_replicas(config.roles["actor"])
    smallest = config.algorithm.min_group_size
    if group_size < smallest and config.actor.engine != "sim":
        raise ConfigError(
            f"schedule.n_samples_per_prompt: {group_size} is too few for {config.algorithm.name} to compare; give "
            f"{smallest} or more"
        )
    if groups % ranks:
        fits = _either(groups - groups % ranks, groups - groups % ranks + ranks)
        raise ConfigError(
            f"schedule.rollout_batch_size: {groups} groups do not divide over {_trainers(config)}; use {fits} "
            f"groups, or {_either(*_nearest(ranks, _divisors(groups)))} {_kind(config)}"
        )
    updates, own = config.actor.num_mini_batches, groups // ranks
    if own % updates:
        raise ConfigError(
            f"actor.num_mini_batches: {updates} mini-batches do not divide a rank's {own} groups per step "
            f"({groups} groups over {_trainers(config)}); use {_either(*_nearest(updates, _divisors(own)))}"
        )
    samples = own // updates * group_size
    _check_micro_batches(config, samples, "actor", config.actor.micro_batch_size)
    if "critic" in config.roles:
        _check_critic(config)


def _check_critic(config: RunConfig) -> None:
    """Check that a step divides over a critic's ranks, mini-batches and micro-batches as it does over the actor's."""
    groups, group_size = config.schedule.rollout_batch_size, config.schedule.n_samples_per_prompt
    ranks, updates = config.roles["critic"], config.actor.num_mini_batches
    if groups % (ranks * updates):
        fitting = [number for number in _divisors(groups) if groups % (number * updates) == 0]
        raise ConfigError(
            f"roles: {groups} groups (schedule.rollout_batch_size) do not divide over critic:{ranks} and {updates} "
            f"updates a step; use {_either(*_nearest(ranks, fitting))} critic ranks"
        )
    _check_micro_batches(config, groups // ranks // updates * group_size, "critic", config.critic.micro_batch_size)


def _check_micro_batches(config: RunConfig, samples: int, role: str, micro: int) -> None:
    """Check that a rank's samples of a mini-batch divide over micro-batches."""
    updates = config.actor.num_mini_batches
    groups, group_size = config.schedule.rollout_batch_size, config.schedule.n_samples_per_prompt
    fitting = [size for size in _divisors(samples) if size % group_size == 0 or group_size % size == 0]
    if micro not in fitting:
        per = "per step" if updates == 1 else f"per update, {updates} a step"
        over = _trainers(config) if role == "actor" else f"{role}:{config.roles[role]}"
        raise ConfigError(
            f"{role}.micro_batch_size: {micro} does not divide a rank's {samples} samples {per} ({groups} groups x "
            f"{group_size} responses over {over}) into whole or equally cut groups; "
            f"use {_either(*_nearest(micro, fitting))}"
        )


def check_token_budget(config: RunConfig) -> None:
    """Check that rounds which fill a token budget (`tq.policy: token-budget`) have one, and can be had.

    Raises:
        ConfigError: they have none, or the schedule wants rounds of rows.
    """
    if policy_name(config.tq.policy) != "token-budget":
        return
    for role in sorted({"actor", "critic"} & config.roles.keys()):
        if not getattr(config, role).max_tokens_per_micro_batch:
            raise ConfigError(
                f"tq.policy: {config.tq.policy} fills {role}.max_tokens_per_micro_batch, which is 0; set that, or "
                f"tq.policy to token-balanced"
            )
    if config.schedule.lateness:
        raise ConfigError(
            f"tq.policy: {config.tq.policy} cannot be with schedule.fill {config.schedule.fill}, whose steps are made "
            f"of rounds of equally many rows; set schedule.fill to in_order, or tq.policy to token-balanced"
        )


def num_micro_batches(config: RunConfig) -> int:
    """Return the micro-batches of one actor rank in one pass over a step."""
    schedule = config.schedule
    samples = schedule.rollout_batch_size * schedule.n_samples_per_prompt
    return samples // (config.actor.num_replicas(config.roles["actor"]) * config.actor.micro_batch_size)


def _kind(config: RunConfig) -> str:
    return "actor ranks" if config.actor.engine != "megatron" else "replicas"


def _trainers(config: RunConfig) -> str:
    """Name what rows are divided over: ranks, or replicas of several ranks."""
    ranks = config.roles["actor"]
    if config.actor.engine != "megatron":
        return f"actor:{ranks}"
    return f"the {config.actor.num_replicas(ranks)} replicas of actor:{ranks}"


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
