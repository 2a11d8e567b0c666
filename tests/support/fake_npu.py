"""`torch_npu` for machines without an NPU: the fused operators that we call, as operators of PyTorch on the CPU.

Each is one call to a dispatcher, forward and backward, as on the device, so that what it reads and writes can be
counted (`MovedBytes`). Signatures are those of op-plugin (torch_npu 2.10).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@torch.library.custom_op("fake_npu::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return gamma * (x.float() * rstd).to(x.dtype), rstd


@torch.library.custom_op("fake_npu::rms_norm_backward", mutates_args=())
def _rms_norm_backward(gradient: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    normed, scaled = x.float() * rstd, gradient.float() * gamma.float()
    of_x = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (gradient.float() * normed).flatten(0, -2).sum(0).to(gamma.dtype)


@torch.library.custom_op("fake_npu::swiglu", mutates_args=())
def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@torch.library.custom_op("fake_npu::swiglu_backward", mutates_args=())
def _swiglu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    share, wide = gate.sigmoid(), gradient.float()
    of_gate = wide * up * share * (1 + gate * (1 - share))
    return torch.cat((of_gate, wide * gate * share), dim=-1).to(x.dtype)


@torch.library.custom_op("fake_npu::rotary_mul", mutates_args=())
def _rotary_mul(x: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * r1 + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * r2


@torch.library.custom_op("fake_npu::rotary_mul_backward", mutates_args=())
def _rotary_mul_backward(gradient: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    half, turned = gradient.shape[-1] // 2, gradient * r2
    return gradient * r1 + torch.cat((turned[..., half:], -turned[..., :half]), dim=-1)


def _keep(*places: int) -> Any:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(inputs[place] for place in places), *(output[1:] if isinstance(output, tuple) else ()))

    return setup


_rms_norm.register_autograd(
    lambda ctx, gradient, _: (*_rms_norm_backward(gradient, *ctx.saved_tensors), None), setup_context=_keep(0, 1)
)
_swiglu.register_autograd(
    lambda ctx, gradient: _swiglu_backward(gradient.contiguous(), *ctx.saved_tensors), setup_context=_keep(0)
)
_rotary_mul.register_autograd(
    lambda ctx, gradient: (_rotary_mul_backward(gradient, *ctx.saved_tensors), None, None), setup_context=_keep(1, 2)
)


def _npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    assert dim in (-1, x.dim() - 1)
    return _swiglu(x)


def _npu_rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    assert rotary_mode == "half"
    return _rotary_mul(x, r1, r2)


def _npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert x.dtype == gamma.dtype, "the kernel takes one element type"
    return _rms_norm(x, gamma, epsilon)


@contextmanager
def fake_torch_npu() -> Iterator[None]:
    """Let `import torch_npu` give these operators; what was patched into transformers is undone at the end."""
    from transformers.models.llama import modeling_llama
    from transformers.models.mistral import modeling_mistral
    from transformers.models.qwen2 import modeling_qwen2
    from transformers.models.qwen3 import modeling_qwen3

    homes: list[Any] = [modeling_llama, modeling_mistral, modeling_qwen2, modeling_qwen3]
    rotaries = [home.apply_rotary_pos_emb for home in homes]
    module: Any = ModuleType("torch_npu")
    module.npu_rms_norm, module.npu_swiglu, module.npu_rotary_mul = _npu_rms_norm, _npu_swiglu, _npu_rotary_mul
    before = sys.modules.get("torch_npu")
    sys.modules["torch_npu"] = module
    try:
        yield
    finally:
        for home, rotary in zip(homes, rotaries, strict=True):
            home.apply_rotary_pos_emb = rotary
        del sys.modules["torch_npu"]
        if before is not None:
            sys.modules["torch_npu"] = before


class MovedBytes(TorchDispatchMode):
    """Adds up what kernels read and write, beside matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.kernels = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        name = function.overloadpacket.__name__
        if function.is_view or name in ("mm", "addmm", "bmm", "_unsafe_view", "detach", "empty_like", "empty_strided"):
            return result
        if "attention" in name:
            return result
        tensors = [each for each in tree_leaves((arguments, keywords, result)) if isinstance(each, Tensor)]
        self.total += sum(each.numel() * each.element_size() for each in tensors)
        self.kernels += 1
        return result
