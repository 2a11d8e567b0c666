"""A model of SmolLM2-135M's widths with random weights, and what parts that time training do with it.

Fewer layers than the real one: the time is spent in the same matrix products, and the head, which neither way of
packing changes, weighs more, so ratios are rather too small than too large.

Legend of shapes: A response tokens of a batch.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from workers.engines.fsdp.sharding import FsdpEngine
from workers.settings.engines import ActorConfig

VOCABULARY, LAYERS = 49152, 6


def save_model(directory: Path, layers: int = LAYERS) -> Path:
    """Write the model once; returns its directory."""
    path = directory / f"training-model-{layers}"
    if not path.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_attention_heads=9,
            num_hidden_layers=layers, num_key_value_heads=3, tie_word_embeddings=True,
            max_position_embeddings=8192,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(path)
    return path


@contextmanager
def process_group() -> Iterator[None]:
    """A default process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def open_engine(model_dir: Path, *, shared_prompt: bool) -> FsdpEngine:
    """Return the training engine."""
    actor = ActorConfig(shared_prompt=shared_prompt)
    return FsdpEngine(model_dir, actor=actor, temperature=1.0, device=torch.device("cpu"), seed=0)


def loss(log_probs_A: Tensor, _entropy: Tensor) -> Tensor:
    """The policy gradient with advantage 1."""
    return -log_probs_A.sum()


def median_seconds(
    ways: Mapping[str, Callable[[], None]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Run all ways in turn, after one turn that does not count; returns each one's median (s)."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = clock()
            way()
            if number:
                times[name].append(clock() - began)
    return {name: median(values) for name, values in times.items()}
