"""The critic's engine: a language model's backbone with a head of one number, sharded as the actor is.

The head takes the place and the name of the output layer, so packing, attention and sharding are the policy's.

    values(batch)                   V(s_t) of every response token y_t, s_t being the prompt and the tokens before it
    forward_backward(batch, loss)   gradients of the *sum* of the losses, summed over ranks, accumulate

Waits: every method except `zero_grad` is collective over the default process group.
Legend of shapes: A response tokens of the micro-batch.
"""

from typing import Any

import torch
from torch import Tensor, nn

from workers.engines.base import LocalShard, Sequences, ValueLossFunction
from workers.engines.fsdp.sharding import ShardedModel, reshard
from workers.engines.hf.weights import HfWeights
from workers.engines.model_files import SCORE_HEAD
from workers.engines.packed_forward import response_logits

_STORED_HEAD = f"{SCORE_HEAD}.weight"
"""Transformers' name for the head of a reward model or a critic."""


class FsdpValueEngine(ShardedModel):
    """Trains a critic; implements `ValueEngine`.

    Its directory holds a causal language model, or a model with a head of one number; without such a head the critic
    begins with the value 0 everywhere.
    """

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
