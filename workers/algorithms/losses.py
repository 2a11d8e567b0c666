"""Terms of policy losses, as sums over tokens that nobody has normalised yet.

Micro-batches arrive in any order and size; each adds its sum, and `loss_scale` gives the one factor that an update
applies to the accumulated gradient at its end.

Legend of shapes: N answers, A tokens of these answers, packed.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Differences of log-probabilities are clamped to +-20 before `exp`: a ratio beyond e^20 would overflow float32, and
infinity times an advantage of zero is not a number."""

Normalization = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class LossCounts:
    """What an update's normalisation divides by; add those of all ranks and micro-batches.

    Attributes:
        tokens: answer tokens whose loss counts.
        sequences: answers whose loss counts.
        answers: all answers with a reward, masked ones included.
    """

    tokens: int
    sequences: int
    answers: int

    def __add__(self, other: "LossCounts") -> "LossCounts":
        return LossCounts(self.tokens + other.tokens, self.sequences + other.sequences, self.answers + other.answers)


def loss_scale(normalization: Normalization, counts: LossCounts, *, max_response_tokens: int) -> float:
    """Return the factor that turns an update's accumulated sum into its loss; 0 when nothing counts.

    Args:
        normalization: `token`: 1 / tokens (arXiv 2503.14476, eq. 8); `sequence`: 1 / sequences, the sum being weighted
            by `token_weights` (arXiv 2402.03300, eq. 3); `constant`: 1 / (answers * max_response_tokens)
            (arXiv 2503.20783, section 3.2).
        counts: of the whole update over all ranks.
        max_response_tokens: longest answer.
    """
    divisors = {
        "token": counts.tokens,
        "sequence": counts.sequences,
        "constant": counts.answers * max_response_tokens,
    }
    divisor = divisors[normalization]
    return 1.0 / divisor if divisor else 0.0


def token_weights(normalization: Normalization, length_N: Tensor, weight_N: Tensor) -> Tensor:
    """Return float32 [A]: the weight of each token inside the sum.

    Args:
        normalization: `sequence` weighs a token by 1 / length of its answer; the others by 1.
        length_N: integer [N], tokens of each answer.
        weight_N: bool or floating [N], of each answer's loss; 0: it does not count.
    """
    weight_N = weight_N.float()
    if normalization == "sequence":
        weight_N = weight_N / length_N.clamp(min=1)
    return weight_N.repeat_interleave(length_N)


def clipped_policy_loss(
    log_ratio_A: Tensor, advantage_A: Tensor, *, eps_clip: float, eps_clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate of each token, negated, and where a clip replaced the ratio.

    Args:
        log_ratio_A: floating [A], log-probability under the policy minus that under the old policy.
        advantage_A: floating [A].
        eps_clip: the ratio counts down to 1 - eps_clip.
        eps_clip_high: the ratio counts up to 1 + eps_clip_high.
        dual_clip: with a negative advantage, where those two do not bound it, up to this; None: without bound.
    Returns:
        floating [A] and bool [A].
    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; separate bounds Yu et al. 2025 (arXiv 2503.14476), eq. 10;
        dual clip Ye et al. 2020 (arXiv 1912.09729), eq. 5.
    """
    ratio_A = bounded_ratio(log_ratio_A)
    plain_A = ratio_A * advantage_A
    least_A = torch.minimum(plain_A, ratio_A.clamp(1 - eps_clip, 1 + eps_clip_high) * advantage_A)
    if dual_clip is not None:
        least_A = torch.where(advantage_A < 0, torch.maximum(least_A, dual_clip * advantage_A), least_A)
    return -least_A, (least_A != plain_A).detach()


def bounded_ratio(log_ratio_A: Tensor) -> Tensor:
    """Return the probability ratio, floating [A], between e^-20 and e^20 and so always finite."""
    return log_ratio_A.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_divergence(log_probs_A: Tensor, ref_log_probs_A: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Return an estimate, [A], of KL(policy || reference) at each token, from the token that the policy drew.

    With d = log policy - log reference; "unbiased" is of the value, the gradient is that of the term inside a loss:

        k1 = d                  unbiased, may be negative; its gradient averages to zero: it holds the policy nowhere
        k2 = d^2 / 2            biased; its gradient averages to that of KL(policy || reference)
        k3 = exp(-d) - 1 + d    unbiased, non-negative; its gradient averages to that of KL(reference || policy)

    All of it holds for tokens that the policy itself drew; stale tokens are not reweighted.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; k3: arXiv 2402.03300, eq. 4.
    """
    difference_A = log_probs_A - ref_log_probs_A
    if estimator == "k1":
        return difference_A
    if estimator == "k2":
        return 0.5 * difference_A.square()
    bounded_A = difference_A.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-bounded_A) + bounded_A
