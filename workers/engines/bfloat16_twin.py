"""What a rank that shares its weights with nobody computes with under `autocast: bfloat16`: a bfloat16 copy of them.

FSDP2 would cast every weight again in each pass, forward and backward, and every gradient on its way back. Here they
are cast once an update, and gradients are added to the float32 ones as soon as autograd has them. The numbers are
FSDP2's: passes in bfloat16, sums of micro-batches in float32. Costs two bytes a weight.
"""

from functools import partial

import torch
from torch import Tensor, nn


class Bfloat16Twin:
    """Follows a float32 model, whose parameters the optimizer has."""

    def __init__(self, masters: nn.Module, model: nn.Module) -> None:
        """Args:
        masters: float32, with memory; gets the gradients.
        model: the same in bfloat16, with memory; its values do not matter.
        """
        self.model = model
        """Forward and backward passes go through this one."""
        self.stale = True
        """Whether the float32 weights changed since `refresh`."""
        self._pairs: list[tuple[Tensor, Tensor]] = []
        named = dict(masters.named_parameters())
        for name, own in model.named_parameters():
            own.register_post_accumulate_grad_hook(partial(_hand_over, named[name]))  # type: ignore[no-untyped-call]
            self._pairs.append((own, named[name]))

    @torch.no_grad()
    def refresh(self) -> nn.Module:
        """Return the model, with the weights as they are now."""
        if self.stale:
            for own, master in self._pairs:
                own.copy_(master)
            self.stale = False
        return self.model


def _hand_over(master: Tensor, own: Tensor) -> None:
    """Add a gradient that is complete for this pass to its float32 sum."""
    gradient, own.grad = own.grad, None
    assert gradient is not None, "autograd calls this with a gradient"
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
