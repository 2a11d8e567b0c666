"""Packed attention on the CPU: torch's flash kernel, run of documents by run, in one autograd function.

Each document attends to itself causally; one that continues a prompt attends to the prompt in a call of its own,
without a mask, together with its neighbours. The two results are merged by their log-sum-exps, l:

    out = out_own exp(l_own - l) + out_prompt exp(l_prompt - l),    l = log(exp(l_own) + exp(l_prompt))

The flash backward computes probabilities again, as exp(score - l), so each part gets its exact gradients when it is
given the *merged* result and l. The kernel is called by its operator (`torch.ops.aten`), since SDPA keeps l to itself.

Source: the merge is that of ring attention (Liu et al. 2023, arXiv 2310.01889), and of shared-prefix attention
(Juravsky et al. 2024, arXiv 2402.05099).

Legend of shapes: N documents of L tokens, M keys, T tokens in all, H heads, D head dimension.
"""

from typing import Any

import torch
from torch import Tensor

from workers.engines.packed_layout import Block, PackedLayout

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_SHORT = 256
"""Up to this many keys the backward kernel is faster in float32 than in bfloat16, casts included."""


def cpu_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float) -> Tensor:
    """Attend inside each document; arguments: see `Kernel` of packed attention."""
    out_THD: Tensor = _CpuAttention.apply(query, key, value, layout, scale)  # type: ignore[no-untyped-call]
    return out_THD


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float) -> Tensor:
        heads, tokens, size = query.shape
        out_HTD = query.new_empty(tokens, heads, size).transpose(0, 1)
        # In the kernel's own memory order, and its accumulation type.
        lse_HT = torch.empty(tokens, heads, dtype=torch.promote_types(query.dtype, torch.float32)).T
        for block in layout.own_blocks:
            out_NHLD, lse_NHL = _forward(*_inputs(query, key, value, block), 0.0, True, scale=scale)
            _queries(out_HTD, block).copy_(out_NHLD)
            _queries(lse_HT, block).copy_(lse_NHL)
        for block in layout.prompt_blocks:
            out_NHLD, lse_NHL = _forward(*_inputs(query, key, value, block), 0.0, False, scale=scale)
            own_NHLD, own_lse_NHL = _queries(out_HTD, block), _queries(lse_HT, block)
            merged_NHL = torch.logaddexp(own_lse_NHL, lse_NHL)
            weight_NHL1, own_weight_NHL1 = ((part - merged_NHL).exp().unsqueeze(-1) for part in (lse_NHL, own_lse_NHL))
            own_NHLD.copy_(own_NHLD * own_weight_NHL1 + out_NHLD * weight_NHL1)
            own_lse_NHL.copy_(merged_NHL)
        ctx.save_for_backward(query, key, value, out_HTD, lse_HT)
        ctx.layout, ctx.scale = layout, scale
        return out_HTD.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out_HTD, lse_HT = ctx.saved_tensors
        grad_HTD, layout, exact = grads[0].transpose(0, 1), ctx.layout, lse_HT.dtype
        totals = (
            torch.empty_like(query, dtype=exact),
            torch.empty_like(key, dtype=exact),
            torch.empty_like(value, dtype=exact),
        )

        def parts(block: Block, causal: bool) -> Any:
            inputs = (_queries(grad_HTD, block), *_inputs(query, key, value, block), _queries(out_HTD, block))
            cast = [each.to(exact) for each in inputs] if block.num_keys <= _SHORT else inputs
            return _backward(*cast, _queries(lse_HT, block), 0.0, causal, scale=ctx.scale)

        for block in layout.own_blocks:
            for total, part in zip(totals, parts(block, True), strict=True):
                _queries(total, block).copy_(part)
        for block in layout.prompt_blocks:
            for total, part in zip(_inputs(*totals, block), parts(block, False), strict=True):
                total.add_(part)
        return (*(total.to(query.dtype) for total in totals), None, None)


def _inputs(query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of a block's queries, keys and values: [N, H, L, D], and twice [N, H, M, D]."""
    return _queries(query, block), _keys(key, block), _keys(value, block)


def _queries(tensor: Tensor, block: Block) -> Tensor:
    """Return a view [N, H, L, ...] of a tensor [H, T, ...]."""
    tokens = tensor.narrow(1, block.start, block.documents * block.length)
    return torch.unflatten(tokens, 1, (block.documents, block.length)).transpose(0, 1)


def _keys(tensor: Tensor, block: Block) -> Tensor:
    tokens = tensor.narrow(1, block.keys, block.documents * block.num_keys)
    return torch.unflatten(tokens, 1, (block.documents, block.num_keys)).transpose(0, 1)
