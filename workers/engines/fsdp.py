"""The default training engine: FSDP2 over all ranks of the actor.

One `fully_shard` unit per decoder layer and one for the rest (embedding, norm, head). Parameters, gradients and
optimizer state are float32 and sharded by rows; with `autocast: bfloat16` FSDP2 gathers and computes in bfloat16.

    forward_backward(batch, loss)   gradients of the *sum* of the losses, summed over ranks, accumulate
    forward_backward(None, loss)    a rank without rows joins the gathers and adds nothing
    step(scale)                     gradients * scale, clip, AdamW, gradients cleared

Waits: every method except `shards` and `zero_grad` is collective; a rank that does not call it blocks the others.
Legend of shapes: A answer tokens of the micro-batch.
"""

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from workers.config import ActorConfig, ModelConfig
from workers.engines.base import LocalShard, LossFunction, Sequences, StepStats
from workers.engines.dtensor_shards import local_shards
from workers.engines.hf_model import decoder_layers, empty_causal_lm, materialize, parameter_aliases
from workers.engines.hf_weights import HfWeights, copy_without_weights, write_weights
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import PackedInputs, answer_log_probs
from workers.engines.saved_tensors import SavedTensors

logger = logging.getLogger(__name__)


class FsdpEngine:
    """Trains a causal language model; implements `TrainEngine`."""

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        *,
        actor: ActorConfig,
        temperature: float,
        device: torch.device,
        seed: int,
    ) -> None:
        """Build, shard and load the model. The default process group exists and spans the actor's ranks.

        Args:
            model_dir: Hugging Face directory; each rank reads its own rows.
            config: of the model; its dtype is that of the other roles' copies, the trainer's weights are float32.
            actor: optimizer and computation.
            temperature: divides the logits.
            device: this rank's.
            seed: of this process's random numbers (none are drawn without dropout).
        Raises:
            ConfigError: the directory does not hold the model that its config.json describes.
        """
        torch.manual_seed(seed)
        self._model_dir = model_dir
        self._actor = actor
        self._temperature = temperature
        self._device = device
        self._num_updates = 0
        self._resumed = (0, 0)
        """Steps, and updates, that are in the state which was loaded."""
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self._model = empty_causal_lm(model_dir, dtype=torch.float32, attention=PACKED_ATTENTION)
        self._aliases = parameter_aliases(self._model)
        self._shapes = {name: tuple(p.shape) for name, p in self._model.named_parameters()}
        _shard(self._model, self._mesh, actor)
        materialize(self._model, device)
        self._load_weights(HfWeights(model_dir))
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=actor.lr,
            betas=actor.betas,
            eps=actor.eps,
            weight_decay=actor.weight_decay,
            # One fused call instead of a dozen: DTensor's dispatch dominates small models. torch_npu has no fused AdamW
            # behind this flag.
            fused=device.type in ("cpu", "cuda"),
        )

    @property
    def optimizer_updates(self) -> int:
        """How often `step` was called for these weights."""
        return self._num_updates

    @torch.no_grad()
    def log_probs(self, batch: Sequences | None) -> Tensor:
        """Return float32 [A]: log-probabilities of the answers' tokens, without gradient. None: this rank has no rows;
        it only joins the collectives, and gets [0]."""
        inputs = PackedInputs.of(_IDLE if batch is None else batch, self._device)
        log_probs_A, _ = answer_log_probs(self._model, inputs, self._temperature)
        self._reshard()
        return log_probs_A[:0] if batch is None else log_probs_A

    def forward_backward(self, batch: Sequences | None, loss: LossFunction) -> None:
        """Accumulate gradients of `loss`. None: this rank has no rows; it only joins the collectives."""
        inputs = PackedInputs.of(_IDLE if batch is None else batch, self._device)
        log_probs_A, entropy_A = answer_log_probs(self._model, inputs, self._temperature, entropy=batch is not None)
        total = log_probs_A.sum() * 0.0 if batch is None else loss(log_probs_A, entropy_A)
        total.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, scale: float) -> StepStats:
        """Multiply the gradients (summed over ranks) by `scale`, clip, update, clear them.

        A gradient that is not finite changes no weight: the step is logged and reported with its `grad_norm`.
        """
        gradients = [_local(p.grad) for p in self._model.parameters() if p.grad is not None]
        assert gradients, "step() without a forward_backward() before it"
        grad_norm = abs(scale) * self._global_norm(gradients)
        lr = self._actor.lr * min(1.0, (self._num_steps + 1) / max(1, self._actor.lr_warmup_steps))
        if math.isfinite(grad_norm):
            clip = min(1.0, self._actor.grad_clip / (grad_norm + 1e-6))
            torch._foreach_mul_(gradients, scale * clip)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        else:
            logger.warning("update %d skipped: its gradient norm is %s", self._num_updates + 1, grad_norm)
        self._num_updates += 1
        self.zero_grad()
        return StepStats(grad_norm=grad_norm, lr=lr)

    def zero_grad(self) -> None:
        """Drop accumulated gradients: the step in progress was abandoned."""
        self._optimizer.zero_grad(set_to_none=True)

    def shards(self) -> Iterable[LocalShard]:
        """Return this rank's pieces of all parameters, in a fixed order; views, so copy before the next `step`."""
        self._reshard()
        return local_shards(self._model.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and numbers of steps and updates for torch.distributed.checkpoint."""
        fresh = not self._optimizer.state
        model, optimizer_state = get_state_dict(self._model, self._optimizer)
        optimizer: dict[str, Any] = optimizer_state
        if fresh:
            # get_state_dict made the state by an update without gradients, which AdamW counts as its first.
            for moments in optimizer["state"].values():
                moments["step"].zero_()
        counts = {"num_steps": torch.tensor(self._num_steps), "optimizer_updates": torch.tensor(self._num_updates)}
        return {"model": model, "optimizer": optimizer, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self._num_updates = int(state["optimizer_updates"])
        self._resumed = (int(state["num_steps"]), self._num_updates)
        self.zero_grad()

    def export_hf(self, target: Path, saved: Path) -> None:
        """Write a Hugging Face directory of a saved state, in the element type of the initial model's files."""
        source, tensors = HfWeights(self._model_dir), SavedTensors(saved)
        copy_without_weights(self._model_dir, target)

        def read(name: str) -> Tensor:
            dtype = source.dtype(source.find(name, self._aliases[name]))
            return tensors.read(f"model.{name}").to(dtype)

        write_weights(target, self._shapes, read)

    @torch.no_grad()
    def _load_weights(self, weights: HfWeights) -> None:
        for shard in local_shards(self._model.named_parameters()):
            stored = weights.find(shard.name, self._aliases[shard.name])
            start, num_rows = shard.box.offset[0], shard.box.size[0]
            shard.values.copy_(weights.read_rows(stored, shard.shape, start, start + num_rows))

    @property
    def _num_steps(self) -> int:
        """Steps that are complete: warm-up counts these, however many updates they make, or made before a resume."""
        steps, updates = self._resumed
        return steps + (self._num_updates - updates) // self._actor.num_updates

    def _reshard(self) -> None:
        """Give up whole parameters that a forward without a backward leaves at the root: the next forward would compute
        with them, although an update has changed the shards."""
        cast(FSDPModule, self._model).reshard()

    def _global_norm(self, gradients: list[Tensor]) -> float:
        squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
        if self._mesh.size() > 1:
            dist.all_reduce(squares, group=self._mesh.get_group())
        return float(squares.sqrt())


_IDLE = Sequences(
    tokens_T=torch.zeros(2, dtype=torch.int64),
    lengths_N=torch.tensor([2], dtype=torch.int32),
    prompt_lengths_N=torch.tensor([1], dtype=torch.int32),
)
"""The least that has a prompt and an answer."""


def _shard(model: nn.Module, mesh: DeviceMesh, actor: ActorConfig) -> None:
    """Apply FSDP2 so that gradients are summed, not averaged, over ranks."""
    policy = MixedPrecisionPolicy()
    if actor.autocast == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if actor.gradient_checkpointing:
        model.train()
        _checkpoint_activations(model)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Gloo has no pre-multiplied sum, which a divide factor selects otherwise.
            module.set_force_sum_reduction_for_comms(True)


def _checkpoint_activations(model: nn.Module) -> None:
    """Recompute each layer in the backward pass; transformers renamed the method, and 6 drops the old name."""
    new: Any = getattr(model, "activation_checkpointing_enable", None)
    if new is None:
        new = model.gradient_checkpointing_enable
    new({"use_reentrant": False})


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
