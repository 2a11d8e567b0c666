"""Packed attention on accelerators: one call of the vendor's variable-length kernel for all documents.

Each document brings its queries and all keys that it sees, in one piece: a prompt's keys and values are copied to each
of its answers (only these; everything else of a prompt is computed once), and the copy's backward adds their gradients
up. The masks of both kernels are causal from the *last* query and key backwards, so a token of an answer sees its
prompt and what comes before it in the answer.

Kernels: `torch.nn.attention.varlen.varlen_attn` (torch 2.13; flash attention, whose causal mask is aligned to the lower
right, see `torch.nn.attention.bias`), and `torch_npu.npu_fusion_attention`, layout TND with `sparse_mode=3`
(rightDownCausal) and its compressed mask of 2048 x 2048, as in transformers' `integrations.npu_flash_attention`. Both
want float16 or bfloat16.

Legend of shapes: N documents, K keys of all documents, T tokens in all, H heads, D head dimension.
"""

from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from workers.engines.packed_layout import PackedLayout

_DOWN_RIGHT_CAUSAL = 3
_MASK_SIDE = 2048


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float) -> Tensor:
    """Attend inside each document on CUDA; see `packed_attention.Kernel`."""
    from torch.nn.attention.varlen import varlen_attn

    q_THD, k_KHD, v_KHD = _gathered(query, key, value, layout)
    queries, keys = _boundaries(layout, query.device)
    out_THD = varlen_attn(
        q_THD,
        k_KHD,
        v_KHD,
        queries,
        keys,
        max(layout.lengths),
        layout.longest,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query.shape[0] != key.shape[0],
    )
    assert isinstance(out_THD, Tensor)  # a pair is for who asks for log-sum-exps
    return out_THD


def npu_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float) -> Tensor:
    """Attend inside each document on an Ascend NPU; see `packed_attention.Kernel`."""
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


def _gathered(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [T, H, D], and keys and values [K, H, D] of one document after another."""
    q_THD, k_THD, v_THD = (each.transpose(0, 1) for each in (query, key, value))
    index_K = _key_index(layout, query.device)
    if index_K is None:
        return q_THD.contiguous(), k_THD.contiguous(), v_THD.contiguous()
    return q_THD.contiguous(), k_THD.index_select(0, index_K), v_THD.index_select(0, index_K)


# All layers of a forward pass share a layout: what is made of it on the device is made once.


@lru_cache(maxsize=4)
def _key_index(layout: PackedLayout, device: torch.device) -> Tensor | None:
    index_K = layout.key_index()
    return None if index_K is None else index_K.to(device)


@lru_cache(maxsize=4)
def _boundaries(layout: PackedLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return int32 [N + 1] twice: where each document's queries, and its keys, begin."""
    sums = (tuple(accumulate(lengths, initial=0)) for lengths in (layout.lengths, layout.key_lengths))
    queries, keys = (torch.tensor(each, dtype=torch.int32).to(device) for each in sums)
    return queries, keys


@lru_cache(maxsize=4)
def _compressed_mask(device: torch.device) -> Tensor:
    return torch.ones(_MASK_SIDE, _MASK_SIDE, dtype=torch.bool, device=device).triu(1)
