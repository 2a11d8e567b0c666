"""A critic over two Gloo ranks, one of which holds nothing of the head, is that of one rank; so after a resume."""

from pathlib import Path

import pytest
import torch
from rank_processes import run_script
from transformers import LlamaConfig, LlamaForCausalLM

SCRIPT = Path(__file__).with_name("critic_rank.py")
DEADLINE_S = 240


def run_ranks(root: Path, mode: str, num_ranks: int) -> tuple[int, torch.Tensor]:
    """Return how many updates the state counts, and the values of all responses."""
    run_script(SCRIPT, root, mode, num_ranks=num_ranks, deadline_s=DEADLINE_S)
    updates, values = torch.load(root / f"values-{mode}-{num_ranks}.pt")
    return updates, values


@pytest.mark.timeout(900)
def test_two_ranks_and_a_resume_on_one_give_the_values_of_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=13, hidden_size=30, intermediate_size=41, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    updates, expected = run_ranks(tmp_path, "train", 1)
    assert updates == 3 and float(expected.abs().min()) > 0
    for mode, num_ranks in (("train", 2), ("resume", 1)):
        count, values = run_ranks(tmp_path, mode, num_ranks)
        assert count == 3
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
