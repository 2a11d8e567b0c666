"""GRPO: group-relative policy optimisation.

Asked for, in this order: `advantages` of whole groups, by their task; by the trainer `counts` and `loss` of every
micro-batch, and `scale` once for each update. Pure; the graph of its tasks is in `workers.algorithms.graph`.

Legend of shapes: N answers, G answers of a prompt, A tokens of the answers, packed.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tq.batch import PackedBatch
from workers.algorithms.advantages import group_advantages
from workers.algorithms.config import AlgorithmConfig
from workers.algorithms.losses import (
    LossCounts,
    bounded_ratio,
    clipped_policy_loss,
    kl_divergence,
    loss_scale,
    token_weights,
)
from workers.algorithms.off_policy import correct
from workers.dataflow import LOSS_MASKS


class GRPO:
    """The objective: clipped surrogate with group-relative advantages, and optionally a KL penalty.

    Source: Shao et al. 2024 (arXiv 2402.03300), eq. 3; which policy is the old one: `workers.algorithms.off_policy`.
    """

    def __init__(self, config: AlgorithmConfig, *, max_response_tokens: int, mask_truncated: bool) -> None:
        """Keep the settings.

        Args:
            config: of the algorithm.
            max_response_tokens: longest answer, for the normalisation `constant`.
            mask_truncated: answers that were cut do not count.
        """
        self._config = config
        self._max_response_tokens = max_response_tokens
        self._mask_truncated = mask_truncated

    def advantages(self, reward_N: Tensor, *, group_size: int) -> Tensor:
        """Return float32 [N]: one advantage per answer.

        Args:
            reward_N: floating [N]; the G answers of a prompt are neighbours.
            group_size: G.
        """
        scale_by_std = self._config.scale_advantages_by_std
        reward_BG = reward_N.reshape(-1, group_size)
        return group_advantages(reward_BG, scale_by_std=scale_by_std, eps=self._config.advantage_eps).flatten()

    def counts(self, batch: PackedBatch) -> LossCounts:
        """Return what a micro-batch adds to the divisor; reads `responses`, `truncated` and, if there, `loss_masks`."""
        keep_N = self._answer_weights(batch) > 0
        length_N = batch["responses"].lengths
        return LossCounts(tokens=int(length_N[keep_N].sum()), sequences=int(keep_N.sum()), answers=len(batch))

    def loss(self, batch: PackedBatch, *, device: torch.device) -> "PolicyLoss":
        """Return the loss of a micro-batch.

        Args:
            batch: columns `responses`, `rollout_log_probs`, `advantages` (one per row), `truncated`, and with a KL
                penalty `ref_log_probs`; where somebody writes them `log_probs`, of the policy that the step found, and
                `loss_masks`, one weight per row.
            device: where the engine computes.
        """
        length_N = batch["responses"].lengths.long()
        weight_A = token_weights(self._config.loss_normalization, length_N, self._answer_weights(batch))
        advantage_A = batch["advantages"].values.float().repeat_interleave(length_N)
        return PolicyLoss(
            config=self._config,
            length_N=length_N.to(device),
            weight_A=weight_A.to(device),
            advantage_A=advantage_A.to(device),
            old_log_probs_A=batch["rollout_log_probs"].values.to(device),
            ref_log_probs_A=batch["ref_log_probs"].values.to(device) if self._config.kl_coef > 0 else None,
            proximal_log_probs_A=batch["log_probs"].values.to(device) if "log_probs" in batch.columns else None,
        )

    def scale(self, counts: LossCounts) -> float:
        """Return the factor for `TrainEngine.step`, from the counts of the update's micro-batches on all ranks."""
        return loss_scale(self._config.loss_normalization, counts, max_response_tokens=self._max_response_tokens)

    def _answer_weights(self, batch: PackedBatch) -> Tensor:
        truncated_N = batch["truncated"].values.bool()
        weight_N = torch.ones(len(batch)) if LOSS_MASKS not in batch.columns else batch[LOSS_MASKS].values.float()
        return weight_N * ~truncated_N if self._mask_truncated else weight_N


@dataclass
class PolicyLoss:
    """The loss of one micro-batch: called once by the engine, then holds `stats`.

    Attributes:
        length_N: tokens of each answer.
        weight_A: of each token inside the sum; 0 where masked.
        advantage_A: of each token's answer.
        old_log_probs_A: under the policy that generated the tokens.
        ref_log_probs_A: under the reference; None without a KL penalty.
        proximal_log_probs_A: under the policy that the step found; None: the one that is trained has not changed since.
        stats: scalar tensors on the device: `loss` (the sum as trained, times `scale` gives the update's loss), and
            sums over the tokens that count: `tokens`, `entropy`, `ratio` and `ratio_squared` (of policy to behaviour),
            `clipped`, `corrected` (weights that were cut or masked), `kl` (to the reference; 0 without), `drift` (k3 of
            KL(behaviour || policy)), `old_drift` (of KL(behaviour || PPO's old policy)).
    """

    config: AlgorithmConfig
    length_N: Tensor
    weight_A: Tensor
    advantage_A: Tensor
    old_log_probs_A: Tensor
    ref_log_probs_A: Tensor | None = None
    proximal_log_probs_A: Tensor | None = None
    stats: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, log_probs_A: Tensor, entropy_A: Tensor) -> Tensor:
        """Return the unnormalised sum, a scalar with gradient."""
        config = self.config
        high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
        correction = correct(
            log_probs_A, self.old_log_probs_A, self.length_N, config.off_policy, proximal_A=self.proximal_log_probs_A
        )
        loss_A, clipped_A = clipped_policy_loss(
            log_probs_A - correction.old_log_probs_A,
            self.advantage_A,
            eps_clip=config.eps_clip,
            eps_clip_high=high,
        )
        loss_A = loss_A * correction.weight_A
        kl_A = torch.zeros_like(loss_A)
        if self.ref_log_probs_A is not None:
            kl_A = kl_divergence(log_probs_A, self.ref_log_probs_A, config.kl_estimator)
            loss_A = loss_A + config.kl_coef * kl_A
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
