"""All that must hold before a run is accepted, shared by `--dry-run` and a real start. Reads, never writes.

Each check raises ConfigError at the first condition that fails; the message names a setting and what to do.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncflow.errors import ConfigError, UserCodeFailed
from asyncflow.job import GangSpec
from launcher.checks.models import check_broadcast, check_models, device_memory, ignored_files
from launcher.checks.placement import Devices, find_devices, place_gangs
from launcher.checks.proof_cache import check_proven
from launcher.checks.trial_rollout import check_rollout_code
from launcher.config.paths import check_makeable
from launcher.config.rules import AT_START, check_batch_sizes, check_rules
from workers.admission.task_sampler import try_sampler
from workers.calls.user_function import check_function, search_beside
from workers.data.model_files import count_parameters, read_model_config
from workers.data.prompt_rows import PromptRow, ShownPrompt, check_ends, check_prompts, read_data
from workers.data.task_source import TaskSource, held_out_rows
from workers.data.tokenizer import ModelTokenizer
from workers.engines.device_memory import ModelSizes, Parts
from workers.rewards.group_filter import ARGUMENTS as FILTER_ARGUMENTS
from workers.rewards.group_filter import FIELD as FILTER
from workers.rewards.load_reward import check_reward
from workers.settings.algorithms import ZERO_VARIANCE
from workers.settings.dataflow import PlacedTask, place_tasks
from workers.settings.openai import UPDATE_ARGUMENTS
from workers.settings.run import RunConfig
from workers.settings.sim import SimConfig
from workers.tasks.graph import graph_of
from workers.tasks.row import ARGUMENTS

# Notes at the start of a run: settings that are valid but rarely intended. Pure.
#
# `--dry-run` shows the same lines. A setting that would train on something other than the user intended is refused by
# the other checks instead.

_MOST_PROCESSES_PER_CORE = 16
"""The quickstart's seventeen processes run well on two cores, because they mostly wait."""


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
    gangs = place_gangs(config, devices, num_nodes=num_nodes)
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
            *ignored_files(config),
        ),
    )  # fmt: skip


def check_node(config: RunConfig) -> Devices:
    """Run the checks of `check_run` except placement on a node other than node 0; return this node's devices."""
    _check_settings(config)
    devices = find_devices(config.launcher.device)
    _check_files(config)
    return devices


def users_functions(config: RunConfig) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield setting, name and arguments of the user's functions that are called with what AsyncFlow made."""
    for number, task in enumerate(config.tasks):
        yield f"tasks.{number}.function", task.function, ARGUMENTS
    if config.rollout.engine == "openai" and config.openai.update != "vllm":
        yield "openai.update", config.openai.update, UPDATE_ARGUMENTS
    if config.algorithm.group_filter not in (None, ZERO_VARIANCE):
        yield FILTER, str(config.algorithm.group_filter), FILTER_ARGUMENTS


def _check_settings(config: RunConfig) -> tuple[PlacedTask, ...]:
    # First, so that the checks below find the user's modules.
    search_beside(config.code_directory)
    check_rules(config, AT_START)
    config.algorithm.check(config)
    tasks = place_tasks(graph_of(config), tuple(config.roles))
    check_batch_sizes(config)
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
    export = config.weightsync.export
    if export is not None and Path(export.directory).is_absolute():
        check_makeable(export.directory, "weightsync.export.directory")
    if config.rollout.engine == "openai":
        check_makeable(config.openai.weights_dir, "openai.weights_dir")
    if config.rollout.engine == "sim":
        check_lengths(config.sim)
    check_reward(config.reward)
    for key, name, _ in users_functions(config):
        check_function(name, field=key)
    check_models(config)
    check_rollout_code(config)
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


def _training_rows(config: RunConfig) -> tuple[int | None, list[PromptRow]]:
    """Return the size of the data, and its rows: all of a file, a few of a source, none of a feed."""
    data, own = config.data, config.rollout.is_own
    if data.is_feed:
        return None, []
    if data.source is None:
        rows = read_data(data, own_rollout=own)
        return len(rows), rows
    with TaskSource(data, seed=config.seed, own_rollout=own) as source:
        return source.size, source.tried()


def _check_rows(config: RunConfig, rows: list[PromptRow], held_out: list[PromptRow]) -> ShownPrompt | None:
    if config.rollout.is_own:  # an own rollout builds its prompts itself
        return ShownPrompt(str(rows[0].prompt) or rows[0].task, rows[0].ground_truth, None) if rows else None
    model_dir, data = Path(config.model.path), config.data
    with ModelTokenizer(model_dir, chat=data.chat_template, templates=data.templates) as tokenizer:
        if not rows:  # prompts are fed later
            check_ends(data, tokenizer)
        first_prompt = check_prompts(rows, data, model_dir=model_dir, tokenizer=tokenizer) if rows else None
        if held_out:
            check_prompts(held_out, config.evaluate.prompts(data), model_dir=model_dir, tokenizer=tokenizer)
        return first_prompt
