"""Notes at the start of a run: settings that are valid but rarely intended. Pure.

`--dry-run` shows the same lines. A setting that would train on something other than the user intended is refused by the
checks instead.
"""

from collections.abc import Iterator, Sequence

from asyncflow.job import GangSpec
from launcher.checks.placement import Devices
from workers.settings.rollout import RolloutConfig
from workers.settings.run import RunConfig

_MOST_PROCESSES_PER_CORE = 16
"""The quickstart's seventeen processes run well on two cores, because they mostly wait."""


def settings_without_effect(config: RunConfig) -> str:
    """Return one line that names settings that change nothing in this run, such as clips of a ratio that is 1; ""
    without any."""
    algorithm, schedule = config.algorithm, config.schedule
    found = []
    # The ratio is 1 at a step's first update, where the policy is still its own old one; with one update there is no
    # other. The same holds for the critic's values. Without importance weights (`off_policy.method: none`) the ratio is
    # to the policy that drew the tokens, which is the trained policy itself only for an on-policy run with
    # `actor.tri_model`.
    own_old_policy = algorithm.off_policy.has_proximal_policy or (
        config.actor.tri_model and not schedule.staleness_bound
    )
    # Role actor_fwd may compute the old policy with another engine or dtype, so the ratio to it is not exactly 1.
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
    if config.lora is None and config.weightsync.lora != "adapter":
        found.append("weightsync.lora (there is no section lora)")
    if idle := _idle_sampling(config):
        found.append(f"{', '.join(idle)} (algorithm.name {algorithm.name} generates nothing to train on)")
    return f"without effect: {'; '.join(found)}" if found else ""


def _idle_sampling(config: RunConfig) -> list[str]:
    """Return the settings of `rollout` that were changed and that neither rollouts nor evaluations read."""
    if not config.algorithm.is_supervised:
        return []
    # Evaluations inherit how to draw, not the engine.
    unread = {"engine", "engine_options", "keep_sampling_mask", "truncated"}
    unread = unread if "evaluate" in config.roles else {*RolloutConfig.model_fields}
    unread -= {"max_response_tokens"} | ({"engine"} if config.actor.engine == "sim" else set())
    fields = {name: field for name, field in RolloutConfig.model_fields.items() if name in unread}
    return [
        f"rollout.{name}"
        for name, field in fields.items()
        if getattr(config.rollout, name) != field.get_default(call_default_factory=True)
    ]


def start_notes(config: RunConfig, gangs: Sequence[GangSpec], devices: Devices, *, num_cores: int) -> tuple[str, ...]:
    """Return one line per note. `num_cores` is this node's count; `devices` are those of each node."""
    return (
        *_outside_roles(config),
        *_crowded_nodes(gangs, devices, num_cores),
        *_small_micro_batches(config),
        *_filtered_draws(config),
        *filter(None, [settings_without_effect(config)]),
    )


def _outside_roles(config: RunConfig) -> Iterator[str]:
    for role in config.outside_roles:
        yield (
            f"roles: {role}:0 starts no {role} here, so the run waits for processes outside that do its work "
            f"(docs/outside.md)"
        )


def _crowded_nodes(gangs: Sequence[GangSpec], devices: Devices, num_cores: int) -> Iterator[str]:
    nodes = {node for gang in gangs for node in gang.nodes}
    most = max((sum(gang.nodes.count(node) for gang in gangs) for node in nodes), default=0)
    if most > _MOST_PROCESSES_PER_CORE * num_cores:
        cores = f"{num_cores} core{'s' * (num_cores != 1)}"
        where = "all of them compute on these" if devices.kind == "cpu" else "each needs some of their time"
        yield f"roles: {most} processes share {cores} of a node, and {where}; launch fewer ranks"


def _small_micro_batches(config: RunConfig) -> Iterator[str]:
    for role in () if config.algorithm.is_supervised else sorted({"actor", "critic"} & config.roles.keys()):
        budget, longest = getattr(config, role).max_tokens_per_micro_batch, config.rollout.max_response_tokens
        if 0 < budget < longest:
            yield (
                f"{role}.max_tokens_per_micro_batch: {budget} is less than one response may have "
                f"(rollout.max_response_tokens {longest}), so many micro-batches hold a single sample; raise it to a "
                f"multiple of that"
            )


def _filtered_draws(config: RunConfig) -> Iterator[str]:
    whole = config.rollout.keeps_mask or config.algorithm.is_supervised
    for name, off in () if whole else (("top_p", 1), ("top_k", 0)):
        if (value := getattr(config.rollout, name)) != off:
            yield (
                f"rollout.{name} {value:g} draws from a part of the distribution, and the trainer computes with the "
                f"whole: what it leaves out is never explored, and gradients are those of other samples; "
                f"rollout.{name} {off} is what the formulas assume, or rollout.keep_sampling_mask true"
            )
