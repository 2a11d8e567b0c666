"""Runs of flattened Megatron parameters as boxes of Hugging Face tensors; their way through checkpoint and copy."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from weightsync.plan import Box
from workers.checkpoint.saved_shards import BoxedTensor, BoxPart, HostCopy
from workers.engines.hf.export import SavedTensors
from workers.engines.megatron.names import MegatronGeometry, flat_boxes, megatron_shards

GEOMETRY = MegatronGeometry(
    num_layers=1, hidden_size=6, num_heads=8, num_kv_heads=4, head_dim=2, ffn_hidden_size=10, vocab_size=7,
    tp_size=2, tp_rank=1,
)  # fmt: skip
PARAMETERS = {
    "decoder.layers.0.self_attention.linear_qkv.weight": (16, 6),
    "decoder.layers.0.self_attention.linear_qkv.bias": (16,),
    "decoder.layers.0.self_attention.linear_proj.weight": (6, 8),
    "decoder.layers.0.mlp.linear_fc1.weight": (10, 6),
    "decoder.layers.0.mlp.linear_fc2.weight": (6, 5),
    "decoder.layers.0.input_layernorm.weight": (6,),
    "embedding.word_embeddings.weight": (4, 6),
}


@given(st.sampled_from(sorted(PARAMETERS)), st.lists(st.integers(0, 96), max_size=3))
def test_runs_together_hold_what_the_whole_parameter_holds(name: str, cuts: list[int]) -> None:
    shape = PARAMETERS[name]
    parameter = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    expected = {}
    for shard in megatron_shards(name, parameter, GEOMETRY):
        whole = expected.setdefault(shard.name, torch.full(shard.shape, -1.0))
        whole[shard.box.slices] = shard.values.reshape(shard.box.size)
    found = {key: torch.full_like(whole, -1.0) for key, whole in expected.items()}
    ends = sorted({0, parameter.numel(), *(min(cut, parameter.numel()) for cut in cuts)})
    for start, stop in pairwise(ends):
        flat = parameter.flatten()[start:stop]
        for box in flat_boxes(name, parameter, GEOMETRY, start=start, stop=stop):
            target = found[box.name][box.box.slices]
            assert bool((target == -1).all()), "two boxes overlap"
            target.copy_(box.view_of_run(flat))
    for key, whole in expected.items():
        assert found[key].equal(whole), key


def boxed(parts: dict[Box, torch.Tensor], *, replica: bool = False) -> BoxedTensor:
    return BoxedTensor((4, 3), [BoxPart(box, values, replica) for box, values in parts.items()])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_boxes_read_what_boxes_saved(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    saving = [Box((0, 0), (1, 2)), Box((0, 2), (1, 1)), Box((1, 0), (3, 3))]
    state = {"model": {"a.b": boxed({box: whole[box.slices].clone() for box in saving})}}
    copy = HostCopy(torch.device("cpu"))
    copied = copy.begin(state)
    copy.wait()
    state["model"]["a.b"].parts[0].values.fill_(-1)  # what is saved is the copy
    dcp.save(copied, checkpoint_id=tmp_path, no_dist=True)
    copy.close()
    loading = [Box((0, 1), (2, 2)), Box((3, 0), (1, 3))]
    target = boxed({box: torch.zeros(box.size) for box in loading}, replica=True)
    dcp.load({"model": {"a.b": target}}, checkpoint_id=tmp_path, no_dist=True)
    for part in target.parts:
        assert part.values.equal(whole[part.box.slices])
    assert SavedTensors(tmp_path).shapes_below("model.") == {"a.b": (4, 3)}
    assert SavedTensors(tmp_path).read("model.a.b").equal(whole)
