"""`shared_prompt_x`: forward-backward of a group, response by response, against once with the prompt shared.

Prompt of 512 tokens, 8 responses of 32. The same engine, weights and loss; gradients are equal (tests/unit/engines).
For every shape "P+RxK" (prompt, response, responses) there are also

    shared_prompt_x P+RxK          the same ratio
    shared_prompt_packed_x P+RxK   against all responses in one micro-batch, each with its own copy of the prompt
    shared_prompt_tokens_x P+RxK   by counting the tokens that linear layers compute: K (P + R) / (P + K R)
    shared_prompt_pairs_x P+RxK    by counting query-key pairs of attention: K (P + R)^2 / (P^2 + K R (P + R)), the
                                   reciprocal of (15) in arXiv 2511.18871

The model has SmolLM2-135M's widths and random weights, see `training_case.py`; `--model` is not used.
"""

import sys
import time
from collections.abc import Callable

import torch

from benchmarks.end_to_end.runs import Lab
from benchmarks.end_to_end.training_case import (
    VOCABULARY,
    loss,
    median_seconds,
    open_engine,
    process_group,
    save_model,
)
from workers.engines.fsdp.sharding import FsdpEngine
from workers.rows.packed_rows import Sequences

SHAPE = (512, 32, 8)
SHAPES = (SHAPE, (512, 32, 4), (512, 128, 8), (128, 128, 8), (64, 256, 8), (1024, 32, 8))
"""Prompt tokens, response tokens, responses of a group."""


def run(lab: Lab) -> dict[str, float]:
    """Measure every shape."""
    torch.set_num_threads(lab.threads)
    figures: dict[str, float] = {}
    with process_group():
        model_dir = save_model(lab.directory)
        alone, shared = (open_engine(model_dir, shared_prompt=share) for share in (False, True))
        for shape in SHAPES:
            ratios = _ratios(alone, shared, shape, lab.rounds)
            name = f"{shape[0]}+{shape[1]}x{shape[2]}"
            print(name, {key: round(value, 2) for key, value in ratios.items()}, file=sys.stderr, flush=True)
            figures |= {f"{key} {name}": value for key, value in ratios.items()}
    return {"shared_prompt_x": figures[f"shared_prompt_x {SHAPE[0]}+{SHAPE[1]}x{SHAPE[2]}"], **figures}


def _ratios(alone: FsdpEngine, shared: FsdpEngine, shape: tuple[int, int, int], rounds: int) -> dict[str, float]:
    prompt, response, count = shape
    seconds = seconds_of_ways(alone, shared, shape, rounds)
    return {
        "shared_prompt_x": seconds["per_sample"] / seconds["shared"],
        "shared_prompt_packed_x": seconds["packed"] / seconds["shared"],
        "shared_prompt_tokens_x": counted_x(shape),
        "shared_prompt_pairs_x": count
        * (prompt + response) ** 2
        / (prompt**2 + count * response * (prompt + response)),
    }


def counted_x(shape: tuple[int, int, int]) -> float:
    """Return how many times as many tokens linear layers compute without sharing; `shape`: (P, R, K)."""
    prompt, response, count = shape
    return count * (prompt + response) / (prompt + count * response)


def seconds_of_ways(
    alone: FsdpEngine,
    shared: FsdpEngine,
    shape: tuple[int, int, int],
    rounds: int,
    *,
    seed: int = 1,
    packed: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median seconds of forward and backward: `per_sample`, `packed`, `shared`.

    Args:
        alone, shared: engines that compute a prompt for each response, and once.
        shape: (P, R, K).
        rounds: that count; one more comes first.
        seed: of the tokens.
        packed: whether to take that way, too: one micro-batch, in which each response has its own copy of the prompt.
        clock: returns seconds.
    """
    prompt, response, count = shape
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (prompt,), generator=chance)
    responses = [torch.randint(0, VOCABULARY, (response,), generator=chance) for _ in range(count)]

    def per_sample() -> None:
        for each in responses:
            alone.forward_backward(Sequences.from_turns([tokens], [each]), loss)
        alone.zero_grad()

    def together(engine: FsdpEngine) -> None:
        engine.forward_backward(Sequences.from_turns([tokens] * count, responses), loss)
        engine.zero_grad()

    ways = {"per_sample": per_sample, "shared": lambda: together(shared)}
    return median_seconds(ways | ({"packed": lambda: together(alone)} if packed else {}), rounds, clock)
