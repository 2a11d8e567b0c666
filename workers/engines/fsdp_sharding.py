"""How FSDP2 shards a model: one unit per decoder layer and one for the rest. Policy, its copies and critic are alike.

One rank has nothing to share, and FSDP2 would still copy every weight before each pass and every gradient behind it (a
third of a pass of a small model): there the model stays as it is, in the element type in which it was built.

Looks at nothing but the model's layers and the settings of its training; loads no weights.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from workers.config import TrainingConfig
from workers.engines.hf_model import decoder_layers

COMPILER = "inductor"
"""Backend of `torch.compile`."""


def shard(model: nn.Module, mesh: DeviceMesh, config: TrainingConfig) -> None:
    """Apply FSDP2, where there are several ranks, so that gradients are summed, not averaged, over them."""
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
    """Return what several ranks compute in; the same numbers as `Bfloat16Twin`, so activations pass as they are."""
    if config.autocast == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def reshard(model: nn.Module) -> None:
    """Give up whole parameters that a forward without a backward leaves at the root.

    The next forward would compute with them, although an update has changed the shards.
    """
    if isinstance(model, FSDPModule):
        model.reshard()


def _checkpoint_activations(model: nn.Module) -> None:
    """Recompute each layer in the backward pass; transformers renamed the method, and 6 drops the old name."""
    new: Any = getattr(model, "activation_checkpointing_enable", None)
    if new is None:
        new = model.gradient_checkpointing_enable
    new({"use_reentrant": False})
