"""Layers with an adapter in a Megatron model, divided as the layers are: column- and row-parallel, dense.

A layer of Megatron's holds several of Hugging Face's modules (`names.fused_layers`), each with a pair A, B of its own,
as peft has them. On rank k of the tensor-parallel ones, whose tokens x_k are a share of all between the layers:

    column-parallel    y_k = gather(x) W_k + scaling x gather(x_k A) B_k        A whole, B_k some rows of B
    row-parallel       y_k = scatter(x W_k) + scaling x scatter(x A_k) B        A_k some columns of A, B whole
                       (x here: all tokens, some inputs; scatter: sum over ranks, of which each gets its tokens)

So what is gathered and scattered has `rank` numbers a token and module. A whole A or B sees only its rank's tokens:
its gradient is summed over the tensor-parallel ranks, as those of norms are (`sequence_parallel`). W is frozen, in the
element type of the computation; A and B are float32, cast to it where they are used.

Source: Hu et al. 2021, arXiv 2106.09685, eq. 3; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from weightsync.sender import Shard
from workers.engines.base import LocalShard
from workers.engines.lora import PREFIX, AdapterSwitch, MergedShard
from workers.engines.megatron.names import ADAPTER, FusedLayer, MegatronGeometry, fused_layers, megatron_shards
from workers.settings.lora import LoraConfig


class MegatronAdapter:
    """The adapter of this rank's part of a model: puts the pairs in, freezes the rest, and names what is trained.

    Args:
        targets: path of each adapted module -> (out, in), of the whole model; every chunk has at least one.
    """

    def __init__(self, lora: LoraConfig, targets: Mapping[str, tuple[int, int]]) -> None:
        self.lora, self.targets = lora, targets
        self.switch = AdapterSwitch()
        # Whether backward passes follow the passes under way. Autograd does not know: a layer whose activations are
        # recomputed runs without gradients first, and must drop the same inputs in both of its passes.
        self.trains = False
        self._pairs: dict[str, _Pair] = {}  # path of each adapted module that this rank has a part of

    def attach(self, network: Any, geometry: MegatronGeometry, *, recomputes: bool) -> None:
        """Freeze a chunk of the model and give its layers their pairs, which are 0."""
        network.requires_grad_(False)
        layers = fused_layers(geometry)
        for number, decoder_layer in enumerate(network.decoder.layers):
            prefix = f"model.layers.{number + geometry.layer_offset}."
            for name, fused in layers.items():
                layer = decoder_layer.get_submodule(name)
                own = ParallelAdapter(fused, prefix, self, device=layer.weight.device, ranks=geometry.tp_size)
                if own.pairs:
                    layer.add_module(ADAPTER, own)
                    layer.register_forward_hook(own.add_change)
                    self._pairs |= {prefix + module: pair for module, pair in own.pairs.items()}
        if recomputes and network.pre_process:
            network.embedding.register_forward_hook(_begin_graph)

    def shards(self, network: Any, geometry: MegatronGeometry) -> Iterator[LocalShard]:
        """Yield a chunk's pieces of the adapter, under peft's names."""
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                for shard in megatron_shards(name, parameter, geometry):
                    yield replace(shard, name=PREFIX + shard.name)

    def merged_shards(self, network: Any, geometry: MegatronGeometry) -> Iterator[Shard]:
        """Yield a chunk's pieces of the whole model under its own names, with the adapter added; it is added when a
        piece is read, from what this rank has: A and B are cut as W's columns and rows are."""
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                continue
            for shard in megatron_shards(name, parameter, geometry):
                pair = self._pairs.get(shard.name.removesuffix(".weight"))
                if pair is None:
                    yield shard
                else:
                    yield MergedShard(shard, pair.lora_A.detach(), pair.lora_B.detach(), self.lora.scaling)


class _Pair(nn.Module):
    """A and B of one module, this rank's parts."""

    def __init__(self, rank: int, inputs: int, outputs: int, device: torch.device) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros(rank, inputs, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank, dtype=torch.float32, device=device))


class ParallelAdapter(nn.Module):
    """The pairs of a layer, as a submodule of it: `<layer>.adapter.q_proj.lora_A`."""

    # Legend of shapes: t tokens of this rank, T those of all tensor-parallel ranks, m adapted modules, r rank.

    def __init__(
        self, fused: FusedLayer, prefix: str, owner: MegatronAdapter, *, device: torch.device, ranks: int
    ) -> None:
        """`prefix`: of the paths of the modules; `ranks`: tensor-parallel ones."""
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

        super().__init__()
        self._fused, self._owner = fused, owner
        self._shares_tokens = ranks > 1
        self.pairs: dict[str, _Pair] = {}
        for module, outputs in fused.parts:
            if prefix + module not in owner.targets:
                continue
            pair = self.pairs[module] = _Pair(owner.lora.rank, fused.inputs, fused.groups * outputs, device)
            self.add_module(module.rpartition(".")[2], pair)
            whole: Any
            cut, whole, dim = (pair.lora_B, pair.lora_A, 0) if fused.column else (pair.lora_A, pair.lora_B, 1)
            set_tensor_model_parallel_attributes(cut, True, dim, 1)
            whole.sequence_parallel = self._shares_tokens  # read by `finalize_model_grads`

    def add_change(self, _: nn.Module, inputs: tuple[Tensor, ...], given: Any) -> Any:
        """Add the adapter to what the layer returned, (output, bias); a forward hook."""
        output, bias = given
        if not self._owner.switch.on:
            return given
        return self._changed(output, self._inner(inputs[0])), bias

    def _inner(self, given: Tensor) -> Tensor:
        """Return x A of all adapted modules for the tokens that the layer's output has: [T, 1, m r], or [t, 1, m r] of
        a row-parallel layer."""
        from megatron.core.tensor_parallel import (
            gather_from_sequence_parallel_region,
            reduce_scatter_to_sequence_parallel_region,
        )

        owner = self._owner
        all_a = [pair.lora_A.to(given.dtype) for pair in self.pairs.values()]
        share = owner.lora.dropout if owner.trains else 0.0
        if share:  # every module drops inputs of its own, as in peft
            inner = torch.cat([linear(dropout(given, share), a) for a in all_a], dim=-1)
        else:
            inner = linear(given, torch.cat(all_a))
        if self._shares_tokens:
            if self._fused.column:
                # Every rank has the gradient of its own outputs alone: they are summed on the way back.
                inner = gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True)
            else:
                inner = reduce_scatter_to_sequence_parallel_region(inner)
        return inner

    def _changed(self, output: Tensor, inner: Tensor) -> Tensor:
        """Return the layer's output with the changes of all modules, each in its place."""
        groups, lora = self._fused.groups, self._owner.lora
        inners = iter(torch.split(inner, lora.rank, dim=-1))
        given = torch.split(
            output.reshape(*output.shape[:-1], groups, -1), [outputs for _, outputs in self._fused.parts], dim=-1
        )
        parts = []
        for own, (module, outputs) in zip(given, self._fused.parts, strict=True):
            pair = self.pairs.get(module)
            if pair is None:
                parts.append(own)
                continue
            change = linear(next(inners), pair.lora_B.to(output.dtype))
            change = change.reshape(*change.shape[:-1], groups, outputs)
            parts.append(torch.add(own, change, alpha=lora.scaling))
        return parts[0].flatten(-2) if len(parts) == 1 else torch.cat(parts, dim=-1).flatten(-2)


def _begin_graph(_: nn.Module, __: Any, hidden: Tensor) -> Tensor:
    """Let the first layer be recomputed with gradients: Megatron's checkpoints do so only if their input needs one, and
    the embedding is frozen."""
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden
