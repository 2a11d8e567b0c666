"""The two ways of the packing benchmark do the same work."""

import torch
from end_to_end_parts.part_packed import _padded_loss
from transformers import LlamaConfig, LlamaForCausalLM

from workers.engines.base import Sequences
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import PackedInputs, answer_log_probs


def test_padded_loss_is_the_packed_one() -> None:
    config = LlamaConfig(
        vocab_size=13, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    prompts = [torch.randint(0, 13, (n,)) for n in (3, 6, 1)]
    answers = [torch.randint(0, 13, (n,)) for n in (5, 2, 4)]
    padded = _padded_loss(model, prompts, answers)
    model.set_attn_implementation(PACKED_ATTENTION)
    inputs = PackedInputs.of(Sequences.of(prompts, answers), torch.device("cpu"))
    torch.testing.assert_close(padded, -answer_log_probs(model, inputs, 1.0)[0].sum(), rtol=1e-5, atol=1e-5)
