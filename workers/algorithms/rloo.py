"""RLOO: REINFORCE leave-one-out: a response is compared with the mean of the others to its prompt.

Source: Ahmadian et al. 2024 (arXiv 2402.14740), section 2.2.

Legend of shapes: B prompts, G responses of each.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tq.columns import Column, PackedBatch
from workers.algorithms.advantages import has_equal_rewards, response_penalties
from workers.algorithms.algorithm import Algorithm
from workers.settings.algorithms import RLOOConfig


class RLOO(Algorithm[RLOOConfig]):
    """Rewards, less the KL penalty of their whole response, against those of the others."""

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return `advantages`, one per row, from `rewards` and, with a penalty, the log-probabilities."""
        reward_N = batch["rewards"].values.double()
        if self._config.kl_coef:
            reward_N = reward_N - self._config.kl_coef * response_penalties(batch)
        return {"advantages": Column.of_scalars(leave_one_out(reward_N.reshape(-1, group_size)))}


def leave_one_out(reward_BG: Tensor) -> Tensor:
    """Return float32 [B, G]: each reward minus the mean of the others; zeros where there are no others.

    One that is NaN is none, and gets zero. Computed in float64, and exactly zero in a group of equal rewards.
    """
    reward_BG = reward_BG.double()
    others_B1 = (reward_BG.isfinite().sum(1, keepdim=True) - 1).clamp(min=1)
    others_BG = (reward_BG.nansum(1, keepdim=True) - reward_BG) / others_B1
    return torch.where(has_equal_rewards(reward_BG), 0.0, (reward_BG - others_BG).nan_to_num(nan=0.0)).float()
