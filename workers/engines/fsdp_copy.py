"""Other weights of the policy in the trainer's own layout: the reference, or the policy as an earlier step left it.

A copy is sharded over the actor's ranks as the policy is, computes in the same element type and kernels, and gets the
same packed inputs, so that equal weights give equal log-probabilities to the last bit. Its shards
are kept in the type of the computation: bfloat16 under `autocast: bfloat16`, to which the policy's are cast anyway.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from workers.config import ActorConfig
from workers.engines.base import Sequences
from workers.engines.dtensor_shards import local_shards
from workers.engines.fsdp_sharding import reshard, shard
from workers.engines.hf_model import DTYPES, empty_causal_lm, materialize, parameter_aliases
from workers.engines.hf_weights import HfWeights
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import InputsOfBatch, answer_log_probs


class FsdpCopy:
    """Computes log-probabilities without gradient; implements `PolicyCopy`. It begins without weights."""

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
        model_dir: Hugging Face directory, of which only config.json is read.
        policy: sharded; whose weights are taken.
        mesh: that it is sharded over.
        actor: as for the policy.
        temperature: divides the logits.
        inputs: packs micro-batches, for the policy and its copies once.
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
        """Hold the weights that the policy has now; each rank copies its own shards."""
        sources = local_shards(self._policy.named_parameters())
        for target, source in zip(local_shards(self._model.named_parameters()), sources, strict=True):
            target.values.copy_(source.values)

    @torch.no_grad()
    def read(self, weights: HfWeights) -> None:
        """Hold the weights in files; each rank reads its own rows."""
        for part in local_shards(self._model.named_parameters()):
            part.values.copy_(weights.read_shard(part, self._aliases[part.name]))

    @torch.no_grad()
    def log_probs(self, batch: Sequences | None) -> Tensor:
        """Return float32 [A]; see `TrainEngine.log_probs`."""
        log_probs_A, _ = answer_log_probs(self._model, self._inputs(batch), self._temperature)
        reshard(self._model)
        return log_probs_A[:0] if batch is None else log_probs_A
