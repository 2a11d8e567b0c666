"""Correction for tokens that another policy drew: the one place that knows how. Pure.

With mu the policy that drew a token, as the generating engine computed it, theta the one that is trained, and p the
*proximal* policy: theta at the start of the step, as the trainer computes it. Two engines round differently, so mu
is not p even where both have the same weights.

Where a step makes one update, p is theta without its gradient, and costs no forward pass of its own. It also
means that theta / p is 1: the clip acts under `none` only, and what bounds an update otherwise is C. Where it makes
several, p comes as the column `log_probs` (task `actor_log_probs`); under `none` the loss does not need it. The KL
penalty and the loss's normalisation know nothing of the correction: a masked answer still counts in both.

    truncated_is    min(p / mu, C)                      * clip(theta / p)
    decoupled       p / mu, and 0 where that is > C     * clip(theta / p)
    sequence_mask   min(p / mu, C), and 0 for answers whose mean p / mu is far from 1     * clip(theta / p)
    none            clip(theta / mu): the policy that drew the tokens is taken for PPO's old one

Legend of shapes: N answers, A tokens of these answers, packed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.algorithms.config import OffPolicyConfig
from workers.algorithms.losses import bounded_ratio


@dataclass(frozen=True)
class Correction:
    """What a micro-batch's tokens are corrected by; without gradient.

    Attributes:
        old_log_probs_A: floating [A]: of the policy that the surrogate's ratio and clip are relative to.
        weight_A: floating [A], finite: multiplies each token's surrogate.
        changed_A: bool [A]: where the plain importance weight was cut or masked.
    """

    old_log_probs_A: Tensor
    weight_A: Tensor
    changed_A: Tensor


def correct(
    log_probs_A: Tensor,
    behaviour_A: Tensor,
    length_N: Tensor,
    config: OffPolicyConfig,
    *,
    proximal_A: Tensor | None = None,
) -> Correction:
    """Return the correction for one micro-batch.

    Args:
        log_probs_A: floating [A], under the policy that is trained, before its next update.
        behaviour_A: floating [A], under the policy that drew the tokens.
        length_N: integer [N], tokens of each answer.
        config: which correction.
        proximal_A: floating [A], under the policy that the step found; None: that is still the one that is trained.

    Source: truncated importance sampling: Espeholt et al. 2018 (arXiv 1802.01561), section 4.1; decoupled objective:
        Hilton et al. 2022 (arXiv 2110.00641), used for language models by Fu et al. 2025 (arXiv 2505.24298), whose
        code (AReaL) leaves out the tokens beyond the cap.
    """
    proximal_A = log_probs_A.detach() if proximal_A is None else proximal_A
    ones_A = torch.ones_like(proximal_A)
    if not config.has_proximal_policy:
        return Correction(behaviour_A, ones_A, torch.zeros_like(ones_A, dtype=torch.bool))
    log_ratio_A = proximal_A - behaviour_A
    plain_A = bounded_ratio(log_ratio_A)
    weight_A = plain_A.clamp(max=config.cap)
    if config.method == "decoupled":
        weight_A = torch.where(plain_A > config.cap, 0.0, plain_A)
    if config.method == "sequence_mask":
        mean_N = answer_means(log_ratio_A, length_N)
        kept_N = (mean_N >= -config.mask_log_ratio) & (mean_N <= config.mask_log_ratio)
        weight_A = weight_A * kept_N.repeat_interleave(length_N)
    return Correction(proximal_A, weight_A, weight_A != plain_A)


def answer_sums(value_A: Tensor, length_N: Tensor) -> Tensor:
    """Return floating [N]: the sum over each answer's tokens; 0 for an answer without any."""
    answer_A = torch.arange(len(length_N), device=value_A.device).repeat_interleave(length_N)
    return torch.zeros(len(length_N), dtype=value_A.dtype, device=value_A.device).index_add(0, answer_A, value_A)


def answer_means(value_A: Tensor, length_N: Tensor) -> Tensor:
    """Return floating [N]: the mean of each answer's tokens; 0 for an answer without any."""
    return answer_sums(value_A, length_N) / length_N.clamp(min=1)
