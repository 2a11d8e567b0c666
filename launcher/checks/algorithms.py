"""What an algorithm needs of the rest of the configuration."""

from asyncflow.errors import ConfigError
from workers.config import RunConfig


def check_algorithm(config: RunConfig) -> None:
    """Refuse settings beside the algorithm that it cannot be trained with.

    Raises:
        ConfigError: an engine or a schedule does not fit it, or its own settings refuse another one.
    """
    _check_critic(config)
    config.algorithm.check(config)


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
