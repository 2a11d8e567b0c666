"""All that must hold before a run is accepted, shared by `--dry-run` and a real start. Reads, never writes.

Each check raises ConfigError at the first condition that fails; the message names a setting and what to do.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from asyncflow.errors import ConfigError, UserCodeFailed
from asyncflow.job import GangSpec
from asyncflow.vendors import CPU, vendor_of
from launcher.checks.environments import RowsToCheck, has_launchers_interpreter
from launcher.checks.models import Models, check_models
from launcher.checks.placement import HEAD, Devices, find_devices, place_gangs
from launcher.checks.proof_cache import check_proven
from launcher.checks.start_notes import start_notes
from launcher.checks.user_code import Roles, check_names, check_rollout_code
from launcher.config.paths import check_makeable
from launcher.config.rules import AT_START, check_batch_sizes, check_rules
from workers.admission.task_sampler import try_sampler
from workers.calls.user_function import search_beside
from workers.data.prompt_rows import CHUNK, PromptRow, ShownPrompt, check_ends, check_prompts, read_data
from workers.data.supervised_rows import check_supervised
from workers.data.task_source import TaskSource, held_out_sets
from workers.data.tokenizer import ModelTokenizer
from workers.engines.device_memory import OtherModels, Parts, version_bytes
from workers.engines.lora import Trained
from workers.settings.dataflow import PlacedTask, place_tasks
from workers.settings.run import RunConfig, key_of_set
from workers.settings.sim import SimConfig
from workers.tasks.graph import graph_of


def check_lengths(config: SimConfig) -> None:
    """Refuse a file of response lengths that is unreadable, empty, or holds something other than positive numbers."""
    if config.lengths == "file":
        path = Path(config.lengths_file)
        try:
            numbers = [float(word) for word in path.read_text().split()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"sim.lengths_file: {path} cannot be read ({error}); give one number a line") from error
        if not numbers or not all(0 < number < math.inf for number in numbers):
            wrong = next((number for number in numbers if not 0 < number < math.inf), "no number")
            raise ConfigError(f"sim.lengths_file: {path} has {wrong}; give one number above 0 a line")


class Data(NamedTuple):
    """What a run's data are; see `Preflight`."""

    num_prompts: int | None
    num_held_out: int
    first_prompt: ShownPrompt | None
    rows: RowsToCheck


@dataclass(frozen=True)
class Cluster:
    """The nodes on which a run will start that is checked elsewhere, such as on a login node.

    Attributes:
        auto: the kind of device that `launcher.device: auto` finds there.
        devices_per_node: that the job asks for; 0: it does not say.
    """

    num_nodes: int
    auto: str = "cpu"
    devices_per_node: int = 0

    def devices_of(self, config: RunConfig) -> Devices:
        """Return the devices of every node. Raises ConfigError if the run needs more than the job asks for."""
        wanted, there = config.launcher.devices_per_node, self.devices_per_node
        kind = self.auto if config.launcher.device == "auto" else config.launcher.device
        if vendor_of(kind) is CPU:
            return Devices("cpu")
        if 0 < there < wanted:
            raise ConfigError(
                f"launcher.devices_per_node: {wanted}, but the job asks for {there} {kind} devices of a node; set it "
                f"to {there} or less, or ask for more"
            )
        # If nobody says how many there are, as many as all ranks need.
        return Devices(kind, wanted or there or config.num_devices)


@dataclass(frozen=True)
class Preflight:
    """An accepted configuration and what it resolves to.

    Attributes:
        devices: where model ranks run.
        tasks: what the queue serves, with fused tasks folded in.
        num_prompts: rows of the data; None: an endless source makes them, or they are fed.
        num_held_out: prompts of one evaluation; 0 without the role `evaluate`.
        first_prompt: the first row as the model gets it; None: prompts are fed.
        rows_to_check: what this machine's interpreters are checked with.
        num_parameters: elements in the model's files; tied weights count once.
        num_reward_parameters: elements in the reward model's files; 0 without a reward model.
        others: sizes of models that only score and are not the policy.
        memory: what each role's ranks need on their devices; see `device_memory`.
        notes: lines about settings that are valid but may not be what the user intended.
    """

    config: RunConfig
    devices: Devices
    gangs: tuple[GangSpec, ...]
    tasks: tuple[PlacedTask, ...]
    num_prompts: int | None
    num_held_out: int
    first_prompt: ShownPrompt | None
    rows_to_check: RowsToCheck
    num_parameters: int
    trained: Trained
    num_reward_parameters: int = 0
    others: OtherModels = field(default_factory=dict)
    memory: Mapping[str, Parts] = field(default_factory=dict)
    num_nodes: int = 1
    notes: tuple[str, ...] = ()

    @property
    def version_bytes(self) -> int:
        """Bytes of one version of the weights on the wire."""
        return version_bytes(self.config, self.num_parameters, self.trained)


def check_run(
    config: RunConfig,
    *,
    num_nodes: int = 1,
    cluster: Cluster | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Preflight:
    """Check roles, devices, batch sizes, user functions, model and data, the cheap checks first.

    Args:
        num_nodes: nodes of the run, all assumed to be like this one.
        cluster: where the run will start instead, with as many nodes as it has; nothing here is looked at for devices.
        say: told what takes long.
    """
    tasks = _check_settings(config)
    num_nodes = num_nodes if cluster is None else cluster.num_nodes
    devices = usable_devices(config) if cluster is None else cluster.devices_of(config)
    _check_adapters(config, devices)
    gangs = place_gangs(config, devices, num_nodes=num_nodes)
    here = has_launchers_interpreter(config, HEAD)
    models, data = _check_files(config, devices, here, say)
    notes = start_notes(config, gangs, devices, num_cores=len(os.sched_getaffinity(0)))
    return Preflight(
        config, devices, gangs, tasks, data.num_prompts, data.num_held_out, data.first_prompt, data.rows,
        models.num_parameters, models.trained, models.num_reward_parameters, models.others, models.memory,
        num_nodes=num_nodes, notes=(*notes, *models.notes),
    )  # fmt: skip


def check_node(config: RunConfig, node: int) -> tuple[Devices, RowsToCheck]:
    """Run the checks of `check_run` except placement on a node other than node 0; return this node's devices, and what
    the checks that need the placement look at."""
    _check_settings(config)
    devices = find_devices(config.launcher.device)
    _, data = _check_files(config, devices, has_launchers_interpreter(config, node))
    return devices, data.rows


def _check_settings(config: RunConfig) -> tuple[PlacedTask, ...]:
    # First, so that the checks below find the user's modules.
    search_beside(config.code_directory)
    check_rules(config, AT_START)
    config.algorithm.check(config)
    tasks = place_tasks(graph_of(config), tuple(config.roles))
    check_batch_sizes(config)
    return tasks


def _check_adapters(config: RunConfig, devices: Devices) -> None:
    if not (config.sends_adapter and any(map(config.is_vllm, config.roles))):
        return
    if devices.kind != "cpu" and (config.vllm.dtype or config.model.dtype) == "float32":
        raise ConfigError(
            f"weightsync.lora: adapter cannot be used with vLLM in float32 on {devices.kind}, where its kernels for "
            f"adapters take bfloat16 and float16 only; set model.dtype or vllm.dtype to bfloat16, or weightsync.lora "
            f"to merged"
        )
    if config.vllm.tensor_parallel_size > 1 and not vendor_of(devices.kind).has_adapters_over_ranks:
        raise ConfigError(
            f"weightsync.lora: adapter cannot be used with vllm.tensor_parallel_size "
            f"{config.vllm.tensor_parallel_size} on {devices.kind}, where vLLM instances of several ranks are known to "
            f"crash with adapters; set weightsync.lora to merged, or vllm.tensor_parallel_size to 1"
        )


def usable_devices(config: RunConfig) -> Devices:
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


def _check_files(
    config: RunConfig, devices: Devices, here: Roles, say: Callable[[str], None] = lambda line: None
) -> tuple[Models, Data]:
    """Check all that is read from disk, then what needs a child process; of users' functions and of the proof of models
    that of roles with the launcher's interpreter."""
    _check_paths(config)
    check_names(config, here)
    models = check_models(config, has_ipc=vendor_of(devices.kind).has_ipc)
    data = _check_data(config)
    check_rollout_code(config, here)
    check_proven(config, [role for role in config.roles if here(role)], say)
    return models, data


def _check_paths(config: RunConfig) -> None:
    export = config.weightsync.export
    if export is not None and Path(export.directory).is_absolute():
        check_makeable(export.directory, "weightsync.export.directory")
    if config.rollout.engine == "openai":
        check_makeable(config.openai.weights_dir, "openai.weights_dir")
    if config.rollout.engine == "sim":
        check_lengths(config.sim)


def _check_data(config: RunConfig) -> Data:
    try:
        num_rows, rows = _training_rows(config)
        held_out = held_out_sets(config) if "evaluate" in config.roles else {}
        first_prompt, first_held_out = _check_rows(config, rows, held_out)
        if config.data.sampler is not None and first_prompt is not None:
            kept = first_prompt.num_kept if config.data.source is None else None
            try_sampler(config.data, size=kept or num_rows, seed=config.seed)
    except UserCodeFailed as error:  # before the start, failing user code is a user error
        raise ConfigError(str(error)) from error
    chunk = () if config.data.source is not None else tuple(rows[:CHUNK])
    tried = rows[0] if rows else None, first_prompt
    if config.algorithm.is_supervised:  # responses, which rewards score, are those to held-out prompts
        tried = next(iter(held_out.values()))[0] if held_out else None, first_held_out
    return Data(num_rows, sum(map(len, held_out.values())), first_prompt, RowsToCheck(*tried, chunk))


def _training_rows(config: RunConfig) -> tuple[int | None, list[PromptRow]]:
    """Return the size of the data, and its rows: all of a file, a few of a source, none of a feed."""
    data, own = config.data, config.rollout.is_own
    if data.is_feed:
        return None, []
    if data.source is None:
        rows = read_data(data, own_rollout=own)
        return len(rows), rows
    with TaskSource(data, seed=config.seed, own_rollout=own) as source:
        return source.size, source.trial_rows()


def _check_rows(
    config: RunConfig, rows: list[PromptRow], held_out: Mapping[str, list[PromptRow]]
) -> tuple[ShownPrompt | None, ShownPrompt | None]:
    """Return the first row and the first held-out prompt, as far as there are any and templates make them."""
    if config.rollout.is_own:
        return _as_given(rows[0]) if rows else None, None
    model_dir, data = Path(config.model.path), config.data
    supervised = data.completion_field is not None and rows  # rows of a feed come later
    first_row = check_supervised(rows, data, model_dir=model_dir) if supervised else None
    if first_row is not None and not held_out:
        return first_row, None
    with ModelTokenizer(model_dir, chat=data.chat_template, templates=data.templates) as tokenizer:
        if not rows:  # prompts are fed later
            check_ends(data, tokenizer)
        first_prompt = first_row
        if first_prompt is None and rows:
            first_prompt = check_prompts(rows, data, model_dir=model_dir, tokenizer=tokenizer)
        return first_prompt, _check_sets(config, held_out, tokenizer) if held_out else None


def _as_given(row: PromptRow) -> ShownPrompt:
    """Return a row as the user's own rollout gets it, which makes the prompt itself."""
    return ShownPrompt(str(row.prompt) or row.task, row.ground_truth, None)


def _check_sets(config: RunConfig, held_out: Mapping[str, list[PromptRow]], tokenizer: ModelTokenizer) -> ShownPrompt:
    """Check the prompts of all sets, at least one; return the first one of the first set."""
    sets, shown = config.evaluate.named_sets(), []
    for name, each in held_out.items():
        prompts = sets[name].prompts(config.data, key=key_of_set(name))
        same = prompts.chat_template == config.data.chat_template
        found = check_prompts(each, prompts, model_dir=tokenizer.model_dir, tokenizer=tokenizer if same else None)
        shown.append(found)
    return shown[0]


def check_held_out(config: RunConfig) -> RowsToCheck:
    """Check the held-out prompts of an evaluation without training; returns what users' functions are tried on. Raises
    ConfigError, or UserCodeFailed for a source."""
    held_out, data = held_out_sets(config), config.data
    first = next(iter(held_out.values()))[0]
    if config.rollout.is_own:
        return RowsToCheck(first, _as_given(first), ())
    with ModelTokenizer(Path(config.model.path), chat=data.chat_template, templates=data.templates) as tokenizer:
        return RowsToCheck(first, _check_sets(config, held_out, tokenizer), ())
