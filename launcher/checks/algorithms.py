"""What an algorithm needs of the rest of the configuration."""

from asyncflow.errors import ConfigError
from workers.algorithms.config import DAPOConfig, GSPOConfig
from workers.config import RunConfig


def check_algorithm(config: RunConfig) -> None:
    """Refuse settings beside the algorithm that it cannot be trained with.

    Raises:
        ConfigError: an engine, a schedule or a limit of lengths does not fit it.
    """
    _check_critic(config)
    _check_overlong(config)
    _check_gspo(config)


def _check_critic(config: RunConfig) -> None:
    """Refuse engines and schedules that have no critic."""
    if not config.algorithm.has_critic:
        return
    name, engine = config.algorithm.name, config.actor.engine
    if engine == "sim":
        raise ConfigError(f"actor.engine: sim cannot be with algorithm.name {name}, whose critic is trained; use fsdp")
    if engine != "fsdp" and "critic" not in config.roles:
        raise ConfigError(
            f"actor.engine: {engine} trains no critic, which algorithm.name {name} has; add role critic (--roles "
            f"...,critic:N), where fsdp trains it, or set actor.engine to fsdp"
        )
    if config.schedule.lateness and "critic" in config.roles:
        raise ConfigError(
            f"schedule.fill: {config.schedule.fill} cannot be with role critic: the step that trains a group is not "
            f"known when the critic gets it; set schedule.fill to in_order, or leave critic out (the actor then trains "
            f"it)"
        )


def _check_overlong(config: RunConfig) -> None:
    """Refuse a buffer for long answers that begins before their first token: it would price every answer alike."""
    algorithm, rollout = config.algorithm, config.rollout
    if not isinstance(algorithm, DAPOConfig) or not algorithm.overlong_buffer_tokens:
        return
    if rollout.is_own and not rollout.max_drawn_tokens:
        raise ConfigError(
            f"algorithm.overlong_buffer_tokens: {algorithm.overlong_buffer_tokens} is a price of long rollouts, but "
            f"rollout.max_drawn_tokens 0 sets them no limit; set that, or overlong_buffer_tokens to 0"
        )
    if algorithm.overlong_buffer_tokens > rollout.longest_rollout:
        limit = "max_drawn_tokens" if rollout.is_own else "max_response_tokens"
        raise ConfigError(
            f"algorithm.overlong_buffer_tokens: {algorithm.overlong_buffer_tokens} are more than the longest answer "
            f"(rollout.{limit} {rollout.longest_rollout}); set it below that"
        )


def _check_gspo(config: RunConfig) -> None:
    """Refuse ratios between two engines that round differently: GSPO's clip is as narrow as that gap."""
    algorithm = config.algorithm
    own_ratios = algorithm.off_policy.has_proximal_policy or config.actor.tri_model
    if isinstance(algorithm, GSPOConfig) and not own_ratios:
        raise ConfigError(
            "algorithm.off_policy.method: none cannot be with algorithm.name gspo, whose clip is as narrow as the gap "
            "between the generating engine's log-probabilities and the trainer's; leave it out, or set actor.tri_model"
        )
