"""DPPO: divergence proximal policy optimisation: how far a probability moved is bounded, not by which factor.

Source: Qi et al. 2026 (arXiv 2602.04879), eq. 11 to 14: the binary approximations of the divergence.
"""

from workers.algorithms.grpo import GRPO
from workers.algorithms.parts import BinaryDivergence, Clip, WeightClip
from workers.settings.algorithms import DPPOConfig

AUTHORS_BOUNDS = {"tv": 0.15, "kl": 0.05}
"""Largest divergence in the authors' runs (verl, `examples/dppo_trainer`)."""


class DPPO(GRPO):
    """GRPO's advantages; tokens too far from the policy that drew them do not move on."""

    def clips(self) -> tuple[Clip, ...]:
        """Return the truncation of the ratio, then the trust region."""
        config = self._config
        assert isinstance(config, DPPOConfig)
        bound = config.max_divergence or AUTHORS_BOUNDS[config.divergence]
        return (WeightClip(0.0, config.max_ratio), BinaryDivergence(config.divergence, bound))
