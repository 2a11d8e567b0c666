"""Random models of two layers, and what they say in float64.

Legend of shapes: P prompt tokens, R response tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
}
EOS = 1
VOCABULARY = 13
MAX_POSITIONS = 64
"""Longest prompt and response of the models (tokens)."""


def save_tiny_model(path: Path, family: str, *, seed: int, changes: Mapping[str, Any]) -> Path:
    """Write a model whose responses are of very different lengths; returns its directory."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.3,
        "tie_word_embeddings": family == "llama",
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    model_class(config_class(**{**settings, **changes})).save_pretrained(path)
    return path


class Reference:
    """A model in float64, without cache, batch or padding."""

    def __init__(self, path: Path, *, temperature: float) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
        self._temperature = temperature

    @torch.no_grad()
    def log_probs(self, prompt_P: Tensor, response_R: Tensor) -> Tensor:
        """Return float64 [R]: log-probabilities of a response under the tempered distribution."""
        tokens = torch.cat([prompt_P, response_R])
        logits = self._model(tokens.unsqueeze(0)).logits[0, prompt_P.numel() - 1 : -1] / self._temperature
        picked: Tensor = logits.log_softmax(-1).gather(-1, response_R.unsqueeze(-1)).squeeze(-1)
        return picked
