"""PPO: a critic says what every token is worth, and GAE what it was better.

Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7 and 9, with a critic of its own, so that the losses are not
added; advantages Schulman et al. 2016 (arXiv 1506.02438); the KL penalty in the reward Ouyang et al. 2022
(arXiv 2203.02155), eq. 2, at each token.
"""

from collections.abc import Mapping

import torch

from asyncflow.device import to_device
from tq.columns import Column, PackedBatch
from workers.algorithms.advantages import generalized_advantages, token_penalties, token_rewards
from workers.algorithms.algorithm import Algorithm, Moments
from workers.algorithms.losses import ValueLoss
from workers.rows.rows import drawn_per_sample
from workers.settings.algorithms import PPOConfig


class PPO(Algorithm[PPOConfig]):
    """The clipped surrogate with an advantage per token, and the critic's loss."""

    def __init__(self, config: PPOConfig, *, max_response_tokens: int, mask_truncated: bool) -> None:
        """See `Algorithm`."""
        super().__init__(config, max_response_tokens=max_response_tokens, mask_truncated=mask_truncated)
        self.whole_step = config.whole_step

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return `advantages`, not whitened yet, and `returns`, per token, each sample by itself.

        Reads `rewards`, `values`, `sample_lengths`, `response_mask` and, with the KL penalty in the reward,
        `old_log_probs` and `ref_log_probs`.
        """
        config, values, length_S = self._config, batch["values"], drawn_per_sample(batch)
        penalty_A = config.kl_coef * token_penalties(batch) if config.has_reward_penalty else None
        reward_N = batch["rewards"].values.nan_to_num(nan=0.0)  # of one without any nothing counts
        reward_S = reward_N.repeat_interleave(batch["sample_lengths"].lengths.long())
        reward_A = token_rewards(reward_S, length_S, penalty_A)
        advantage_A, return_A = generalized_advantages(
            reward_A, values.values, length_S, gamma=config.gamma, lam=config.lam
        )
        return {"advantages": Column(advantage_A, values.lengths), "returns": Column(return_A, values.lengths)}

    def normalized(self, batch: PackedBatch, moments: Moments) -> PackedBatch:
        """Whiten `advantages`: mean 0 and variance 1 over the step's tokens that count."""
        column = batch["advantages"]
        deviation = (moments.deviation**2 + self._config.advantage_eps) ** 0.5
        values = (column.values.double() - moments.mean) / deviation
        return batch.with_columns({"advantages": Column(values.float(), column.lengths)})

    def value_loss(self, batch: PackedBatch, *, device: torch.device) -> ValueLoss:
        """Return the critic's loss of a micro-batch; its sum is scaled as the policy's is (`counts`, `scale`).

        Args:
            batch: of samples, columns `values`, `returns`, `truncated`, `rewards`, and where a task writes it
                `loss_weights`.
            device: where the engine computes.
        """
        columns = [self._token_weights(batch), batch["values"].values, batch["returns"].values]
        weight_A, old_value_A, return_A = to_device(columns, device)
        config = self._config
        return ValueLoss(weight_A, old_value_A, return_A, clip=config.value_clip, coef=config.value_loss_coef)
