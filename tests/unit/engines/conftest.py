"""Tiny random models in temporary directories, and batches for them."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from workers.engines.base import Sequences

sys.path.append(str(Path(__file__).parent))  # tests import `test_trainer` by name; behind other conftests

FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they give on models of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_model_dir(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that saves a random model of two layers; `eos` is token 1."""

    def make(family: str = "qwen2", *, seed: int = 0, **changes: object) -> Path:
        config_class, model_class = FAMILIES[family]
        settings = {
            "vocab_size": 13,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        torch.manual_seed(seed)
        model = model_class(config_class(**(settings | changes)))
        path = tmp_path / f"{family}-{seed}-{'-'.join(changes)}"
        model.save_pretrained(path)
        return path

    return make


@pytest.fixture
def model_dir(make_model_dir: Callable[..., Path]) -> Path:
    return make_model_dir()


@pytest.fixture
def single_rank() -> Iterator[None]:
    """A default process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def batch() -> Sequences:
    """Five samples; two of one length, one with an empty answer."""
    generator = torch.Generator().manual_seed(3)
    prompts, answers = [3, 2, 5, 1, 4], [4, 5, 1, 6, 0]
    parts = [size for pair in zip(prompts, answers, strict=True) for size in pair]
    tokens = torch.randint(2, 13, (sum(parts),), generator=generator).split(parts)
    return Sequences.of(tokens[::2], tokens[1::2])


@pytest.fixture
def groups() -> Sequences:
    """Two prompts with four answers each, mixed, of 0 to 5 tokens, and one sample alone, in between."""
    generator = torch.Generator().manual_seed(4)
    first, second, alone = (torch.randint(2, 13, (n,), generator=generator) for n in (5, 3, 4))
    prompts = [first, second, first, alone, second, first, second, first, second]
    answers = [torch.randint(2, 13, (n,), generator=generator) for n in (3, 1, 5, 3, 0, 3, 4, 1, 2)]
    return Sequences.of(prompts, answers)


@pytest.fixture
def turns() -> Sequences:
    """Conversations: two begin alike and go on otherwise, one of them with an observation last; one has no drawn token,
    one begins like it; one is alone."""
    generator = torch.Generator().manual_seed(5)
    first, second = (torch.randint(2, 13, (n,), generator=generator) for n in (3, 2))
    begins = (first, second, first, second, torch.tensor([7]))
    masks = ([1, 1, 0, 0, 1], [0, 0, 0], [1, 0, 1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1])
    rest = [torch.randint(2, 13, (len(mask),), generator=generator) for mask in masks]
    mask = torch.tensor([one for begin, mask in zip(begins, masks, strict=True) for one in ([0] * len(begin) + mask)])
    whole = Sequences.of(begins, rest)
    return Sequences(whole.tokens_T, whole.lengths_N, mask.to(torch.uint8))
