"""REINFORCE++: rewards minus a KL penalty to come, normalised over all tokens of the step; with or without a baseline.

Source: Hu et al. 2025 (arXiv 2501.03262, v9), section 3, eq. 8 to 10; the weights of tokens are those of the authors'
code (OpenRLHF): mean and deviation are over tokens, not over responses.

Legend of shapes: N rows, A drawn tokens of these, packed.
"""

from collections.abc import Mapping

from tq.columns import Column, PackedBatch
from workers.algorithms.advantages import group_advantages, penalties_to_come
from workers.algorithms.algorithm import Algorithm, Moments
from workers.rows.rows import drawn_per_sample
from workers.settings.algorithms import ReinforcePlusPlusConfig


class ReinforcePlusPlus(Algorithm[ReinforcePlusPlusConfig]):
    """Advantages are comparable over the whole step, and so is their deviation, whatever a single group's is."""

    whole_step = True

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return `advantages`, not normalised yet: one per row, or per token where the KL penalty is in the reward."""
        reward_N, config = batch["rewards"].values.double(), self._config
        if config.baseline == "group":
            return {
                "advantages": Column.of_scalars(group_advantages(reward_N.reshape(-1, group_size), scale_by_std=False))
            }
        if not config.kl_coef:
            return {"advantages": Column.of_scalars(reward_N.nan_to_num(nan=0.0).float())}
        length_N = batch["old_log_probs"].lengths
        to_come_A = penalties_to_come(batch, drawn_per_sample(batch))
        advantage_A = reward_N.nan_to_num(nan=0.0).repeat_interleave(length_N.long()) - config.kl_coef * to_come_A
        return {"advantages": Column(advantage_A.float(), length_N)}

    def normalized(self, batch: PackedBatch, moments: Moments) -> PackedBatch:
        """Center and scale `advantages` by the whole step's."""
        column = batch["advantages"]
        values = (column.values.double() - moments.mean) / max(moments.deviation, self._config.advantage_eps)
        return batch.with_columns({"advantages": Column(values.float(), column.lengths, shapes=column.shapes)})
