"""DAPO: decoupled clip and dynamic sampling policy optimisation.

The higher upper clip is `eps_clip_high`, the token-level loss `loss_normalization: token`. Dynamic sampling: groups
that teach nothing, since all their responses have the same reward, are taken out before they get here, by the filter
`zero_variance` (`workers.rewards.group_filter`; section 3.2).

Source: Yu et al. 2025 (arXiv 2503.14476), section 3.

Legend of shapes: N responses.
"""

from collections.abc import Mapping

from torch import Tensor

from tq.columns import Column, PackedBatch
from workers.algorithms.advantages import group_advantages
from workers.algorithms.algorithm import Algorithm
from workers.rows.rows import drawn_per_row
from workers.settings.algorithms import DAPOConfig


class DAPO(Algorithm[DAPOConfig]):
    """GRPO's advantages, from rewards that fall for overlong responses."""

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return `advantages`, one per row, from `rewards` and, with a buffer, the drawn tokens of each."""
        reward_N = batch["rewards"].values.double()
        buffer = self._config.overlong_buffer_tokens
        if buffer:
            reward_N = reward_N + overlong_penalty(
                drawn_per_row(batch), max_tokens=self._max_response_tokens, buffer_tokens=buffer
            )
        reward_BG = reward_N.reshape(-1, group_size)
        return {"advantages": Column.of_scalars(group_advantages(reward_BG, eps=self._config.advantage_eps))}


def overlong_penalty(length_N: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Return float64 [N]: 0 for responses shorter than the buffer's begin, then falling linearly, -1 at `max_tokens`.

    Args:
        length_N: integer [N], tokens of each response.
        max_tokens: L_max.
        buffer_tokens: L_cache, at least 1.
    Source: arXiv 2503.14476, eq. 13.
    """
    return ((max_tokens - buffer_tokens - length_N.double()) / buffer_tokens).clamp(-1, 0)
