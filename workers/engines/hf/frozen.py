"""Models that are not trained: one computes log-probabilities, one scores responses.

Legend of shapes: N samples, T tokens of the micro-batch, A drawn tokens, D width.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from asyncflow.errors import ConfigError
from weightsync.plan import Need
from workers.data.model_files import HEAD_TENSORS, SCORE_HEAD
from workers.engines.base import EngineSetup, check_sequences
from workers.engines.fsdp.dtensor_shards import local_shards
from workers.engines.fsdp.sharding import over_ranks, reshard, shard
from workers.engines.hf.model import (
    DTYPES,
    adapter_needs,
    check_stored,
    empty_causal_lm,
    empty_reward_model,
    loadable_parameters,
    materialize,
    read_parameters,
    read_weights,
    replace_weights,
    stored_names,
    vocab_size,
    weight_needs,
    write_parameters,
)
from workers.engines.hf.weights import HfWeights
from workers.engines.offload import OffloadedState
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import InputsOfBatch, PackedInputs, response_log_probs, response_top_log_probs
from workers.rows.packed_rows import Sequences
from workers.settings.engines import TrainingConfig
from workers.settings.lora import LoraConfig
from workers.settings.run import ModelConfig


class FrozenModel(OffloadedState):
    """Computes log-probabilities of drawn tokens, without gradient; implements `TopTokensEngine` and `Sleeper`.

    Args:
        weights_dir: directory of the safetensors; None: `model_dir`.
        lora: `load_weights` gets adapters, on the base in `model_dir`; `weights_dir` then holds an adapter, None: the
            base is the model.
        shared_prompt: compute a prompt that several samples share only once.
    Raises:
        ConfigError: the directory does not hold the model that its config.json describes.
    """

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        *,
        temperature: float,
        device: torch.device,
        weights_dir: Path | None = None,
        lora: LoraConfig | None = None,
        shared_prompt: bool = True,
    ) -> None:
        self._temperature = temperature
        self._device = device
        self._lora = lora
        weights = HfWeights(weights_dir or model_dir)
        self._model = empty_causal_lm(model_dir, dtype=DTYPES[config.dtype], attention=PACKED_ATTENTION)
        materialize(self._model, device)
        self._inputs = InputsOfBatch(device, vocab_size=vocab_size(self._model), shared_prompt=shared_prompt)
        self._model.requires_grad_(False)
        self._parameters = loadable_parameters(self._model, model_dir, lora)
        if lora is None or weights_dir is not None:
            self._read_weights(weights)

    @staticmethod
    def of_run(setup: EngineSetup) -> "FrozenModel":
        return FrozenModel(
            setup.model_dir,
            setup.run.model,
            temperature=setup.run.rollout.temperature,
            device=setup.device,
            weights_dir=setup.weights_dir,
            lora=setup.adapter,
            shared_prompt=setup.run.ref.shared_prompt,
        )

    @property
    def adopts_weights(self) -> bool:
        """True on the CPU, where weights in host memory can be used in place."""
        return self._device.type == "cpu"

    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        replace_weights(self._parameters, weights, adopt=adopt and self.adopts_weights)

    def read_weights(self, weights_dir: Path) -> None:
        self._read_weights(HfWeights(weights_dir))

    def weight_needs(self) -> Mapping[str, Need]:
        return weight_needs(self._model) if self._lora is None else adapter_needs(self._model, self._lora)

    def save_weights(self, target: Path) -> None:
        write_parameters(self._parameters, target)

    def _read_weights(self, weights: HfWeights) -> None:
        if self._lora is None:
            read_weights(self._model, weights)
        else:
            read_parameters(self._parameters, weights, what="the adapter")

    def _state_tensors(self) -> Iterable[Tensor]:
        return self._model.parameters()

    @torch.no_grad()
    def log_probs(self, batch: Sequences) -> Tensor:
        return response_log_probs(self._model, self._inputs(batch), self._temperature)[0]

    def top_log_probs(self, batch: Sequences, k: int, *, num_tokens: int) -> tuple[Tensor, Tensor]:
        return response_top_log_probs(self._model, self._inputs(batch), self._temperature, k, num_tokens)


class RewardModel:
    """Scores responses: a language model's backbone with a scalar head, read at the last token.

    Responses are packed, and a shared prompt is computed once. Ranks that share the model must make the same calls with
    the same batch.

    Args:
        model_dir: Hugging Face directory of a sequence classification model with one label.
        dtype: of the weights; the head computes in float32 or better.
        shared: the ranks of the default group share the model (FSDP2).
    Raises:
        ConfigError: the directory does not hold such a model on a language model's backbone.
    """

    def __init__(self, model_dir: Path, *, dtype: torch.dtype, device: torch.device, shared: bool = False) -> None:
        self._device = device
        weights = HfWeights(model_dir, key="reward.model.path")
        model: Any = empty_reward_model(model_dir, dtype=dtype, attention=PACKED_ATTENTION)
        if not isinstance(getattr(model, SCORE_HEAD, None), nn.Linear) or model.base_model is model:
            raise ConfigError(
                f"reward.model.path: {model_dir} is of a {type(model).__name__}, which has no head {SCORE_HEAD!r} on a "
                f"language model; use a reward model of the policy's family"
            )
        aliases = stored_names(model)
        check_stored(model, weights, aliases, unused=HEAD_TENSORS)  # leftovers of its language model
        self._shared = shared
        if shared:  # shard all but the head
            shard(model.base_model, init_device_mesh(device.type, (dist.get_world_size(),)), TrainingConfig())
        materialize(model, device)
        self._exact = torch.promote_types(dtype, torch.float32)
        model.score.to(self._exact)
        self._model = model.requires_grad_(False)
        self._vocab_size = vocab_size(model)
        self._padding = model.config.get_text_config().pad_token_id
        weights.fill(local_shards(model.named_parameters()), aliases)

    @torch.no_grad()
    def score_samples(self, batch: Sequences) -> Tensor:
        """Return float32 [N] (float64 for a float64 model): what transformers' model returns for each sample alone.
        Raises BadRequest, see `check_sequences`."""
        read = _with_one_more(batch.clamped(self._vocab_size))
        check_sequences(read, vocab_size=self._vocab_size)
        if not self._shared:
            return self._score_packed(read)
        # A rank without samples computes something anyway, to take part in the gathers.
        return over_ranks(read, lambda part: self._score_packed(part or read), count=lambda part: len(part.lengths_N))

    def _score_packed(self, read: Sequences) -> Tensor:
        inputs = PackedInputs.from_batch(read, self._device, shared_prompt=True)
        hidden_TD = self._model.base_model(
            input_ids=inputs.tokens_T.unsqueeze(0),
            position_ids=inputs.positions_T.unsqueeze(0),
            packed_layout=inputs.layout,
            use_cache=False,
        ).last_hidden_state[0]
        hidden_ND = hidden_TD[inputs.predictors_A[self._last_tokens(inputs, read)]]
        reshard(self._model.base_model)
        score_N1: Tensor = self._model.score(hidden_ND.to(self._exact))
        return score_N1.squeeze(-1)

    def _last_tokens(self, inputs: PackedInputs, read: Sequences) -> Tensor:
        """Return int64 [N]: the place in `predictors_A` of each sample's last token that is not padding."""
        # Search behind the prompt; if there is nothing but padding, the prompt's last token counts.
        responses_N = (read.lengths_N - read.prompt_lengths).long()
        ends_N = responses_N.cumsum(0)
        if self._padding is None:
            return (ends_N - 1).to(self._device)
        tokens_A = inputs.tokens_T[inputs.predictors_A].cpu()
        sample_A = torch.arange(len(responses_N)).repeat_interleave(responses_N)
        place_A = torch.arange(len(tokens_A)).masked_fill(tokens_A == self._padding, -1)
        last_N = (ends_N - responses_N).scatter_reduce(0, sample_A, place_A, "amax")
        return last_N.to(self._device)


def _with_one_more(batch: Sequences) -> Sequences:
    """Append a token to each sample, and have everything after the prompt predicted."""
    # `PackedInputs` leaves out each sample's last token, which predicts nothing but is the one to score.
    sample_T = torch.arange(len(batch.lengths_N)).repeat_interleave(batch.lengths_N)
    longer_T = torch.zeros(len(batch.tokens_T) + len(batch.lengths_N), dtype=torch.int64)
    longer_T[torch.arange(len(batch.tokens_T)) + sample_T] = batch.tokens_T.cpu().long()
    rest_N = batch.lengths_N + 1 - batch.prompt_lengths
    parts_V = torch.stack([batch.prompt_lengths, rest_N], dim=1).flatten()
    mask_T = torch.tensor([0, 1], dtype=torch.uint8).repeat(len(rest_N)).repeat_interleave(parts_V)
    return Sequences(longer_T, batch.lengths_N + 1, mask_T)
