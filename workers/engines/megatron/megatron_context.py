"""Context parallelism of the `megatron` engine: ranks with the same part of the model share a micro-batch's tokens.

Legend of shapes: T tokens of a micro-batch, C ranks, t = T / C tokens of this rank, H heads of a tensor-parallel rank,
h = H / C, K key/value heads of a tensor-parallel rank, D head dimension, A drawn tokens, a those that this rank's
tokens predict.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from asyncflow.device import to_device
from workers.engines.packed_attention import packed_attention
from workers.engines.packed_forward import ALONE, PackedInputs, PackedLayout

# Every rank computes the layers for its own tokens. Around the attention the ranks exchange tokens for heads (Ulysses),
# so each attends over all tokens with its share of the heads, using the other engines' kernels:
#
#     rank 0   tokens 0 .. t, all heads          tokens 0 .. T, heads 0 .. h
#     rank 1   tokens t .. T, all heads   <-->   tokens 0 .. T, heads h .. H
#
# To Megatron these ranks are data-parallel replicas: it sums their gradients, and splits the optimizer over them.
#
# Source: DeepSpeed Ulysses, arXiv 2309.14509, section 3.


@dataclass(frozen=True)
class TokenShare:
    """This rank's tokens of a micro-batch."""

    tokens_t: Tensor  # int64 [t]
    positions_t: Tensor  # int64 [t]
    layout: PackedLayout  # of all T tokens; filler tokens make T a multiple of C x `divisor`
    predictors_a: Tensor  # int64 [a], see `PackedInputs`; a single dummy if this rank has none
    targets_a: Tensor  # likewise
    drawn_a: Tensor  # int64 [a], places among the A drawn tokens; may be empty
    num_drawn: int  # A

    @staticmethod
    def from_inputs(
        inputs: PackedInputs, rank: int, size: int, device: torch.device, *, divisor: int = 1
    ) -> "TokenShare":
        """Return the share of one of `size` ranks on its device, a multiple of `divisor` tokens; `inputs` are in host
        memory."""
        spare = -inputs.tokens_T.numel() % (size * divisor)
        layout = inputs.layout
        if spare:
            layout = PackedLayout((*layout.lengths, spare), (*layout.prompts, ALONE))
        length = (inputs.tokens_T.numel() + spare) // size
        tokens = slice(rank * length, (rank + 1) * length)
        places_A = inputs.predictors_A - tokens.start
        if size == 1:
            drawn_a = torch.arange(places_A.numel(), device=places_A.device)
        else:
            drawn_a = torch.nonzero((places_A >= 0) & (places_A < length))[:, 0]
        nothing_a = drawn_a.new_zeros(1)
        tokens_t, positions_t, predictors_a, targets_a, drawn_a = to_device(
            [
                pad(inputs.tokens_T, (0, spare))[tokens],
                pad(inputs.positions_T, (0, spare))[tokens],
                places_A[drawn_a] if drawn_a.numel() else nothing_a,
                inputs.targets_A[drawn_a] if drawn_a.numel() else nothing_a,
                drawn_a,
            ],
            device,
        )
        return TokenShare(tokens_t, positions_t, layout, predictors_a, targets_a, drawn_a, inputs.targets_A.numel())

    def select_own(self, values_A: Tensor) -> Tensor:
        """Return this rank's part [a] of values of all drawn tokens; 0 for the dummy."""
        own = values_A[self.drawn_a]
        return own if own.numel() else values_A.new_zeros(1)

    def spread_values(self, values_a: Tensor) -> Tensor:
        """Return [A]: this rank's values in their places, 0 elsewhere."""
        return values_a.new_zeros(self.num_drawn).index_copy(0, self.drawn_a, values_a[: self.drawn_a.numel()])


def heads_for_tokens(local_tHD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [T, H / C, D]: all tokens of this rank's heads, from all heads of its tokens."""
    size = dist.get_world_size(group)
    # Repeat heads until C divides H.
    times = size // gcd(size, local_tHD.shape[1])
    if times > 1:
        local_tHD = local_tHD.repeat_interleave(times, dim=1)
    parts_CthD = torch.unflatten(local_tHD, 1, (size, -1)).transpose(0, 1)
    return _exchange(parts_CthD, group).flatten(0, 1)


def tokens_for_heads(whole_ThD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [t, H, D]: the inverse of `heads_for_tokens`."""
    size = dist.get_world_size(group)
    parts_CthD = _exchange(torch.unflatten(whole_ThD, 0, (size, -1)), group)
    return parts_CthD.transpose(0, 1).flatten(1, 2)


class MegatronPackedAttention(nn.Module):
    """Core attention of Megatron's layers over packed documents: the same function as in the other engines.

    Replaces Megatron's `DotProductAttention` and follows its protocol `CoreAttention`.
    """

    def __init__(self, config: Any, layer_number: int, *_: object, softmax_scale: float | None = None, **__: object):
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Any,
        **__: object,
    ) -> Tensor:
        """Attend within each document: query [t, H, D], key and value [t, K, D] -> [t, H * D]."""
        # They travel in `packed_seq_params`, so that recomputed layers get them again.
        layout, context = packed_seq_params.packed_layout, packed_seq_params.context
        if context is not None:
            query, key, value = (heads_for_tokens(tensor, context) for tensor in (query, key, value))
        heads_first = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        output: Tensor
        output, _ = packed_attention(self, *heads_first, attention_mask, packed_layout=layout, scaling=self._scale)
        own_tHD = output[0] if context is None else tokens_for_heads(output[0], context)
        return own_tHD.flatten(1)


class _Exchange(torch.autograd.Function):
    """Rank i's part j and rank j's part i change places: its own inverse and transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        given = parts.contiguous()
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given, group=group)
        return taken

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    exchanged: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return exchanged
