"""Ascend's fused kernels in the layers of transformers' models: RMSNorm, SwiGLU, rotary embedding; and in the norms of
Megatron's (`rms_norm`), whose other layers MindSpeed patches.

transformers computes each by several kernels, which read and write their tensors again and again (a third of a layer's
time beside attention). `shard` calls `fuse_layers` for models on NPUs; every other model stays as it is.
"""

# Source: torch_npu 2.10 (op-plugin, `npu_rms_norm`, `npu_swiglu`, `npu_rotary_mul`); used like this in verl,
# `verl/models/transformers/npu_patch.py`, and MindSpeed-RL, `rl-plugin/transformer_npu`. AdamW is torch's own with
# `fused=True`, for which torch_npu has a kernel: `has_fused_adamw`.

import sys
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

# Modules whose layers compute exactly what the kernels do; Gemma's norm, for one, multiplies by 1 + weight.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def fuse_layers(model: nn.Module) -> int:
    """Let the layers of a model of `FAMILIES` use the kernels; return how many modules do. Weights keep their names."""
    fused, homes = 0, set[ModuleType]()
    for module in model.modules():
        kind = type(module)
        family = kind.__module__.split(".")[-2:-1]
        if not family or family[0] not in FAMILIES:
            continue
        patched: Any = module
        if kind.__name__.endswith("RMSNorm"):
            patched.forward = partial(_rms_norm, module)
        elif kind.__name__.endswith("MLP") and patched.act_fn(torch.ones(1)).equal(silu(torch.ones(1))):
            patched.forward = partial(_gated_mlp, module)
        elif kind.__name__.endswith("Attention"):
            homes.add(sys.modules[kind.__module__])
        else:
            continue
        fused += 1
    for home in homes:  # attention looks the function up there; this process computes on NPUs only
        known: Any = home
        known.apply_rotary_pos_emb = _rotate
    return fused


def has_fused_adamw(device: torch.device) -> bool:
    """Whether `torch.optim.AdamW(fused=True)` has a kernel on a device."""
    return device.type in ("cpu", "cuda") or (
        device.type == torch._C._get_privateuse1_backend_name()
        and torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", "PrivateUse1")
    )


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm over the last dimension, in the element type of `hidden`; only on NPUs."""
    import torch_npu

    found: Tensor = torch_npu.npu_rms_norm(hidden, weight.to(hidden.dtype), epsilon=eps)[0]
    return found


def _rms_norm(norm: Any, hidden: Tensor) -> Tensor:
    return rms_norm(hidden, norm.weight, norm.variance_epsilon)


def _gated_mlp(mlp: Any, hidden: Tensor) -> Tensor:
    import torch_npu

    # The kernel wants gate and up beside each other.
    both = torch.cat((mlp.gate_proj(hidden), mlp.up_proj(hidden)), dim=-1)
    found: Tensor = mlp.down_proj(torch_npu.npu_swiglu(both, dim=-1))
    return found


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Take the place of transformers' `apply_rotary_pos_emb`: [B, H, T, D] each, cos and sin [B, T, D]."""
    import torch_npu

    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return torch_npu.npu_rotary_mul(query, cos, sin), torch_npu.npu_rotary_mul(key, cos, sin)
