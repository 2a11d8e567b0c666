"""Maps parameters of a Megatron-core GPT model to Hugging Face names and boxes: dense Llama, Qwen2 and Qwen3.

Pure: a local tensor goes in, views of it come out. Knows names and layouts, but neither process groups nor Megatron.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncflow.errors import PlanError
from weightsync.plan import Box
from workers.engines.base import LocalShard

#     linear_qkv     rows, per query group (one key/value head):  its query heads | key | value
#     linear_fc1     rows, per tensor-parallel rank:               gate | up
#     linear_proj, linear_fc2                                      columns split over tensor-parallel ranks
#     word_embeddings, output_layer                                rows split; padding rows come last and are dropped
#     <layer>.adapter.<module>.lora_A, .lora_B                     of each of Hugging Face's modules in it; of a
#                                                                  column-parallel layer A whole and B's rows split, of
#                                                                  a row-parallel one A's columns split and B whole
#
# A layer's norm weights sit in the matrix that follows them (Transformer Engine) or apart (local modules). With fewer
# query groups than tensor-parallel ranks, a group's rows are split across ranks wherever the division falls.
#
# The distributed optimizer splits parameters without regard to rows: a data-parallel rank has elements `start` to
# `stop` of the flattened parameter. Split by query group, each shard is one run of the parameter, and `flat_boxes`
# divides it:
#
#     parameter (flat)    | q of group 0 | k | v | q of group 1 | k | v |
#     this rank                  |======================|
#     boxes of q_proj, k_proj, v_proj: rest of a row, whole rows, beginning of a row
#
# Source: megatron-core 0.16.0, `core/transformer/attention.py` (`get_query_key_value_tensors`),
# `core/transformer/mlp.py` (`glu`), `core/models/gpt/gpt_layer_specs.py` (names of norms with and without Transformer
# Engine); Megatron-Bridge, `models/qwen/qwen2_bridge.py` and `qwen3_bridge.py`. Unchanged in megatron-core 0.20.


@dataclass(frozen=True)
class MegatronGeometry:
    """Sizes of the whole model, and which part of it this rank has."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int  # Megatron's query groups
    head_dim: int  # Megatron's `kv_channels`
    ffn_hidden_size: int  # of gate and of up
    vocab_size: int  # without padding
    tp_size: int = 1
    tp_rank: int = 0
    layer_offset: int = 0  # number of this pipeline stage's (or model chunk's) first layer
    tied: bool = False  # input and output embedding are one; the last pipeline stage's copy is a replica of the first's

    @property
    def heads_per_group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads


ADAPTER = "adapter"  # the submodule of a layer that has its adapter


@dataclass(frozen=True)
class FusedLayer:
    """A linear layer of Megatron's on one rank, and the modules of Hugging Face's that it consists of."""

    column: bool  # column-parallel: this rank has some outputs of every module; else some inputs
    inputs: int  # of this rank
    groups: int  # of its outputs; each has some of every module
    parts: tuple[tuple[str, int], ...]  # in every group: module in a decoder layer -> its outputs


def fused_layers(geometry: MegatronGeometry) -> dict[str, FusedLayer]:
    """Return the linear layers of a decoder layer, by Megatron's names; the ranks divide the key/value heads."""
    queries, ranks = geometry.num_heads * geometry.head_dim, geometry.tp_size
    if geometry.num_kv_heads % ranks:
        raise PlanError(f"an adapter of query groups that {ranks} ranks divide; {geometry}: use fewer ranks")
    heads = [(f"self_attn.{which}_proj", number * geometry.head_dim) for which, number in _heads(geometry)]
    half = geometry.ffn_hidden_size // ranks
    return {
        "self_attention.linear_qkv": FusedLayer(
            True, geometry.hidden_size, geometry.num_kv_heads // ranks, tuple(heads)
        ),
        "self_attention.linear_proj": FusedLayer(
            False, queries // ranks, 1, (("self_attn.o_proj", geometry.hidden_size),)
        ),
        "mlp.linear_fc1": FusedLayer(True, geometry.hidden_size, 1, (("mlp.gate_proj", half), ("mlp.up_proj", half))),
        "mlp.linear_fc2": FusedLayer(False, half, 1, (("mlp.down_proj", geometry.hidden_size),)),
    }


def megatron_shards(name: str, local: Tensor, geometry: MegatronGeometry) -> list[LocalShard]:
    """Return which parts of Hugging Face's tensors a parameter holds, as views of `local` without gradient.

    `name` is from the unwrapped GPTModel's `named_parameters()`; its layers count from this stage's first. Raises
    PlanError for an unknown name, or a shape that does not follow from the geometry.
    """
    rest, prefix = name, ""
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if layer is not None:
        number = int(layer[1]) + geometry.layer_offset
        if number >= geometry.num_layers:
            raise PlanError(f"{name}: would be layer {number} of {geometry.num_layers}; is the layer offset right?")
        rest, prefix = layer[2], f"model.layers.{number}."
        adapted = re.fullmatch(rf"(.+)\.{ADAPTER}\.(\w+)\.(lora_[AB])", rest)
        if adapted is not None:
            return [_adapter_shard(_Parameter(name, local.detach(), geometry), prefix, *adapted.groups())]
    layout, target = (_OF_LAYER if layer else _OUTSIDE_OF_LAYERS).get(rest, (None, ""))
    if layout is None:
        raise PlanError(
            f"{name}: not a parameter of a dense Llama, Qwen2 or Qwen3 model in Megatron; pass the names of the "
            "unwrapped GPTModel, or add the layout to workers/engines/megatron/names.py"
        )
    return list(layout(_Parameter(name, local.detach(), geometry), prefix + target))


def hf_weight_names(geometry: MegatronGeometry, *, qkv_bias: bool, qk_norm: bool) -> dict[str, tuple[str, ...]]:
    """Return Hugging Face's names of all weights of the whole model, each with its aliases."""
    optional = {".bias": qkv_bias, "q_norm.weight": qk_norm, "k_norm.weight": qk_norm}
    targets = [
        target.format(which)
        for _, target in _OF_LAYER.values()
        for which in (("q", "k", "v") if "self_attn" in target else ("gate", "up"))
        if all(there for ending, there in optional.items() if target.endswith(ending))
    ]
    names: dict[str, tuple[str, ...]] = {
        f"model.layers.{layer}.{target}": () for layer in range(geometry.num_layers) for target in targets
    }
    head = _OUTSIDE_OF_LAYERS["output_layer.weight"][1]
    outside: dict[str, tuple[str, ...]] = {target: () for _, target in _OUTSIDE_OF_LAYERS.values()}
    if geometry.tied:
        del outside[head]
        outside[_EMBEDDING] = (head,)
    return {**outside, **names}


@dataclass(frozen=True)
class FlatBox:
    """A box of a Hugging Face tensor, and where it lies in this rank's run."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    start: int  # the box's first element in the run

    def view_of_run(self, flat: Tensor) -> Tensor:
        """Return the box's view of the run's values."""
        return flat[self.start : self.start + self.box.numel].view(self.box.size)


def flat_boxes(name: str, parameter: Tensor, geometry: MegatronGeometry, *, start: int, stop: int) -> Iterator[FlatBox]:
    """Yield the boxes of elements `start` to `stop` of a flattened contiguous parameter, without vocabulary padding."""
    first = int(parameter.storage_offset())
    for shard in megatron_shards(name, parameter, geometry):
        for box, values in _runs(shard):
            begin = int(values.storage_offset()) - first
            low, high = max(start, begin), min(stop, begin + box.numel)
            for part, offset in _cut(box, low - begin, high - begin):
                yield FlatBox(shard.name, shard.shape, part, begin + offset - start)


@dataclass(frozen=True)
class _Parameter:
    """A Megatron parameter on one rank."""

    name: str
    values: Tensor
    geometry: MegatronGeometry

    def require_shape(self, *shape: int) -> None:
        """Refuse values of another shape."""
        if tuple(self.values.shape) != shape:
            raise PlanError(
                f"{self.name}: shape {tuple(self.values.shape)}, but {shape} follows from {self.geometry}; "
                "give the geometry of this model and rank"
            )


def _adapter_shard(parameter: _Parameter, prefix: str, layer: str, module: str, which: str) -> LocalShard:
    geometry, fused = parameter.geometry, fused_layers(parameter.geometry)[layer]
    path, outputs = next(part for part in fused.parts if part[0].endswith(f".{module}"))
    is_a = which == "lora_A"
    rank = parameter.values.shape[0 if is_a else 1]
    size = (rank, fused.inputs) if is_a else (fused.groups * outputs, rank)
    parameter.require_shape(*size)
    cut = None if is_a == fused.column else (1 if is_a else 0)  # the dimension that is divided
    shape = tuple(geometry.tp_size * n if dim == cut else n for dim, n in enumerate(size))
    offset = tuple(geometry.tp_rank * n if dim == cut else 0 for dim, n in enumerate(size))
    return LocalShard(f"{prefix}{path}.{which}.weight", shape, Box(offset, size), parameter.values)


def _whole_hidden(parameter: _Parameter, target: str) -> Iterator[LocalShard]:
    yield from _whole(parameter, target, parameter.geometry.hidden_size)


def _whole_head(parameter: _Parameter, target: str) -> Iterator[LocalShard]:
    yield from _whole(parameter, target, parameter.geometry.head_dim)


def _whole(parameter: _Parameter, target: str, size: int) -> Iterator[LocalShard]:
    parameter.require_shape(size)
    yield LocalShard(target, (size,), Box.from_shape((size,)), parameter.values)


def _attention_columns(parameter: _Parameter, target: str) -> Iterator[LocalShard]:
    yield _columns(parameter, target, parameter.geometry.num_heads * parameter.geometry.head_dim)


def _ffn_columns(parameter: _Parameter, target: str) -> Iterator[LocalShard]:
    yield _columns(parameter, target, parameter.geometry.ffn_hidden_size)


def _columns(parameter: _Parameter, target: str, num_columns: int) -> LocalShard:
    geometry = parameter.geometry
    rows, columns = geometry.hidden_size, num_columns // geometry.tp_size
    parameter.require_shape(rows, columns)
    return LocalShard(
        target, (rows, num_columns), Box((0, geometry.tp_rank * columns), (rows, columns)), parameter.values
    )


def _output_rows(parameter: _Parameter, target: str) -> Iterator[LocalShard]:
    yield from _vocabulary_rows(parameter, _EMBEDDING if parameter.geometry.tied else target)


def _vocabulary_rows(parameter: _Parameter, target: str) -> Iterator[LocalShard]:
    geometry, padded_rows = parameter.geometry, parameter.values.shape[0]
    parameter.require_shape(padded_rows, geometry.hidden_size)
    start = min(geometry.tp_rank * padded_rows, geometry.vocab_size)
    values = parameter.values[: geometry.vocab_size - start]
    yield _rows(target, geometry.vocab_size, start, len(values), values)


def _gate_and_up(parameter: _Parameter, target: str) -> Iterator[LocalShard]:
    geometry = parameter.geometry
    rows = geometry.ffn_hidden_size // geometry.tp_size
    parameter.require_shape(2 * rows, geometry.hidden_size)
    for which, values in (("gate", parameter.values[:rows]), ("up", parameter.values[rows:])):
        yield _rows(target.format(which), geometry.ffn_hidden_size, geometry.tp_rank * rows, rows, values)


def _fused_qkv(parameter: _Parameter, target: str) -> Iterator[LocalShard]:
    geometry = parameter.geometry
    rows = (geometry.num_heads + 2 * geometry.num_kv_heads) * geometry.head_dim // geometry.tp_size
    parameter.require_shape(rows, *(() if target.endswith(".bias") else (geometry.hidden_size,)))
    if geometry.num_kv_heads % geometry.tp_size:
        yield from _fused_parts_of_groups(parameter, target)
        return
    num_groups = geometry.num_kv_heads // geometry.tp_size
    grouped = torch.unflatten(parameter.values, 0, (num_groups, geometry.heads_per_group + 2, geometry.head_dim))
    heads = torch.split(grouped, [geometry.heads_per_group, 1, 1], dim=1)
    for (which, heads_of_group), values in zip(_heads(geometry), heads, strict=True):
        rows = num_groups * heads_of_group * geometry.head_dim
        yield _rows(target.format(which), rows * geometry.tp_size, geometry.tp_rank * rows, rows, values)


def _fused_parts_of_groups(parameter: _Parameter, target: str) -> Iterator[LocalShard]:
    """Yield what lies between this rank's first and last row, which may be in the middle of a head."""
    geometry, num_rows = parameter.geometry, len(parameter.values)
    first, start = geometry.tp_rank * num_rows, 0
    for group in range(geometry.num_kv_heads):
        for which, heads_of_group in _heads(geometry):
            rows = heads_of_group * geometry.head_dim
            low, high = max(start, first), min(start + rows, first + num_rows)
            if low < high:
                values = parameter.values[low - first : high - first]
                target_rows, target_start = geometry.num_kv_heads * rows, group * rows + low - start
                yield _rows(target.format(which), target_rows, target_start, high - low, values)
            start += rows


def _heads(geometry: MegatronGeometry) -> tuple[tuple[str, int], ...]:
    """Return what a query group consists of, in order, with numbers of heads."""
    return ("q", geometry.heads_per_group), ("k", 1), ("v", 1)


def _rows(target: str, num_rows: int, start: int, count: int, values: Tensor) -> LocalShard:
    """Return rows of a matrix or vector; a matrix's values are whole in their last dimension."""
    tail = () if target.endswith(".bias") else tuple(values.shape[-1:])
    shape = (num_rows, *tail)
    return LocalShard(target, shape, Box.rows(shape, start, start + count), values)


def _runs(shard: LocalShard) -> Iterator[tuple[Box, Tensor]]:
    """Split a shard of several query groups into one run of the parameter each."""
    if shard.values.is_contiguous():
        yield shard.box, shard.values
        return
    row = shard.box.offset[0]
    for values in shard.values:
        assert values.is_contiguous(), f"{shard.name}: a query group's rows are apart"
        rows = values.numel() * shard.box.size[0] // shard.box.numel
        yield Box((row, *shard.box.offset[1:]), (rows, *shard.box.size[1:])), values
        row += rows


def _cut(box: Box, low: int, high: int) -> Iterator[tuple[Box, int]]:
    """Yield (box, its first element) of elements `low` to `high` of a one- or two-dimensional box."""
    width = box.size[1] if len(box.size) == 2 else 1
    while low < high:
        # At most three boxes: the rest of the first row, whole rows, and the beginning of the last row.
        row, column = divmod(low, width)
        rows = max(1, (high - low) // width) if not column else 1
        count = min(rows * width, high - low) if not column else min(width - column, high - low)
        if len(box.size) == 2:
            yield Box((box.offset[0] + row, box.offset[1] + column), (rows, count // rows)), low
        else:
            yield Box((box.offset[0] + row,), (rows,)), low
        low += count


_Layout = Callable[[_Parameter, str], Iterator[LocalShard]]
_EMBEDDING = "model.embed_tokens.weight"
_OUTSIDE_OF_LAYERS: dict[str, tuple[_Layout, str]] = {
    "embedding.word_embeddings.weight": (_vocabulary_rows, _EMBEDDING),
    "output_layer.weight": (_output_rows, "lm_head.weight"),
    "decoder.final_layernorm.weight": (_whole_hidden, "model.norm.weight"),
}
_OF_LAYER: dict[str, tuple[_Layout, str]] = {
    "input_layernorm.weight": (_whole_hidden, "input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": (_whole_hidden, "input_layernorm.weight"),
    "self_attention.linear_qkv.weight": (_fused_qkv, "self_attn.{}_proj.weight"),
    "self_attention.linear_qkv.bias": (_fused_qkv, "self_attn.{}_proj.bias"),
    "self_attention.q_layernorm.weight": (_whole_head, "self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": (_whole_head, "self_attn.k_norm.weight"),
    "self_attention.linear_proj.weight": (_attention_columns, "self_attn.o_proj.weight"),
    "pre_mlp_layernorm.weight": (_whole_hidden, "post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": (_whole_hidden, "post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": (_gate_and_up, "mlp.{}_proj.weight"),
    "mlp.linear_fc2.weight": (_ffn_columns, "mlp.down_proj.weight"),
}
