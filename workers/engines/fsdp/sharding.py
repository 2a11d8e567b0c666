"""A model over the ranks that train it, with its optimizer: policy, its copies and critic alike.

Several ranks use FSDP2, one unit per decoder layer and one for the rest. On a single rank FSDP2 would still copy every
weight before each pass and every gradient after it (a third of a pass of a small model), so there the model stays as it
is, in the element type in which it was built; under `autocast: bfloat16` it computes through a `Bfloat16Twin`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from workers.data.model_files import POLICY_KEY
from workers.engines.base import LocalShard, StepStats
from workers.engines.fsdp.dtensor_shards import local_shards
from workers.engines.hf.model import (
    check_stored,
    decoder_layers,
    empty_causal_lm,
    materialize,
    stored_names,
    vocab_size,
)
from workers.engines.hf.weights import HfWeights
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import InputsOfBatch, cut
from workers.engines.updates import Updates, decay, decays
from workers.rows.rows import Sequences
from workers.settings.engines import ActorConfig, TrainingConfig

COMPILER = "inductor"
"""Backend of `torch.compile`."""


class ShardedModel:
    """What the engines of policy and critic have in common; implements `TrainedEngine` but for `forward_backward`."""

    model_key = POLICY_KEY
    """The setting that names its directory."""
    unused_weights: tuple[str, ...] = ()
    """Names in files that it may leave out."""

    def __init__(self, model_dir: Path, training: ActorConfig, *, device: torch.device, seed: int) -> None:
        """Build, shard and load the model. The default process group exists and spans the ranks that train it.

        Args:
            model_dir: Hugging Face directory; each rank reads its own rows.
            training: optimizer and computation; the weights are float32.
            device: this rank's.
            seed: of this process's random numbers (none are drawn without dropout).
        Raises:
            ConfigError: the directory does not hold the model that its config.json describes.
        """
        torch.manual_seed(seed)
        self._model_dir = model_dir
        self._training = training
        self._device = device
        self._updates = Updates(training)
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self._model = self._empty_model(torch.float32)
        self._inputs = InputsOfBatch(device, vocab_size=vocab_size(self._model), shared_prompt=training.shared_prompt)
        self._aliases = stored_names(self._model)
        weights = HfWeights(model_dir, key=self.model_key)
        check_stored(self._model, weights, self._aliases, unused=self.unused_weights)
        self._twin: Bfloat16Twin | None = None
        if training.autocast == "bfloat16" and self._mesh.size() == 1:
            materialize(self._model, device)
            computing = self._empty_model(torch.bfloat16)
            shard(computing, self._mesh, training)
            materialize(computing, device)
            self._twin = Bfloat16Twin(self._model, computing)
        else:
            shard(self._model, self._mesh, training)
            materialize(self._model, device)
        self._load_weights(weights)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=training.lr,
            betas=training.betas,
            eps=training.eps,
            weight_decay=0.0,  # `decay` does it
            # One fused call instead of a dozen: DTensor's dispatch dominates small models. torch_npu has no fused AdamW
            # behind this flag.
            fused=device.type in ("cpu", "cuda"),
        )

    @property
    def optimizer_updates(self) -> int:
        return self._updates.number

    @torch.no_grad()
    def step(self, scale: float) -> StepStats:
        """Multiply the gradients (summed over ranks) by `scale`, clip, update, clear them.

        A gradient that is not finite changes no weight: the step is logged and reported with its `grad_norm`.
        """
        gradients = [_local(p.grad) for p in self._model.parameters() if p.grad is not None]
        assert gradients, "step() without a forward_backward() before it"
        factor, stats = self._updates.next(self._global_norm(gradients), scale)
        if factor is not None:
            torch._foreach_mul_(gradients, factor)
            for group in self._optimizer.param_groups:
                group["lr"] = stats.lr
            decay([_local(p) for p in self._model.parameters() if decays(p)], self._training, stats.lr)
            self._optimizer.step()
            self._changed()
        self.zero_grad()
        return stats

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and numbers of steps and updates for torch.distributed.checkpoint."""
        fresh = not self._optimizer.state
        model, optimizer_state = get_state_dict(self._model, self._optimizer)
        optimizer: dict[str, Any] = optimizer_state
        if fresh:
            # get_state_dict made the state by an update without gradients, which AdamW counts as its first.
            for moments in optimizer["state"].values():
                moments["step"].zero_()
        return {"model": model, "optimizer": optimizer, **self._updates.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        for group in self._optimizer.param_groups:
            group["weight_decay"] = 0.0  # a state of an earlier version has it there
        self._changed()
        self._updates.load_state_dict(state)
        self.zero_grad()

    def _computing(self) -> nn.Module:
        """Return the model that passes go through; its gradients end up in the float32 parameters."""
        return self._model if self._twin is None else self._twin.refresh()

    def _changed(self) -> None:
        """Note that the float32 parameters changed."""
        if self._twin is not None:
            self._twin.stale = True

    def _empty_model(self, dtype: torch.dtype) -> nn.Module:
        """Build the model, with its parameters on the meta device."""
        return empty_causal_lm(self._model_dir, dtype=dtype, attention=PACKED_ATTENTION)

    @torch.no_grad()
    def _load_weights(self, weights: HfWeights) -> None:
        for part in local_shards(self._model.named_parameters()):
            self._load_shard(part, weights)
        self._changed()

    def _load_shard(self, shard: LocalShard, weights: HfWeights) -> None:
        shard.values.copy_(weights.read_shard(shard, self._aliases[shard.name]))

    def _global_norm(self, gradients: list[Tensor]) -> float:
        squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
        if self._mesh.size() > 1:
            dist.all_reduce(squares, group=self._mesh.get_group())
        return float(squares.sqrt())


def shard(model: nn.Module, mesh: DeviceMesh, config: TrainingConfig) -> None:
    """Apply FSDP2 where there are several ranks; gradients are summed over them, not averaged."""
    if config.gradient_checkpointing:
        model.train()
        _checkpoint_activations(model)
    layers = decoder_layers(model)
    for layer in layers if config.compile else ():
        layer.compile(backend=COMPILER, dynamic=True)  # lengths differ from micro-batch to micro-batch
    if mesh.size() > 1:
        divide(model, mesh, config)


def divide(model: nn.Module, mesh: DeviceMesh, config: TrainingConfig) -> None:
    """Make FSDP2's units: one per decoder layer, and one for the rest."""
    policy = mixed_precision(config)
    for module in (*decoder_layers(model), model):
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


def over_ranks(
    batch: Sequences, compute: Callable[[Sequences | None], Tensor], *, count: Callable[[Sequences], int]
) -> Tensor:
    """Return what the ranks compute of a batch together, on every rank; collective over the default group.

    Args:
        batch: on all ranks the same; each gets samples of about as many tokens.
        compute: a vector of some samples, in their order; collective. None: this rank has none, and what it returns
            does not matter.
        count: how many numbers that is.
    """
    parts, rank = list(cut(batch, dist.get_world_size())), dist.get_rank()
    own = compute(parts[rank] if rank < len(parts) else None)
    if dist.get_world_size() == 1:
        return own
    counts = [count(part) for part in parts]
    whole = own.new_zeros(sum(counts))
    if rank < len(parts):
        start = sum(counts[:rank])
        whole[start : start + counts[rank]] = own
    dist.all_reduce(whole)  # the others add zeros: exact
    return whole


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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
