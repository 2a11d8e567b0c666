"""The reference policy: a frozen copy of the initial model, loaded once from its directory.

Called by the `ref` role, or by the actor that hosts it. Never trained, never synchronised.
"""

from pathlib import Path

import torch
from torch import Tensor

from workers.config import ModelConfig
from workers.engines.base import Sequences
from workers.engines.hf_model import DTYPES, empty_causal_lm, materialize, parameter_aliases
from workers.engines.hf_weights import HfWeights
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import PackedInputs, answer_log_probs


class FrozenModel:
    """Computes log-probabilities of answers, without gradient."""

    def __init__(self, model_dir: Path, config: ModelConfig, *, temperature: float, device: torch.device) -> None:
        """Load the weights in `config.dtype`.

        Args:
            model_dir: Hugging Face directory.
            config: of the model.
            temperature: divides the logits, as in rollout and training.
            device: where it computes.
        Raises:
            ConfigError: the directory does not hold the model that its config.json describes.
        """
        self._temperature = temperature
        self._device = device
        weights = HfWeights(model_dir)
        self._model = empty_causal_lm(model_dir, dtype=DTYPES[config.dtype], attention=PACKED_ATTENTION)
        aliases = parameter_aliases(self._model)
        materialize(self._model, device)
        self._model.requires_grad_(False)
        for name, parameter in self._model.named_parameters():
            parameter.copy_(weights.read(weights.find(name, aliases[name]), tuple(parameter.shape)))

    @torch.no_grad()
    def log_probs(self, batch: Sequences) -> Tensor:
        """Return float32 [A]: log-probabilities of the answers' tokens under the tempered distribution."""
        inputs = PackedInputs.of(batch, self._device)
        return answer_log_probs(self._model, inputs, self._temperature)[0]
