"""GSPO: group sequence policy optimisation: ratio and clip belong to whole samples.

Source: Zheng et al. 2025 (arXiv 2507.18071), eq. 5 to 7.
"""

from collections.abc import Mapping

from tq.batch import Column, PackedBatch
from workers.algorithms.advantages import group_advantages
from workers.algorithms.algorithm import Algorithm
from workers.algorithms.config import GSPOConfig


class GSPO(Algorithm[GSPOConfig]):
    """GRPO's advantages; a response is clipped as a whole."""

    sequence_ratio = True

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return `advantages`, one per row, from `rewards`."""
        reward_BG = batch["rewards"].values.reshape(-1, group_size)
        return {"advantages": Column.of_scalars(group_advantages(reward_BG, eps=self._config.advantage_eps))}
