"""Attention over packed documents, registered in transformers' attention interface.

A packed sequence [1, T] holds documents one after another; each attends causally to itself only. Documents are sorted
by length beforehand (`packed_forward`), so those of one length are neighbours, and a bucket of them is a view:

    lengths  3 3 5        T = 11
    buckets  (2, 3) (1, 5)     two calls of SDPA: [2, H, 3, D] and [1, H, 5, D]

So many short documents cost a few large calls and a few long ones cost one call each; nothing is padded or copied and
no [T, T] mask exists. SDPA with `is_causal` picks the device's own kernel (flash attention on CPU and CUDA, torch_npu's
fused attention on Ascend). A variable-length kernel (flash_attn_varlen, npu_fusion_attention TND) would need one call
instead of one per bucket; on those devices that is the faster choice for many distinct lengths and is not used here.

Legend of shapes: N documents, L tokens of each document in a bucket, T tokens in all, H heads, D head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncflow.errors import ConfigError

PACKED_ATTENTION = "asyncflow_packed"
"""Name in transformers' attention interface. No mask function is registered under it: transformers then builds none."""


@dataclass(frozen=True)
class PackedLayout:
    """Where the documents of a packed sequence lie; passed to the model as the keyword argument `packed_layout`.

    Attributes:
        buckets: (documents, tokens of each), in the order of the sequence.
    """

    buckets: tuple[tuple[int, int], ...]


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
    """Attend inside each document; transformers' signature of an attention function.

    Args:
        query: [1, H, T, D]; `key` and `value` may have fewer heads (grouped-query attention).
        attention_mask: None.
        packed_layout: of the T tokens.
        scaling: factor on the scores; None: D ** -0.5.
        sliding_window: a token sees itself and the tokens before it, this many in all; None: all before it.
        softcap, s_aux: refused when set, since SDPA has neither.
    Returns:
        [1, T, H, D], and no attention weights.
    Raises:
        ConfigError: the model caps its scores or has attention sinks.
    """
    assert attention_mask is None, "packed attention got a mask"
    if softcap is not None or s_aux is not None:
        raise ConfigError("model.path: models with capped scores or attention sinks cannot be trained packed yet")
    sizes = [num * length for num, length in packed_layout.buckets]
    queries, keys, values = (torch.split(tensor[0], sizes, dim=1) for tensor in (query, key, value))
    outputs = [
        _attend(queries[i], keys[i], values[i], packed_layout.buckets[i], scaling, sliding_window)
        for i in range(len(sizes))
    ]
    return torch.cat(outputs).unsqueeze(0), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bucket: tuple[int, int],
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Attend inside the documents of one bucket: [H, N * L, D] -> [N * L, H, D]."""
    length = bucket[1]
    q_NHLD, k_NHLD, v_NHLD = (t.view(-1, *bucket, t.shape[-1]).transpose(0, 1) for t in (query, key, value))
    mask = None
    if sliding_window is not None and length > sliding_window:
        position = torch.arange(length, device=query.device)
        distance = position[:, None] - position[None, :]
        mask = (distance >= 0) & (distance < sliding_window)
    out_NHLD = scaled_dot_product_attention(
        q_NHLD,
        k_NHLD,
        v_NHLD,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[0] != key.shape[0],
    )
    return out_NHLD.transpose(1, 2).flatten(0, 1)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
