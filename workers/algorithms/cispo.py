"""CISPO: the ratio is a clipped weight of the policy gradient, so that no token loses its gradient.

Source: MiniMax 2025 (arXiv 2506.13585), eq. 4 and 5.
"""

from workers.algorithms.grpo import GRPO
from workers.algorithms.parts import Clip, WeightClip
from workers.settings.algorithms import CISPOConfig


class CISPO(GRPO):
    """GRPO's advantages; clipped weights."""

    def clips(self) -> tuple[Clip, ...]:
        """Return the bounds of the weight."""
        config = self._config
        assert isinstance(config, CISPOConfig)
        return (WeightClip(1 - config.eps_clip, 1 + config.eps_clip_high),)
