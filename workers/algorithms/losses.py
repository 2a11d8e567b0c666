"""The losses: what the policy's and the critic's loss of a micro-batch is, and the terms that it is made of. Pure.

Losses are sums over tokens, not normalised yet: micro-batches come in any order and size, and `loss_scale` gives the
one factor that an update applies to the accumulated gradient.

Legend of shapes: N samples, A drawn tokens of these, packed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from workers.algorithms.config import OffPolicyConfig, PolicyConfig

MAX_LOG_RATIO = 20.0
"""Differences of log-probabilities are clamped to +-20 before `exp`: a ratio beyond e^20 would overflow float32, and
infinity times an advantage of zero is not a number."""

Normalization = Literal["token", "sequence", "constant"]


class MicroLoss(Protocol):
    """The loss of one micro-batch: called once by the engine, then holds `stats`."""

    @property
    def stats(self) -> Mapping[str, Tensor]:
        """Scalar tensors: `loss` and `tokens`, and further sums over the tokens that count."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the unnormalised sum, a scalar with gradient; the policy's is given `log_probs_A` and `entropy_A`,
        the critic's `value_A`."""


@dataclass
class PolicyLoss:
    """The policy's loss of one micro-batch.

    Attributes:
        length_N: drawn tokens of each sample.
        weight_A: of each token inside the sum; 0 where masked.
        advantage_A: of each token.
        rollout_log_probs_A: under the policy that drew the tokens, as the generating engine recorded them.
        ref_log_probs_A: under the reference; None without a KL penalty.
        old_log_probs_A: under the policy as the step found it; None: it has not changed since.
        sequence_ratio: the ratio is one of whole samples: e to the mean of their tokens' log ratios.
        stats: scalar tensors on the device: `loss` (the sum as trained, times `scale` gives the update's loss), and
            sums over the tokens that count: `tokens`, `entropy`, `ratio` and `ratio_squared` (of policy to rollout),
            `clipped`, `corrected` (weights that were cut or masked), `kl` (to the reference; 0 without), `drift` (k3 of
            KL(rollout || policy)), `old_drift` (of KL(rollout || old policy)).
    """

    config: PolicyConfig
    length_N: Tensor
    weight_A: Tensor
    advantage_A: Tensor
    rollout_log_probs_A: Tensor
    ref_log_probs_A: Tensor | None = None
    old_log_probs_A: Tensor | None = None
    sequence_ratio: bool = False
    stats: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, log_probs_A: Tensor, entropy_A: Tensor) -> Tensor:
        """Return the unnormalised sum, a scalar with gradient."""
        config = self.config
        kl_coef, kl_estimator = config.kl_loss
        correction = correct(
            log_probs_A, self.rollout_log_probs_A, self.length_N, config.off_policy, old_A=self.old_log_probs_A
        )
        log_ratio_A = log_probs_A - correction.base_log_probs_A
        if self.sequence_ratio:
            log_ratio_A = answer_means(log_ratio_A, self.length_N).repeat_interleave(self.length_N)
        loss_A, clipped_A = clipped_policy_loss(
            log_ratio_A,
            self.advantage_A,
            eps_clip=config.eps_clip,
            eps_clip_high=config.upper_clip,
            dual_clip=config.dual_clip,
        )
        loss_A = loss_A * correction.weight_A
        kl_A = torch.zeros_like(loss_A)
        if self.ref_log_probs_A is not None:
            kl_A = kl_divergence(log_probs_A, self.ref_log_probs_A, kl_estimator)
            loss_A = loss_A + kl_coef * kl_A
        total = (loss_A * self.weight_A).sum()
        with torch.no_grad():
            drift_A = kl_divergence(self.rollout_log_probs_A, log_probs_A, "k3")
            old_drift_A = kl_divergence(self.rollout_log_probs_A, correction.base_log_probs_A, "k3")
            # Bounded: else infinity times a masked token's 0 is not a number.
            ratio_A = bounded_ratio(log_probs_A - self.rollout_log_probs_A)
            counts_A = self.weight_A > 0
            terms = {
                "entropy": entropy_A,
                "ratio": ratio_A,
                "ratio_squared": ratio_A.square(),
                "clipped": clipped_A,
                "corrected": correction.changed_A,
                "kl": kl_A,
                "drift": drift_A,
                "old_drift": old_drift_A,
            }
            sums = torch.stack([term.to(ratio_A) for term in terms.values()]) @ counts_A.to(ratio_A)
            self.stats = dict(zip(terms, sums.unbind(), strict=True))
            self.stats |= {"loss": total.detach(), "tokens": counts_A.sum()}
        return total


@dataclass
class ValueLoss:
    """The critic's loss of one micro-batch.

    Attributes:
        weight_A: of each token inside the sum; 0 where masked.
        old_value_A: the values that the step's returns were made from.
        return_A: the targets.
        clip: see `clipped_value_loss`.
        coef: multiplies the loss.
        stats: scalar tensors on the device: `loss` (the sum as trained, times `scale` gives the update's loss), and
            sums over the tokens that count: `tokens`, `clipped`, `value`, `return`, `return_squared`, `error_squared`
            (of the values before the update).
    """

    weight_A: Tensor
    old_value_A: Tensor
    return_A: Tensor
    clip: float | None
    coef: float
    stats: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, value_A: Tensor) -> Tensor:
        """Return the unnormalised sum, a scalar with gradient."""
        loss_A, clipped_A = clipped_value_loss(value_A, self.old_value_A, self.return_A, clip=self.clip)
        total = self.coef * (loss_A * self.weight_A).sum()
        with torch.no_grad():
            counts_A = self.weight_A > 0
            terms = {
                "clipped": clipped_A,
                "value": self.old_value_A,
                "return": self.return_A,
                "return_squared": self.return_A.square(),
                "error_squared": (self.old_value_A - self.return_A).square(),
            }
            sums = torch.stack([term.to(loss_A) for term in terms.values()]) @ counts_A.to(loss_A)
            self.stats = dict(zip(terms, sums.unbind(), strict=True))
            self.stats |= {"loss": total.detach(), "tokens": counts_A.sum()}
        return total


@dataclass(frozen=True)
class LossCounts:
    """What an update's normalisation divides by; add those of all ranks and micro-batches.

    Attributes:
        tokens: drawn tokens whose loss counts.
        sequences: rows (rollouts, whatever their samples) whose loss counts.
        answers: all rows with a reward, masked ones included.
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
        max_response_tokens: longest response.
    """
    divisors = {
        "token": counts.tokens,
        "sequence": counts.sequences,
        "constant": counts.answers * max_response_tokens,
    }
    divisor = divisors[normalization]
    return 1.0 / divisor if divisor else 0.0


def token_weights(normalization: Normalization, length_N: Tensor, weight_N: Tensor, row_N: Tensor) -> Tensor:
    """Return float32 [A]: the weight of each token inside the sum.

    Args:
        normalization: `sequence` weighs a token by 1 / drawn tokens of its whole row; the others by 1.
        length_N: integer [N], drawn tokens of each sample.
        weight_N: bool or floating [N], of the loss of each sample's row; 0: it does not count.
        row_N: integer [N], drawn tokens of each sample's row.
    """
    weight_N = weight_N.float()
    if normalization == "sequence":
        weight_N = weight_N / row_N.clamp(min=1)
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


def clipped_value_loss(
    value_A: Tensor, old_value_A: Tensor, return_A: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of each token, and where the clipped one was larger.

        max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2

    Args:
        value_A: floating [A], with gradient.
        old_value_A: floating [A], as the critic gave them before the step's update.
        return_A: floating [A], the targets.
        clip: how far a value may move in a step and still be pulled; None: any distance.
    Returns:
        floating [A] and bool [A].
    Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 28 with a quadratic penalty; the clip is that of OpenAI's PPO2
        (github.com/openai/baselines, `ppo2/model.py`), discussed by Engstrom et al. 2020 (arXiv 2005.12729), section 3.
    """
    plain_A = (value_A - return_A).square()
    if clip is None:
        return 0.5 * plain_A, torch.zeros_like(plain_A, dtype=torch.bool)
    near_A = old_value_A + (value_A - old_value_A).clamp(-clip, clip)
    clipped_A = (near_A - return_A).square()
    return 0.5 * torch.maximum(plain_A, clipped_A), (clipped_A > plain_A).detach()


@dataclass(frozen=True)
class Correction:
    """The off-policy correction of a micro-batch; without gradient.

    Attributes:
        base_log_probs_A: floating [A]: of the policy that the surrogate's ratio and clip are relative to.
        weight_A: floating [A], finite: multiplies each token's surrogate.
        changed_A: bool [A]: where the plain importance weight was cut or masked.
    """

    base_log_probs_A: Tensor
    weight_A: Tensor
    changed_A: Tensor


def correct(
    log_probs_A: Tensor,
    rollout_A: Tensor,
    length_N: Tensor,
    config: OffPolicyConfig,
    *,
    old_A: Tensor | None = None,
) -> Correction:
    """Return the correction for tokens that another policy drew.

    Three policies are involved: `rollout` drew the token, as the generating engine computed it; `old` is the policy
    as the step found it, as the trainer computes it; `policy` is the one in training. Two engines round differently,
    so `rollout` is not `old` even where both have the same weights.

    A step with one update needs no forward pass for `old`: it is the policy without its gradient. The ratio
    policy / old is then 1, so the clip acts under `none` only, and the cap C bounds the update otherwise. With several
    updates `old` comes as a column (task `actor_log_probs`), except under `none`, which does not use it. The KL
    penalty and the normalisation ignore the correction: a masked response still counts in both.

        truncated_is    min(old / rollout, C)                       * clip(policy / old)
        decoupled       old / rollout, and 0 where that is > C      * clip(policy / old)
        sequence_mask   as truncated_is, and 0 for samples whose mean log ratio is large
        none            clip(policy / rollout)

    Args:
        log_probs_A: floating [A], under the policy in training, before its next update.
        rollout_A: floating [A], under the policy that drew the tokens.
        length_N: integer [N], drawn tokens of each sample.
        config: which correction.
        old_A: floating [A], under the policy as the step found it; None: it is still the one in training.

    Source: truncated importance sampling: Espeholt et al. 2018 (arXiv 1802.01561), section 4.1; decoupled objective:
        Hilton et al. 2022 (arXiv 2110.00641), used for language models by Fu et al. 2025 (arXiv 2505.24298), whose
        code (AReaL) leaves out the tokens beyond the cap.
    """
    old_A = log_probs_A.detach() if old_A is None else old_A
    ones_A = torch.ones_like(old_A)
    if not config.has_proximal_policy:
        return Correction(rollout_A, ones_A, torch.zeros_like(ones_A, dtype=torch.bool))
    log_ratio_A = old_A - rollout_A
    plain_A = bounded_ratio(log_ratio_A)
    weight_A = plain_A.clamp(max=config.cap)
    if config.method == "decoupled":
        weight_A = torch.where(plain_A > config.cap, 0.0, plain_A)
    if config.method == "sequence_mask":
        mean_N = answer_means(log_ratio_A, length_N)
        kept_N = (mean_N >= -config.mask_log_ratio) & (mean_N <= config.mask_log_ratio)
        weight_A = weight_A * kept_N.repeat_interleave(length_N)
    return Correction(old_A, weight_A, weight_A != plain_A)


def answer_sums(value_A: Tensor, length_N: Tensor) -> Tensor:
    """Return floating [N]: the sum over each sample's tokens; 0 for one without any."""
    answer_A = torch.arange(len(length_N), device=value_A.device).repeat_interleave(length_N)
    return torch.zeros(len(length_N), dtype=value_A.dtype, device=value_A.device).index_add(0, answer_A, value_A)


def answer_means(value_A: Tensor, length_N: Tensor) -> Tensor:
    """Return floating [N]: the mean of each sample's tokens; 0 for one without any."""
    return answer_sums(value_A, length_N) / length_N.clamp(min=1)
