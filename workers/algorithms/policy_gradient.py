"""The clipped policy loss that all algorithms share; each adds how it compares answers. Pure.

Legend of shapes: N answers, A tokens of the answers, packed.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from tq.batch import Column, PackedBatch
from workers.algorithms.config import PolicyConfig
from workers.algorithms.losses import (
    LossCounts,
    bounded_ratio,
    clipped_policy_loss,
    kl_divergence,
    loss_scale,
    token_weights,
)
from workers.algorithms.moments import Moments
from workers.algorithms.off_policy import answer_means, correct
from workers.dataflow import LOSS_MASKS

Config = TypeVar("Config", bound=PolicyConfig)


class PolicyGradient(ABC, Generic[Config]):
    """The objective: a clipped surrogate, and optionally a KL penalty; see `workers.algorithms.base.Algorithm`.

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7. Which policy is the old one: `workers.algorithms.off_policy`
    """

    whole_step = False
    sequence_ratio: ClassVar[bool] = False
    """The ratio is one of whole answers."""

    def __init__(self, config: Config, *, max_response_tokens: int, mask_truncated: bool) -> None:
        """Keep the settings.

        Args:
            config: of the algorithm.
            max_response_tokens: longest answer.
            mask_truncated: answers that were cut do not count.
        """
        self._config = config
        self._max_response_tokens = max_response_tokens
        self._mask_truncated = mask_truncated

    @abstractmethod
    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return `advantages`."""

    def moments(self, batch: PackedBatch) -> Moments:
        """Return those of the advantages of all tokens that count."""
        counts_A = self._answer_weights(batch).repeat_interleave(batch["responses"].lengths.long()) > 0
        return Moments.of(token_advantages(batch)[counts_A])

    def normalized(self, batch: PackedBatch, moments: Moments) -> PackedBatch:
        """Only algorithms over the whole step do."""
        raise AssertionError(f"{type(self).__name__} normalises nothing over a step")

    def counts(self, batch: PackedBatch) -> LossCounts:
        """Return what a micro-batch adds to the divisor; reads `responses`, `truncated`, `rewards` and, if there,
        `loss_masks`."""
        keep_N = self._answer_weights(batch) > 0
        length_N = batch["responses"].lengths
        answers = int(has_reward(batch).sum())
        return LossCounts(tokens=int(length_N[keep_N].sum()), sequences=int(keep_N.sum()), answers=answers)

    def loss(self, batch: PackedBatch, *, device: torch.device) -> "PolicyLoss":
        """Return the loss of a micro-batch.

        Args:
            batch: columns `responses`, `rollout_log_probs`, `advantages` (one per row or token), `truncated`,
                `rewards`, and with a KL penalty `ref_log_probs`; where somebody writes them `log_probs`, of the policy
                that the step found, without which that is the policy in training, and `loss_masks`, one weight per row.
            device: where the engine computes.
        """
        length_N = batch["responses"].lengths.long()
        weight_A = token_weights(self._config.loss_normalization, length_N, self._answer_weights(batch))
        return PolicyLoss(
            config=self._config,
            length_N=length_N.to(device),
            weight_A=weight_A.to(device),
            advantage_A=token_advantages(batch).to(device),
            old_log_probs_A=batch["rollout_log_probs"].values.to(device),
            ref_log_probs_A=batch["ref_log_probs"].values.to(device) if self._config.kl_coef > 0 else None,
            proximal_log_probs_A=batch["log_probs"].values.to(device) if "log_probs" in batch.columns else None,
            sequence_ratio=self.sequence_ratio,
        )

    def scale(self, counts: LossCounts) -> float:
        """Return the factor for `TrainEngine.step`, from the counts of the update's micro-batches on all ranks."""
        return loss_scale(self._config.loss_normalization, counts, max_response_tokens=self._max_response_tokens)

    def _answer_weights(self, batch: PackedBatch) -> Tensor:
        truncated_N = batch["truncated"].values.bool()
        weight_N = torch.ones(len(batch)) if LOSS_MASKS not in batch.columns else batch[LOSS_MASKS].values.float()
        weight_N = weight_N * has_reward(batch)
        return weight_N * ~truncated_N if self._mask_truncated else weight_N


def has_reward(batch: PackedBatch) -> Tensor:
    """Return bool [N]: whether an answer has a reward; where scoring failed it is NaN, and the answer has no weight."""
    return batch["rewards"].values.isfinite()


def token_advantages(batch: PackedBatch) -> Tensor:
    """Return float32 [A]: the advantage of each answer token, from a column with one per answer or per token."""
    column, length_N = batch["advantages"], batch["responses"].lengths
    if torch.equal(column.lengths, length_N):
        return column.values.float()
    return column.values.float().repeat_interleave(length_N.long())


@dataclass
class PolicyLoss:
    """The loss of one micro-batch: called once by the engine, then holds `stats`.

    Attributes:
        length_N: tokens of each answer.
        weight_A: of each token inside the sum; 0 where masked.
        advantage_A: of each token.
        old_log_probs_A: under the policy that generated the tokens, as the engine that did recorded them.
        ref_log_probs_A: under the reference; None without a KL penalty.
        proximal_log_probs_A: under the policy that the step found; None: the one that is trained has not changed since.
        sequence_ratio: the ratio is one of whole answers: e to the mean of their tokens' log ratios.
        stats: scalar tensors on the device: `loss` (the sum as trained, times `scale` gives the update's loss), and
            sums over the tokens that count: `tokens`, `entropy`, `ratio` and `ratio_squared` (of policy to behaviour),
            `clipped`, `corrected` (weights that were cut or masked), `kl` (to the reference; 0 without), `drift` (k3 of
            KL(behaviour || policy)), `old_drift` (of KL(behaviour || PPO's old policy)).
    """

    config: PolicyConfig
    length_N: Tensor
    weight_A: Tensor
    advantage_A: Tensor
    old_log_probs_A: Tensor
    ref_log_probs_A: Tensor | None = None
    proximal_log_probs_A: Tensor | None = None
    sequence_ratio: bool = False
    stats: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, log_probs_A: Tensor, entropy_A: Tensor) -> Tensor:
        """Return the unnormalised sum, a scalar with gradient."""
        config = self.config
        kl_coef, kl_estimator = config.kl_loss
        correction = correct(
            log_probs_A, self.old_log_probs_A, self.length_N, config.off_policy, proximal_A=self.proximal_log_probs_A
        )
        log_ratio_A = log_probs_A - correction.old_log_probs_A
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
            drift_A = kl_divergence(self.old_log_probs_A, log_probs_A, "k3")
            old_drift_A = kl_divergence(self.old_log_probs_A, correction.old_log_probs_A, "k3")
            # Bounded: else infinity times a masked token's 0 is not a number.
            ratio_A = bounded_ratio(log_probs_A - self.old_log_probs_A)
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
