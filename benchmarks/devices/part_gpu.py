"""A trainer's micro-batch on a real GPU: how far it is from the card's peak, and what each choice brings."""

import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from asyncflow import vendors
from benchmarks.devices.whole_logits import VOCABULARY
from benchmarks.end_to_end.training_case import loss, median_seconds
from launcher.doctor.device_check import default_group
from workers.engines.fsdp.sharding import FsdpEngine
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig

SHAPES = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
"""Of Qwen2.5's models."""
GROUPS, SAMPLES, PROMPT, RESPONSE, SHORTER = 2, 8, 512, 768, 37
PASSES = 3
PEAK = 989e12
"""Dense bfloat16 FLOP/s of an H100 or H200 SXM, by their data sheet."""


def run(*, rounds: int, **_: int) -> dict[str, float]:
    """Return the figures; none without a CUDA device."""
    if not torch.cuda.is_available():
        print("part gpu: skipped, there is no CUDA device", file=sys.stderr)
        return {}
    figures: dict[str, float] = {}
    for size, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as place, default_group(torch.device("cuda:0")):
            write_model(Path(place), shape)
            plain, compiled = (_engine(Path(place), compile=compile) for compile in (False, True))
            ways = {
                "rounded": partial(_passes, plain, unrounded=False),
                "unrounded": partial(_passes, plain, unrounded=True),
                "compiled": partial(_passes, compiled, unrounded=True),
            }
            seconds = median_seconds(ways, rounds)
            figures |= {
                f"gpu_{size}_unrounded_x": seconds["rounded"] / seconds["unrounded"],
                f"gpu_{size}_compiled_x": seconds["unrounded"] / seconds["compiled"],
                f"gpu_{size}_mfu": PASSES * flops(shape) / seconds["compiled"] / PEAK,
                f"gpu_{size}_waits": float(_waits(plain)),
            }
            del plain, compiled, ways
            torch.cuda.empty_cache()
    return figures


def write_model(path: Path, shape: dict[str, int]) -> None:
    """Write a model with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    given: Any = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "tie_word_embeddings": True, **shape}
    with torch.device("cuda"):
        Qwen2ForCausalLM(Qwen2Config(**given)).bfloat16().save_pretrained(path)


def lengths() -> list[int]:
    """Return the tokens of each response."""
    return [RESPONSE - SHORTER * number for number in range(SAMPLES)] * GROUPS


def flops(shape: dict[str, int]) -> float:
    """Return the floating point operations of a micro-batch, forwards and backwards, recomputed logits not counted.

    6 for each weight and token that passes it (a shared prompt passes once, only drawn tokens pass the head), and 12
    for each layer, width and visible pair of tokens.
    """
    hidden, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    kept = 2 * hidden // shape["num_attention_heads"]  # of each key and value
    layer = 2 * hidden * hidden + 2 * hidden * kept + 3 * hidden * inner
    drawn = sum(lengths())
    tokens = drawn + GROUPS * PROMPT
    pairs = sum(size * (PROMPT + size / 2) for size in lengths()) + GROUPS * PROMPT**2 / 2
    return 6 * (tokens * layers * layer + drawn * hidden * VOCABULARY) + 12 * layers * hidden * pairs


def _engine(path: Path, *, compile: bool) -> FsdpEngine:
    actor = ActorConfig.model_validate({"autocast": "bfloat16", "compile": compile})
    return FsdpEngine(path, actor=actor, temperature=1.0, device=torch.device("cuda:0"), seed=0)


def _batch() -> Sequences:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, VOCABULARY, (GROUPS, PROMPT), generator=generator)
    responses = [torch.randint(3, VOCABULARY, (size,), generator=generator) for size in lengths()]
    return Sequences.from_turns([prompt for prompt in prompts for _ in range(SAMPLES)], responses)


def _pass(engine: FsdpEngine) -> None:
    engine.forward_backward(_batch(), loss)


@contextmanager
def _rounding(unrounded: bool) -> Iterator[None]:
    record = replace(vendors.vendor_of("cuda"), has_float32_products=unrounded)
    with mock.patch("workers.engines.packed_forward.vendor_of", return_value=record):
        yield


def _passes(engine: FsdpEngine, *, unrounded: bool) -> None:
    """Compute the gradients of some micro-batches, and wait for them."""
    with _rounding(unrounded):
        for _ in range(PASSES):
            _pass(engine)
        torch.cuda.synchronize()
    engine.zero_grad()


def _waits(engine: FsdpEngine) -> int:
    """Return how often the host waits for the device in a micro-batch."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _pass(engine)
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in seen)
