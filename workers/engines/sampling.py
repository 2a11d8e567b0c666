"""Draws tokens from logits with random numbers that the caller drew.

Legend of shapes: B rows, V vocabulary.
"""

import torch
from torch import Tensor

from workers.config import SamplingConfig


def draw_tokens(logits_BV: Tensor, uniform_B: Tensor, config: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Invert each row's cumulative distribution at its random number; at temperature 0, take its likeliest token.

    A row's result depends on that row alone. Top-k is applied first, then top-p to what it left.

    Args:
        logits_BV: any floating type.
        uniform_B: float32 in [0, 1).
        config: temperature, top_k, top_p.
    Returns:
        tokens, int64 [B], and their log-probabilities, float32 [B], under the tempered distribution before filtering;
        at temperature 0 under the untempered one.
    """
    logits_BV = logits_BV.float()
    if config.temperature not in (0, 1):
        logits_BV = logits_BV / config.temperature
    log_probs_BV = logits_BV.log_softmax(-1)
    probs_BV = log_probs_BV.exp()
    if config.temperature == 0:
        token_B = log_probs_BV.argmax(-1)
    elif 0 < config.top_k < probs_BV.shape[-1] or config.top_p < 1:
        token_B = _draw_filtered(probs_BV, uniform_B, config)
    else:
        token_B = _invert(probs_BV, uniform_B)
    return token_B, log_probs_BV.gather(-1, token_B.unsqueeze(-1)).squeeze(-1)


def _draw_filtered(probs_BV: Tensor, uniform_B: Tensor, config: SamplingConfig) -> Tensor:
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    if config.top_k > 0:
        sorted_BV = sorted_BV[:, : config.top_k]
    if config.top_p < 1:
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        sorted_BV = sorted_BV * (before_BV < config.top_p * sorted_BV.sum(-1, keepdim=True))
    return order_BV.gather(-1, _invert(sorted_BV, uniform_B).unsqueeze(-1)).squeeze(-1)


def _invert(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds uniform * total; never one of weight zero.

    A row that is not finite has no such index: it gets the last one, and log-probabilities that say so.
    """
    cumulative_BV = weights_BV.cumsum(-1)
    total_B1 = cumulative_BV[:, -1:].contiguous()
    drawn_B1 = torch.searchsorted(cumulative_BV, uniform_B.unsqueeze(-1) * total_B1, right=True)
    # uniform * total may round up to total, which lies behind the last index with a weight.
    last_B1 = torch.searchsorted(cumulative_BV, total_B1)
    return torch.minimum(drawn_B1, last_B1).clamp_(max=weights_BV.shape[-1] - 1).squeeze(-1)
