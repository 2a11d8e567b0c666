"""The parts of a policy loss: `ratio`, `clip`, `mask`, `aggregate`; an algorithm picks them. Pure.

    loss = - sum over tokens:  aggregate * importance * mask * clip(ratio * advantage)

    ratio       policy in training / base, per token or per whole sample
    clip        bounds a token's step: PPOClip, DualClip, WeightClip (CISPO), BinaryDivergence, TopDivergence (DPPO)
    mask        drops tokens that another policy drew, by their importance weight: Band, SampleMask
    aggregate   a token's weight in the sum, and what an update divides by

Three policies are involved: `rollout` drew the token, as the generating engine computed it; `old` is the policy at the
start of the step, as the trainer computes it; `policy` is the one in training. Two engines round differently, so
`rollout` differs from `old` even with the same weights. With the base `old`, the importance weight old / rollout
corrects for that, and for older weights; with the base `rollout` there is no such weight.

Legend of shapes: N samples, A their drawn tokens, packed, K tokens that are compared at each place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from asyncflow.errors import ConfigError
from workers.settings.algorithms import KlEstimator, OffPolicyConfig

# Differences of log-probabilities are clamped to +-20 before `exp`: larger ratios could overflow float32, and infinity
# times an advantage of zero is NaN.
MAX_LOG_RATIO = 20.0

# Deviation (nats) of a token's log-probability between two engines that compute the same weights in bfloat16. Measured
# with SmolLM2-135M, see docs/algorithms.md; mostly the rounding of the logits, to one part in 256.
BFLOAT16_ERROR = 0.06

Normalization = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class TopOutcomes:
    """The K likeliest tokens, by the policy that drew, at the place of each drawn token. Without gradient."""

    rollout_log_probs_AK: Tensor  # floating [A, K], under the policy that drew
    has_drawn_A: Tensor  # bool [A], whether the drawn token is one of the K
    log_probs_AK: Tensor | None = None  # floating [A, K], under the policy in training; the loss sets it


@dataclass(frozen=True)
class Tokens:
    """The drawn tokens of a micro-batch."""

    log_probs_A: Tensor  # floating [A], under the policy in training; the only one with gradient
    old_log_probs_A: Tensor  # floating [A], under the policy at the start of the step
    rollout_log_probs_A: Tensor  # floating [A], under the policy that drew the tokens
    advantage_A: Tensor  # floating [A]
    length_N: Tensor  # integer [N], drawn tokens of each sample
    top: TopOutcomes | None = None  # for `TopDivergence`


# (tokens, ratio_A, surrogate_A) -> the surrogate to maximize, floating [A], and where it was bounded, bool [A].
Clip = Callable[[Tokens, Tensor, Tensor], tuple[Tensor, Tensor]]
Mask = Callable[[Tokens], Tensor]  # tokens -> whether each token counts, bool [A]


@dataclass(frozen=True)
class PolicyParts:
    """The components of a policy loss."""

    clips: tuple[Clip, ...]  # applied in order, starting from ratio x advantage
    # One ratio per sample, e to the mean of its tokens' log ratios (arXiv 2507.18071, eq. 7); otherwise one per token.
    whole_samples: bool = False
    base: Literal["old", "rollout"] = "old"  # denominator of the ratio; with `rollout` there is no importance weight
    cap: float | None = None  # largest importance weight; None: unbounded
    masks: tuple[Mask, ...] = ()  # a token must pass them all
    aggregate: Normalization = "token"  # how tokens are averaged

    def base_log_probs(self, tokens: Tokens) -> Tensor:
        """Return floating [A], without gradient, of the policy that ratio and clip are relative to."""
        return tokens.old_log_probs_A if self.base == "old" else tokens.rollout_log_probs_A

    def ratio(self, tokens: Tokens) -> Tensor:
        """Return floating [A], policy in training / base."""
        log_ratio_A = tokens.log_probs_A - self.base_log_probs(tokens)
        if self.whole_samples:
            log_ratio_A = _of_tokens(response_means(log_ratio_A, tokens.length_N), tokens)
        return bounded_ratio(log_ratio_A)

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return the objective to maximize, floating [A], and where a clip bounded it, bool [A]."""
        ratio_A = self.ratio(tokens)
        surrogate_A, clipped_A = ratio_A * tokens.advantage_A, torch.zeros_like(ratio_A, dtype=torch.bool)
        for clip in self.clips:
            surrogate_A, bounded_A = clip(tokens, ratio_A, surrogate_A)
            clipped_A = clipped_A | bounded_A
        return surrogate_A, clipped_A

    def weights(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return each token's weight, floating [A], finite, without gradient, and where it was capped or masked."""
        plain_A = importance(tokens) if self.base == "old" else torch.ones_like(tokens.rollout_log_probs_A)
        weight_A = plain_A if self.cap is None else plain_A.clamp(max=self.cap)
        for mask in self.masks:
            weight_A = weight_A * mask(tokens)
        return weight_A, weight_A != plain_A


def policy_parts(
    clips: tuple[Clip, ...], off_policy: OffPolicyConfig, aggregate: Normalization, *, whole_samples: bool = False
) -> PolicyParts:
    """Return the parts, with the off-policy correction that `off_policy` selects.

        truncated_is    min(old / rollout, C)                        * clip(policy / old)
        decoupled       old / rollout, and 0 where that is > C       * clip(policy / old)
        icepop          old / rollout, and 0 outside [low, high]     * clip(policy / old)
        none            clip(policy / rollout)

    A step with a single update needs no forward pass for `old`: it is the policy without its gradient. policy / old is
    then 1, so clips only act under `none`; otherwise the cap bounds the update. The KL penalty and the aggregate ignore
    the correction: masked responses still count in both.
    """
    # Source: truncated importance sampling: Espeholt et al. 2018 (arXiv 1802.01561), section 4.1; decoupled objective:
    # Hilton et al. 2022 (arXiv 2110.00641), used for language models by Fu et al. 2025 (arXiv 2505.24298), whose code
    # (AReaL) drops tokens beyond the cap; IcePop: Ling Team 2025 (arXiv 2510.18855).
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
    """Return old / rollout, floating [A], without gradient."""
    return bounded_ratio(tokens.old_log_probs_A - tokens.rollout_log_probs_A)


def bounded_ratio(log_ratio_A: Tensor) -> Tensor:
    """Return the probability ratio, floating [A], clamped to [e^-20, e^20] and thus always finite."""
    return log_ratio_A.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True)
class PPOClip:
    """Clamps the ratio to [1 - low, 1 + high] where that lowers the surrogate."""

    # Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; separate bounds Yu et al. 2025 (arXiv 2503.14476), eq. 10.

    low: float
    high: float

    def __call__(self, tokens: Tokens, ratio_A: Tensor, surrogate_A: Tensor) -> tuple[Tensor, Tensor]:
        least_A = torch.minimum(surrogate_A, ratio_A.clamp(1 - self.low, 1 + self.high) * tokens.advantage_A)
        return least_A, (least_A != surrogate_A).detach()


@dataclass(frozen=True)
class DualClip:
    """Caps the ratio at `bound` for negative advantages, where PPO's clip does not bound it."""

    # Source: Ye et al. 2020 (arXiv 1912.09729), eq. 5.

    bound: float

    def __call__(self, tokens: Tokens, ratio_A: Tensor, surrogate_A: Tensor) -> tuple[Tensor, Tensor]:
        advantage_A = tokens.advantage_A
        bounded_A = torch.where(advantage_A < 0, torch.maximum(surrogate_A, self.bound * advantage_A), surrogate_A)
        return bounded_A, (bounded_A != surrogate_A).detach()


@dataclass(frozen=True)
class WeightClip:
    """Weights the gradient by the clamped ratio: stop_gradient(clamp(ratio, least, most)) * advantage * log policy."""

    # Every token keeps its gradient. Source: MiniMax 2025 (arXiv 2506.13585), eq. 4 and 5 (CISPO).

    least: float
    most: float

    def __call__(self, tokens: Tokens, ratio_A: Tensor, surrogate_A: Tensor) -> tuple[Tensor, Tensor]:
        ratio_A = ratio_A.detach()
        weight_A = ratio_A.clamp(self.least, self.most)
        return weight_A * tokens.advantage_A * tokens.log_probs_A, weight_A != ratio_A


@dataclass(frozen=True)
class BinaryDivergence:
    """Drops tokens that are further than `bound` from the policy that drew them and would move further away.

    Policies are compared as distributions over two outcomes, this token or any other; mu is the rollout's probability,
    pi the policy's:

        tv    |mu - pi|
        kl    mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))
    """

    # Source: Qi et al. 2026 (arXiv 2602.04879), eq. 11 to 14 (DPPO); the authors' code in verl, `dppo_tv`, `dppo_kl`.

    kind: Literal["tv", "kl"]
    bound: float

    def __call__(self, tokens: Tokens, ratio_A: Tensor, surrogate_A: Tensor) -> tuple[Tensor, Tensor]:
        policy_A, rollout_A = tokens.log_probs_A.detach(), tokens.rollout_log_probs_A
        moves_away_A = tokens.advantage_A * (policy_A - rollout_A) > 0
        dropped_A = moves_away_A & (self.divergence(tokens) > self.bound)
        return surrogate_A * ~dropped_A, dropped_A

    def divergence(self, tokens: Tokens) -> Tensor:
        """Return the divergence at each token, floating [A], without gradient."""
        policy_A, rollout_A = tokens.log_probs_A.detach(), tokens.rollout_log_probs_A
        mu_A, pi_A = rollout_A.exp(), policy_A.exp()
        if self.kind == "tv":
            return (mu_A - pi_A).abs()
        # A probability of 1 leaves none for the other outcome; keep that one's logarithm finite.
        others_mu_A, others_pi_A = (torch.log(-torch.expm1(x_A.clamp(max=-1e-7))) for x_A in (rollout_A, policy_A))
        return mu_A * (rollout_A - policy_A) + (1 - mu_A) * (others_mu_A - others_pi_A)


@dataclass(frozen=True)
class TopDivergence(BinaryDivergence):
    """Like `BinaryDivergence`, with more outcomes: each of the K tokens that are likeliest under mu, the drawn token
    if it is none of them, and all others as one.

        tv    1/2 sum |mu - pi|
        kl    sum mu log(mu / pi)

    Both are at least those of two outcomes, and at most those of the whole distributions, which they are if K is the
    vocabulary.
    """

    # Source: Qi et al. 2026 (arXiv 2602.04879), the top-K approximation: TopK(mu, K) and the drawn token, as TRL's
    # `DPPOTrainer` quotes it; the sums are those of the authors' code (sail-sg/Stable-RL, `compute_topk_kl`). Both keep
    # exactly K tokens: there a drawn token that is none of the K likeliest replaces the last of them.

    def divergence(self, tokens: Tokens) -> Tensor:
        top = tokens.top
        assert top is not None and top.log_probs_AK is not None, "the algorithm names the tokens (`other_tokens`)"
        rollout_AJ = _outcomes(top.rollout_log_probs_AK, tokens.rollout_log_probs_A, top.has_drawn_A)
        policy_AJ = _outcomes(top.log_probs_AK, tokens.log_probs_A.detach(), top.has_drawn_A)
        mu_AJ = rollout_AJ.exp()
        if self.kind == "tv":
            return (mu_AJ - policy_AJ.exp()).abs().sum(1) / 2
        # An outcome of probability 0 counts nothing; its logarithm is infinite.
        return (mu_AJ * (rollout_AJ - policy_AJ)).where(mu_AJ > 0, 0.0).sum(1)


def _outcomes(top_AK: Tensor, drawn_A: Tensor, has_drawn_A: Tensor) -> Tensor:
    """Return log-probabilities, [A, K + 2]: of K tokens; of the drawn one, unless it is among them; of all others."""
    return _with_rest(torch.cat([top_AK, drawn_A.masked_fill(has_drawn_A, -torch.inf).unsqueeze(1)], dim=1))


@dataclass(frozen=True)
class Band:
    """Keeps tokens whose importance weight is within [low, high]."""

    # Source: Ling Team 2025 (arXiv 2510.18855), section on IcePop; without a lower bound AReaL's (arXiv 2505.24298).

    low: float
    high: float

    def __call__(self, tokens: Tokens) -> Tensor:
        weight_A = importance(tokens)
        return (weight_A >= self.low) & (weight_A <= self.high)


def rounding_bound(length_N: Tensor) -> Tensor:
    """Return floating [N]: how far from 0 (nats) rounding alone takes a sample's summed log weights, on-policy."""
    # The weights of n tokens drawn by the generating engine average 1, so with independent errors of deviation s their
    # logarithms have mean -s^2 / 2; the sum has mean -n s^2 / 2 and deviation s sqrt(n). The bound is three deviations
    # beyond the mean: it excludes one of several hundred samples, whatever their length.
    return 3 * BFLOAT16_ERROR * length_N.sqrt() + length_N * BFLOAT16_ERROR**2 / 2


@dataclass(frozen=True)
class SampleMask:
    """Keeps samples whose log importance weight is within +- `bound` (nats): the mean over their tokens, or the sum.

    Without a bound, `rounding_bound` applies to the sum, and both variants are the same mask.
    """

    # Source: Liu, Li et al. 2025, https://richardli.xyz/rl-collapse-3; names as in verl's rollout correction.

    bound: float | None
    geometric: bool

    def __call__(self, tokens: Tokens) -> Tensor:
        log_weight_A = tokens.old_log_probs_A - tokens.rollout_log_probs_A
        whole_N = response_sums(log_weight_A, tokens.length_N)
        length_N = tokens.length_N.to(whole_N)
        if self.bound is None:
            bound_N = rounding_bound(length_N)
        else:
            bound_N = self.bound * (length_N if self.geometric else torch.ones_like(length_N))
        return _of_tokens(whole_N.abs() <= bound_N, tokens)


def _of_tokens(value_N: Tensor, tokens: Tokens) -> Tensor:
    """Return [A]: each sample's value repeated for all of its tokens."""
    return value_N.repeat_interleave(tokens.length_N, output_size=len(tokens.log_probs_A))


@dataclass(frozen=True)
class LossCounts:
    """The divisors of an update's normalization; summed over all ranks and micro-batches."""

    tokens: int  # drawn tokens whose loss counts
    sequences: int  # rows (whole rollouts, however many samples they have) whose loss counts
    responses: int  # all rows with a reward, masked ones included

    def __add__(self, other: "LossCounts") -> "LossCounts":
        return LossCounts(
            self.tokens + other.tokens, self.sequences + other.sequences, self.responses + other.responses
        )


def token_weights(aggregate: Normalization, length_N: Tensor, weight_N: Tensor, row_N: Tensor) -> Tensor:
    """Return float32 [A]: each token's weight in the sum, from its row's loss weight (0: it does not count).

    `sequence` divides it by `row_N`, the drawn tokens of the sample's whole row.
    """
    weight_N = weight_N.float()
    if aggregate == "sequence":
        weight_N = weight_N / row_N.clamp(min=1)
    return weight_N.repeat_interleave(length_N)


def loss_scale(aggregate: Normalization, counts: LossCounts, *, max_response_tokens: int) -> float:
    """Return the factor that turns an update's accumulated sum into its loss; 0 if nothing counts.

    `counts` are those of the whole update over all ranks.
    """
    divisors = {
        "token": counts.tokens,  # arXiv 2503.14476, eq. 8
        "sequence": counts.sequences,  # of a sum weighted by `token_weights`; arXiv 2402.03300, eq. 3
        "constant": counts.responses * max_response_tokens,  # arXiv 2503.20783, section 3.2
    }
    divisor = divisors[aggregate]
    return 1.0 / divisor if divisor else 0.0


def response_sums(value_A: Tensor, length_N: Tensor) -> Tensor:
    """Return floating [N]: the sum over each sample's tokens; 0 for a sample without any."""
    numbers_N = torch.arange(len(length_N), device=value_A.device)
    # Giving `output_size` avoids a device synchronization.
    response_A = numbers_N.repeat_interleave(length_N, output_size=len(value_A))
    return torch.zeros(len(length_N), dtype=value_A.dtype, device=value_A.device).index_add(0, response_A, value_A)


def response_means(value_A: Tensor, length_N: Tensor) -> Tensor:
    """Return floating [N]: the mean over each sample's tokens; 0 for a sample without any."""
    return response_sums(value_A, length_N) / length_N.clamp(min=1)


# The probability that is left for all other tokens is at least this: float32 knows no smaller one, and its logarithm
# must be finite.
_LEAST_REST = 1e-6


def _with_rest(log_probs_AK: Tensor) -> Tensor:
    """Return [A, K + 1]: the last column is the log-probability of all other tokens together."""
    total_A1 = log_probs_AK.logsumexp(1, keepdim=True).clamp(max=-_LEAST_REST)
    return torch.cat([log_probs_AK, torch.log(-torch.expm1(total_A1))], dim=1)


def top_reverse_kl(log_probs_AK: Tensor, teacher_AK: Tensor) -> Tensor:
    """Return KL(policy || teacher), [A], over K tokens and, as one more outcome, all others.

        sum over k:  p_k (log p_k - log q_k)  +  p_rest (log p_rest - log q_rest)        p: policy, q: teacher

    It is at most the divergence over the whole vocabulary, and never negative. Both arguments are log-probabilities,
    [A, K], of the same tokens.
    """
    # The K likeliest tokens of the teacher: NeMo RL (DistillationLossFn, `kl_type: reverse`) and, with the forward
    # divergence, verl (compute_forward_kl_topk). NeMo RL normalizes both over the K tokens, so that a policy may put
    # its mass elsewhere; the outcome of all others, as in self-distillation (Huebotter et al. 2026, arXiv 2601.20802),
    # forbids that.
    policy_AJ, teacher_AJ = _with_rest(log_probs_AK), _with_rest(teacher_AK)
    return (policy_AJ.exp() * (policy_AJ - teacher_AJ)).sum(1)


# The losses of a micro-batch, for policy and critic. Pure; the policy's is composed of the parts above.
#
# Losses are sums over tokens, not normalized yet: micro-batches come in any order and size, and `loss_scale` gives the
# one factor that an update applies to the accumulated gradient.
#
# Legend of shapes: N samples, A their drawn tokens, packed.

# Largest k3 of a token (nats), reached at d = -2.6 or d = 11. The log ratio itself, which importance weights use too,
# has its own bound, `MAX_LOG_RATIO`.
MAX_K3 = 10.0


class MicroLoss(Protocol):
    """The loss of one micro-batch: the engine calls it once, after which `stats` is set."""

    @property
    def stats(self) -> Mapping[str, Tensor]:
        """Scalar tensors: `loss`, `tokens`, and further sums over the tokens that count."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the unnormalized sum, a scalar with gradient, from log-probabilities and entropies, or from values."""


@dataclass(frozen=True)
class Teacher:
    """A teacher's log-probabilities: of drawn tokens, [A], or of its K most likely ones, [A, K]."""

    log_probs: Tensor
    coef: float  # weight of the divergence from it in the loss
    is_reference: bool  # then the divergence is the metric `kl`

    def divergence(self, log_probs_A: Tensor, others_P: Tensor | None) -> Tensor:
        """Return [A]; `others_P` are the policy's log-probabilities of the K tokens."""
        if self.log_probs.dim() == 1:
            return kl_divergence(log_probs_A, self.log_probs, "k3")
        assert others_P is not None, "the engine got the teacher's tokens (`Sequences.others`)"
        return top_reverse_kl(others_P.view_as(self.log_probs), self.log_probs)


@dataclass
class PolicyLoss:
    """The policy's loss of one micro-batch; a `DivisibleLoss`."""

    parts: PolicyParts
    kl: tuple[float, KlEstimator]  # weight of the KL term, and its estimator; with weight 0 it is only measured
    length_N: Tensor  # drawn tokens of each sample
    weight_A: Tensor  # each token's weight in the sum; 0 where masked
    advantage_A: Tensor
    rollout_log_probs_A: Tensor  # under the policy that drew the tokens, as the generating engine recorded them
    ref_log_probs_A: Tensor | None = None  # under the reference; None without a KL penalty
    old_log_probs_A: Tensor | None = None  # under the policy at the start of the step; None: it has not changed since
    entropy_coef: float = 0.0  # weight of the mean entropy, which is added to the objective
    per_sample: bool = False  # no sample's loss depends on other samples (`Algorithm.per_sample`)
    teacher: Teacher | None = None
    top: TopOutcomes | None = None  # for a clip that compares more than the drawn tokens
    # Scalar tensors on the device: `loss` (the trained sum; times `scale` it is the update's loss), and sums over the
    # tokens that count, under the names of docs/metrics.md: `tokens`, `entropy`, `ratio_mean` and `ratio_squared`
    # (policy / rollout), `clip_fraction`, `corrected_fraction` (weights that were capped or masked), `kl` (to the
    # reference; 0 without one), `kl_clamped_fraction` (k3 cut at `MAX_K3`), `behaviour_kl` (k3 of KL(rollout ||
    # policy)), `old_policy_kl` (of KL(rollout || old policy)), `teacher_kl`. Whatever is added here is a metric.
    stats: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, log_probs_A: Tensor, entropy_A: Tensor, others_P: Tensor | None = None) -> Tensor:
        old_A = log_probs_A.detach() if self.old_log_probs_A is None else self.old_log_probs_A
        top = self.top
        if top is not None:
            assert others_P is not None, "the engine got the tokens (`Sequences.others`)"
            top = replace(top, log_probs_AK=others_P.detach().view_as(top.rollout_log_probs_AK))
        tokens = Tokens(log_probs_A, old_A, self.rollout_log_probs_A, self.advantage_A, self.length_N, top)
        surrogate_A, clipped_A = self.parts.surrogate(tokens)
        weight_A, corrected_A = self.parts.weights(tokens)
        loss_A, (kl_coef, kl_estimator) = -surrogate_A * weight_A, self.kl
        kl_A = clamped_A = torch.zeros_like(loss_A)
        if self.ref_log_probs_A is not None:
            kl_A = kl_divergence(log_probs_A, self.ref_log_probs_A, kl_estimator)
            loss_A = loss_A + kl_coef * kl_A
            if kl_estimator == "k3":
                clamped_A = k3_values(log_probs_A.detach() - self.ref_log_probs_A) > MAX_K3
        teacher_A: dict[str, Tensor] = {}
        if self.teacher is not None:
            found_A = self.teacher.divergence(log_probs_A, others_P)
            if self.teacher.coef:
                loss_A = loss_A + self.teacher.coef * found_A
            if self.teacher.is_reference:
                kl_A = found_A
            else:
                teacher_A = {"teacher_kl": found_A}
        if self.entropy_coef:
            if log_probs_A.requires_grad and not entropy_A.requires_grad:
                raise ConfigError(
                    f"algorithm.entropy_coef: {self.entropy_coef:g} cannot be used with this training engine, whose "
                    f"entropies have no gradient; set it to 0, or have `forward_backward` give them one"
                )
            loss_A = loss_A - self.entropy_coef * entropy_A
        total = (loss_A * self.weight_A).sum()
        with torch.no_grad():
            drift_A = kl_divergence(self.rollout_log_probs_A, log_probs_A, "k3")
            old_drift_A = kl_divergence(self.rollout_log_probs_A, self.parts.base_log_probs(tokens), "k3")
            # Bounded: infinity times a masked token's 0 would be NaN.
            ratio_A = bounded_ratio(log_probs_A - self.rollout_log_probs_A)
            counts_A = self.weight_A > 0
            terms = {
                "entropy": entropy_A,
                "ratio_mean": ratio_A,
                "clip_fraction": clipped_A,
                "corrected_fraction": corrected_A,
                "kl": kl_A,
                "kl_clamped_fraction": clamped_A,
                "behaviour_kl": drift_A,
                "old_policy_kl": old_drift_A,
                "ratio_squared": ratio_A.square(),
                **teacher_A,
            }
            self.stats = _sums_over(counts_A, terms, ratio_A) | {"loss": total.detach(), "tokens": counts_A.sum()}
        return total

    def cut_loss(self, sizes: Sequence[tuple[int, int]]) -> "Sequence[PolicyLoss] | None":
        """See `DivisibleLoss`."""
        if not self.per_sample or (self.teacher is not None and self.teacher.log_probs.dim() > 1):
            return None
        if self.top is not None:
            return None
        samples, drawn = ([size[k] for size in sizes] for k in (0, 1))
        cuts: dict[str, Sequence[Any]] = {"length_N": torch.split(self.length_N, samples)}
        names = ("weight_A", "advantage_A", "rollout_log_probs_A", "ref_log_probs_A", "old_log_probs_A")
        for name in names:
            column: Tensor | None = getattr(self, name)
            cuts[name] = [None] * len(sizes) if column is None else torch.split(column, drawn)
        if self.teacher is not None:
            cuts["teacher"] = [
                replace(self.teacher, log_probs=part) for part in torch.split(self.teacher.log_probs, drawn)
            ]
        return [
            replace(self, stats={}, **dict(zip(cuts, part, strict=True))) for part in zip(*cuts.values(), strict=True)
        ]


@dataclass
class CrossEntropy:
    """SFT's loss of one micro-batch: -log p of each trained token, times its weight; a `DivisibleLoss`."""

    weight_A: Tensor  # each token's weight in the sum; 0 where masked
    # Scalar tensors on the device: `loss` (the trained sum; times `scale` it is the update's loss), and sums over the
    # tokens that count: `tokens`, `cross_entropy` (nats), `entropy`.
    stats: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, log_probs_A: Tensor, entropy_A: Tensor) -> Tensor:
        total = -(log_probs_A * self.weight_A).sum()
        with torch.no_grad():
            counts_A = (self.weight_A > 0).to(log_probs_A)
            self.stats = {"cross_entropy": -(log_probs_A @ counts_A), "entropy": entropy_A.to(log_probs_A) @ counts_A}
            self.stats |= {"loss": total.detach(), "tokens": counts_A.sum()}
        return total

    def cut_loss(self, sizes: Sequence[tuple[int, int]]) -> "Sequence[CrossEntropy]":
        """See `DivisibleLoss`."""
        return [CrossEntropy(weight_A) for weight_A in torch.split(self.weight_A, [drawn for _, drawn in sizes])]


@dataclass
class ValueLoss:
    """The critic's loss of one micro-batch."""

    weight_A: Tensor  # each token's weight in the sum; 0 where masked
    old_value_A: Tensor  # the values from which the step's returns were computed
    return_A: Tensor  # the targets
    clip: float | None  # see `clipped_value_loss`
    coef: float
    # Scalar tensors on the device: `loss` (the trained sum; times `scale` it is the update's loss), and sums over the
    # tokens that count: `tokens`, `value_clip_fraction`, `value_mean`, `return_mean`, `return_squared`, `error_squared`
    # (of the values before the update).
    stats: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, value_A: Tensor) -> Tensor:
        loss_A, clipped_A = clipped_value_loss(value_A, self.old_value_A, self.return_A, clip=self.clip)
        total = self.coef * (loss_A * self.weight_A).sum()
        with torch.no_grad():
            counts_A = self.weight_A > 0
            terms = {
                "value_clip_fraction": clipped_A,
                "value_mean": self.old_value_A,
                "return_mean": self.return_A,
                "return_squared": self.return_A.square(),
                "error_squared": (self.old_value_A - self.return_A).square(),
            }
            self.stats = _sums_over(counts_A, terms, loss_A) | {"loss": total.detach(), "tokens": counts_A.sum()}
        return total


def _sums_over(counts_A: Tensor, terms: Mapping[str, Tensor], like_A: Tensor) -> dict[str, Tensor]:
    """Return each term's sum over the tokens that count, in the element type of `like_A`: one product for them all."""
    sums = torch.stack([term.to(like_A) for term in terms.values()]) @ counts_A.to(like_A)
    return dict(zip(terms, sums.unbind(), strict=True))


def kl_divergence(log_probs_A: Tensor, ref_log_probs_A: Tensor, estimator: KlEstimator) -> Tensor:
    """Return an estimate, [A], of KL(policy || reference) at each token, from the token that the policy drew.

    With d = log policy - log reference ("unbiased" refers to the value; gradients are those of the term inside a loss):

        k1 = d                  unbiased, may be negative; its gradient averages to zero and restrains nothing
        k2 = d^2 / 2            biased; its gradient averages to that of KL(policy || reference)
        k3 = exp(-d) - 1 + d    unbiased, non-negative; its gradient averages to that of KL(reference || policy)

    This holds for tokens that the policy itself drew; stale tokens are not reweighted.
    """
    # Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; k3: arXiv 2402.03300, eq. 4.
    difference_A = log_probs_A - ref_log_probs_A
    if estimator == "k1":
        return difference_A
    if estimator == "k2":
        return 0.5 * difference_A.square()
    # No gradient beyond the cap: the e^-d of a single token that the policy has all but given up would outweigh all
    # others.
    return k3_values(difference_A).clamp(max=MAX_K3)


def k3_values(difference_A: Tensor) -> Tensor:
    """Return k3, floating [A], uncapped but always finite, from log policy - log reference."""
    bounded_A = difference_A.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-bounded_A) + bounded_A


def clipped_value_loss(
    value_A: Tensor, old_value_A: Tensor, return_A: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of each token, floating [A], and where the clipped one was larger, bool [A].

        max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2

    `clip` is how far a value may move in a step and still be pulled; None: any distance.
    """
    # Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 28 with a quadratic penalty; the clip is that of OpenAI's
    # PPO2 (github.com/openai/baselines, `ppo2/model.py`), discussed by Engstrom et al. 2020 (arXiv 2005.12729), section
    # 3.
    plain_A = (value_A - return_A).square()
    if clip is None:
        return 0.5 * plain_A, torch.zeros_like(plain_A, dtype=torch.bool)
    near_A = old_value_A + (value_A - old_value_A).clamp(-clip, clip)
    clipped_A = (near_A - return_A).square()
    return 0.5 * torch.maximum(plain_A, clipped_A), (clipped_A > plain_A).detach()
