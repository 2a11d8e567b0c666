"""All that must hold before a run is accepted, shared by `--dry-run` and a real start. Reads, never writes.

Each check raises ConfigError at the first condition that fails; the message names a setting and what to do.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from asyncflow.errors import ConfigError, UserCodeFailed
from asyncflow.job import GangSpec
from asyncflow.run_files import OWN_NAMES
from launcher.checks.models import (
    check_broadcast,
    check_generating,
    check_positions,
    check_reference,
    check_reward_model,
    check_reward_role,
    check_tensor_parallel,
    device_memory,
    ranks_per_instance,
)
from launcher.checks.placement import Devices, find_devices, place_gangs
from launcher.checks.proof_cache import check_proven
from launcher.checks.trial_rollout import check_own_rollouts, check_rollout_code
from launcher.config.paths import check_makeable
from tq.policies import policy_name
from workers.admission.task_sampler import try_sampler
from workers.calls.user_function import check_function, search_beside
from workers.data.model_files import (
    BACKBONE,
    check_model_dir,
    check_other_model_dir,
    check_trainable,
    ignored_weights,
    read_model_config,
    stored_tensors,
)
from workers.data.prompt_rows import PromptRow, ShownPrompt, check_ends, check_prompts, check_templates, read_data
from workers.data.task_source import TaskSource, held_out_rows
from workers.data.tokenizer import ModelTokenizer
from workers.engines.device_memory import ModelSizes, Parts
from workers.rewards.group_filter import check_group_filter
from workers.rewards.load_reward import check_reward
from workers.roles.own_classes import check_policy
from workers.settings.dataflow import PlacedTask, place_tasks
from workers.settings.megatron import DenseModel, check_division
from workers.settings.run import RunConfig
from workers.settings.sim import SimConfig
from workers.tasks.graph import graph_of

# What an algorithm requires of the rest of the configuration.


def check_algorithm(config: RunConfig) -> None:
    """Refuse engines, schedules and settings that the algorithm cannot be trained with."""
    _check_critic_beside_actor(config)
    if config.algorithm.entropy_coef and config.actor.engine == "sim":
        raise ConfigError("algorithm.entropy_coef: cannot be with actor.engine sim, which has no distributions; set 0")
    config.algorithm.check(config)


def settings_without_effect(config: RunConfig) -> str:
    """Return one line that names the `algorithm` settings that change no gradient of this run, or ""."""
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
    return f"without effect: {'; '.join(found)}" if found else ""


def _check_critic_beside_actor(config: RunConfig) -> None:
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


# How a step's samples divide over actor ranks and micro-batches; if they do not, which numbers would. Pure.


def check_batch_sizes(config: RunConfig) -> None:
    """Check that whole groups divide over actor ranks, mini-batches and micro-batches; errors name numbers that fit."""
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
    """Check that rounds that fill a token budget (`tq.policy: token-budget`) have one and fit the schedule."""
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
    """Return the number of micro-batches that one actor rank processes in one pass over a step."""
    schedule = config.schedule
    samples = schedule.rollout_batch_size * schedule.n_samples_per_prompt
    return samples // (config.actor.num_replicas(config.roles["actor"]) * config.actor.micro_batch_size)


def _kind(config: RunConfig) -> str:
    return "actor ranks" if config.actor.engine != "megatron" else "replicas"


def _trainers(config: RunConfig) -> str:
    """Name what rows are divided over: ranks, or with megatron replicas of several ranks."""
    ranks = config.roles["actor"]
    if config.actor.engine != "megatron":
        return f"actor:{ranks}"
    return f"the {config.actor.num_replicas(ranks)} replicas of actor:{ranks}"


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _nearest(wanted: int, candidates: list[int]) -> tuple[int, int]:
    """Return the nearest candidates below and above `wanted`; at either end, the same candidate twice."""
    below = [size for size in candidates if size <= wanted] or candidates[:1]
    above = [size for size in candidates if size >= wanted] or candidates[-1:]
    return below[-1], above[0]


def _either(low: int, high: int) -> str:
    options = [str(number) for number in dict.fromkeys((low, high)) if number > 0]
    return " or ".join(options)


# Notes at the start of a run: settings that are valid but rarely intended. Pure.
#
# `--dry-run` shows the same lines. A setting that would train on something other than the user intended is refused by
# the other checks instead.

_MOST_PROCESSES_PER_CORE = 16
"""The quickstart's seventeen processes run well on two cores, because they mostly wait."""


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
    for role in sorted({"actor", "critic"} & config.roles.keys()):
        budget, longest = getattr(config, role).max_tokens_per_micro_batch, config.rollout.max_response_tokens
        if 0 < budget < longest:
            yield (
                f"{role}.max_tokens_per_micro_batch: {budget} is less than one response may have "
                f"(rollout.max_response_tokens {longest}), so many micro-batches hold a single sample; raise it to a "
                f"multiple of that"
            )


def _filtered_draws(config: RunConfig) -> Iterator[str]:
    for name, off in (("top_p", 1), ("top_k", 0)):
        if (value := getattr(config.rollout, name)) != off:
            yield (
                f"rollout.{name} {value:g} draws from a part of the distribution, and the trainer computes with the "
                f"whole: what it leaves out is never explored, and gradients are those of other samples; "
                f"rollout.{name} {off} is what the formulas assume"
            )


# Simulated engines.


def check_sim(config: RunConfig) -> None:
    """Refuse simulated engines next to real ones, stop strings, and response lengths that they cannot draw from."""
    engines = {"rollout": config.rollout.engine, "actor": config.actor.engine}
    if config.algorithm.kl_coef > 0:
        engines["ref"] = config.ref.engine
    if "evaluate" in config.roles:
        engines["evaluate"] = config.evaluate.engine
    if "sim" not in engines.values():
        return
    if set(engines.values()) != {"sim"}:
        others = ", ".join(f"{role}.engine {engine}" for role, engine in engines.items() if engine != "sim")
        raise ConfigError(f"{others}: cannot be with a role whose engine is sim; set all of them to sim, or none")
    if config.rollout.stop:
        raise ConfigError(
            "rollout.stop: cannot be with the engine sim, which draws no text that a string could end; leave it out"
        )
    check_lengths(config.sim)


def check_lengths(config: SimConfig) -> None:
    """Refuse a file of response lengths that is unreadable, empty, or holds something other than positive numbers."""
    if config.lengths == "file":
        path = Path(config.lengths_file)
        try:
            numbers = [float(word) for word in path.read_text().split()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"sim.lengths_file: {path} cannot be read ({error}); give one number a line") from error
        if not numbers or not all(0 < number < math.inf for number in numbers):
            raise ConfigError(f"sim.lengths_file: {path} must have one number above 0 a line")


@dataclass(frozen=True)
class Preflight:
    """An accepted configuration and what it resolves to.

    Attributes:
        devices: where model ranks run.
        tasks: what the queue serves, with fused tasks folded in.
        num_prompts: rows of the data; None: an endless source makes them, or they are fed.
        num_held_out: prompts of one evaluation; 0 without the role `evaluate`.
        num_parameters: elements in the model's files; tied weights count once.
        first_row, first_prompt: the first row as the data has it and as the model gets it; None: prompts are fed.
        num_reward_parameters: elements in the reward model's files; 0 without a reward model.
        memory: what each role's ranks need on their devices; see `device_memory`.
        notes: lines about settings that are valid but may not be what the user intended.
    """

    config: RunConfig
    devices: Devices
    gangs: tuple[GangSpec, ...]
    tasks: tuple[PlacedTask, ...]
    num_prompts: int | None
    num_held_out: int
    num_parameters: int
    first_row: PromptRow | None
    first_prompt: ShownPrompt | None
    num_nodes: int = 1
    num_reward_parameters: int = 0
    memory: Mapping[str, Parts] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def check_run(config: RunConfig, *, num_nodes: int = 1) -> Preflight:
    """Check roles, devices, batch sizes, user functions, model and data, the cheap checks first.

    `num_nodes`: nodes of the run, all assumed to be like this one.
    """
    tasks = _check_settings(config)
    devices = _usable_devices(config)
    check_broadcast(config, devices.kind)
    gangs = place_gangs(config, devices, num_nodes=num_nodes, ranks_per_instance=ranks_per_instance(config))
    num_prompts, num_held_out, first_row, first_prompt = _check_files(config)
    num_parameters = count_parameters(Path(config.model.path))
    sizes = ModelSizes.of(read_model_config(Path(config.model.path)), num_parameters)
    model = config.reward.model
    return Preflight(
        config, devices, gangs, tasks, num_prompts, num_held_out, num_parameters, first_row, first_prompt, num_nodes,
        num_reward_parameters=0 if model is None else count_parameters(Path(model.path)),
        memory=device_memory(config, sizes, config.launcher.device_memory_gb),
        notes=(
            *start_notes(config, gangs, devices, num_cores=len(os.sched_getaffinity(0))),
            *_ignored_files(config),
        ),
    )  # fmt: skip


def check_node(config: RunConfig) -> Devices:
    """Run the checks of `check_run` except placement on a node other than node 0; return this node's devices."""
    _check_settings(config)
    devices = find_devices(config.launcher.device)
    _check_files(config)
    return devices


def count_parameters(model_dir: Path) -> int:
    """Count the elements in the headers of the model's files; a tensor stored in two files counts once."""
    return sum(math.prod(stored.shape) for stored in stored_tensors(model_dir).values())


def _ignored_files(config: RunConfig) -> tuple[str, ...]:
    models = {"model.path": config.model.path}
    if config.algorithm.has_critic and config.critic.path is not None:
        models["critic.path"] = config.critic.path
    if config.reward.model is not None:
        models["reward.model.path"] = config.reward.model.path
    return tuple(filter(None, (ignored_weights(Path(path), key=key) for key, path in models.items())))


def check_megatron(config: RunConfig) -> None:
    """Refuse a model that cannot be divided as configured, incomplete replicas, and settings that megatron lacks."""
    actor, roles = config.actor, config.roles
    of_ref = config.ref.engine == "megatron" and roles.keys() & {"ref", "actor_fwd"}
    if actor.engine != "megatron" and not of_ref:
        return
    model = DenseModel.of(read_model_config(Path(config.model.path)))
    if of_ref:
        check_division(model, config.ref.megatron, section="ref")
    if actor.engine != "megatron":
        return
    actor.megatron.layout(roles["actor"])
    check_division(model, actor.megatron)
    if actor.compile:
        raise ConfigError("actor.compile: megatron's layers are not compiled; set it to false, or actor.engine to fsdp")


def _check_settings(config: RunConfig) -> tuple[PlacedTask, ...]:
    # First, so that the checks below find the user's modules.
    search_beside(config.code_directory)
    tasks = _place_tasks(config)
    check_batch_sizes(config)
    check_clients(config)
    _check_queue(config)
    _check_fill(config)
    _check_export(config)
    check_sim(config)
    _check_outside(config)
    check_generating(config)
    check_reference(config)
    check_algorithm(config)
    _check_ground_truth(config)
    check_reward_role(config)
    _check_evaluate(config)
    check_own_rollouts(config)
    return tasks


def _usable_devices(config: RunConfig) -> Devices:
    """Return the devices of this node that ranks may use; every other node must have at least as many."""
    devices, wanted = find_devices(config.launcher.device), config.launcher.devices_per_node
    if devices.kind == "cpu" or not wanted:
        return devices
    if wanted > devices.count:
        raise ConfigError(
            f"launcher.devices_per_node: {wanted}, but this node has {devices.count} {devices.kind} devices; set it to "
            f"{devices.count} or less"
        )
    return Devices(devices.kind, wanted)


def _check_files(config: RunConfig) -> tuple[int | None, int, PromptRow | None, ShownPrompt | None]:
    """Check user functions, model and data; return the counts of prompts and held-out prompts, and the first prompt."""
    check_reward(config.reward)
    check_group_filter(config.algorithm)
    for number, task in enumerate(config.tasks):
        check_function(task.function, field=f"tasks.{number}.function")
    check_model_dir(Path(config.model.path))
    if config.actor.engine != "sim":
        check_trainable(Path(config.model.path))
    check_megatron(config)
    if config.algorithm.has_critic and config.critic.path is not None:
        check_other_model_dir(Path(config.critic.path), BACKBONE, key="critic.path")
    check_reward_model(config)
    check_rollout_code(config)
    check_positions(config)
    check_tensor_parallel(config)
    try:
        num_rows, rows = _training_rows(config)
        held_out = held_out_rows(config) if "evaluate" in config.roles else []
        first_prompt = _check_rows(config, rows, held_out)
        if config.data.sampler is not None and first_prompt is not None:
            kept = first_prompt.num_kept if config.data.source is None else None
            try_sampler(config.data, size=kept or num_rows, seed=config.seed)
    except UserCodeFailed as error:  # before the start, failing user code is a user error
        raise ConfigError(str(error)) from error
    check_proven(config)
    return num_rows, len(held_out), rows[0] if rows else None, first_prompt


def _check_rows(config: RunConfig, rows: list[PromptRow], held_out: list[PromptRow]) -> ShownPrompt | None:
    check_templates(config.data)
    if config.rollout.is_own:  # an own rollout builds its prompts itself
        return ShownPrompt(str(rows[0].prompt) or rows[0].task, rows[0].ground_truth, None) if rows else None
    model_dir = Path(config.model.path)
    data = config.data
    if data.chat_template_options and not data.chat_template:
        raise ConfigError(
            "data.chat_template_options: are set, but data.chat_template is false; set that to true or remove them"
        )
    with ModelTokenizer(model_dir, chat=data.chat_template, templates=data.templates) as tokenizer:
        if not rows:  # prompts are fed later
            check_ends(data, tokenizer)
        first_prompt = check_prompts(rows, data, model_dir=model_dir, tokenizer=tokenizer) if rows else None
        if held_out:
            check_prompts(held_out, config.evaluate.prompts(data), model_dir=model_dir, tokenizer=tokenizer)
        return first_prompt


def _training_rows(config: RunConfig) -> tuple[int | None, list[PromptRow]]:
    """Return the size of the data, and its rows: all of a file, a few of a source, none of a feed."""
    data, seed, own = config.data, config.seed, config.rollout.is_own
    stuck_s = config.launcher.operation_timeout_s
    if (data.source or data.sampler) and data.timeout_s >= stuck_s:
        raise ConfigError(
            f"data.timeout_s: {data.timeout_s:g} is not below launcher.operation_timeout_s {stuck_s:g}, after which "
            f"the task source counts as stuck. Lower data.timeout_s or raise launcher.operation_timeout_s"
        )
    if data.is_feed:
        return None, []
    if data.source is None:
        rows = read_data(data, own_rollout=own)
        size: int | None = len(rows)
    else:
        with TaskSource(data, seed=seed, own_rollout=own) as source:
            size, rows = source.size, source.tried()
    return size, rows


def _check_evaluate(config: RunConfig) -> None:
    num_ranks = config.roles.get("evaluate", 0)
    if num_ranks and config.evaluate.path is None and config.evaluate.source is None:
        raise ConfigError(
            "evaluate.path: is missing, but the role evaluate was launched; name a JSONL file of held-out prompts "
            "(--set evaluate.path=FILE), or a source of tasks (evaluate.source), or leave the role out"
        )
    size = ranks_per_instance(config).get("evaluate", 1)
    most = size * -(-config.steps // config.evaluate.interval)  # instance 0 evaluates the last step in any case
    if num_ranks > most:
        raise ConfigError(
            f"roles: evaluate:{num_ranks} is more ranks than there are versions to evaluate up to step {config.steps}; "
            f"launch {most} or fewer, or lower evaluate.interval ({config.evaluate.interval})"
        )


def _check_queue(config: RunConfig) -> None:
    """Refuse limits under which no step could complete, and an unknown queue policy."""
    if ":" not in policy_name(config.tq.policy):  # `workers.roles.own_classes` checks users' own classes
        check_policy(config)
    check_token_budget(config)
    schedule, limit = config.schedule, config.tq.max_live_rows
    if 0 < limit < schedule.live_rows:
        raise ConfigError(
            f"tq.max_live_rows: {limit} rows are fewer than the schedule keeps alive ({schedule.rollout_batch_size} "
            f"groups x {schedule.n_samples_per_prompt} responses x {schedule.gate_staleness + 1} steps = "
            f"{schedule.live_rows}), so the run would wait forever; set it to {schedule.live_rows} or more, or to 0"
        )


def _check_fill(config: RunConfig) -> None:
    """Refuse whatever depends on the step that trains a row when another role computes it before that step is known."""
    interval = config.algorithm.ref_update_interval
    if config.schedule.lateness and "actor_fwd" in config.roles:
        raise ConfigError(
            f"schedule.fill: {config.schedule.fill} cannot be with role actor_fwd: the step that trains a group, and "
            f"with it the policy that it finds, is not known before; leave actor_fwd out, or set schedule.fill to "
            f"in_order"
        )
    if config.schedule.lateness and config.algorithm.kl_coef > 0 and interval > 0:
        raise ConfigError(
            f"schedule.fill: {config.schedule.fill} cannot be with algorithm.ref_update_interval {interval}: the step "
            f"that trains a group, and with it the reference, is not known before; set schedule.fill to in_order, or "
            f"algorithm.ref_update_interval to 0"
        )


def _check_ground_truth(config: RunConfig) -> None:
    reward = config.reward
    needs_none = reward.is_users or reward.group_function or reward.model or config.rollout.is_own
    if config.data.ground_truth_field is None and not needs_none:
        raise ConfigError(
            f"data.ground_truth_field: null cannot be with reward.function {reward.function}, which compares responses "
            f"with the ground truth; name the field, or a reward that needs none (module:function, a URL, reward.model)"
        )


def _check_export(config: RunConfig) -> None:
    """Refuse an export directory that is among the run's own files or could not be created."""
    if config.weightsync.export is None:
        return
    given = config.weightsync.export.directory
    key, relative = "weightsync.export.directory", PurePath(given)
    if not relative.is_absolute():
        if not relative.parts or relative.parts[0] in (*OWN_NAMES, ".."):
            raise ConfigError(
                f"{key}: {given!r} is among the run's own files, or outside; use a name such as weights, "
                f"or an absolute path"
            )
        return
    check_makeable(given, key)


def _check_outside(config: RunConfig) -> None:
    outside = config.outside_roles
    # Without role reward, the rollout processes score.
    scores = "reward" if "reward" in config.roles else "rollout"
    # Processes outside do not receive these settings.
    for setting, needed, role in (
        ("deterministic: true", bool(outside) and config.deterministic, scores),
        ("algorithm.group_filter", scores in outside and config.algorithm.filters_groups, scores),
        ("reward.group_function", scores in outside and config.reward.group_function is not None, scores),
        ("rollout.stop", "rollout" in outside and bool(config.rollout.stop), "rollout"),
    ):
        if needed:
            raise ConfigError(
                f"{setting}: cannot be with roles {' '.join(f'{name}:0' for name in outside)}, since processes outside "
                f"know nothing of it; launch {role}, or leave the setting out"
            )


def check_clients(config: RunConfig) -> None:
    """Refuse more processes than one queue service accepts."""
    sizes = ranks_per_instance(config)
    ranks = sum(number // sizes.get(role, 1) for role, number in config.roles.items())
    processes = ranks + config.tq.num_storage_units + config.tq.num_controllers
    if processes > config.tq.max_clients:
        raise ConfigError(
            f"roles: {processes} processes (with tq.num_storage_units {config.tq.num_storage_units} and "
            f"tq.num_controllers {config.tq.num_controllers}) are more than a queue service takes "
            f"(tq.max_clients {config.tq.max_clients}); launch fewer, or raise tq.max_clients"
        )


def _place_tasks(config: RunConfig) -> tuple[PlacedTask, ...]:
    if "ref" in config.roles and config.algorithm.kl_coef == 0:
        raise ConfigError(
            "roles: 'ref' has nothing to do because algorithm.kl_coef is 0; leave ref out, or set algorithm.kl_coef > 0"
        )
    for role in ("ref", "actor_fwd") if config.actor.tri_model else ():
        if role in config.roles:
            raise ConfigError(
                f"roles: {role!r} has nothing to do: actor.tri_model computes its log-probabilities in the actor; "
                f"leave {role} out"
            )
    tasks = graph_of(config)
    if "actor_fwd" in config.roles and not any(task.role == "actor_fwd" for task in tasks):
        raise ConfigError(
            "roles: 'actor_fwd' has nothing to do: its log-probabilities are needed where a step makes several updates "
            "(actor.num_mini_batches, actor.ppo_epochs) and algorithm.off_policy.method is not none, or where the "
            "KL penalty is part of the reward; leave it out"
        )
    return place_tasks(tasks, tuple(config.roles))
