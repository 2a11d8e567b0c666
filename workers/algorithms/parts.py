"""The parts of a policy's loss: `ratio`, `clip`, `mask`, `aggregate`. Pure; an algorithm picks them, `losses` adds up.

    loss = - sum over tokens:  aggregate * importance * mask * clip(ratio * advantage)

    ratio       of the policy in training to the base: of tokens, or of whole samples
    clip        bounds what a token moves: PPOClip, DualClip, WeightClip (CISPO), BinaryDivergence (DPPO)
    mask        leaves out tokens that another policy drew, by their importance weight: Band, SampleMask
    aggregate   what a token counts in the sum, and what an update divides by

Three policies are involved: `rollout` drew the token, as the generating engine computed it; `old` is the policy as the
step found it, as the trainer computes it; `policy` is the one in training. Two engines round differently, so `rollout`
is not `old` even where both have the same weights. With the base `old`, the importance weight old / rollout corrects
for that, and for older weights; with the base `rollout` there is none.

Legend of shapes: N samples, A drawn tokens of these, packed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from asyncflow.errors import ConfigError
from workers.settings.algorithms import KlEstimator, OffPolicyConfig

MAX_LOG_RATIO = 20.0
"""Differences of log-probabilities are clamped to +-20 before `exp`: a ratio beyond e^20 would overflow float32, and
infinity times an advantage of zero is not a number."""

BFLOAT16_ERROR = 0.06
"""Deviation (nats) of a token's log-probability between two engines that compute the same weights in bfloat16: measured
with SmolLM2-135M, see docs/algorithms.md. It is mostly the rounding of the logits, to one part in 256."""

Normalization = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class Tokens:
    """The drawn tokens of a micro-batch.

    Attributes:
        log_probs_A: floating [A], under the policy in training; alone with gradient.
        old_log_probs_A: floating [A], under the policy as the step found it.
        rollout_log_probs_A: floating [A], under the policy that drew the tokens.
        advantage_A: floating [A].
        length_N: integer [N], drawn tokens of each sample.
    """

    log_probs_A: Tensor
    old_log_probs_A: Tensor
    rollout_log_probs_A: Tensor
    advantage_A: Tensor
    length_N: Tensor


Clip = Callable[[Tokens, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(tokens, ratio_A, surrogate_A) -> the surrogate to be maximised, floating [A], and bool [A]: where it was bounded."""
Mask = Callable[[Tokens], Tensor]
"""tokens -> bool [A]: whether a token counts."""


@dataclass(frozen=True)
class PolicyParts:
    """What a policy's loss is made of.

    Attributes:
        clips: one after the other, from ratio x advantage on.
        whole_samples: the ratio is one of whole samples, e to the mean of their tokens' log ratios (arXiv 2507.18071,
            eq. 7); else of tokens.
        base: of the ratio; `rollout`: there is no importance weight.
        cap: largest importance weight; None: any.
        masks: a token must pass them all.
        aggregate: how tokens are averaged.
    """

    clips: tuple[Clip, ...]
    whole_samples: bool = False
    base: Literal["old", "rollout"] = "old"
    cap: float | None = None
    masks: tuple[Mask, ...] = ()
    aggregate: Normalization = "token"

    def base_log_probs(self, tokens: Tokens) -> Tensor:
        """Return floating [A], without gradient: of the policy that ratio and clip are relative to."""
        return tokens.old_log_probs_A if self.base == "old" else tokens.rollout_log_probs_A

    def ratio(self, tokens: Tokens) -> Tensor:
        """Return floating [A], the policy in training over the base."""
        log_ratio_A = tokens.log_probs_A - self.base_log_probs(tokens)
        if self.whole_samples:
            log_ratio_A = _of_tokens(response_means(log_ratio_A, tokens.length_N), tokens)
        return bounded_ratio(log_ratio_A)

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return what is maximised, floating [A], and bool [A]: where a clip bounded it."""
        ratio_A = self.ratio(tokens)
        surrogate_A, clipped_A = ratio_A * tokens.advantage_A, torch.zeros_like(ratio_A, dtype=torch.bool)
        for clip in self.clips:
            surrogate_A, bounded_A = clip(tokens, ratio_A, surrogate_A)
            clipped_A = clipped_A | bounded_A
        return surrogate_A, clipped_A

    def weights(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return each token's weight, floating [A], finite, without gradient, and where it was cut or masked."""
        plain_A = importance(tokens) if self.base == "old" else torch.ones_like(tokens.rollout_log_probs_A)
        weight_A = plain_A if self.cap is None else plain_A.clamp(max=self.cap)
        for mask in self.masks:
            weight_A = weight_A * mask(tokens)
        return weight_A, weight_A != plain_A


def policy_parts(
    clips: tuple[Clip, ...], off_policy: OffPolicyConfig, aggregate: Normalization, *, whole_samples: bool = False
) -> PolicyParts:
    """Return the parts, with the correction for tokens of another policy that `off_policy` names.

    A step with one update needs no forward pass for `old`: it is the policy without its gradient. The ratio
    policy / old is then 1, so a clip acts under `none` only, and the cap bounds the update otherwise. The KL penalty
    and the aggregate ignore the correction: a masked response still counts in both.

        truncated_is    min(old / rollout, C)                        * clip(policy / old)
        decoupled       old / rollout, and 0 where that is > C       * clip(policy / old)
        icepop          old / rollout, and 0 outside [low, high]     * clip(policy / old)
        none            clip(policy / rollout)

    Source: truncated importance sampling: Espeholt et al. 2018 (arXiv 1802.01561), section 4.1; decoupled objective:
        Hilton et al. 2022 (arXiv 2110.00641), used for language models by Fu et al. 2025 (arXiv 2505.24298), whose
        code (AReaL) leaves out the tokens beyond the cap; IcePop: Ling Team 2025 (arXiv 2510.18855).
    """
    method, cap = off_policy.method, None
    masks: list[Mask] = []
    if method == "decoupled":
        masks.append(Band(0.0, off_policy.cap))
    elif method == "icepop":
        masks.append(Band(off_policy.band_low, off_policy.band_high))
    elif method != "none":
        cap = off_policy.cap
    if off_policy.mask is not None:
        geometric = off_policy.mask == "geometric"
        bound = off_policy.geometric_log_ratio if geometric else off_policy.sequence_log_ratio
        masks.append(SampleMask(bound, geometric=geometric))
    base: Literal["old", "rollout"] = "old" if off_policy.has_proximal_policy else "rollout"
    return PolicyParts(clips, whole_samples, base, cap, tuple(masks), aggregate)


def importance(tokens: Tokens) -> Tensor:
    """Return floating [A], without gradient: old / rollout."""
    return bounded_ratio(tokens.old_log_probs_A - tokens.rollout_log_probs_A)


def bounded_ratio(log_ratio_A: Tensor) -> Tensor:
    """Return the probability ratio, floating [A], between e^-20 and e^20 and so always finite."""
    return log_ratio_A.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True)
class PPOClip:
    """The ratio counts down to 1 - low and up to 1 + high, where that lowers the surrogate.

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; separate bounds Yu et al. 2025 (arXiv 2503.14476), eq. 10.
    """

    low: float
    high: float

    def __call__(self, tokens: Tokens, ratio_A: Tensor, surrogate_A: Tensor) -> tuple[Tensor, Tensor]:
        """See `Clip`."""
        least_A = torch.minimum(surrogate_A, ratio_A.clamp(1 - self.low, 1 + self.high) * tokens.advantage_A)
        return least_A, (least_A != surrogate_A).detach()


@dataclass(frozen=True)
class DualClip:
    """With a negative advantage, where PPO's clip does not bound it, the ratio counts up to `bound`.

    Source: Ye et al. 2020 (arXiv 1912.09729), eq. 5.
    """

    bound: float

    def __call__(self, tokens: Tokens, ratio_A: Tensor, surrogate_A: Tensor) -> tuple[Tensor, Tensor]:
        """See `Clip`."""
        advantage_A = tokens.advantage_A
        bounded_A = torch.where(advantage_A < 0, torch.maximum(surrogate_A, self.bound * advantage_A), surrogate_A)
        return bounded_A, (bounded_A != surrogate_A).detach()


@dataclass(frozen=True)
class WeightClip:
    """The ratio is a weight without gradient between two bounds, and every token keeps its gradient:

        stop_gradient(clamp(ratio, least, most)) * advantage * log policy

    Source: MiniMax 2025 (arXiv 2506.13585), eq. 4 and 5 (CISPO).
    """

    least: float
    most: float

    def __call__(self, tokens: Tokens, ratio_A: Tensor, surrogate_A: Tensor) -> tuple[Tensor, Tensor]:
        """See `Clip`."""
        ratio_A = ratio_A.detach()
        weight_A = ratio_A.clamp(self.least, self.most)
        return weight_A * tokens.advantage_A * tokens.log_probs_A, weight_A != ratio_A


@dataclass(frozen=True)
class BinaryDivergence:
    """A token is left out where it is further than `bound` from the policy that drew it, and would go on moving away.

    Policies are compared as distributions over two outcomes, this token and any other, with mu of the rollout:

        tv    |mu - pi|
        kl    mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))

    Source: Qi et al. 2026 (arXiv 2602.04879), eq. 11 to 14 (DPPO); the authors' code in verl, `dppo_tv`, `dppo_kl`.
    """

    kind: Literal["tv", "kl"]
    bound: float

    def __call__(self, tokens: Tokens, ratio_A: Tensor, surrogate_A: Tensor) -> tuple[Tensor, Tensor]:
        """See `Clip`."""
        policy_A, rollout_A = tokens.log_probs_A.detach(), tokens.rollout_log_probs_A
        moves_away_A = tokens.advantage_A * (policy_A - rollout_A) > 0
        dropped_A = moves_away_A & (self.divergence(policy_A, rollout_A) > self.bound)
        return surrogate_A * ~dropped_A, dropped_A

    def divergence(self, policy_A: Tensor, rollout_A: Tensor) -> Tensor:
        """Return floating [A], from log-probabilities."""
        mu_A, pi_A = rollout_A.exp(), policy_A.exp()
        if self.kind == "tv":
            return (mu_A - pi_A).abs()
        # A probability of 1 leaves nothing for the other outcome: the logarithm of that is kept finite.
        others_mu_A, others_pi_A = (torch.log(-torch.expm1(x_A.clamp(max=-1e-7))) for x_A in (rollout_A, policy_A))
        return mu_A * (rollout_A - policy_A) + (1 - mu_A) * (others_mu_A - others_pi_A)


@dataclass(frozen=True)
class Band:
    """Tokens whose importance weight is within [low, high].

    Source: Ling Team 2025 (arXiv 2510.18855), section on IcePop; without a lower bound AReaL's (arXiv 2505.24298).
    """

    low: float
    high: float

    def __call__(self, tokens: Tokens) -> Tensor:
        """See `Mask`."""
        weight_A = importance(tokens)
        return (weight_A >= self.low) & (weight_A <= self.high)


def rounding_bound(length_N: Tensor) -> Tensor:
    """Return floating [N]: how far from 0 (nats) rounding takes the sum of a sample's log weights, at most, on-policy.

    Weights of n tokens that the generating engine drew average to 1, so with independent errors of deviation s their
    logarithms have the mean -s^2 / 2, and the sum has the mean -n s^2 / 2 and the deviation s sqrt(n). The bound is
    three deviations beyond the mean: of samples of any length one of several hundred is outside.
    """
    return 3 * BFLOAT16_ERROR * length_N.sqrt() + length_N * BFLOAT16_ERROR**2 / 2


@dataclass(frozen=True)
class SampleMask:
    """Samples whose importance weight as a whole is within e to the +- `bound` (nats): the geometric mean of their
    tokens' weights, or their product. Without a number the bound is `rounding_bound`, which makes both the same mask.

    Source: Liu, Li et al. 2025, https://richardli.xyz/rl-collapse-3; the names are those of verl's rollout correction.
    """

    bound: float | None
    geometric: bool

    def __call__(self, tokens: Tokens) -> Tensor:
        """See `Mask`."""
        log_weight_A = tokens.old_log_probs_A - tokens.rollout_log_probs_A
        whole_N = response_sums(log_weight_A, tokens.length_N)
        length_N = tokens.length_N.to(whole_N)
        if self.bound is None:
            bound_N = rounding_bound(length_N)
        else:
            bound_N = self.bound * (length_N if self.geometric else torch.ones_like(length_N))
        return _of_tokens(whole_N.abs() <= bound_N, tokens)


def _of_tokens(value_N: Tensor, tokens: Tokens) -> Tensor:
    """Return [A]: each sample's value at all of its tokens."""
    return value_N.repeat_interleave(tokens.length_N, output_size=len(tokens.log_probs_A))


@dataclass(frozen=True)
class LossCounts:
    """What an update's normalisation divides by; add those of all ranks and micro-batches.

    Attributes:
        tokens: drawn tokens whose loss counts.
        sequences: rows (rollouts, whatever their samples) whose loss counts.
        responses: all rows with a reward, masked ones included.
    """

    tokens: int
    sequences: int
    responses: int

    def __add__(self, other: "LossCounts") -> "LossCounts":
        return LossCounts(
            self.tokens + other.tokens, self.sequences + other.sequences, self.responses + other.responses
        )


def token_weights(aggregate: Normalization, length_N: Tensor, weight_N: Tensor, row_N: Tensor) -> Tensor:
    """Return float32 [A]: the weight of each token inside the sum.

    Args:
        aggregate: `sequence` weighs a token by 1 / drawn tokens of its whole row; the others by 1.
        length_N: integer [N], drawn tokens of each sample.
        weight_N: bool or floating [N], of the loss of each sample's row; 0: it does not count.
        row_N: integer [N], drawn tokens of each sample's row.
    """
    weight_N = weight_N.float()
    if aggregate == "sequence":
        weight_N = weight_N / row_N.clamp(min=1)
    return weight_N.repeat_interleave(length_N)


def loss_scale(aggregate: Normalization, counts: LossCounts, *, max_response_tokens: int) -> float:
    """Return the factor that turns an update's accumulated sum into its loss; 0 when nothing counts.

    Args:
        aggregate: `token`: 1 / tokens (arXiv 2503.14476, eq. 8); `sequence`: 1 / sequences, the sum being weighted
            by `token_weights` (arXiv 2402.03300, eq. 3); `constant`: 1 / (responses * max_response_tokens)
            (arXiv 2503.20783, section 3.2).
        counts: of the whole update over all ranks.
        max_response_tokens: longest response.
    """
    divisors = {
        "token": counts.tokens,
        "sequence": counts.sequences,
        "constant": counts.responses * max_response_tokens,
    }
    divisor = divisors[aggregate]
    return 1.0 / divisor if divisor else 0.0


def response_sums(value_A: Tensor, length_N: Tensor) -> Tensor:
    """Return floating [N]: the sum over each sample's tokens; 0 for one without any."""
    numbers_N = torch.arange(len(length_N), device=value_A.device)
    response_A = numbers_N.repeat_interleave(length_N, output_size=len(value_A))  # else the device is asked how many
    return torch.zeros(len(length_N), dtype=value_A.dtype, device=value_A.device).index_add(0, response_A, value_A)


def response_means(value_A: Tensor, length_N: Tensor) -> Tensor:
    """Return floating [N]: the mean of each sample's tokens; 0 for one without any."""
    return response_sums(value_A, length_N) / length_N.clamp(min=1)


# The losses: what the policy's and the critic's loss of a micro-batch is. Pure; the policy's is made of `parts`.
#
# Losses are sums over tokens, not normalised yet: micro-batches come in any order and size, and `parts.loss_scale`
# gives the one factor that an update applies to the accumulated gradient.
#
# Legend of shapes: N samples, A drawn tokens of these, packed.

MAX_K3 = 10.0
"""Largest k3 of a token (nats), of a d of -2.6 or 11. The log ratio itself, which importance weights use, too, has a
bound of its own, `MAX_LOG_RATIO`."""


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
        parts: ratio, clips, masks.
        kl: weight of the KL term, and its estimator; with weight 0 it is only measured.
        length_N: drawn tokens of each sample.
        weight_A: of each token inside the sum; 0 where masked.
        advantage_A: of each token.
        rollout_log_probs_A: under the policy that drew the tokens, as the generating engine recorded them.
        ref_log_probs_A: under the reference; None without a KL penalty.
        old_log_probs_A: under the policy as the step found it; None: it has not changed since.
        entropy_coef: weight of the mean entropy, which is added to what is maximised.
        stats: scalar tensors on the device: `loss` (the sum as trained, times `scale` gives the update's loss), and
            sums over the tokens that count: `tokens`, `entropy`, `ratio` and `ratio_squared` (of policy to rollout),
            `clipped`, `corrected` (weights that were cut or masked), `kl` (to the reference; 0 without), `kl_clamped`
            (whose k3 was cut at `MAX_K3`), `drift` (k3 of KL(rollout || policy)), `old_drift` (of KL(rollout || old
            policy)).
    """

    parts: PolicyParts
    kl: tuple[float, KlEstimator]
    length_N: Tensor
    weight_A: Tensor
    advantage_A: Tensor
    rollout_log_probs_A: Tensor
    ref_log_probs_A: Tensor | None = None
    old_log_probs_A: Tensor | None = None
    entropy_coef: float = 0.0
    stats: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, log_probs_A: Tensor, entropy_A: Tensor) -> Tensor:
        """Return the unnormalised sum, a scalar with gradient."""
        old_A = log_probs_A.detach() if self.old_log_probs_A is None else self.old_log_probs_A
        tokens = Tokens(log_probs_A, old_A, self.rollout_log_probs_A, self.advantage_A, self.length_N)
        surrogate_A, clipped_A = self.parts.surrogate(tokens)
        weight_A, corrected_A = self.parts.weights(tokens)
        loss_A, (kl_coef, kl_estimator) = -surrogate_A * weight_A, self.kl
        kl_A = clamped_A = torch.zeros_like(loss_A)
        if self.ref_log_probs_A is not None:
            kl_A = kl_divergence(log_probs_A, self.ref_log_probs_A, kl_estimator)
            loss_A = loss_A + kl_coef * kl_A
            if kl_estimator == "k3":
                clamped_A = k3_values(log_probs_A.detach() - self.ref_log_probs_A) > MAX_K3
        if self.entropy_coef:
            if log_probs_A.requires_grad and not entropy_A.requires_grad:
                raise ConfigError(
                    f"algorithm.entropy_coef: {self.entropy_coef:g} cannot be with this training engine, whose "
                    f"entropies have no gradient; set it to 0, or have `forward_backward` give them one"
                )
            loss_A = loss_A - self.entropy_coef * entropy_A
        total = (loss_A * self.weight_A).sum()
        with torch.no_grad():
            drift_A = kl_divergence(self.rollout_log_probs_A, log_probs_A, "k3")
            old_drift_A = kl_divergence(self.rollout_log_probs_A, self.parts.base_log_probs(tokens), "k3")
            # Bounded: else infinity times a masked token's 0 is not a number.
            ratio_A = bounded_ratio(log_probs_A - self.rollout_log_probs_A)
            counts_A = self.weight_A > 0
            terms = {
                "entropy": entropy_A,
                "ratio": ratio_A,
                "ratio_squared": ratio_A.square(),
                "clipped": clipped_A,
                "corrected": corrected_A,
                "kl": kl_A,
                "kl_clamped": clamped_A,
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


def kl_divergence(log_probs_A: Tensor, ref_log_probs_A: Tensor, estimator: KlEstimator) -> Tensor:
    """Return an estimate, [A], of KL(policy || reference) at each token, from the token that the policy drew.

    With d = log policy - log reference; "unbiased" is of the value, the gradient is that of the term inside a loss:

        k1 = d                  unbiased, may be negative; its gradient averages to zero: it holds the policy nowhere
        k2 = d^2 / 2            biased; its gradient averages to that of KL(policy || reference)
        k3 = exp(-d) - 1 + d    unbiased, non-negative; its gradient averages to that of KL(reference || policy)

    All of it holds for tokens that the policy itself drew; stale tokens are not reweighted. A k3 counts up to `MAX_K3`,
    and has no gradient beyond: e^-d of one token that the policy all but gave up would outweigh all others.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; k3: arXiv 2402.03300, eq. 4.
    """
    difference_A = log_probs_A - ref_log_probs_A
    if estimator == "k1":
        return difference_A
    if estimator == "k2":
        return 0.5 * difference_A.square()
    return k3_values(difference_A).clamp(max=MAX_K3)


def k3_values(difference_A: Tensor) -> Tensor:
    """Return k3, floating [A], without the bound on its value, from log policy - log reference; always finite."""
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
