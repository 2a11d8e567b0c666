"""The default training engine, of policy and critic: FSDP2 over all ranks of the actor, or of the critic.

One `fully_shard` unit per decoder layer and one for the rest (embedding, norm, head). Parameters, gradients and
optimizer state are float32 and sharded by rows; with `autocast: bfloat16` FSDP2 gathers and computes in bfloat16. One
rank alone trains the plain model, under `autocast: bfloat16` through a `Bfloat16Twin`.

    forward_backward(batch, loss)   gradients of the *sum* of the losses, summed over ranks, accumulate
    forward_backward(None, loss)    a rank without rows joins the gathers and adds nothing
    step(scale)                     gradients * scale, clip, AdamW, gradients cleared

Waits: every method except `shards` and `zero_grad` is collective; a rank that does not call it blocks the others.
Legend of shapes: A drawn tokens of the micro-batch.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from workers.data.model_files import HEAD_TENSORS, SCORE_HEAD
from workers.engines.base import LocalShard, LossFunction, ValueLossFunction, check_sequences
from workers.engines.fsdp.dtensor_shards import local_shards
from workers.engines.fsdp.sharding import ShardedModel, over_ranks, reshard, shard
from workers.engines.hf.model import DTYPES, check_stored, empty_causal_lm, materialize, stored_names, vocab_size
from workers.engines.hf.weights import HfWeights, SavedTensors, copy_without_weights, write_weights
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import InputsOfBatch, PackedInputs, response_log_probs, response_logits
from workers.engines.setup import EngineSetup
from workers.engines.shared_model import SharedModel
from workers.rows.rows import Sequences
from workers.settings.engines import ActorConfig, TrainingConfig


class FsdpEngine(ShardedModel):
    """Trains a causal language model; implements `TrainEngine`."""

    def __init__(
        self, model_dir: Path, *, actor: ActorConfig, temperature: float, device: torch.device, seed: int
    ) -> None:
        """Build, shard and load the model; see `ShardedModel`.

        Args:
            model_dir: Hugging Face directory.
            actor: optimizer and computation.
            temperature: divides the logits.
            device: this rank's.
            seed: of this process's random numbers.
        """
        super().__init__(model_dir, actor, device=device, seed=seed)
        self._temperature = temperature
        self._shapes = {name: tuple(p.shape) for name, p in self._model.named_parameters()}

    @staticmethod
    def of_run(setup: EngineSetup) -> "FsdpEngine":
        """Return the engine of a run."""
        run, temperature = setup.run, setup.run.rollout.temperature
        return FsdpEngine(
            setup.model_dir, actor=setup.actor, temperature=temperature, device=setup.device, seed=run.seed
        )

    @torch.no_grad()
    def log_probs(self, batch: Sequences | None) -> Tensor:
        inputs = self._inputs(batch)
        log_probs_A, _ = response_log_probs(self._computing(), inputs, self._temperature)
        reshard(self._model)
        return log_probs_A[:0] if batch is None else log_probs_A

    def forward_backward(self, batch: Sequences | None, loss: LossFunction) -> None:
        inputs = self._inputs(batch)
        log_probs_A, entropy_A = response_log_probs(
            self._computing(), inputs, self._temperature, entropy=batch is not None
        )
        total = log_probs_A.sum() * 0.0 if batch is None else loss(log_probs_A, entropy_A)
        total.backward()  # type: ignore[no-untyped-call]

    def shards(self) -> Iterable[LocalShard]:
        reshard(self._model)
        return local_shards(self._model.named_parameters())

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
            self._model_dir, self._training, self._model, temperature=self._temperature, inputs=self._inputs
        )
        if initial:
            copy.read_weights(self._model_dir)
        return copy


class _Scorer(SharedModel):
    """A causal language model without an optimizer, sharded over all ranks of the default group as the policy is.

    It computes in the same element type and kernels, so equal weights and inputs give equal log-probabilities to the
    last bit. It begins without weights. Its shards are kept in the type of the computation: bfloat16 under
    `autocast: bfloat16`, to which the policy's are cast anyway.
    """

    def __init__(self, model_dir: Path, training: TrainingConfig, *, temperature: float, device: torch.device) -> None:
        """Args:
        model_dir: Hugging Face directory; only config.json is read.
        training: how it is computed.
        temperature: divides the logits.
        device: this rank's.
        """
        self._temperature = temperature
        self._model = empty_causal_lm(model_dir, dtype=DTYPES[training.autocast], attention=PACKED_ATTENTION)
        self._aliases = stored_names(self._model)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        shard(self._model, mesh, training.model_copy(update={"gradient_checkpointing": False}))
        materialize(self._model, device)
        self._model.requires_grad_(False)

    def shards(self) -> Iterable[LocalShard]:
        return local_shards(self._model.named_parameters())

    def _check_stored(self, weights: HfWeights) -> None:
        check_stored(self._model, weights, self._aliases)

    @torch.no_grad()
    def _score(self, inputs: PackedInputs) -> Tensor:
        log_probs_A, _ = response_log_probs(self._model, inputs, self._temperature)
        reshard(self._model)
        return log_probs_A


class FsdpCopy(_Scorer):
    """Other weights of the policy: the reference, or the policy as an earlier step left it; implements `PolicyCopy`."""

    def __init__(
        self, model_dir: Path, training: TrainingConfig, policy: nn.Module, *, temperature: float, inputs: InputsOfBatch
    ) -> None:
        """Args:
        model_dir, training, temperature: see `_Scorer`.
        policy: the sharded model whose weights `take` copies.
        inputs: packs each micro-batch once, for the policy and its copies.
        """
        super().__init__(model_dir, training, temperature=temperature, device=next(policy.parameters()).device)
        self._policy = policy
        self._inputs = inputs

    @torch.no_grad()
    def take(self) -> None:
        """Copy the policy's current weights; each rank copies its own shards."""
        for target, source in zip(self.shards(), local_shards(self._policy.named_parameters()), strict=True):
            target.values.copy_(source.values)

    def log_probs(self, batch: Sequences | None) -> Tensor:
        log_probs_A = self._score(self._inputs(batch))
        return log_probs_A[:0] if batch is None else log_probs_A


class FsdpFrozenModel(_Scorer):
    """A model that is not trained over several ranks, which divide each batch; implements `FrozenEngine`."""

    def __init__(
        self, model_dir: Path, training: TrainingConfig, *, temperature: float, device: torch.device, weights_dir: Path
    ) -> None:
        """Build the model, and read the weights in `weights_dir`; collective. The others: see `_Scorer`.

        Raises:
            ConfigError: the directory does not hold the model that its config.json describes.
        """
        super().__init__(model_dir, training, temperature=temperature, device=device)
        self._vocab_size = vocab_size(self._model)
        self._inputs = InputsOfBatch(device, vocab_size=self._vocab_size, shared_prompt=training.shared_prompt)
        self.read_weights(weights_dir)

    @staticmethod
    def of_run(setup: EngineSetup) -> "FsdpFrozenModel":
        """Return the engine of a run."""
        return FsdpFrozenModel(
            setup.model_dir,
            setup.run.ref.computation(setup.run.model.dtype),
            temperature=setup.run.rollout.temperature,
            device=setup.device,
            weights_dir=setup.weights_dir or setup.model_dir,
        )

    def log_probs(self, batch: Sequences) -> Tensor:
        """Return float32 [A]: every rank computes for some of the samples, and gets the results of all.

        Raises:
            BadRequest: see `check_sequences`; before any collective.
        """
        check_sequences(batch, vocab_size=self._vocab_size)
        return over_ranks(batch, lambda part: self._score(self._inputs(part)), count=_num_drawn)


def _num_drawn(batch: Sequences) -> int:
    return int(batch.response_mask_T.sum())


_STORED_HEAD = f"{SCORE_HEAD}.weight"
"""Transformers' name for the head of a reward model or a critic."""


class FsdpValueEngine(ShardedModel):
    """Trains a critic: a language model's backbone with a head of one number; implements `ValueEngine`.

    The head takes the place and the name of the output layer, so packing, attention and sharding are the policy's.
    V(s_t) of a response token y_t: s_t is the prompt and the tokens before it.

    Its directory holds a causal language model, or a model with a head of one number; without such a head the critic
    begins with the value 0 everywhere.
    """

    model_key = "critic.path"
    unused_weights = (_STORED_HEAD, *HEAD_TENSORS)

    @torch.no_grad()
    def values(self, batch: Sequences | None) -> Tensor:
        value_A = self._forward(batch)
        reshard(self._model)
        return value_A[:0] if batch is None else value_A

    def forward_backward(self, batch: Sequences | None, loss: ValueLossFunction) -> None:
        value_A = self._forward(batch)
        total = value_A.sum() * 0.0 if batch is None else loss(value_A)
        total.backward()  # type: ignore[no-untyped-call]

    def _forward(self, batch: Sequences | None) -> Tensor:
        """Return float32 [A], with gradient where enabled; None: of a smallest batch."""
        return response_logits(self._computing(), self._inputs(batch))[:, 0]

    def _empty_model(self, dtype: torch.dtype) -> nn.Module:
        model: Any = super()._empty_model(dtype)
        inner = model.get_output_embeddings().in_features
        model.config.tie_word_embeddings = False  # else the head would become the input embedding again
        model.set_output_embeddings(nn.Linear(inner, 1, bias=False, device="meta", dtype=dtype))
        head = model.get_output_embeddings().weight
        (self._head,) = (name for name, parameter in model.named_parameters() if parameter is head)
        built: nn.Module = model
        return built

    def _load_shard(self, shard: LocalShard, weights: HfWeights) -> None:
        if shard.name != self._head:
            super()._load_shard(shard, weights)
        elif _STORED_HEAD in weights:
            start = shard.box.offset[0]
            shard.values.copy_(weights.read_rows(_STORED_HEAD, shard.shape, start, start + shard.box.size[0]))
        else:
            shard.values.zero_()
