"""Log-probabilities and entropies from whole logits, as the engines computed them before.

Legend of shapes: A drawn tokens, D width, V vocabulary.
"""

import torch
from torch import Tensor

HIDDEN, VOCABULARY = 896, 151_936
"""Of Qwen2.5-0.5B."""


def of_logits(logits_AV: Tensor, targets_A: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return [A] log-probabilities, and [A] entropies without gradient."""
    if temperature != 1.0:
        logits_AV = logits_AV / temperature
    log_probs_AV = logits_AV.log_softmax(-1)
    log_probs_A = log_probs_AV.gather(-1, targets_A.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        return log_probs_A, -(log_probs_AV.exp() * log_probs_AV).sum(-1)


def before(hidden_AD: Tensor, weight_VD: Tensor, targets_A: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return what `of_logits` says of hidden states."""
    return of_logits(torch.nn.functional.linear(hidden_AD, weight_VD), targets_A, temperature)


def now(hidden_AD: Tensor, weight_VD: Tensor, targets_A: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the same by the engines' head."""
    from workers.engines.packed_forward import HeadRequest, head_log_probs

    request = HeadRequest(targets_A, temperature, entropy=True)
    log_probs_A, entropy_A = head_log_probs(hidden_AD, weight_VD, None, request)
    return log_probs_A, entropy_A.detach()


WAYS = {"before": before, "now": now}


def inputs(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states and a head, whose logits deviate by 3 and which want gradients, and targets."""
    generator = torch.Generator().manual_seed(0)
    hidden_AD = torch.randn(num_tokens, HIDDEN, generator=generator)
    weight_VD = torch.randn(VOCABULARY, HIDDEN, generator=generator).mul_(3 / HIDDEN**0.5)
    targets_A = torch.randint(VOCABULARY, (num_tokens,), generator=generator)
    return hidden_AD.to(dtype).requires_grad_(), weight_VD.to(dtype).requires_grad_(), targets_A
