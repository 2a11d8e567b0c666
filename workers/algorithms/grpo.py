"""GRPO: group-relative policy optimisation, and with two settings Dr. GRPO.

Source: Shao et al. 2024 (arXiv 2402.03300), eq. 3.
"""

from collections.abc import Mapping

from tq.columns import Column, PackedBatch
from workers.algorithms.advantages import group_advantages
from workers.algorithms.algorithm import Algorithm
from workers.settings.algorithms import GroupConfig


class GRPO(Algorithm[GroupConfig]):
    """How much better a response is than the group's mean, in deviations."""

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return `advantages`, one per row, from `rewards`."""
        config = self._config
        reward_BG = batch["rewards"].values.reshape(-1, group_size)
        advantage_BG = group_advantages(
            reward_BG, scale_by_std=config.scale_advantages_by_std, eps=config.advantage_eps
        )
        return {"advantages": Column.of_scalars(advantage_BG)}
