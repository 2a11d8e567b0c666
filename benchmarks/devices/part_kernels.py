"""Bytes that a layer's kernels move beside matrix products and attention: transformers' own, fused, and compiled."""

import copy
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from workers.engines.npu_kernels import fuse_layers

fake_npu: Any = import_module("tests.support.fake_npu")

NUM_TOKENS = 512
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 1,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0,
}  # fmt: skip
"""Qwen2.5-0.5B's layer."""


def run(**_: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES)).bfloat16()
    hidden = torch.randn(1, NUM_TOKENS, SIZES["hidden_size"]).bfloat16()
    angles = model.model.rotary_emb(hidden, torch.arange(NUM_TOKENS).unsqueeze(0))
    eager, expected = _moved(model, hidden, angles)
    with fake_npu.fake_torch_npu():
        fused = copy.deepcopy(model)
        fuse_layers(fused)
        patched, found = _moved(fused, hidden, angles)
    norm = torch.cat([each.flatten() for each in expected]).float().norm()
    wrong = torch.cat([(one - other).flatten() for one, other in zip(expected, found, strict=True)]).float().norm()
    return {
        "npu_patched_bytes_x": eager / patched,
        "npu_patched_gradients_rel": float(wrong / norm),
        "compiled_bytes_x": eager / _compiled_bytes(model, hidden, angles),
    }


def _pass(layer: Any, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> None:
    """Forward and backward of a layer."""
    out = layer(hidden, position_embeddings=angles, attention_mask=None)
    (out if isinstance(out, Tensor) else out[0]).backward(torch.ones_like(hidden))


def _moved(model: Any, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[int, list[Tensor]]:
    """Return the bytes of one pass, and the gradients."""
    layer, given = model.model.layers[0], hidden.clone().requires_grad_()
    with fake_npu.MovedBytes() as moved:
        _pass(layer, given, angles)
    assert given.grad is not None
    gradients = [given.grad, *(parameter.grad for parameter in layer.parameters())]
    model.zero_grad()
    return moved.total, gradients


def _compiled_bytes(model: Any, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> float:
    """Return inductor's own count of what its kernels read and write; calls of libraries (products, attention) are
    left out."""
    from torch._inductor import metrics
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    torch._logging.set_logs(inductor_metrics=True)  # it counts where it logs
    metrics.reset()
    compiled = torch.compile(model.model.layers[0], backend="inductor")
    _pass(compiled, hidden.clone().requires_grad_(), angles)
    total = 4 * sum(size for node, size in metrics.nodes_num_elem if not isinstance(node, ExternKernelSchedulerNode))
    torch._logging.set_logs()
    torch.compiler.reset()
    return float(total)
