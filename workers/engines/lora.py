"""Low-rank adapters: which modules have one, what its tensors are called, and its files in peft's form. Pure: no
processes, no engine, and no torch at import (the launcher asks it, too). Layers: `workers.engines.hf.adapter` and
`workers.engines.megatron.adapter`.

    W' = W + scaling x B A       A [rank, in], B [out, rank]       (Hu et al. 2021, arXiv 2106.09685, eq. 3)

Trainer, generators and exports ask it, so that all of them mean the same tensors. Names are peft's:
`base_model.model.` + a module's Hugging Face path + `.lora_A.weight` or `.lora_B.weight`. What `TrainEngine.shards`
yields depends on `weightsync.lora`:

    adapter   the adapter's tensors alone, float32, under peft's names (`adapter_shapes`)
    merged    all weights under the model's names, as a run without `lora` has them, with W' for the adapted ones
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from safetensors import safe_open

from asyncflow.errors import ConfigError
from workers.data.model_files import FLOATS, few_of, is_finite, read_header
from workers.settings.lora import ALL_LINEAR, LoraConfig

if TYPE_CHECKING:
    from torch import Tensor

    from workers.engines.base import LocalShard

PREFIX = "base_model.model."
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
A, B = ".lora_A.weight", ".lora_B.weight"
_WEIGHT = ".weight"
# Their A is divided by tensor-parallel ranks, B of all others (Megatron, vLLM).
_ROW_PARALLEL = ("o_proj", "down_proj")
# Path components that stand before the number of a decoder layer.
_STACKS = ("layers", "h", "blocks")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Trained:
    """How many parameters are trained.

    Attributes:
        all_a: of an adapter, those of all A.
        undivided: of an adapter, those that each tensor-parallel rank has: A of column-parallel layers, B of others.
    """

    total: int
    all_a: int = 0
    undivided: int = 0

    def on_rank(self, tensor: int) -> int:
        """Return how many of an adapter one of `tensor` tensor-parallel ranks has."""
        return self.undivided + (self.total - self.undivided) // tensor


class AdapterSwitch:
    """Whether the adapters of a model take part in its passes."""

    def __init__(self) -> None:
        self.on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        self.on = False
        try:
            yield
        finally:
            self.on = True


class MergedShard:
    """A part of an adapted weight, whose values are computed whenever they are read: float32 [rows, columns].

    Args:
        base: the part of W.
        a: A's columns that belong to it, [rank, columns].
        b: B's rows, [rows, rank].
    """

    def __init__(self, base: "LocalShard", a: "Tensor", b: "Tensor", scaling: float) -> None:
        self.name, self.shape, self.box = base.name, base.shape, base.box
        self._base, self._a, self._b, self._scaling = base.values, a, b, scaling

    @property
    def values(self) -> "Tensor":
        return merge(self._base.reshape(self.box.size), self._a, self._b, self._scaling)


def adapter_targets(shapes: Mapping[str, Shape], lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """Return the path of each adapted module -> (out, in), in the order of `shapes`.

    Args:
        shapes: of the model's weights by HF name (e.g. of `weight_needs`), tied ones once.
    Raises:
        ConfigError: a target or a module of `modules_to_save` is not in the model, or cannot be what it should.
    """
    linears = {
        name.removesuffix(_WEIGHT): (shape[0], shape[1])
        for name, shape in shapes.items()
        if name.endswith(_WEIGHT) and len(shape) == 2 and _is_in_layer(name)
    }
    wanted = None if lora.targets == ALL_LINEAR else lora.targets
    kept = saved_weights(shapes, lora)
    modules = {name.rpartition(".")[0] for name in shapes}
    for target in wanted or ():
        if not any(_ends_with(module, target) for module in linears):
            known = sorted({module.rpartition(".")[2] for module in linears})
            other = next((module for module in modules if _ends_with(module, target)), None)
            why = "the model has no such module" if other is None else f"{other} is no linear layer of a decoder layer"
            raise ConfigError(f"lora.targets: {target!r}: {why}; it has {' '.join(known)}")
    found = {
        module: shape
        for module, shape in linears.items()
        if (wanted is None or any(_ends_with(module, target) for target in wanted)) and module + _WEIGHT not in kept
    }
    if not found:
        raise ConfigError("lora.targets: no linear layer is left to adapt; name others, or shorten modules_to_save")
    return found


def saved_weights(shapes: Mapping[str, Shape], lora: LoraConfig) -> tuple[str, ...]:
    """Return the HF names of the weights that are trained whole (`modules_to_save`). Raises ConfigError for a module
    that the model lacks."""
    for module in lora.modules_to_save:
        if not any(_is_of_module(name, module) for name in shapes):
            raise ConfigError(f"lora.modules_to_save: the model has no module {module!r}; correct the name")
    return tuple(name for name in shapes if any(_is_of_module(name, module) for module in lora.modules_to_save))


def adapter_shapes(targets: Mapping[str, tuple[int, int]], rank: int) -> dict[str, Shape]:
    """Return the name of each tensor of an adapter, as peft has it -> its shape; A before B, in the targets' order."""
    shapes: dict[str, Shape] = {}
    for module, (outputs, inputs) in targets.items():
        shapes[PREFIX + module + A] = (rank, inputs)
        shapes[PREFIX + module + B] = (outputs, rank)
    return shapes


def adapted_modules(names: Iterable[str]) -> list[str]:
    """Return the paths of the layers that the tensors of an adapter belong to."""
    return [name.removeprefix(PREFIX).removesuffix(A) for name in names if name.endswith(A)]


def trained_parameters(shapes: Mapping[str, Shape], lora: LoraConfig) -> Trained:
    """Count what is trained: the adapter, and `modules_to_save`."""
    targets = adapter_targets(shapes, lora)
    inner = sum(inputs for _, inputs in targets.values())
    outer = sum(outputs for outputs, _ in targets.values())
    undivided = sum(
        outputs if module.endswith(_ROW_PARALLEL) else inputs for module, (outputs, inputs) in targets.items()
    )
    saved = sum(math.prod(shapes[name]) for name in saved_weights(shapes, lora))
    return Trained(lora.rank * (inner + outer) + saved, lora.rank * inner, lora.rank * undivided)


def merge(weight: "Tensor", a: "Tensor", b: "Tensor", scaling: float) -> "Tensor":
    """Return W + scaling x B A in float32 (or the weight's wider type); cast it once, where it is used. Rows of W need
    the same rows of B."""
    import torch

    exact = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(exact) + scaling * (b.to(exact) @ a.to(exact))


def initial_a(name: str, shape: Shape, lora: LoraConfig, *, seed: int) -> "Tensor":
    """Return A at the start, float32; it depends on its name and the run's seed alone, not on ranks or devices."""
    import torch

    generator = torch.Generator().manual_seed(xxhash.xxh3_64(f"{seed}/{name}".encode()).intdigest() % 2**63)
    a = torch.empty(shape, dtype=torch.float32)
    if lora.init == "gaussian":
        return a.normal_(std=1 / lora.rank, generator=generator)
    # Source: peft 0.21, `LoraLayer.reset_lora_parameters`: kaiming_uniform with a = sqrt(5).
    bound = shape[1] ** -0.5
    return a.uniform_(-bound, bound, generator=generator)


def fill_adapter(
    shards: "Iterable[LocalShard]", lora: LoraConfig, targets: Mapping[str, tuple[int, int]], *, seed: int
) -> None:
    """Give parts of an adapter, under peft's names, their first values: those of `lora.path`, or new ones."""
    read = None if lora.path is None else read_adapter(Path(lora.path), lora, targets)
    for shard in shards:
        if read is not None:
            whole = read[shard.name]
        elif shard.name.endswith(A):
            whole = initial_a(shard.name, shard.shape, lora, seed=seed)
        else:
            shard.values.zero_()
            continue
        shard.values.copy_(whole[shard.box.slices].reshape(shard.values.shape))


def peft_config(lora: LoraConfig, targets: Iterable[str], *, base: str) -> dict[str, Any]:
    """Return `adapter_config.json`; `base` is what it says of the model that the adapter belongs to."""
    alpha = lora.alpha_or_rank
    named = {module.rpartition(".")[2] for module in targets} if lora.targets == ALL_LINEAR else lora.targets
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True if lora.init == "default" else lora.init,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": list(lora.modules_to_save) or None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted(named),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.use_rslora,
    }


def write_adapter(
    target: Path, tensors: "Mapping[str, Tensor]", lora: LoraConfig, targets: Iterable[str], *, base: str
) -> None:
    """Write an adapter in peft's form into `target`, which is created. `tensors` are contiguous, on the CPU, by their
    names in the file."""
    from safetensors.torch import save_file

    target.mkdir(parents=True, exist_ok=True)
    text = json.dumps(peft_config(lora, targets, base=base), indent=2, sort_keys=True)
    (target / CONFIG_FILE).write_text(text)
    save_file(dict(tensors), target / WEIGHTS_FILE, metadata={"format": "pt"})
    (target / WEIGHTS_FILE).chmod((target / CONFIG_FILE).stat().st_mode)  # safetensors makes it its owner's only


def check_adapter(directory: Path, lora: LoraConfig, targets: Mapping[str, tuple[int, int]]) -> None:
    """Raise ConfigError if a directory does not hold, in peft's form, the plain LoRA that `lora` describes, or it does
    not fit the model."""
    given = f"lora.path: {directory}"
    try:
        config = json.loads((directory / CONFIG_FILE).read_text())
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG_FILE} holds no settings")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{given} cannot be read as an adapter ({error}); name peft's directory of one") from error
    _check_plain(config, given)
    for key, name, own in (
        ("r", "rank", lora.rank),
        ("lora_alpha", "alpha", lora.alpha_or_rank),
        ("use_rslora", "use_rslora", lora.use_rslora),
    ):
        theirs = config.get(key, False)
        if theirs != own:
            raise ConfigError(f"{given} has {key} {theirs}, but lora.{name} is {own}; set it to the adapter's")
    if not (directory / WEIGHTS_FILE).exists():
        raise ConfigError(f"{given} has no {WEIGHTS_FILE}; name a directory in which peft saved an adapter's weights")
    held = read_header(directory / WEIGHTS_FILE, key="lora.path")
    shapes = adapter_shapes(targets, lora.rank)
    missing, unknown = shapes.keys() - held.keys(), held.keys() - shapes.keys()
    if missing or unknown:
        found = [f"{what} {few_of(names)}" for what, names in (("lacks", missing), ("also has", unknown)) if names]
        raise ConfigError(
            f"{given} does not fit lora.targets {lora.targets!r}: it {' and '.join(found)}; set them to the adapter's "
            f"target_modules, or name another adapter"
        )
    for name, shape in shapes.items():
        if held[name].shape != shape:
            raise ConfigError(
                f"{given}: {name} has shape {held[name].shape}, but the model asks for {shape}; name an adapter of "
                f"this model"
            )
        if held[name].dtype not in FLOATS:
            raise ConfigError(f"{given}: {name} has elements of type {held[name].dtype}; name an adapter of floats")
        if not is_finite(held[name]):
            raise ConfigError(f"{given}: {name} has numbers that are not finite; name an adapter of an earlier step")


def read_adapter(directory: Path, lora: LoraConfig, targets: Mapping[str, tuple[int, int]]) -> "dict[str, Tensor]":
    """Return the tensors of an adapter in peft's form, by name, in the files' element type; errors as
    `check_adapter`."""
    check_adapter(directory, lora, targets)
    with safe_open(directory / WEIGHTS_FILE, framework="pt") as file:
        return {name: file.get_tensor(name) for name in adapter_shapes(targets, lora.rank)}


def _check_plain(config: Mapping[str, Any], given: str) -> None:
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{given} is a {config.get('peft_type')} adapter; name one of type LORA")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() != "gaussian":
        raise ConfigError(
            f"{given} was made with init_lora_weights {init}, which rewrites the base; convert it with peft"
        )
    for key in ("use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "layer_replication", "modules_to_save",
                "target_parameters", "trainable_token_indices", "alora_invocation_tokens", "fan_in_fan_out",
                "use_qalora", "use_bdlora", "kasa_config", "monteclora_config", "arrow_config"):  # fmt: skip
        if config.get(key):
            raise ConfigError(f"{given} has {key}, which is not supported; name an adapter without it")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{given} trains biases (bias {config['bias']}), which is not supported; use bias none")


def _is_in_layer(name: str) -> bool:
    parts = name.split(".")
    return any(stack in _STACKS and number.isdigit() for stack, number in itertools.pairwise(parts))


def _ends_with(module: str, end: str) -> bool:
    """Return whether peft's `target_modules` would match a module's path."""
    return module == end or module.endswith(f".{end}")


def _is_of_module(weight: str, module: str) -> bool:
    """Return whether a weight lies in a module, or one of its inner modules, named by an end of its path."""
    path = weight.split(".")[:-1]
    return any(_ends_with(".".join(path[: k + 1]), module) for k in range(len(path)))
