"""Builds transformers models from a Hugging Face directory without reading or initializing weights.

Every engine calls `empty_causal_lm` and fills in the parameters itself: the trainer from files, the generator from the
trainer. Reads config.json; opens weight files only to check or fill a model.
"""

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from asyncflow.errors import ConfigError, PlanError
from weightsync.device_copies import without_reading
from weightsync.plan import Need
from workers.data.model_files import few_of
from workers.engines.base import GenerateRequest, SleepOrder, check_request
from workers.engines.fsdp.dtensor_shards import local_shards
from workers.engines.hf.weights import HfWeights, write_weights
from workers.engines.lora import PREFIX, A, B, adapted_modules, adapter_shapes, adapter_targets
from workers.settings.lora import LoraConfig
from workers.settings.rollout import SamplingConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def empty_causal_lm(model_dir: Path, *, dtype: torch.dtype, attention: str) -> nn.Module:
    """Build the model in evaluation mode, with parameters on the meta device and real buffers on the CPU.

    `attention` is a name in transformers' attention interface. Raises ConfigError if config.json is missing, or no
    causal language model of transformers fits it.
    """
    return _empty_model(AutoModelForCausalLM, model_dir, dtype=dtype, attention=attention, key="model.path")


def empty_reward_model(model_dir: Path, *, dtype: torch.dtype, attention: str) -> nn.Module:
    """Build a model that gives a sequence a single number; otherwise like `empty_causal_lm`, errors included."""
    kind = AutoModelForSequenceClassification
    return _empty_model(kind, model_dir, dtype=dtype, attention=attention, key="reward.model.path", num_labels=1)


def _empty_model(
    kind: Any, model_dir: Path, *, dtype: torch.dtype, attention: str, key: str, **changes: object
) -> nn.Module:
    """Build what transformers' class `kind` makes of a config.json with some `changes`; `key` begins messages."""
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"{key}: {model_dir} has no config.json; give a Hugging Face model directory")
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False, **changes)
        # Dropout is off in training mode too: a policy update's probability ratio compares two forward passes.
        _without_dropout(config)
        config.dtype = dtype  # or models with a head of their own build their backbone in config.json's (5.5.4)
        with _parameters_on_meta():
            model: nn.Module = kind.from_config(config, dtype=dtype, attn_implementation=attention)
    except ValueError as error:
        raise ConfigError(f"{key}: transformers cannot build {model_dir}: {error}") from error
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # for models whose configuration does not mention it
        elif isinstance(module, nn.Embedding):
            module.padding_idx = None  # otherwise its row gets no gradient, though this token often ends responses
    return model.eval()


def _without_dropout(config: Any) -> None:
    """Set every dropout setting to 0."""
    # In the configuration, because many models apply dropout by a function, with no module to find.
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate uninitialized memory on `device` for every meta parameter; buffers keep their values, ties stay."""
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


def stored_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return every parameter's name, tied weights once, with all other names that files may use for it."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    # Files differ in names that transformers renames on loading (GPT-NeoX's `embed_out` is `lm_head` in memory), and by
    # the base model's prefix (GPT-2's files on the Hub have `wte.weight` for `transformer.wte.weight`).
    renamings = _saving_renames(model)
    names = {}
    for name, aliases in parameter_aliases(model).items():
        others = list(aliases)
        for own in (name, *aliases):
            stored = own
            for renaming in renamings:
                stored = renaming.rename_source_key(stored)[0]
            others += [stored, *(each.removeprefix(prefix) for each in (own, stored))]
        names[name] = tuple(dict.fromkeys(other for other in others if other != name))
    return names


def _saving_renames(model: nn.Module) -> list[Any]:
    """Return transformers' renamings on saving, without conversions that change tensors."""
    known: Any = model
    conversions = get_model_conversion_mapping(known, add_legacy=False)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    return [each.reverse_transform() for each in reversed(renamings)]


def weight_needs(model: nn.Module) -> dict[str, Need]:
    """Return what a model's `load_weights` needs, by HF name; tied weights once."""
    aliases = parameter_aliases(model)
    return {name: Need(tuple(parameter.shape), aliases[name]) for name, parameter in model.named_parameters()}


def adapter_needs(model: nn.Module, lora: LoraConfig) -> dict[str, Need]:
    """Return what `load_weights` needs where versions are adapters. Raises ConfigError, see `adapter_targets`."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    targets = adapter_targets(shapes, lora)
    for module in targets:
        if not isinstance(layer := model.get_submodule(module), nn.Linear):
            raise ConfigError(
                f"lora.targets: {module} is a {type(layer).__name__}; only layers of nn.Linear are adapted"
            )
    return {name: Need(shape) for name, shape in adapter_shapes(targets, lora.rank).items()}


def loadable_parameters(model: nn.Module, base: Path, lora: LoraConfig | None) -> dict[str, nn.Parameter]:
    """Return what a version replaces, by HF name: all of a model's parameters or, with `lora`, those of an adapter that
    is put on it; then the model's weights are read from the directory `base`, which raises ConfigError."""
    if lora is None:
        return dict(model.named_parameters())
    read_weights(model, HfWeights(base))
    return attach_adapter(model, lora)


@torch.no_grad()
def attach_adapter(model: nn.Module, lora: LoraConfig) -> dict[str, nn.Parameter]:
    """Have a model without gradients add an adapter's part, x A^T B^T x scaling, to what its adapted layers return.
    Returns the adapter's tensors by peft's names, on the model's device; all are 0, which is the base."""
    # By a hook: the base's parameters keep their names and their memory, and loading an adapter touches nothing else.
    some = next(model.parameters())
    tensors = {
        name: nn.Parameter(torch.zeros(need.shape, dtype=some.dtype, device=some.device), requires_grad=False)
        for name, need in adapter_needs(model, lora).items()
    }
    for module in adapted_modules(tensors):
        a, b = (tensors[PREFIX + module + end] for end in (A, B))
        model.get_submodule(module).register_forward_hook(partial(_add_adapter, a, b, lora.scaling))
    return tensors


def _add_adapter(
    a: nn.Parameter, b: nn.Parameter, scaling: float, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> None:
    # In place: one kernel adds the product to what the layer has just computed.
    low = linear(inputs[0], a).flatten(0, -2)
    output.view(-1, output.shape[-1]).addmm_(low, b.T, alpha=scaling)


def vocab_size(model: nn.Module) -> int:
    known: Any = model
    return int(known.get_input_embeddings().num_embeddings)


class CheckedEngine(ABC):
    """Common to the engines that generate with a model of transformers: refuses wrong requests and weights before it
    does anything. `max_length`: see `check_request`; `lora`: of the adapters that `load_weights` gets, None: it gets
    whole weights."""

    def __init__(
        self, model: nn.Module, sampling: SamplingConfig, max_length: int | None, lora: LoraConfig | None = None
    ) -> None:
        self._sampling = sampling
        self._needs = weight_needs(model) if lora is None else adapter_needs(model, lora)
        self._vocab_size = vocab_size(model)
        self._max_length = max_length
        self._loaded = False
        self._order = SleepOrder()

    @property
    @abstractmethod
    def num_running(self) -> int:
        """See `GenerateEngine`."""

    @property
    def free_slots(self) -> int:
        return self._sampling.batch_size - self.num_running

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        assert self._loaded, "submit() before load_weights()"
        assert len(requests) <= self.free_slots
        for request in requests:
            check_request(
                request,
                vocab_size=self._vocab_size,
                max_length=self._max_length,
                max_response_tokens=self._sampling.max_response_tokens,
            )
        self._start(requests)

    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        """See `GenerateEngine`. Raises PlanError if a weight is missing, unknown, or of another shape; nothing was
        replaced."""
        missing, unknown = self._needs.keys() - weights.keys(), weights.keys() - self._needs.keys()
        if missing or unknown:
            lacks, others = (few_of(names) or "none" for names in (missing, unknown))
            raise PlanError(f"weights do not fit the model: missing {lacks}, unknown {others}")
        like = without_reading(weights)
        for name, need in self._needs.items():
            if (shape := tuple(like[name].shape)) != need.shape:
                raise PlanError(f"weight {name}: its shape is {shape}, but the model's is {need.shape}")
        self._order.note_loaded()
        self._replace_weights(weights, adopt=adopt)
        self._loaded = True

    def weight_needs(self) -> Mapping[str, Need]:
        return self._needs

    @abstractmethod
    def _start(self, requests: Sequence[GenerateRequest]) -> None: ...

    @abstractmethod
    def _replace_weights(self, weights: Mapping[str, Tensor], *, adopt: bool) -> None: ...


def read_stored(model_dir: Path, needs: Mapping[str, Need]) -> dict[str, Tensor]:
    """Return the needed weights, by HF name, from a model's directory. Raises ConfigError, see `HfWeights`."""
    weights = HfWeights(model_dir)
    names = stored_names(empty_causal_lm(model_dir, dtype=torch.float32, attention="eager"))
    found = {}
    for name, need in needs.items():
        rows = need.shape[0] if need.shape else 0
        stored = weights.find_name(name, (*names.get(name, ()), *need.aliases))
        found[name] = weights.read_rows(stored, need.shape, 0, rows)
    return found


def read_parameters(parameters: Mapping[str, nn.Parameter], weights: HfWeights, *, what: str) -> None:
    """Fill parameters from files that hold these and nothing else. Raises ConfigError, see `HfWeights`."""
    weights.check_used(dict.fromkeys(parameters, ()), model=what)
    weights.fill(local_shards(parameters.items()))


def write_parameters(parameters: Mapping[str, nn.Parameter], target: Path) -> None:
    """Create a directory with parameters as safetensors, in their own element type."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    target.mkdir(parents=True, exist_ok=True)
    write_weights(target, shapes, lambda name: parameters[name].detach().cpu().contiguous())


@torch.no_grad()
def replace_weights(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor], *, adopt: bool) -> None:
    """Give parameters new values of the same shapes; other element types are cast. `adopt`: see `GenerateEngine`."""
    for name, parameter in parameters.items():
        if adopt:
            parameter.data = weights[name].to(parameter.dtype)
        else:
            parameter.copy_(weights[name])


def check_stored(
    model: nn.Module, weights: HfWeights, aliases: Mapping[str, Iterable[str]], *, unused: Iterable[str] = ()
) -> None:
    """Refuse files with tensors that the model would not use; see `HfWeights.check_used`.

    Args:
        aliases: `stored_names` of the model before it was sharded.
        unused: further names to tolerate, e.g. of another kind of head.
    Raises:
        ConfigError: names the tensor.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    # Tolerate buffers that equal the model's own, and what transformers itself leaves out (old rotary frequencies,
    # masks, layers for multi-token prediction).
    stored = ((name, buffer) for own, buffer in model.named_buffers() for name in (own, own.removeprefix(prefix)))
    same = [name for name, buffer in stored if name in weights and _holds(weights, name, buffer)]
    weights.check_used(aliases, model=type(model).__name__, unused=(*same, *unused), ignored=names_left_out(model))


def names_left_out(model: nn.Module) -> re.Pattern[str] | None:
    """Return a pattern for names that transformers silently leaves out; None: there are none."""
    # Source: transformers 5.24, `PreTrainedModel._adjust_missing_and_unexpected_keys`.
    known: Any = model
    patterns = {*(known._keys_to_ignore_on_load_unexpected or ())}
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return re.compile("|".join(f"({pattern})" for pattern in sorted(patterns))) if patterns else None


def _holds(weights: HfWeights, name: str, buffer: Tensor) -> bool:
    stored = weights.read_whole(name)
    return stored.shape == buffer.shape and bool((stored.to(buffer.dtype) == buffer.cpu()).all())


def read_weights(model: nn.Module, weights: HfWeights) -> None:
    """Fill all parameters of a model from files. Raises ConfigError if they lack weights, or hold others."""
    aliases = stored_names(model)
    check_stored(model, weights, aliases)
    weights.fill(local_shards(model.named_parameters()), aliases)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a transformers model."""
    # transformers models declare the classes of these blocks as indivisible.
    indivisible = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in indivisible]


# Serializes builds, since each one patches `register_parameter` and restores it afterwards.
_BUILDING = threading.RLock()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter that this thread's modules register to the meta device; buffers stay real."""
    patched: Any = nn.Module
    # Building under `torch.device("meta")` would lose buffers that no file holds (rotary frequencies), and transformers
    # offers no public way to recompute them. The patch affects the whole process, so it checks the thread.
    builder = threading.get_ident()
    with _BUILDING:
        register = nn.Module.register_parameter

        def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None and not param.is_meta and threading.get_ident() == builder:
                param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            register(module, name, param)

        patched.register_parameter = register_on_meta
        try:
            yield
        finally:
            patched.register_parameter = register
