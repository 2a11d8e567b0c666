"""Attention over packed documents, registered in transformers' attention interface; picks the device's fastest kernel.

Legend of shapes: N documents, L tokens of a document, M tokens that its last token sees, K keys of all documents, T
tokens in all, H heads, D head dimension.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncflow.device import to_device
from asyncflow.errors import ConfigError
from workers.engines.packed_forward import ALONE, PackedLayout, QueryBlock

#     CPU                     `cpu_attention`: torch's flash kernel per run of documents, prompt and response merged
#     CUDA (half precision)   `varlen_attention`: one variable-length flash call
#     NPU (half precision)    `npu_attention`: one fused call, layout TND
#     anything else           `sdpa_attention`: one call per run of documents of one shape
#
# No kernel pads, and none builds a [T, T] mask. All compute the same (`tests/unit/engines/test_packed_attention.py`).
#
# On accelerators each document brings its queries and all keys that it sees, in one piece: a prompt's keys and values
# are copied to each of its responses (everything else of a prompt is computed once), and the copy's backward sums their
# gradients. Both accelerator kernels mask causally from the *last* query and key backwards, so a response token sees
# its prompt and the response before it. Both require float16 or bfloat16. Sources:
# `torch.nn.attention.varlen.varlen_attn` (torch 2.13; its causal mask is aligned to the lower right, see
# `torch.nn.attention.bias`); `torch_npu.npu_fusion_attention`, layout TND with `sparse_mode=3` (rightDownCausal) and
# its compressed mask of 2048 x 2048, as in transformers' `integrations.npu_flash_attention`.

# Name in transformers' attention interface. No mask function is registered under it, so transformers builds no mask.
PACKED_ATTENTION = "asyncflow_packed"

_DOWN_RIGHT_CAUSAL = 3
_MASK_SIDE = 2048
# Called directly as operators, since SDPA does not return the log-sum-exps.
_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# With up to this many keys the backward kernel is faster in float32 than in bfloat16, casts included.
_SHORT = 256

# (query [H, T, D], key and value with as many heads or fewer, layout, factor on the scores) -> [T, H, D].
Kernel = Callable[[Tensor, Tensor, Tensor, PackedLayout, float], Tensor]


# Excluded from compilation: every micro-batch has another layout, and each would be compiled again.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: object,
) -> tuple[Tensor, None]:
    """Attend within each document; query [1, H, T, D] -> [1, T, H, D], and no attention weights.

    The signature is that of transformers' attention functions. `key` and `value` may have fewer heads (grouped-query
    attention). `scaling` is the factor on the scores (None: D ** -0.5), `sliding_window` how many tokens each token
    sees, itself included (None: all before it). Raises ConfigError if the model caps its scores (`softcap`) or has
    attention sinks (`s_aux`), which no kernel supports.
    """
    assert attention_mask is None, "packed attention got a mask"
    if softcap is not None or s_aux is not None:
        raise ConfigError("model.path: models with capped scores or attention sinks cannot be trained packed yet")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is not None and packed_layout.longest > sliding_window:
        out_THD = sdpa_attention(query[0], key[0], value[0], packed_layout, scale, sliding_window)
    else:
        out_THD = kernel_of(query)(query[0], key[0], value[0], packed_layout, scale)
    return out_THD.unsqueeze(0), None


def kernel_of(query: Tensor) -> Kernel:
    half = query.dtype in (torch.bfloat16, torch.float16)
    match query.device.type:
        case "cpu":
            return cpu_attention
        case "cuda" if half:
            return varlen_attention
        case "npu" if half:
            return npu_attention
        case _:
            return sdpa_attention


def sdpa_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, sliding_window: int | None = None
) -> Tensor:
    """Attend with SDPA, on any device: one call for neighbours of equal length that continue the same prompt."""
    outputs = []
    shapes = zip(layout.prompts, layout.lengths, layout.starts, strict=True)
    for (prompt, length), run in groupby(shapes, key=lambda shape: shape[:2]):
        starts = [start for _, _, start in run]
        tokens = slice(starts[0], starts[0] + len(starts) * length)
        q_NHLD, k_NHMD, v_NHMD = (_documents(t[:, tokens], length) for t in (query, key, value))
        if prompt != ALONE:
            # Copy the prompt's keys and values to each of its responses.
            first, size = layout.starts[prompt], layout.lengths[prompt]
            k_NHMD, v_NHMD = (
                torch.cat([t[:, first : first + size].expand(len(starts), -1, -1, -1), own], dim=2)
                for t, own in ((key, k_NHMD), (value, v_NHMD))
            )
        outputs.append(alike_attention(q_NHLD, k_NHMD, v_NHMD, scale, sliding_window))
    return torch.cat(outputs)


def alike_attention(
    q_NHLD: Tensor, k_NHMD: Tensor, v_NHMD: Tensor, scale: float | None, sliding_window: int | None
) -> Tensor:
    """Return [N * L, H, D]: SDPA of documents of one shape, each causal from its last query and key backwards."""
    mask = _mask(q_NHLD.shape[2], k_NHMD.shape[2], sliding_window, q_NHLD.device)
    out_NHLD = scaled_dot_product_attention(
        q_NHLD,
        k_NHMD,
        v_NHMD,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q_NHLD.shape[1] != k_NHMD.shape[1],
    )
    return out_NHLD.transpose(1, 2).flatten(0, 1)


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float) -> Tensor:
    """Attend within each document on CUDA."""
    from torch.nn.attention.varlen import varlen_attn

    q_THD, k_KHD, v_KHD = _gathered(query, key, value, layout)
    queries, keys = _boundaries(layout, query.device)
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0), "enable_gqa": query.shape[0] != key.shape[0]}
    known = _parameters(varlen_attn)
    if "window_size" in known:
        # torch 2.11 takes fewer heads of keys without being told.
        options = {name: value for name, value in options.items() if name in known}
    else:
        # torch 2.10 has a flag, and a scale of its own.
        options = {"is_causal": True}
        q_THD = q_THD * (scale * query.shape[-1] ** 0.5)
    out_THD = varlen_attn(q_THD, k_KHD, v_KHD, queries, keys, max(layout.lengths), layout.longest, **options)
    assert isinstance(out_THD, Tensor)  # it is a pair only when log-sum-exps are requested
    return out_THD


def npu_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float) -> Tensor:
    """Attend within each document on an Ascend NPU."""
    from torch_npu import npu_fusion_attention

    q_THD, k_KHD, v_KHD = _gathered(query, key, value, layout)
    out_THD: Tensor = npu_fusion_attention(
        q_THD,
        k_KHD,
        v_KHD,
        query.shape[0],
        input_layout="TND",
        pse=None,
        padding_mask=None,
        atten_mask=_compressed_mask(query.device),
        scale=scale,
        keep_prob=1.0,
        actual_seq_qlen=tuple(accumulate(layout.lengths)),
        actual_seq_kvlen=tuple(accumulate(layout.key_lengths)),
        sparse_mode=_DOWN_RIGHT_CAUSAL,
    )[0]
    return out_THD


def _documents(tensor: Tensor, length: int) -> Tensor:
    """Return [H, N * L, D] as [N, H, L, D]."""
    return torch.unflatten(tensor, 1, (-1, length)).transpose(0, 1)


def _mask(length: int, num_keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return bool [L, M]: what the last L of M positions see; None: plain causal."""
    if length == num_keys and (window is None or num_keys <= window):
        return None
    position = torch.arange(num_keys, device=device)
    distance = position[num_keys - length :, None] - position[None, :]
    return (distance >= 0) & (distance < (num_keys if window is None else window))


def _gathered(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [T, H, D], and keys and values [K, H, D], document by document."""
    q_THD, k_THD, v_THD = (each.transpose(0, 1) for each in (query, key, value))
    index_K = _key_index(layout, query.device)
    if index_K is None:
        return q_THD.contiguous(), k_THD.contiguous(), v_THD.contiguous()
    return q_THD.contiguous(), k_THD.index_select(0, index_K), v_THD.index_select(0, index_K)


# All layers of a forward pass share a layout, so what is derived from it on the device is cached.


@lru_cache(maxsize=4)
def _key_index(layout: PackedLayout, device: torch.device) -> Tensor | None:
    index_K = layout.key_index()
    return None if index_K is None else to_device([index_K], device)[0]


@lru_cache(maxsize=4)
def _boundaries(layout: PackedLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return int32 [N + 1] twice: where each document's queries, and its keys, begin."""
    sums = (tuple(accumulate(lengths, initial=0)) for lengths in (layout.lengths, layout.key_lengths))
    queries, keys = to_device([torch.tensor(each, dtype=torch.int32) for each in sums], device)
    return queries, keys


@lru_cache(maxsize=4)
def _compressed_mask(device: torch.device) -> Tensor:
    return torch.ones(_MASK_SIDE, _MASK_SIDE, dtype=torch.bool, device=device).triu(1)


@lru_cache(maxsize=4)
def _parameters(function: Callable[..., object]) -> frozenset[str]:
    """Return the names of a function's parameters. Every layer of a pass asks, so they are read once."""
    return frozenset(inspect.signature(function).parameters)


def cpu_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float) -> Tensor:
    """Attend within each document on the CPU, with torch's flash kernel in one autograd function.

    Each document attends to itself causally; neighbours that continue the same prompt attend to it in one more call,
    without a mask. The two results are merged by their log-sum-exps, l:

        out = out_own exp(l_own - l) + out_prompt exp(l_prompt - l),    l = log(exp(l_own) + exp(l_prompt))
    """
    # Source: the merge is that of ring attention (Liu et al. 2023, arXiv 2310.01889), and of shared-prefix attention
    # (Juravsky et al. 2024, arXiv 2402.05099).
    out_THD: Tensor = _CpuAttention.apply(query, key, value, layout, scale)  # type: ignore[no-untyped-call]
    return out_THD


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float) -> Tensor:
        heads, tokens, size = query.shape
        out_HTD = query.new_empty(tokens, heads, size).transpose(0, 1)
        # In the kernel's own memory order and accumulation type.
        lse_HT = torch.empty(tokens, heads, dtype=torch.promote_types(query.dtype, torch.float32)).T
        for block in layout.own_blocks:
            out_NHLD, lse_NHL = _cpu_forward(*_inputs(query, key, value, block), 0.0, True, scale=scale)
            _queries(out_HTD, block).copy_(out_NHLD)
            _queries(lse_HT, block).copy_(lse_NHL)
        for block in layout.prompt_blocks:
            out_NHLD, lse_NHL = _cpu_forward(*_inputs(query, key, value, block), 0.0, False, scale=scale)
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

        def parts(block: QueryBlock, causal: bool) -> Any:
            # The flash backward recomputes probabilities as exp(score - l), so each part gets its exact gradients from
            # the *merged* output and l.
            inputs = (_queries(grad_HTD, block), *_inputs(query, key, value, block), _queries(out_HTD, block))
            cast = [each.to(exact) for each in inputs] if block.num_keys <= _SHORT else inputs
            return _cpu_backward(*cast, _queries(lse_HT, block), 0.0, causal, scale=ctx.scale)

        for block in layout.own_blocks:
            for total, part in zip(totals, parts(block, True), strict=True):
                _queries(total, block).copy_(part)
        for block in layout.prompt_blocks:
            for total, part in zip(_inputs(*totals, block), parts(block, False), strict=True):
                total.add_(part)
        return (*(total.to(query.dtype) for total in totals), None, None)


def _inputs(query: Tensor, key: Tensor, value: Tensor, block: QueryBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of a block's queries, keys and values: [N, H, L, D], and twice [N, H, M, D]."""
    return _queries(query, block), _keys(key, block), _keys(value, block)


def _queries(tensor: Tensor, block: QueryBlock) -> Tensor:
    """Return a view [N, H, L, ...] of a tensor [H, T, ...]."""
    tokens = tensor.narrow(1, block.start, block.documents * block.length)
    return torch.unflatten(tokens, 1, (block.documents, block.length)).transpose(0, 1)


def _keys(tensor: Tensor, block: QueryBlock) -> Tensor:
    tokens = tensor.narrow(1, block.keys, block.documents * block.num_keys)
    return torch.unflatten(tokens, 1, (block.documents, block.num_keys)).transpose(0, 1)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
