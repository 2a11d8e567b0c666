"""How a model lies over the ranks that train it: policy, its copies and critic alike.

Several ranks use FSDP2, one unit per decoder layer and one for the rest. On a single rank FSDP2 would still copy every
weight before each pass and every gradient after it (a third of a pass of a small model), so there the model stays as it
is, in the element type in which it was built; under `autocast: bfloat16` it computes through a `Bfloat16Twin`.

Looks only at the model's layers and the training settings; loads no weights.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from workers.config import TrainingConfig
from workers.engines.hf_model import decoder_layers

COMPILER = "inductor"
"""Backend of `torch.compile`."""


def shard(model: nn.Module, mesh: DeviceMesh, config: TrainingConfig) -> None:
    """Apply FSDP2 where there are several ranks; gradients are summed over them, not averaged."""
    if config.gradient_checkpointing:
        model.train()
        _checkpoint_activations(model)
    layers = decoder_layers(model)
    for layer in layers if config.compile else ():
        layer.compile(backend=COMPILER, dynamic=True)  # lengths differ from micro-batch to micro-batch
    if mesh.size() == 1:
        return
    policy = mixed_precision(config)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Gloo has no pre-multiplied sum, which a divide factor selects otherwise.
            module.set_force_sum_reduction_for_comms(True)


def mixed_precision(config: TrainingConfig) -> MixedPrecisionPolicy:
    """Return FSDP2's policy; it gives the same numbers as `Bfloat16Twin`, so activations are not cast."""
    if config.autocast == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that a forward without a backward leaves at the root.

    Else the next forward would use them, although an update has changed the shards.
    """
    if isinstance(model, FSDPModule):
        model.reshard()


class Bfloat16Twin:
    """A bfloat16 copy of a float32 model: what a single rank computes with under `autocast: bfloat16`.

    FSDP2 would cast every weight again in each pass, forward and backward, and every gradient on its way back. Here
    weights are cast once an update, and gradients are added to the float32 ones as soon as autograd has them. The
    numbers are FSDP2's: passes in bfloat16, sums of micro-batches in float32. Costs two bytes a weight.
    """

    def __init__(self, masters: nn.Module, model: nn.Module) -> None:
        """Args:
        masters: float32, with memory; the optimizer updates them, and they get the gradients.
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


def _checkpoint_activations(model: nn.Module) -> None:
    """Recompute each layer in the backward pass; transformers renamed the method, and 6 drops the old name."""
    new: Any = getattr(model, "activation_checkpointing_enable", None)
    if new is None:
        new = model.gradient_checkpointing_enable
    new({"use_reentrant": False})


def _hand_over(master: Tensor, own: Tensor) -> None:
    """Add a pass's complete gradient to its float32 sum."""
    gradient, own.grad = own.grad, None
    assert gradient is not None, "autograd calls this with a gradient"
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
