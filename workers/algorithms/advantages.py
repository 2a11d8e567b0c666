"""Advantages: how much better an answer is than its alternatives.

Legend of shapes: B prompts, G answers of each.
"""

import torch
from torch import Tensor


def group_advantages(reward_BG: Tensor, *, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Center the rewards of each prompt's answers and, by default, scale them.

    Computed in float64, so that rounding of a mean is never divided by `eps`.

    Args:
        reward_BG: floating [B, G]; with G of 1 there is nothing to compare with, and all is zero.
        scale_by_std: divide by the group's sample standard deviation (Bessel's correction, as TRL and verl do).
        eps: added to the deviation.
    Returns:
        float32 [B, G], mean 0 over G; zeros for a group of equal rewards.
    Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1.2; without scaling Liu et al. 2025 (arXiv 2503.20783),
        section 3.2 (Dr. GRPO).
    """
    assert reward_BG.dim() == 2 and reward_BG.shape[1], f"no group: rewards of shape {tuple(reward_BG.shape)}"
    if reward_BG.shape[1] == 1:
        return torch.zeros_like(reward_BG, dtype=torch.float32)
    reward_BG = reward_BG.double()
    centered_BG = reward_BG - reward_BG.mean(1, keepdim=True)
    if scale_by_std:
        centered_BG = centered_BG / (reward_BG.std(1, keepdim=True) + eps)
    constant_B1 = reward_BG.amax(1, keepdim=True) == reward_BG.amin(1, keepdim=True)
    return torch.where(constant_B1, 0.0, centered_BG).float()
