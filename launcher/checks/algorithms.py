"""What an algorithm needs of the rest of the configuration."""

from asyncflow.errors import ConfigError
from workers.settings.run import RunConfig


def check_algorithm(config: RunConfig) -> None:
    """Refuse settings beside the algorithm that it cannot be trained with.

    Raises:
        ConfigError: an engine or a schedule does not fit it, or its own settings refuse another one.
    """
    _check_critic(config)
    if config.algorithm.entropy_coef and config.actor.engine == "sim":
        raise ConfigError("algorithm.entropy_coef: cannot be with actor.engine sim, which has no distributions; set 0")
    config.algorithm.check(config)


def settings_without_effect(config: RunConfig) -> str:
    """Return one line that names the settings of section `algorithm` that change no gradient of this run; "": none.

    Before a step's first update the policy is its own old one. With one update there is no other, so the ratio is 1,
    and so are the critic's values their own old ones. Without weights (`off_policy.method: none`) the ratio is to the
    policy that drew the tokens, which is itself with `actor.tri_model` alone, and on-policy. Role `actor_fwd` may
    compute the old policy with another engine or type than the actor, so that the ratio to it is not 1.
    """
    algorithm, schedule = config.algorithm, config.schedule
    found = []
    own_old_policy = algorithm.off_policy.has_proximal_policy or (
        config.actor.tri_model and not schedule.staleness_bound
    )
    if "actor_fwd" in config.roles and config.needs_old_log_probs:
        own_old_policy = False
    bounds = [name for name in algorithm.ratio_bounds if getattr(algorithm, name) is not None]
    if config.actor.num_updates == 1:
        bounds = bounds if own_old_policy else [name for name in bounds if name == "value_clip"]
        if bounds:
            found.append(
                f"{', '.join(f'algorithm.{name}' for name in bounds)} (with one update a step, "
                f"actor.num_mini_batches x ppo_epochs, the ratio to the policy that the step found is 1)"
            )
    if not algorithm.kl_coef and algorithm.ref_update_interval:
        found.append("algorithm.ref_update_interval (algorithm.kl_coef is 0)")
    return f"without effect: {'; '.join(found)}" if found else ""


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
