"""The critic's engine: a language model's backbone with a head of one number, sharded as the actor is.

The head takes the place and the name of the output layer, so packing, attention and sharding are those of `FsdpEngine`.

    values(batch)                   V(s_t) of every answer token y_t, s_t being the prompt and the tokens before it
    forward_backward(batch, loss)   gradients of the *sum* of the losses, summed over ranks, accumulate

Waits: every method except `zero_grad` is collective over the default process group.
Legend of shapes: A answer tokens of the micro-batch.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workers.config import ActorConfig, ModelConfig
from workers.engines.base import LocalShard, Sequences, StepStats, ValueLossFunction
from workers.engines.fsdp import FsdpEngine
from workers.engines.fsdp_sharding import reshard
from workers.engines.hf_weights import HfWeights
from workers.engines.packed_forward import answer_logits
from workers.model_files import SCORE_HEAD

_STORED_HEAD = f"{SCORE_HEAD}.weight"
"""Transformers' name for the head of a reward model or a critic."""


class FsdpValueEngine:
    """Trains a critic; implements `ValueEngine`."""

    def __init__(
        self, model_dir: Path, config: ModelConfig, *, training: ActorConfig, device: torch.device, seed: int
    ) -> None:
        """Build, shard and load the model. The default process group exists and spans the ranks that train it.

        Args:
            model_dir: Hugging Face directory of a causal language model, or of one with a head of one number; a model
                without such a head begins with the value 0 everywhere.
            config: of the model.
            training: optimizer and computation.
            device: this rank's.
            seed: of this process's random numbers (none are drawn without dropout).

        Raises:
            ConfigError: the directory does not hold the model that its config.json describes.
        """
        self._model = _ValueModel(model_dir, config, actor=training, temperature=1.0, device=device, seed=seed)

    @property
    def optimizer_updates(self) -> int:
        return self._model.optimizer_updates

    def values(self, batch: Sequences | None) -> Tensor:
        """Return float32 [A]: the value before each answer token. None: this rank has no rows; it gets [0]."""
        return self._model.values(batch)

    def forward_backward(self, batch: Sequences | None, loss: ValueLossFunction) -> None:
        value_A = self._model.forward(batch)
        total = value_A.sum() * 0.0 if batch is None else loss(value_A)
        total.backward()  # type: ignore[no-untyped-call]

    def step(self, scale: float) -> StepStats:
        return self._model.step(scale)

    def zero_grad(self) -> None:
        self._model.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self._model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state)


class _ValueModel(FsdpEngine):
    """The sharded model with its optimizer; only those of the policy's methods are used that know no tokens."""

    def forward(self, batch: Sequences | None) -> Tensor:
        """Return float32 [A], with gradient where enabled; None: of a smallest batch."""
        return answer_logits(self.computing(), self._inputs(batch))[:, 0]

    @torch.no_grad()
    def values(self, batch: Sequences | None) -> Tensor:
        value_A = self.forward(batch)
        reshard(self._model)
        return value_A[:0] if batch is None else value_A

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
