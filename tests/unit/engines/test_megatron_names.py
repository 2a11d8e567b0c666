"""Megatron parameters as shards: cut a Hugging Face state dict as Megatron does, map it back, compare bit by bit.

The cutting follows megatron-core's documented layout one query group and one rank at a time, and shares no code with
the mapping.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncflow.errors import PlanError
from weightsync.plan import Box, ShardSpec, plan_transfer
from workers.engines.base import LocalShard
from workers.engines.hf.model import empty_causal_lm, parameter_aliases
from workers.engines.lora import A, B, MergedShard, adapter_shapes
from workers.engines.megatron.names import ADAPTER, MegatronGeometry, fused_layers, hf_weight_names, megatron_shards
from workers.settings.megatron import DenseModel

NUM_LAYERS, HIDDEN, HEAD_DIM, FFN, VOCAB, PADDED_VOCAB = 4, 12, 6, 20, 29, 40


def hf_weights(num_heads: int, num_kv_heads: int, *, bias: bool, qk_norm: bool, tied: bool) -> dict[str, Tensor]:
    """Random weights under Hugging Face names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    rows = {"q": num_heads * HEAD_DIM, "k": num_kv_heads * HEAD_DIM, "v": num_kv_heads * HEAD_DIM}
    for number in range(NUM_LAYERS):
        layer = f"model.layers.{number}."
        shapes |= {layer + "input_layernorm.weight": (HIDDEN,), layer + "post_attention_layernorm.weight": (HIDDEN,)}
        shapes |= {f"{layer}self_attn.{which}_proj.weight": (count, HIDDEN) for which, count in rows.items()}
        if bias:
            shapes |= {f"{layer}self_attn.{which}_proj.bias": (count,) for which, count in rows.items()}
        if qk_norm:
            shapes |= {f"{layer}self_attn.{which}_norm.weight": (HEAD_DIM,) for which in "qk"}
        shapes |= {
            layer + "self_attn.o_proj.weight": (HIDDEN, rows["q"]),
            layer + "mlp.gate_proj.weight": (FFN, HIDDEN),
        }
        shapes |= {layer + "mlp.up_proj.weight": (FFN, HIDDEN), layer + "mlp.down_proj.weight": (HIDDEN, FFN)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_names_in_files_are_those_of_transformers(make_model_dir: Callable[..., Path], family: str, tied: bool) -> None:
    path = make_model_dir(family, tie_word_embeddings=tied)
    expected = parameter_aliases(empty_causal_lm(path, dtype=torch.float32, attention="sdpa"))
    model = DenseModel.from_config(json.loads((path / "config.json").read_text()))
    geometry = MegatronGeometry(model.num_layers, 32, 4, 2, 8, 48, 13, tied=model.tied)
    assert hf_weight_names(geometry, qkv_bias=model.qkv_bias, qk_norm=model.qk_norm) == expected


def fused_qkv(hf: dict[str, Tensor], attention: str, kind: str, num_kv_heads: int) -> Tensor:
    """q q .. k v | q q .. k v | ...: the whole matrix, group by group."""
    q, k, v = (hf[f"{attention}{which}_proj.{kind}"] for which in "qkv")
    rows = len(q) // num_kv_heads
    groups = []
    for group in range(num_kv_heads):
        groups.append(q[group * rows : (group + 1) * rows])
        groups.append(k[group * HEAD_DIM : (group + 1) * HEAD_DIM])
        groups.append(v[group * HEAD_DIM : (group + 1) * HEAD_DIM])
    return torch.cat(groups)


def part(whole: Tensor, geometry: MegatronGeometry, dim: int = 0) -> Tensor:
    return whole.chunk(geometry.tp_size, dim)[geometry.tp_rank].clone()


def padded(embedding: Tensor, geometry: MegatronGeometry) -> Tensor:
    return part(torch.cat([embedding, torch.full((PADDED_VOCAB - VOCAB, HIDDEN), float("nan"))]), geometry)


def megatron_weights(
    hf: dict[str, Tensor], geometry: MegatronGeometry, stage: int, num_stages: int, *, fused_norms: bool
) -> Iterator[tuple[str, Tensor]]:
    """What Megatron has on one rank."""
    if stage == 0:
        yield "embedding.word_embeddings.weight", padded(hf["model.embed_tokens.weight"], geometry)
    for local in range(NUM_LAYERS // num_stages):
        source, target = f"model.layers.{local + geometry.layer_offset}.", f"decoder.layers.{local}."
        attention = source + "self_attn."
        norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        norms = norms if fused_norms else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
        yield target + norms[0], hf[source + "input_layernorm.weight"].clone()
        yield target + norms[1], hf[source + "post_attention_layernorm.weight"].clone()
        for kind in ("weight", "bias"):
            if f"{attention}q_proj.{kind}" in hf:
                fused = fused_qkv(hf, attention, kind, geometry.num_kv_heads)
                yield f"{target}self_attention.linear_qkv.{kind}", part(fused, geometry)
        for which in "qk":
            if f"{attention}{which}_norm.weight" in hf:
                yield f"{target}self_attention.{which}_layernorm.weight", hf[f"{attention}{which}_norm.weight"].clone()
        yield target + "self_attention.linear_proj.weight", part(hf[attention + "o_proj.weight"], geometry, 1)
        gate, up = (part(hf[f"{source}mlp.{which}_proj.weight"], geometry) for which in ("gate", "up"))
        yield target + "mlp.linear_fc1.weight", torch.cat([gate, up])
        yield target + "mlp.linear_fc2.weight", part(hf[source + "mlp.down_proj.weight"], geometry, 1)
    if stage == num_stages - 1:
        yield "decoder.final_layernorm.weight", hf["model.norm.weight"].clone()
        if not geometry.tied or stage > 0:
            head = hf["model.embed_tokens.weight" if geometry.tied else "lm_head.weight"]
            yield "output_layer.weight", padded(head, geometry)


def make_geometry(
    *, heads: int = 8, kv_heads: int = 4, tp: int = 1, tp_rank: int = 0, offset: int = 0, tied: bool = False
) -> MegatronGeometry:
    return MegatronGeometry(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        ffn_hidden_size=FFN,
        vocab_size=VOCAB,
        tp_size=tp,
        tp_rank=tp_rank,
        layer_offset=offset,
        tied=tied,
    )


def assembled(held: list[list[LocalShard]]) -> dict[str, Tensor]:
    """Whole tensors out of what the plan takes from each rank."""
    plan = plan_transfer(
        [[ShardSpec(shard.name, shard.shape, "float32", shard.box) for shard in shards] for shards in held],
        bucket_bytes=2**30,
        dtype="float32",
    )
    wholes = {name: torch.full(tensor.shape, float("nan")) for name, tensor in plan.tensors.items()}
    by_box = [{(shard.name, shard.box): shard.values for shard in shards} for shards in held]
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            name = plan.names[piece.tensor]
            values = by_box[bucket.sender][name, piece.box]
            wholes[name][piece.box.slices] = values.reshape(piece.box.size)
    return wholes


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "bias", "qk_norm", "tied", "fused_norms"),
    [
        pytest.param(8, 4, False, False, False, True, id="llama"),
        pytest.param(8, 4, True, False, False, True, id="qwen2"),
        pytest.param(8, 4, False, True, True, False, id="qwen3-tied-local-norms"),
        pytest.param(4, 4, False, False, False, True, id="a key for every query"),
        pytest.param(6, 2, True, True, True, True, id="more ranks than keys, cut inside of a head"),
    ],
)
def test_all_ranks_together_give_the_hugging_face_tensors_back(
    tp: int, pp: int, heads: int, kv_heads: int, bias: bool, qk_norm: bool, tied: bool, fused_norms: bool
) -> None:
    hf = hf_weights(heads, kv_heads, bias=bias, qk_norm=qk_norm, tied=tied)
    held: list[list[LocalShard]] = []
    for stage, rank in itertools.product(range(pp), range(tp)):
        offset = stage * NUM_LAYERS // pp
        geometry = make_geometry(heads=heads, kv_heads=kv_heads, tp=tp, tp_rank=rank, offset=offset, tied=tied)
        held.append([])
        for name, local in megatron_weights(hf, geometry, stage, pp, fused_norms=fused_norms):
            shards = megatron_shards(name, local, geometry)
            assert all(s.values.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() for s in shards)
            held[-1].extend(shards)
    wholes = assembled(held)
    assert wholes.keys() == hf.keys()
    assert all(wholes[name].equal(value) for name, value in hf.items())


def test_whole_query_groups_are_one_strided_view_per_projection() -> None:
    geometry = make_geometry(heads=8, kv_heads=4, tp=2, tp_rank=1)
    shards = megatron_shards("decoder.layers.0.self_attention.linear_qkv.weight", torch.zeros(48, HIDDEN), geometry)
    assert [(shard.box, tuple(shard.values.shape)) for shard in shards] == [
        (Box((24, 0), (24, HIDDEN)), (2, 2, HEAD_DIM, HIDDEN)),
        (Box((12, 0), (12, HIDDEN)), (2, 1, HEAD_DIM, HIDDEN)),
        (Box((12, 0), (12, HIDDEN)), (2, 1, HEAD_DIM, HIDDEN)),
    ]


def test_rank_with_padding_only_holds_no_rows() -> None:
    geometry = make_geometry(tp=4, tp_rank=3)
    [shard] = megatron_shards("embedding.word_embeddings.weight", torch.zeros(PADDED_VOCAB // 4, HIDDEN), geometry)
    assert (shard.box, tuple(shard.values.shape)) == (Box((29, 0), (0, HIDDEN)), (0, HIDDEN))


def test_last_stage_of_a_tied_model_sends_its_copy_as_the_embedding() -> None:
    [shard] = megatron_shards("output_layer.weight", torch.zeros(PADDED_VOCAB, HIDDEN), make_geometry(tied=True))
    assert shard.name == "model.embed_tokens.weight"


def test_values_carry_no_gradient() -> None:
    weight = torch.nn.Parameter(torch.zeros(HIDDEN))
    [shard] = megatron_shards("decoder.final_layernorm.weight", weight, make_geometry())
    assert not shard.values.requires_grad


@pytest.mark.parametrize(
    "name",
    [
        "module.decoder.final_layernorm.weight",
        "embedding.position_embeddings.weight",
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.0.self_attention.linear_proj.bias",
        "decoder.layers.x.mlp.linear_fc1.weight",
    ],
)
def test_unknown_parameter_is_named(name: str) -> None:
    with pytest.raises(PlanError, match=rf"^{name}: not a parameter .* unwrapped GPTModel"):
        megatron_shards(name, torch.zeros(HIDDEN), make_geometry())


@pytest.mark.parametrize(
    "name",
    [
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
    ],
)
def test_shape_of_another_geometry_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=rf"^{name}: shape \(7, 5\), but .* give the geometry"):
        megatron_shards(name, torch.zeros(7, 5), make_geometry())


def test_layer_behind_the_last_is_refused() -> None:
    with pytest.raises(PlanError, match="would be layer 5 of 4; is the layer offset right"):
        megatron_shards("decoder.layers.2.mlp.linear_fc2.weight", torch.zeros(1), make_geometry(offset=3))


@pytest.mark.parametrize(("tp", "kv_heads"), [(1, 4), (2, 4), (4, 4), (2, 2)])
def test_a_and_b_are_cut_as_rows_and_columns_of_their_weight_are(tp: int, kv_heads: int) -> None:
    """B A of what a rank holds is the rank's part of the whole product, for every module of a layer."""
    rank, random = 3, torch.Generator().manual_seed(1)
    base = hf_weights(8, kv_heads, bias=False, qk_norm=False, tied=False)
    targets = {
        name.removesuffix(".weight"): (weight.shape[0], weight.shape[1])
        for name, weight in base.items()
        if "_proj.weight" in name
    }
    pairs = {
        name.removeprefix("base_model.model."): torch.randn(shape, generator=random)
        for name, shape in adapter_shapes(targets, rank).items()
    }
    seen: dict[str, list[Box]] = {}
    for tp_rank in range(tp):
        geometry = make_geometry(kv_heads=kv_heads, tp=tp, tp_rank=tp_rank, offset=2)
        held = dict(megatron_weights(base, geometry, 1, 2, fused_norms=False))
        for layer, fused in fused_layers(geometry).items():
            prefix = f"decoder.layers.1.{layer}."
            for weight in megatron_shards(prefix + "weight", torch.zeros_like(held[prefix + "weight"]), geometry):
                module = weight.name.removesuffix(".weight")
                halves = []
                for end, name in ((A, "lora_A"), (B, "lora_B")):
                    outputs = next(number for path, number in fused.parts if module.endswith(path))
                    size = (rank, fused.inputs) if end == A else (fused.groups * outputs, rank)
                    own = f"{prefix}{ADAPTER}.{module.rpartition('.')[2]}.{name}"
                    (half,) = megatron_shards(own, torch.zeros(size), geometry)
                    assert half.name == module + end and half.shape == pairs[module + end].shape
                    halves.append(pairs[half.name][half.box.slices])
                    seen.setdefault(half.name, []).append(half.box)
                whole = pairs[module + B] @ pairs[module + A]
                a, b = halves
                found = MergedShard(weight, a, b, 1.0).values
                torch.testing.assert_close(found, whole[weight.box.slices], rtol=1e-5, atol=1e-5)
    assert len(seen) == 2 * 7
    for name, boxes in seen.items():
        covered = torch.zeros(pairs[name].shape)
        for box in set(boxes):
            covered[box.slices] += 1
        assert covered.eq(1).all(), name


def test_an_adapter_of_other_sizes_is_refused() -> None:
    geometry = make_geometry(tp=2)
    with pytest.raises(PlanError, match="shape"):
        megatron_shards(f"decoder.layers.0.mlp.linear_fc2.{ADAPTER}.down_proj.lora_A", torch.zeros(3, FFN), geometry)
