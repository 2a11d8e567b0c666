"""Refuses a run whose models cannot fit on their devices, and shows what takes how much. Torch-free."""

from pathlib import Path

from asyncflow.errors import ConfigError, size_text
from workers.data.model_files import read_model_config
from workers.engines.device_memory import ModelSizes, Parts, memory_of_roles
from workers.settings.run import RunConfig

_OF_COPIES = (
    "lower ref.micro_batch_size, set model.dtype to bfloat16, or let several ranks share a copy (ref.engine: fsdp)"
)
_REMEDIES = {
    "actor": "lower actor.max_tokens_per_micro_batch, give the actor more ranks, or set actor.gradient_checkpointing",
    "critic": "lower critic.max_tokens_per_micro_batch, or give the critic more ranks",
    "ref": _OF_COPIES,
    "actor_fwd": _OF_COPIES,
    "rollout": "lower rollout.batch_size or, with vllm, raise vllm.tensor_parallel_size",
    "evaluate": "lower rollout.batch_size or, with vllm, raise vllm.tensor_parallel_size",
}
_BESIDE_VLLM = ("next version", "buckets")
"""Not part of what vLLM takes."""


def device_memory(config: RunConfig, num_parameters: int) -> dict[str, Parts]:
    """Return what each role's ranks need on their devices, by role; nothing where `launcher.device_memory_gb` is not
    given, or for models whose sizes are not known.

    Raises:
        ConfigError: a role needs more than the device has; with the sum that shows it.
    """
    limit = config.launcher.device_memory_gb
    model = ModelSizes.of(read_model_config(Path(config.model.path)), num_parameters) if limit else None
    if model is None or limit is None:
        return {}
    roles = memory_of_roles(config, model)
    for role, parts in roles.items():
        is_vllm = _is_vllm(config, role)
        share = config.vllm.gpu_memory_utilization if is_vllm else 1.0
        inside = {name: size for name, size in parts.items() if not is_vllm or name not in _BESIDE_VLLM}
        if sum(inside.values()) > share * limit * 1e9:
            most = f"{limit:g} GB" if share == 1 else f"{share:g} of {limit:g} GB (vllm.gpu_memory_utilization)"
            raise ConfigError(
                f"launcher.device_memory_gb: a rank of {role} needs about {sum_text(inside)}, more than the device's "
                f"{most}; {_REMEDIES[role]}"
            )
        beside = {name: size for name, size in parts.items() if name not in inside}
        if config.vllm.kv_cache_gb is None and sum(beside.values()) > (1 - share) * limit * 1e9:
            raise ConfigError(
                f"launcher.device_memory_gb: a rank of {role} needs about {sum_text(beside)} beside vLLM, which takes "
                f"{share:g} of the device's {limit:g} GB; lower vllm.gpu_memory_utilization, or set weightsync.path to "
                f"staged"
            )
    return roles


def sum_text(parts: Parts) -> str:
    """Return e.g. `34.1 GB = weights 15.2 GB + moments 18.9 GB`, the largest first."""
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    terms = " + ".join(f"{name} {size_text(size)}" for name, size in largest_first)
    return f"{size_text(sum(parts.values()))} = {terms}"


def _is_vllm(config: RunConfig, role: str) -> bool:
    engines = {"rollout": config.rollout.engine, "evaluate": config.evaluate.engine}
    return engines.get(role) == "vllm"
