"""A model of random weights that is trained for a moment, to compare what it takes with the estimate of device memory.

It has the proportions that matter: the head's tiles are full, and activations weigh as much as the state. Called by
`launcher.doctor.device_check` and by the project's tests.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.engines.device_memory import ModelSizes, Parts, fsdp_memory

if TYPE_CHECKING:
    import torch

    from workers.rows.rows import Sequences

SAMPLES, PROMPT, RESPONSE = 24, 16, 72
TOKENS = SAMPLES * (PROMPT + RESPONSE)
"""Of a micro-batch."""
_LARGE = 4
"""Factor on the widths of the model for a real device."""


def write_model(path: Path, *, large: bool = False) -> ModelSizes:
    """Write a Hugging Face directory of some 15 million parameters, or 150; returns its sizes."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    factor = _LARGE if large else 1
    config = Qwen2Config(
        vocab_size=24576, hidden_size=256 * factor, intermediate_size=1024 * factor, num_hidden_layers=8,
        num_attention_heads=4 * factor, num_key_value_heads=2 * factor, tie_word_embeddings=True, eos_token_id=1,
        max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sizes = ModelSizes.of(json.loads((path / "config.json").read_text()), parameters)
    assert sizes is not None
    return sizes


def random_batch() -> "Sequences":
    """Return a micro-batch of `TOKENS` tokens."""
    import torch

    from workers.rows.rows import Sequences

    tokens_NT = torch.randint(2, 1000, (SAMPLES, PROMPT + RESPONSE))
    return Sequences.of(list(tokens_NT[:, :PROMPT]), list(tokens_NT[:, PROMPT:]))


def train(path: Path, sizes: ModelSizes, device: "torch.device", num_ranks: int, **settings: Any) -> Parts:
    """Make two updates of two micro-batches each; returns the estimate. The default group exists.

    Args:
        path, sizes: of `write_model`.
        device: of this rank.
        num_ranks: of the default group.
        settings: of `actor`.
    """
    from workers.engines.fsdp.engine import FsdpEngine
    from workers.settings.engines import ActorConfig

    actor = ActorConfig.model_validate(settings)
    engine = FsdpEngine(path, actor=actor, temperature=1.0, device=device, seed=0)
    for _ in range(2):
        for _ in range(2):
            engine.forward_backward(random_batch(), lambda log_probs, entropy: (log_probs - entropy.detach()).sum())
        engine.step(0.001)
    return fsdp_memory(sizes, actor, num_ranks, TOKENS)
