"""Layers with an adapter, in a model of transformers.

    y = x W + scaling x (x A) B        W frozen, in the model's element type; A and B float32, cast to that of x

Base weights keep their names; A and B are `<module>.lora_A.weight` and `<module>.lora_B.weight`. One switch per model
turns all of its adapters off, so the base is there without a second copy.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import dropout, linear

from asyncflow.errors import ConfigError
from weightsync.sender import Shard
from workers.engines.base import LocalShard
from workers.engines.fsdp.dtensor_shards import local_shards
from workers.engines.hf.model import parameter_aliases
from workers.engines.lora import (
    PREFIX,
    A,
    AdapterSwitch,
    B,
    MergedShard,
    adapter_targets,
    fill_adapter,
    saved_weights,
)
from workers.settings.lora import LoraConfig


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; takes the weight and bias of `base`. A and B are on the meta device."""

    lora_A: nn.Linear
    lora_B: nn.Linear

    def __init__(self, base: nn.Linear, lora: LoraConfig, switch: AdapterSwitch) -> None:
        nn.Module.__init__(self)  # the base's parameters are taken, not made anew
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        for name, inputs, outputs in (
            ("lora_A", base.in_features, lora.rank),
            ("lora_B", lora.rank, base.out_features),
        ):
            setattr(self, name, nn.Linear(inputs, outputs, bias=False, device="meta", dtype=torch.float32))
        self._scaling, self._dropout, self._switch = lora.scaling, lora.dropout, switch

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if not self._switch.on:
            return output
        if self._dropout and torch.is_grad_enabled():
            input = dropout(input, self._dropout)
        inner = linear(input, self.lora_A.weight.to(input.dtype))
        return torch.add(output, linear(inner, self.lora_B.weight.to(input.dtype)), alpha=self._scaling)


class Adapter:
    """The adapter of a model in training: puts the layers in, freezes the rest, and names what is trained.

    The model's parameters may be sharded by rows afterwards (FSDP2).

    Args:
        model: of transformers, with parameters on the meta device.
    Raises:
        ConfigError: the settings do not fit the model.
    """

    def __init__(self, model: nn.Module, lora: LoraConfig) -> None:
        self.switch = AdapterSwitch()
        self._model = model
        self._lora = lora
        self._whole_a: dict[str, Tensor] = {}
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.targets = adapter_targets(shapes, lora)
        saved = saved_weights(shapes, lora)
        aliases = parameter_aliases(model)
        for name in saved:
            if aliases[name]:
                raise ConfigError(
                    f"lora.modules_to_save: {name} is tied to {aliases[name][0]}, so that training it changes both; "
                    "leave the module out"
                )
        model.requires_grad_(False)
        for name in saved:
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
        for path in self.targets:
            parent, _, name = path.rpartition(".")
            owner = model.get_submodule(parent)
            base = getattr(owner, name)
            if type(base) is not nn.Linear:
                raise ConfigError(
                    f"lora.targets: {path} is a {type(base).__name__}, and only torch's Linear can be adapted; name "
                    "others, or another model"
                )
            setattr(owner, name, LoraLinear(base, lora, self.switch))

    def is_base(self, name: str) -> bool:
        """Return whether a parameter is in the model's files."""
        return not name.endswith((A, B))

    def fill(self, *, seed: int) -> None:
        """Give the adapter its first values: those of `lora.path`, or new ones."""
        fill_adapter(self.shards(), self._lora, self.targets, seed=seed)

    def shards(self) -> Iterator[LocalShard]:
        """Yield this rank's pieces of the adapter, under peft's names."""
        named = ((name, value) for name, value in self._model.named_parameters() if not self.is_base(name))
        for shard in local_shards(named):
            yield replace(shard, name=PREFIX + shard.name)

    def gather_a(self) -> None:
        """Keep every A whole, as merging its rows needs it; collective over the ranks that hold the model."""
        for path in self.targets:
            value = self._model.get_parameter(path + A).detach()
            self._whole_a[path] = value.full_tensor() if isinstance(value, DTensor) else value

    @property
    def gathered(self) -> Iterable[Tensor]:
        """Every A, as of the last `gather_a`."""
        return self._whole_a.values()

    def merged_shards(self) -> Iterator[Shard]:
        """Yield this rank's pieces of the whole model under its own names, with the adapter added as of the last
        `gather_a`; it is added when a piece is read, so no second copy is in memory."""
        parameters = dict(self._model.named_parameters())
        changes = {path: list(local_shards([(path, parameters[path + B])])) for path in self.targets}
        base = ((name, value) for name, value in parameters.items() if self.is_base(name))
        for shard in local_shards(base):
            path = shard.name.removesuffix(".weight")
            if path not in changes:
                yield shard
                continue
            # W and B have as many rows, so they are cut alike.
            rows = next(one for one in changes[path] if one.box.offset[0] == shard.box.offset[0])
            assert rows.box.size[0] == shard.box.size[0], f"{path}: rows of W and B are cut differently"
            yield MergedShard(shard, self._whole_a[path], rows.values, self._lora.scaling)
