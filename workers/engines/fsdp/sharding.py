"""A model over the ranks that train it, with its optimizer: policy, its copies and critic alike.

Several ranks use FSDP2, with one unit per decoder layer and one for the rest. On a single rank FSDP2 would still copy
every weight before each pass and every gradient after it (a third of the time of a small model's pass). A single rank
therefore keeps the plain model in the element type in which it was built; under `autocast: bfloat16` it computes
through a `Bfloat16Twin`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from asyncflow.device import seed_rank
from weightsync.plan import Need
from weightsync.sender import Shard
from workers.checkpoint.saved_shards import WHOLE, ExportShare
from workers.data.model_files import HEAD_TENSORS, POLICY_KEY, SCORE_HEAD
from workers.engines.base import (
    EngineSetup,
    LocalShard,
    LossFunction,
    StepStats,
    Updates,
    ValueLossFunction,
    check_sequences,
    decay,
    decays,
)
from workers.engines.fsdp.dtensor_shards import local_shards
from workers.engines.hf.adapter import Adapter
from workers.engines.hf.export import export_adapted, export_saved
from workers.engines.hf.model import (
    DTYPES,
    attach_adapter,
    check_stored,
    decoder_layers,
    empty_causal_lm,
    materialize,
    read_parameters,
    replace_weights,
    stored_names,
    vocab_size,
    write_parameters,
)
from workers.engines.hf.weights import HfWeights
from workers.engines.npu_kernels import fuse_layers, has_fused_adamw
from workers.engines.offload import OffloadedState
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import (
    InputsOfBatch,
    cut,
    response_log_probs,
    response_logits,
    response_results,
    response_top_log_probs,
)
from workers.engines.shared_model import BaseOfPolicy, SharedModel
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig, TrainingConfig
from workers.settings.lora import LoraConfig

COMPILER = "inductor"


class ShardedModel(OffloadedState):
    """Common to the engines of policy and critic; implements `SleepingTrainer` except `forward_backward`.

    Building it is collective over the ranks that train the model, which the default process group must span. Each rank
    reads only its own rows of the Hugging Face directory; the weights are float32, except for a base that is frozen
    beside an adapter: it is in the element type of the computation, to which FSDP2 would cast it anyway.

    Args:
        seed: of this process's random numbers (without dropout none are drawn), and of a new adapter.
        lora: train an adapter; None: all weights.
    Raises:
        ConfigError: the directory does not hold the model that its config.json describes.
    """

    model_key = POLICY_KEY  # the setting that names the model's directory
    unused_weights: tuple[str, ...] = ()  # names of weights in files that it may leave unused

    def __init__(
        self,
        model_dir: Path,
        training: ActorConfig,
        *,
        device: torch.device,
        seed: int,
        lora: LoraConfig | None = None,
    ) -> None:
        seed_rank(seed, 0, dist.get_rank())  # ranks have other samples, and drop other inputs of them
        self._model_dir = model_dir
        self._training = training
        self._device = device
        self._updates = Updates(training)
        self._mesh = make_mesh(device, training)
        self._model = self._empty_model(torch.float32 if lora is None else DTYPES[training.autocast])
        self._inputs = InputsOfBatch(device, vocab_size=vocab_size(self._model), shared_prompt=training.shared_prompt)
        self._aliases = stored_names(self._model)  # before there is an adapter: of the files
        weights = HfWeights(model_dir, key=self.model_key)
        check_stored(self._model, weights, self._aliases, unused=self.unused_weights)
        self._adapter = None if lora is None else Adapter(self._model, lora)
        self._twin: Bfloat16Twin | None = None
        if lora is None and training.autocast == "bfloat16" and self._mesh.size() == 1:
            materialize(self._model, device)
            # `self._model` holds the float32 weights; passes go through this copy.
            computing = self._empty_model(torch.bfloat16)
            shard(computing, self._mesh, training)
            materialize(computing, device)
            self._twin = Bfloat16Twin(self._model, computing)
        else:
            shard(self._model, self._mesh, training)
            materialize(self._model, device)
        stored = ((name, value) for name, value in self._model.named_parameters() if name in self._aliases)
        self._fill(local_shards(stored), weights)
        if self._adapter is not None:
            self._adapter.fill(seed=seed)
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained,
            lr=training.lr,
            betas=training.betas,
            eps=training.eps,
            weight_decay=0.0,  # `decay` does it
            # One fused call instead of a dozen: DTensor's dispatch overhead dominates small models.
            fused=has_fused_adamw(device),
        )

    @property
    def optimizer_updates(self) -> int:
        return self._updates.number

    @torch.no_grad()
    def step(self, scale: float) -> StepStats:
        """Multiply the gradients (summed over ranks) by `scale`, clip, update, and clear them."""
        gradients = [_local(p.grad) for p in self._trained if p.grad is not None]
        assert gradients, "step() without a forward_backward() before it"
        factor, stats = self._updates.next(self._global_norm(gradients), scale)
        # A gradient that is not finite changes no weight; the step is logged and reported with its `grad_norm`.
        if factor is not None:
            torch._foreach_mul_(gradients, factor)
            for group in self._optimizer.param_groups:
                group["lr"] = stats.lr
            decay([_local(p) for p in self._trained if decays(p)], self._training, stats.lr)
            self._optimizer.step()
            self._mark_changed()
        self.zero_grad()
        return stats

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return model (with an adapter, only what is trained), optimizer, and step and update counts for
        torch.distributed.checkpoint."""
        fresh = not self._optimizer.state
        model, optimizer_state = get_state_dict(self._model, self._optimizer)
        if self._adapter is not None:  # torch's own `ignore_frozen_params` leaves the second name of a tied weight
            model = {name: model[name] for name in self._trained_names()}
        optimizer: dict[str, Any] = optimizer_state
        if fresh:
            # get_state_dict created the state by an update without gradients, which AdamW counts as its first.
            for moments in optimizer["state"].values():
                moments["step"].zero_()
        return {"model": model, "optimizer": optimizer, **self._updates.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The frozen base is in no state.
        assert self._adapter is None or {*state["model"]} == {*self._trained_names()}, "a state of another adapter"
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=self._adapter is None),
        )
        for group in self._optimizer.param_groups:
            group["weight_decay"] = 0.0  # states of earlier versions stored it there
        self._mark_changed()
        self._updates.load_state_dict(state)
        self.zero_grad()

    def _trained_names(self) -> list[str]:
        return [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]

    def _prepare_sleep(self) -> None:
        reshard(self._model)

    def _state_tensors(self) -> Iterator[Tensor]:
        for parameter in self._model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        for moments in self._optimizer.state.values():
            yield from (value for value in moments.values() if isinstance(value, Tensor))

    def _scratch_tensors(self) -> Iterable[Tensor]:
        return () if self._twin is None else self._twin.model.parameters()

    def _scratch_lost(self) -> None:
        self._mark_changed()

    def _compute_model(self) -> nn.Module:
        """Return the model that passes go through; its gradients end up in the float32 parameters."""
        return self._model if self._twin is None else self._twin.refresh_weights()

    def _mark_changed(self) -> None:
        if self._twin is not None:
            self._twin.stale = True

    def _empty_model(self, dtype: torch.dtype) -> nn.Module:
        return empty_causal_lm(self._model_dir, dtype=dtype, attention=PACKED_ATTENTION)

    def _fill(self, shards: Iterable[LocalShard], weights: HfWeights) -> None:
        weights.fill(shards, self._aliases)

    def _global_norm(self, gradients: list[Tensor]) -> float:
        squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
        if self._mesh.size() > 1:
            # Of one sharded copy: replicas have the same gradients.
            dist.all_reduce(squares, group=self._mesh.get_group(self._mesh.ndim - 1))
        return float(squares.sqrt())


def make_mesh(device: torch.device, config: TrainingConfig) -> DeviceMesh:
    """Return the mesh of all ranks that FSDP2 divides a model over: one dimension, or with `fsdp_size` replicas x
    shards (HSDP), where neighbouring ranks share a copy."""
    num_ranks = dist.get_world_size()
    size = config.fsdp_size or num_ranks
    config.check_fsdp_size(num_ranks)
    if size == num_ranks:
        return init_device_mesh(device.type, (num_ranks,))
    return init_device_mesh(device.type, (num_ranks // size, size), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, config: TrainingConfig) -> None:
    """Apply checkpointing, compilation, Ascend's kernels, and FSDP2 if there are several ranks; gradients add up."""
    if config.gradient_checkpointing:
        model.train()  # transformers only recomputes layers in training mode; dropout is 0 in any case
        _checkpoint_activations(model)
    if mesh.device_type == "npu":
        fuse_layers(model)
    layers = decoder_layers(model)
    for layer in layers if config.compile else ():
        layer.compile(backend=COMPILER, dynamic=True)  # lengths differ from micro-batch to micro-batch
    if mesh.size() > 1:
        divide(model, mesh, config)


def divide(model: nn.Module, mesh: DeviceMesh, config: TrainingConfig) -> None:
    """Create FSDP2's units: one per decoder layer, and one for the rest."""
    policy = mixed_precision(config)
    # Layers first: the root's unit takes the parameters that are left.
    for module in (*decoder_layers(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sum gradients over ranks; FSDP2 averages by default.
            module.set_gradient_divide_factor(1.0)
            # Otherwise a divide factor selects a pre-multiplied sum, which Gloo lacks.
            module.set_force_sum_reduction_for_comms(True)


def mixed_precision(config: TrainingConfig) -> MixedPrecisionPolicy:
    """Return FSDP2's policy. It yields the same numbers as `Bfloat16Twin`, so activations are not cast."""
    if config.autocast == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def reshard(model: nn.Module) -> None:
    """Free the full parameters that a forward without a backward leaves at the root."""
    if isinstance(model, FSDPModule):
        # Otherwise the next forward would use them even after an update has changed the shards.
        model.reshard()


def over_ranks(
    batch: Sequences, compute: Callable[[Sequences | None], Tensor], *, count: Callable[[Sequences], int]
) -> Tensor:
    """Split a batch over the ranks, and return the combined result on every rank; collective over the default group.

    Args:
        batch: the same on all ranks; each gets samples of about as many tokens.
        compute: returns a vector for some samples, in their order; collective. It is called with None on ranks without
            samples, whose result is ignored.
        count: how many numbers `compute` returns for some samples.
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
    dist.all_reduce(whole)  # the others add zeros, so the sum is exact
    return whole


class Bfloat16Twin:
    """A bfloat16 copy of a float32 model, for computing on a single rank under `autocast: bfloat16`.

    Args:
        masters: float32, with memory; the optimizer updates them, and they receive the gradients.
        model: the same in bfloat16, with memory; its initial values do not matter.
    """

    # FSDP2 would cast every weight again in each pass, forward and backward, and every gradient on its way back. Here
    # weights are cast once per update, and gradients are added to the float32 ones as soon as autograd has them. The
    # numbers equal FSDP2's: passes in bfloat16, sums of micro-batches in float32. Costs two bytes per weight.

    def __init__(self, masters: nn.Module, model: nn.Module) -> None:
        self.model = model  # forward and backward passes go through this one
        self.stale = True  # whether the float32 weights changed since `refresh_weights`
        self._pairs: list[tuple[Tensor, Tensor]] = []
        named = dict(masters.named_parameters())
        for name, own in model.named_parameters():
            own.register_post_accumulate_grad_hook(partial(_hand_over, named[name]))  # type: ignore[no-untyped-call]
            self._pairs.append((own, named[name]))

    @torch.no_grad()
    def refresh_weights(self) -> nn.Module:
        """Return the model, with up-to-date weights."""
        if self.stale:
            for own, master in self._pairs:
                own.copy_(master)
            self.stale = False
        return self.model


def _checkpoint_activations(model: nn.Module) -> None:
    """Recompute each layer in the backward pass."""
    # transformers renamed the method; version 6 drops the old name.
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


# The default training engine of policy and critic: FSDP2 over all ranks of the actor, or of the critic.
#
# One `fully_shard` unit per decoder layer and one for the rest (embedding, norm, head). Parameters, gradients and
# optimizer state are float32 and sharded by rows; with `autocast: bfloat16` FSDP2 gathers and computes in bfloat16.
# A single rank trains the plain model, under `autocast: bfloat16` through a `Bfloat16Twin`.
#
#     forward_backward(batch, loss)   accumulates gradients of the *sum* of the losses, summed over ranks
#     forward_backward(None, loss)    a rank without rows joins the gathers and adds nothing
#     step(scale)                     gradients * scale, clip, AdamW, gradients cleared
#
# Every method except `shards` and `zero_grad` is collective: a rank that does not call it blocks the others.
# Legend of shapes: A drawn tokens of the micro-batch.


class FsdpEngine(ShardedModel):
    """Trains a causal language model; implements `CopyingEngine` and `SleepingTrainer`. For construction see
    `ShardedModel`.

    Args:
        merged: with `lora`, whether `shards` are whole weights with the adapter added, or the adapter alone.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        actor: ActorConfig,
        temperature: float,
        device: torch.device,
        seed: int,
        lora: LoraConfig | None = None,
        merged: bool = False,
    ) -> None:
        super().__init__(model_dir, actor, device=device, seed=seed, lora=lora)
        self._temperature = temperature
        self._copies: list[FsdpCopy] = []
        self._lora = lora
        self._merged = merged
        self._mark_changed()

    @staticmethod
    def of_run(setup: EngineSetup) -> "FsdpEngine":
        run = setup.run
        return FsdpEngine(
            setup.model_dir,
            actor=setup.actor,
            temperature=run.rollout.temperature,
            device=setup.device,
            seed=run.seed,
            lora=run.lora,
            merged=not run.sends_adapter,
        )

    def log_probs(self, batch: Sequences | None) -> Tensor:
        return _log_probs(self._compute_model(), self._inputs, batch, self._temperature)

    def forward_backward(self, batch: Sequences | None, loss: LossFunction) -> None:
        inputs = self._inputs(batch)
        found = response_results(self._compute_model(), inputs, self._temperature, entropy=batch is not None)
        # A rank without rows still needs a backward pass, to take part in FSDP2's collectives.
        total = found.log_probs_A.sum() * 0.0 if batch is None else loss(*found[: 2 + (batch.others is not None)])
        total.backward()  # type: ignore[no-untyped-call]

    def shards(self) -> Iterable[Shard]:
        reshard(self._model)
        if self._adapter is None:
            return local_shards(self._model.named_parameters())
        return self._adapter.merged_shards() if self._merged else self._adapter.shards()

    def _mark_changed(self) -> None:
        super()._mark_changed()
        if self._adapter is not None and self._merged:
            self._adapter.gather_a()

    def export_hf(self, target: Path, saved: Path) -> None:
        self.export_share(target, saved, WHOLE)

    def export_share(self, target: Path, saved: Path, share: ExportShare) -> bool:
        """Write a share of a saved state as a Hugging Face directory, in the element type of the initial model's
        files; with an adapter, the merged model, and the adapter beside it."""
        if self._adapter is not None and self._lora is not None:
            return export_adapted(saved, target, self._model_dir, self._aliases, self._lora, share)
        return export_saved(saved, target, self._model_dir, self._aliases, share)

    def open_copy(self, *, initial: bool = False) -> "FsdpCopy | BaseOfPolicy":
        if self._lora is not None and initial and not self._lora.modules_to_save:
            assert self._adapter is not None
            return BaseOfPolicy(self, self._adapter.switch)
        assert self._lora is None or initial, "older adapters are not kept"
        copy = FsdpCopy(
            self._model_dir, self._training, temperature=self._temperature, device=self._device, policy=self
        )
        if initial:
            copy.read_weights(self._model_dir)
        self._copies.append(copy)
        return copy

    def _prepare_sleep(self) -> None:
        super()._prepare_sleep()
        for copy in self._copies:
            copy._prepare_sleep()

    def _state_tensors(self) -> Iterator[Tensor]:
        yield from super()._state_tensors()
        if self._adapter is not None:
            yield from self._adapter.gathered
        for copy in self._copies:  # they sleep and wake with the policy
            yield from copy._state_tensors()


class FsdpCopy(SharedModel, OffloadedState):
    """Other weights of the policy: the reference, or the policy of an earlier step; implements `PolicyCopy`.

    It has no optimizer and no initial weights, and is sharded over the default group like the policy. It uses the
    policy's computation type and kernels, so equal weights and inputs give bitwise equal log-probabilities. Shards are
    kept in the computation type: under `autocast: bfloat16` the policy's are cast to it anyway.
    """

    def __init__(
        self,
        model_dir: Path,
        training: TrainingConfig,
        *,
        temperature: float,
        device: torch.device,
        policy: FsdpEngine | None = None,
    ) -> None:
        super().__init__(policy)
        self._temperature = temperature
        self._device = device
        self._model = empty_causal_lm(model_dir, dtype=DTYPES[training.autocast], attention=PACKED_ATTENTION)
        self._aliases = stored_names(self._model)
        self._vocab_size = vocab_size(self._model)
        own = InputsOfBatch(device, vocab_size=self._vocab_size, shared_prompt=training.shared_prompt)
        self._inputs = own if policy is None else policy._inputs  # policy and copies pack a micro-batch only once
        mesh = make_mesh(device, training)
        shard(self._model, mesh, training.model_copy(update={"gradient_checkpointing": False}))
        materialize(self._model, device)
        self._model.requires_grad_(False)

    def shards(self) -> Iterable[LocalShard]:
        return local_shards(self._model.named_parameters())

    def log_probs(self, batch: Sequences | None) -> Tensor:
        return _log_probs(self._model, self._inputs, batch, self._temperature)

    def _prepare_sleep(self) -> None:
        reshard(self._model)

    def _state_tensors(self) -> Iterable[Tensor]:
        return self._model.parameters()

    def _check_stored(self, weights: HfWeights) -> None:
        check_stored(self._model, weights, self._aliases)


class FsdpFrozenModel(FsdpCopy):
    """A model that is not trained, sharded over ranks that split each batch; implements `TopTokensEngine`.

    Building it is collective, and reads the weights in `weights_dir`. Raises ConfigError if the directory does not hold
    the model that its config.json describes.

    With `lora`, `load_weights` gets adapters, which every rank holds whole, on the base in `model_dir`; `weights_dir`
    then holds an adapter, unless it is `model_dir`.
    """

    def __init__(
        self,
        model_dir: Path,
        training: TrainingConfig,
        *,
        temperature: float,
        device: torch.device,
        weights_dir: Path,
        lora: LoraConfig | None = None,
    ) -> None:
        super().__init__(model_dir, training, temperature=temperature, device=device)
        self._adapter: dict[str, nn.Parameter] | None = None
        if lora is not None:
            super().read_weights(model_dir)
            self._adapter = attach_adapter(self._model, lora)
        if lora is None or weights_dir != model_dir:
            self.read_weights(weights_dir)

    @staticmethod
    def of_run(setup: EngineSetup) -> "FsdpFrozenModel":
        return FsdpFrozenModel(
            setup.model_dir,
            setup.run.ref.computation(setup.run.model.dtype),
            temperature=setup.run.rollout.temperature,
            device=setup.device,
            weights_dir=setup.weights_dir or setup.model_dir,
            lora=setup.adapter,
        )

    def weight_needs(self) -> Mapping[str, Need]:
        if self._adapter is None:
            return super().weight_needs()
        return {name: Need(tuple(tensor.shape)) for name, tensor in self._adapter.items()}

    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        if self._adapter is None:
            super().load_weights(weights)
        else:
            replace_weights(self._adapter, weights, adopt=False)

    def read_weights(self, weights_dir: Path) -> None:
        if self._adapter is None:
            super().read_weights(weights_dir)
        else:
            read_parameters(self._adapter, HfWeights(weights_dir), what="the adapter")

    def save_weights(self, target: Path) -> None:
        if self._adapter is None:
            super().save_weights(target)
        elif dist.get_rank() == 0:
            write_parameters(self._adapter, target)

    def log_probs(self, batch: Sequences | None) -> Tensor:
        """Return float32 [A]: each rank computes some of the samples, and all get the results of all.
        Raises BadRequest, see `check_sequences`; before any collective."""
        assert batch is not None, "all ranks get the same batch"
        check_sequences(batch, vocab_size=self._vocab_size)
        return over_ranks(batch, super().log_probs, count=lambda part: part.num_drawn)

    def top_log_probs(self, batch: Sequences, k: int, *, num_tokens: int) -> tuple[Tensor, Tensor]:
        """See `TopTokensEngine`; computed like `log_probs`."""
        check_sequences(batch, vocab_size=self._vocab_size)
        k = min(k, num_tokens, self._vocab_size)

        @torch.no_grad()
        def compute(part: Sequences | None) -> Tensor:
            inputs, temperature = self._inputs(part), self._temperature
            ids_AK, log_probs_AK = response_top_log_probs(self._model, inputs, temperature, k, num_tokens)
            reshard(self._model)
            # In one vector, since ranks exchange one; float32 holds ids up to 2^24.
            return torch.cat([ids_AK.to(log_probs_AK.dtype), log_probs_AK], dim=1).flatten()

        found_AJ = over_ranks(batch, compute, count=lambda part: part.num_drawn * 2 * k).view(-1, 2 * k)
        return found_AJ[:, :k].int(), found_AJ[:, k:]


@torch.no_grad()
def _log_probs(model: nn.Module, inputs: InputsOfBatch, batch: Sequences | None, temperature: float) -> Tensor:
    """See `TrainEngine.log_probs`."""
    log_probs_A, _ = response_log_probs(model, inputs(batch), temperature)
    reshard(model)
    return log_probs_A[:0] if batch is None else log_probs_A


_STORED_HEAD = f"{SCORE_HEAD}.weight"  # transformers' name for the head of a reward model or critic


class FsdpValueEngine(ShardedModel):
    """Trains a critic: a language model's backbone with a scalar head; implements `ValueEngine`.

    The head replaces the output layer under the same name, so packing, attention and sharding are the policy's. In
    V(s_t) of a response token y_t, s_t is the prompt and the tokens before y_t.

    Its directory holds a causal language model, or a model that already has a scalar head. Without such a head the
    critic starts with the value 0 everywhere.
    """

    model_key = "critic.path"
    unused_weights = (_STORED_HEAD, *HEAD_TENSORS)

    @torch.no_grad()
    def values(self, batch: Sequences | None) -> Tensor:
        value_A = self._forward_batch(batch)
        reshard(self._model)
        return value_A[:0] if batch is None else value_A

    def forward_backward(self, batch: Sequences | None, loss: ValueLossFunction) -> None:
        value_A = self._forward_batch(batch)
        total = value_A.sum() * 0.0 if batch is None else loss(value_A)
        total.backward()  # type: ignore[no-untyped-call]

    def _forward_batch(self, batch: Sequences | None) -> Tensor:
        """Return float32 [A], with gradient where enabled; None: of a minimal batch."""
        return response_logits(self._compute_model(), self._inputs(batch))[:, 0]

    def _empty_model(self, dtype: torch.dtype) -> nn.Module:
        model: Any = super()._empty_model(dtype)
        inner = model.get_output_embeddings().in_features
        model.config.tie_word_embeddings = False  # otherwise the head would be tied to the input embedding again
        model.set_output_embeddings(nn.Linear(inner, 1, bias=False, device="meta", dtype=dtype))
        head = model.get_output_embeddings().weight
        (self._head,) = (name for name, parameter in model.named_parameters() if parameter is head)
        built: nn.Module = model
        return built

    def _fill(self, shards: Iterable[LocalShard], weights: HfWeights) -> None:
        for shard in shards:
            if shard.name != self._head:
                super()._fill([shard], weights)
            elif _STORED_HEAD in weights:
                super()._fill([replace(shard, name=_STORED_HEAD)], weights)
            else:
                shard.values.zero_()
