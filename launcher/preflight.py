"""All that must hold before a run is accepted, shared by `--dry-run` and a real start. Reads; never writes."""

import math
from dataclasses import dataclass
from pathlib import Path

from asyncflow.errors import ConfigError
from asyncflow.job import GangSpec
from launcher.batch_sizes import check_batch_sizes
from launcher.devices import Devices, find_devices
from launcher.placement import place_gangs
from workers.config import RunConfig
from workers.dataflow import PlacedTask, place_tasks


@dataclass(frozen=True)
class Preflight:
    """An accepted configuration and what it resolves to.

    Attributes:
        config: resolved.
        devices: where model ranks run.
        gangs: every gang of the run.
        tasks: what the queue serves, with fused tasks folded in.
        num_prompts: rows of the data.
        num_parameters: of the model's files; tied weights count once.
    """

    config: RunConfig
    devices: Devices
    gangs: tuple[GangSpec, ...]
    tasks: tuple[PlacedTask, ...]
    num_prompts: int
    num_parameters: int


def check_run(config: RunConfig) -> Preflight:
    """Check roles, devices, batch sizes, reward, model and data, the cheap ones first.

    Raises:
        ConfigError: the first thing that does not hold.
    """
    from workers.data import read_prompt_rows
    from workers.model_files import check_model_dir
    from workers.rewards.load import check_reward

    tasks = _place_tasks(config)
    check_batch_sizes(config)
    devices = find_devices(config.launcher.device)
    gangs = place_gangs(config, devices)
    check_reward(config.reward)
    check_model_dir(Path(config.model.path))
    num_prompts = len(read_prompt_rows(Path(config.data.path), config.data))
    return Preflight(config, devices, gangs, tasks, num_prompts, count_parameters(Path(config.model.path)))


def count_parameters(model_dir: Path) -> int:
    """Count the elements in the headers of all safetensors files; a tensor in two files counts once.

    Raises:
        ConfigError: a header cannot be read.
    """
    from workers.model_files import read_safetensors_header

    tensors = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        tensors.update(read_safetensors_header(file))
    return sum(math.prod(tensor["shape"]) for tensor in tensors.values())


def _place_tasks(config: RunConfig) -> tuple[PlacedTask, ...]:
    from workers.algorithms.graph import algorithm_tasks

    if "ref" in config.roles and config.algorithm.kl_coef == 0:
        raise ConfigError(
            "roles: 'ref' has nothing to do because algorithm.kl_coef is 0; leave ref out, or set algorithm.kl_coef > 0"
        )
    return place_tasks(algorithm_tasks(config.algorithm), tuple(config.roles))
