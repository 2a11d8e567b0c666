"""The critic's loss, as sums over tokens that nobody has normalised yet; `loss_scale` gives the update's factor. Pure.

Legend of shapes: A answer tokens of a micro-batch, packed.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


def clipped_value_loss(
    value_A: Tensor, old_value_A: Tensor, return_A: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of each token, and where the clipped one was larger.

        max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2

    Args:
        value_A: floating [A], with gradient.
        old_value_A: floating [A], as the critic gave them before the step's update.
        return_A: floating [A], the targets.
        clip: how far a value may move in a step and still be pulled; None: any distance.
    Returns:
        floating [A] and bool [A].
    Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 28 with a quadratic penalty; the clip is that of OpenAI's PPO2
        (github.com/openai/baselines, `ppo2/model.py`), discussed by Engstrom et al. 2020 (arXiv 2005.12729), section 3.
    """
    plain_A = (value_A - return_A).square()
    if clip is None:
        return 0.5 * plain_A, torch.zeros_like(plain_A, dtype=torch.bool)
    near_A = old_value_A + (value_A - old_value_A).clamp(-clip, clip)
    clipped_A = (near_A - return_A).square()
    return 0.5 * torch.maximum(plain_A, clipped_A), (clipped_A > plain_A).detach()


@dataclass
class ValueLoss:
    """The critic's loss of one micro-batch: called once by the engine, then holds `stats`.

    Attributes:
        weight_A: of each token inside the sum; 0 where masked.
        old_value_A: the values that the step's returns were made from.
        return_A: the targets.
        clip: see `clipped_value_loss`.
        coef: multiplies the loss.
        stats: scalar tensors on the device: `loss` (the sum as trained, times `scale` gives the update's loss), and
            sums over the tokens that count: `tokens`, `clipped`, `value`, `return`, `return_squared`, `error_squared`
            (of the values before the update).
    """

    weight_A: Tensor
    old_value_A: Tensor
    return_A: Tensor
    clip: float | None
    coef: float
    stats: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, value_A: Tensor) -> Tensor:
        """Return the unnormalised sum, a scalar with gradient."""
        loss_A, clipped_A = clipped_value_loss(value_A, self.old_value_A, self.return_A, clip=self.clip)
        total = self.coef * (loss_A * self.weight_A).sum()
        with torch.no_grad():
            counts_A = self.weight_A > 0
            terms = {
                "clipped": clipped_A,
                "value": self.old_value_A,
                "return": self.return_A,
                "return_squared": self.return_A.square(),
                "error_squared": (self.old_value_A - self.return_A).square(),
            }
            sums = torch.stack([term.to(loss_A) for term in terms.values()]) @ counts_A.to(loss_A)
            self.stats = dict(zip(terms, sums.unbind(), strict=True))
            self.stats |= {"loss": total.detach(), "tokens": counts_A.sum()}
        return total
