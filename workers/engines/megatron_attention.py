"""Core attention of Megatron's layers over packed documents: the same function as the other engines'.

Legend of shapes: t tokens of this rank, H query heads of this rank, K key/value heads of this rank, D head dimension.
"""

from typing import Any

from torch import Tensor, nn

from workers.engines.megatron_context import heads_for_tokens, tokens_for_heads
from workers.engines.packed_attention import packed_attention


class MegatronPackedAttention(nn.Module):
    """Stands where Megatron's `DotProductAttention` would; follows its protocol `CoreAttention`.

    The layout, and who has the other tokens, travel in `packed_seq_params`: layers that are recomputed get it again.
    """

    def __init__(self, config: Any, layer_number: int, *_: object, softmax_scale: float | None = None, **__: object):
        """Args:
        config, layer_number: Megatron's; nothing of them is needed.
        softmax_scale: factor on the scores; None: D ** -0.5.
        """
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
        """Attend inside each document.

        Args:
            query: [t, H, D]; `key` and `value`: [t, K, D].
            attention_mask: None.
            packed_seq_params: with `packed_layout`, of all tokens, and `context`, see `MegatronParts`.

        Returns:
            [t, H * D].
        """
        layout, context = packed_seq_params.packed_layout, packed_seq_params.context
        if context is not None:
            query, key, value = (heads_for_tokens(tensor, context) for tensor in (query, key, value))
        heads_first = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        output: Tensor
        output, _ = packed_attention(self, *heads_first, attention_mask, packed_layout=layout, scaling=self._scale)
        own_tHD = output[0] if context is None else tokens_for_heads(output[0], context)
        return own_tHD.flatten(1)
