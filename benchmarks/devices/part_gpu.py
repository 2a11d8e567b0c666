"""A trainer's micro-batch on a real GPU: how far it is from the card's peak, and what each choice brings."""

import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from asyncflow import vendors
from launcher.doctor.device_check import default_group
from workers.engines.fsdp.sharding import FsdpEngine
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig

SHAPES = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
"""Of Qwen2.5's models."""
VOCABULARY, GROUPS, SAMPLES, PROMPT, RESPONSE, SHORTER = 151_936, 2, 8, 512, 768, 37
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
            ways = {"rounded": (plain, False), "unrounded": (plain, True), "compiled": (compiled, True)}
            seconds = _in_turn(ways, rounds)
            figures |= {
                f"gpu_{size}_unrounded_x": seconds["rounded"] / seconds["unrounded"],
                f"gpu_{size}_compiled_x": seconds["unrounded"] / seconds["compiled"],
                f"gpu_{size}_mfu": flops(shape) / seconds["compiled"] / PEAK,
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
    engine.forward_backward(_batch(), lambda log_probs, _: -log_probs.sum())


@contextmanager
def _rounding(unrounded: bool) -> Iterator[None]:
    record = replace(vendors.vendor_of("cuda"), has_float32_products=unrounded)
    with mock.patch("workers.engines.packed_forward.vendor_of", return_value=record):
        yield


def _in_turn(ways: dict[str, tuple[FsdpEngine, bool]], rounds: int) -> dict[str, float]:
    """Run each way in turn, after one turn that does not count; returns medians of three passes (s)."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, (engine, unrounded) in ways.items():
            with _rounding(unrounded):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(3):
                    _pass(engine)
                torch.cuda.synchronize()
            if number:
                times[name].append((time.perf_counter() - began) / 3)
            engine.zero_grad()
    return {name: median(values) for name, values in times.items()}


def _waits(engine: FsdpEngine) -> int:
    """Return how often the host waits for the device in a micro-batch."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _pass(engine)
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in seen)
