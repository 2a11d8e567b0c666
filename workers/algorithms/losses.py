"""The losses: what the policy's and the critic's loss of a micro-batch is. Pure; the policy's is made of `parts`.

Losses are sums over tokens, not normalised yet: micro-batches come in any order and size, and `parts.loss_scale` gives
the one factor that an update applies to the accumulated gradient.

Legend of shapes: N samples, A drawn tokens of these, packed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncflow.errors import ConfigError
from workers.algorithms.parts import MAX_LOG_RATIO, PolicyParts, Tokens, bounded_ratio
from workers.settings.algorithms import KlEstimator

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
