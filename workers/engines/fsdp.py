"""The default training engine: FSDP2 over all ranks of the actor.

One `fully_shard` unit per decoder layer and one for the rest (embedding, norm, head). Parameters, gradients and
optimizer state are float32 and sharded by rows; with `autocast: bfloat16` FSDP2 gathers and computes in bfloat16. One
rank alone trains the plain model, under `autocast: bfloat16` through a `Bfloat16Twin`.

    forward_backward(batch, loss)   gradients of the *sum* of the losses, summed over ranks, accumulate
    forward_backward(None, loss)    a rank without rows joins the gathers and adds nothing
    step(scale)                     gradients * scale, clip, AdamW, gradients cleared

Waits: every method except `shards` and `zero_grad` is collective; a rank that does not call it blocks the others.
Legend of shapes: A answer tokens of the micro-batch.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from workers.config import ActorConfig, ModelConfig
from workers.engines.base import LocalShard, LossFunction, Sequences, StepStats
from workers.engines.dtensor_shards import local_shards
from workers.engines.fsdp_sharding import Bfloat16Twin, reshard, shard
from workers.engines.hf_model import DTYPES, empty_causal_lm, materialize, parameter_aliases, vocab_size
from workers.engines.hf_weights import HfWeights, SavedTensors, copy_without_weights, write_weights
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import InputsOfBatch, answer_log_probs
from workers.engines.updates import Updates


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
        self._updates = Updates(actor)
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self._model = self._empty_model(torch.float32)
        self._inputs = InputsOfBatch(device, vocab_size=vocab_size(self._model), shared_prompt=actor.shared_prompt)
        self._aliases = parameter_aliases(self._model)
        self._shapes = {name: tuple(p.shape) for name, p in self._model.named_parameters()}
        self._twin: Bfloat16Twin | None = None
        if actor.autocast == "bfloat16" and self._mesh.size() == 1:
            materialize(self._model, device)
            computing = self._empty_model(torch.bfloat16)
            shard(computing, self._mesh, actor)
            materialize(computing, device)
            self._twin = Bfloat16Twin(self._model, computing)
        else:
            shard(self._model, self._mesh, actor)
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
        return self._updates.number

    @torch.no_grad()
    def log_probs(self, batch: Sequences | None) -> Tensor:
        inputs = self._inputs(batch)
        log_probs_A, _ = answer_log_probs(self.computing(), inputs, self._temperature)
        reshard(self._model)
        return log_probs_A[:0] if batch is None else log_probs_A

    def forward_backward(self, batch: Sequences | None, loss: LossFunction) -> None:
        inputs = self._inputs(batch)
        log_probs_A, entropy_A = answer_log_probs(
            self.computing(), inputs, self._temperature, entropy=batch is not None
        )
        total = log_probs_A.sum() * 0.0 if batch is None else loss(log_probs_A, entropy_A)
        total.backward()  # type: ignore[no-untyped-call]

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
            self._optimizer.step()
            self._changed()
        self.zero_grad()
        return stats

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def shards(self) -> Iterable[LocalShard]:
        reshard(self._model)
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
        return {"model": model, "optimizer": optimizer, **self._updates.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self._changed()
        self._updates.load_state_dict(state)
        self.zero_grad()

    def export_hf(self, target: Path, saved: Path) -> None:
        """Write a Hugging Face directory of a saved state, in the element type of the initial model's files."""
        source, tensors = HfWeights(self._model_dir), SavedTensors(saved)
        copy_without_weights(self._model_dir, target)

        def read(name: str) -> Tensor:
            dtype = source.dtype(source.find(name, self._aliases[name]))
            return tensors.read(f"model.{name}").to(dtype)

        write_weights(target, self._shapes, read)

    def open_copy(self, *, initial: bool = False) -> "FsdpCopy":
        copy = FsdpCopy(
            self._model_dir,
            self._model,
            mesh=self._mesh,
            actor=self._actor,
            temperature=self._temperature,
            inputs=self._inputs,
        )
        if initial:
            copy.read(HfWeights(self._model_dir))
        return copy

    def computing(self) -> nn.Module:
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


class FsdpCopy:
    """Other weights of the policy: the reference, or the policy as an earlier step left it; implements `PolicyCopy`.

    It is sharded as the policy is, computes in the same element type and kernels, and gets the same packed inputs, so
    equal weights give equal log-probabilities to the last bit. It begins without weights. Its shards are kept in the
    type of the computation: bfloat16 under `autocast: bfloat16`, to which the policy's are cast anyway.
    """

    def __init__(
        self,
        model_dir: Path,
        policy: nn.Module,
        *,
        mesh: DeviceMesh,
        actor: ActorConfig,
        temperature: float,
        inputs: InputsOfBatch,
    ) -> None:
        """Args:
        model_dir: Hugging Face directory; only config.json is read.
        policy: the sharded model whose weights `take` copies.
        mesh: what it is sharded over.
        actor: as for the policy.
        temperature: divides the logits.
        inputs: packs each micro-batch once, for the policy and its copies.
        """
        self._policy = policy
        self._temperature = temperature
        self._inputs = inputs
        self._model = empty_causal_lm(model_dir, dtype=DTYPES[actor.autocast], attention=PACKED_ATTENTION)
        self._aliases = parameter_aliases(self._model)
        shard(self._model, mesh, actor.model_copy(update={"gradient_checkpointing": False}))
        materialize(self._model, next(iter(policy.parameters())).device)
        self._model.requires_grad_(False)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the policy's current weights; each rank copies its own shards."""
        sources = local_shards(self._policy.named_parameters())
        for target, source in zip(local_shards(self._model.named_parameters()), sources, strict=True):
            target.values.copy_(source.values)

    @torch.no_grad()
    def read(self, weights: HfWeights) -> None:
        """Take the weights in files; each rank reads its own rows."""
        for part in local_shards(self._model.named_parameters()):
            part.values.copy_(weights.read_shard(part, self._aliases[part.name]))

    @torch.no_grad()
    def log_probs(self, batch: Sequences | None) -> Tensor:
        log_probs_A, _ = answer_log_probs(self._model, self._inputs(batch), self._temperature)
        reshard(self._model)
        return log_probs_A[:0] if batch is None else log_probs_A


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
