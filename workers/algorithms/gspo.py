"""GSPO: group sequence policy optimisation: ratio and clip belong to whole samples.

Source: Zheng et al. 2025 (arXiv 2507.18071), eq. 5 to 7.
"""

from workers.algorithms.grpo import GRPO


class GSPO(GRPO):
    """GRPO's advantages; a response is clipped as a whole."""

    whole_samples = True
