"""Builds causal language models from a Hugging Face directory without reading or initialising weights.

Every engine calls `empty_causal_lm` and fills the parameters itself: the trainer from the files, the generator from
the trainer. Knows config.json and generation_config.json; never opens a weight file.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.errors import ConfigError
from weightsync.plan import Need

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Element types by their configuration name."""


def empty_causal_lm(model_dir: Path, *, dtype: torch.dtype, attention: str) -> nn.Module:
    """Build the model with parameters on the meta device and real buffers on the CPU, in evaluation mode.

    Dropout is off in training mode too: the probability ratio of a policy update compares two forward passes.

    Args:
        model_dir: holds config.json.
        dtype: of the parameters.
        attention: name in transformers' attention interface.
    Raises:
        ConfigError: config.json is missing, or no causal language model of transformers fits it.
    """
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"model.path: {model_dir} has no config.json; give a Hugging Face model directory")
    try:
        config = AutoConfig.from_pretrained(model_dir)
        with _parameters_on_meta():
            build: Any = AutoModelForCausalLM.from_config
            model: nn.Module = build(config, dtype=dtype, attn_implementation=attention)
    except ValueError as error:
        raise ConfigError(f"model.path: transformers cannot build {model_dir}: {error}") from error
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.eval()


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give every meta parameter uninitialised memory on `device`; buffers keep their values, tied weights stay tied."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    model.tie_weights()  # type: ignore[operator]


def parameter_aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return every parameter's name, tied weights once, with the other names of the same weight."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {group[0]: tuple(group[1:]) for group in names.values()}


def weight_needs(model: nn.Module) -> dict[str, Need]:
    """Return what replaces all weights of a model, by HF name; tied weights once."""
    aliases = parameter_aliases(model)
    return {name: Need(tuple(parameter.shape), aliases[name]) for name, parameter in model.named_parameters()}


@torch.no_grad()
def replace_weights(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor], *, adopt: bool) -> None:
    """Give parameters new values.

    Args:
        parameters: of the model, by name.
        weights: of the same shapes; other element types are cast.
        adopt: let the parameters be these tensors, where the type is theirs, instead of copying.
    """
    for name, parameter in parameters.items():
        if adopt:
            parameter.data = weights[name].to(parameter.dtype)
        else:
            parameter.copy_(weights[name])


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a transformers model, which declares their classes as indivisible."""
    indivisible = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in indivisible]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it; buffers stay real.

    Building under `torch.device("meta")` would lose buffers that no file holds (rotary frequencies), and transformers
    offers no public way to compute them again.
    """
    register = nn.Module.register_parameter
    patched: Any = nn.Module

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    patched.register_parameter = register_on_meta
    try:
        yield
    finally:
        patched.register_parameter = register
