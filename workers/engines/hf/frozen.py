"""A model that is not trained and computes log-probabilities, with whatever weights its role loads."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from weightsync.plan import Need
from workers.config import ModelConfig
from workers.engines.base import Sequences
from workers.engines.hf.model import (
    DTYPES,
    empty_causal_lm,
    materialize,
    read_weights,
    replace_weights,
    vocab_size,
    weight_needs,
)
from workers.engines.hf.weights import HfWeights, write_weights
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import InputsOfBatch, response_log_probs


class FrozenModel:
    """Computes log-probabilities of responses, without gradient."""

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        *,
        temperature: float,
        device: torch.device,
        weights_dir: Path | None = None,
        shared_prompt: bool = True,
    ) -> None:
        """Load the weights in `config.dtype`.

        Args:
            model_dir: Hugging Face directory.
            config: of the model.
            temperature: divides the logits, as in rollout and training.
            device: where it computes.
            weights_dir: directory of the safetensors; None: `model_dir`.
            shared_prompt: compute a prompt that several samples have in common once.

        Raises:
            ConfigError: the directory does not hold the model that its config.json describes.
        """
        self._temperature = temperature
        self._device = device
        weights = HfWeights(weights_dir or model_dir)
        self._model = empty_causal_lm(model_dir, dtype=DTYPES[config.dtype], attention=PACKED_ATTENTION)
        materialize(self._model, device)
        self._inputs = InputsOfBatch(device, vocab_size=vocab_size(self._model), shared_prompt=shared_prompt)
        self._model.requires_grad_(False)
        read_weights(self._model, weights)

    @property
    def adopts_weights(self) -> bool:
        """On the CPU, where weights in host memory can be used as they are."""
        return self._device.type == "cpu"

    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        """Replace all weights (the names of `weight_needs`); `adopt`: see `GenerateEngine`."""
        replace_weights(dict(self._model.named_parameters()), weights, adopt=adopt and self.adopts_weights)

    def read_weights(self, weights_dir: Path) -> None:
        """Replace all weights by those of safetensors.

        Raises:
            ConfigError: they are not all there.
        """
        read_weights(self._model, HfWeights(weights_dir))

    def weight_needs(self) -> Mapping[str, Need]:
        return weight_needs(self._model)

    def save_weights(self, target: Path) -> None:
        parameters = dict(self._model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        write_weights(target, shapes, lambda name: parameters[name].detach().cpu().contiguous())

    @torch.no_grad()
    def log_probs(self, batch: Sequences) -> Tensor:
        return response_log_probs(self._model, self._inputs(batch), self._temperature)[0]
