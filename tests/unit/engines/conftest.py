"""Tiny random models in temporary directories, and batches for them."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from asyncflow.testing.generating import one_thread as one_thread
from asyncflow.testing.training import save_tiny_model
from workers.rows.packed_rows import Sequences

sys.path.append(str(Path(__file__).parent))  # tests import `test_trainer` by name; behind other conftests


@pytest.fixture
def make_model_dir(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that saves a random model of two layers; `eos` is token 1."""

    def make(family: str = "qwen2", *, seed: int = 0, **changes: object) -> Path:
        path = tmp_path / f"{family}-{seed}-{'-'.join(changes)}"
        return save_tiny_model(path, family, seed=seed, changes={"tie_word_embeddings": False} | changes)

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
    """Five samples; two of one length, one with an empty response."""
    generator = torch.Generator().manual_seed(3)
    prompts, responses = [3, 2, 5, 1, 4], [4, 5, 1, 6, 0]
    parts = [size for pair in zip(prompts, responses, strict=True) for size in pair]
    tokens = torch.randint(2, 13, (sum(parts),), generator=generator).split(parts)
    return Sequences.from_turns(tokens[::2], tokens[1::2])


@pytest.fixture
def groups() -> Sequences:
    """Two prompts with four responses each, mixed, of 0 to 5 tokens, and one sample alone, in between."""
    generator = torch.Generator().manual_seed(4)
    first, second, alone = (torch.randint(2, 13, (n,), generator=generator) for n in (5, 3, 4))
    prompts = [first, second, first, alone, second, first, second, first, second]
    responses = [torch.randint(2, 13, (n,), generator=generator) for n in (3, 1, 5, 3, 0, 3, 4, 1, 2)]
    return Sequences.from_turns(prompts, responses)


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
    whole = Sequences.from_turns(begins, rest)
    return Sequences(whole.tokens_T, whole.lengths_N, mask.to(torch.uint8))
