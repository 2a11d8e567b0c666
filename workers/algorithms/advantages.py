"""Advantages: how much better an answer is than its alternatives.

Legend of shapes: B prompts, G answers of each.
"""

import torch
from torch import Tensor


def group_advantages(reward_BG: Tensor, *, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Center the rewards of each prompt's answers and, by default, scale them.

    Computed in float64, so that rounding of a mean is never divided by `eps`.

    Args:
        reward_BG: floating [B, G]; NaN where an answer has none; the group is then the other answers. A single
            reward has nothing to be compared with, so all is zero.
        scale_by_std: divide by the group's sample standard deviation (Bessel's correction, as TRL and verl do).
        eps: added to the deviation.
    Returns:
        float32 [B, G], mean 0 over G; zeros for a group of equal rewards, and where there is none.
    Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1.2; without scaling Liu et al. 2025 (arXiv 2503.20783),
        section 3.2 (Dr. GRPO).
    """
    assert reward_BG.dim() == 2 and reward_BG.shape[1], f"no group: rewards of shape {tuple(reward_BG.shape)}"
    reward_BG = reward_BG.double()
    number_B1 = reward_BG.isfinite().sum(1, keepdim=True)
    centered_BG = (reward_BG - reward_BG.nanmean(1, keepdim=True)).nan_to_num(nan=0.0)
    if scale_by_std:
        variance_B1 = centered_BG.square().sum(1, keepdim=True) / (number_B1 - 1).clamp(min=1)
        centered_BG = centered_BG / (variance_B1.sqrt() + eps)
    return torch.where(has_equal_rewards(reward_BG), 0.0, centered_BG).float()


def has_equal_rewards(reward_BG: Tensor) -> Tensor:
    """Return bool [B, 1]: whether all rewards of a group are the same; those that are NaN are none."""
    return reward_BG.nan_to_num(nan=-torch.inf).amax(1, keepdim=True) <= reward_BG.nan_to_num(nan=torch.inf).amin(
        1, keepdim=True
    )
