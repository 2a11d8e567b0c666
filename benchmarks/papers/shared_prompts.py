"""Shared prompts: a group trained once with its prompt, against response by response (arXiv 2511.18871).

The model has SmolLM2-135M's widths and random weights (`benchmarks/end_to_end/training_case.py`); its engine is the
trainer's. Each shape is P prompt tokens, R response tokens, K responses that share a prompt:

    512, 32, 8      long prompts and short responses; all 30 layers
    209, 500, 16    six layers, so the head, of which sharing saves nothing, weighs too much. GSM8K's mean lengths with
                    Qwen2.5-7B-Instruct, and the sixteen responses of the paper's micro-batch. The paper gives trained
                    tokens with and without sharing; with 32 prompts of 32 responses a step, which it does not give for
                    this row, these lengths follow. R / P does not depend on that

A whole step also generates the responses and updates the weights, in turn, in one process with one thread.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks import say_when
from benchmarks.end_to_end.part_shared_prompt import counted_x, seconds_of_ways
from benchmarks.end_to_end.training_case import VOCABULARY, loss, open_engine, process_group, save_model
from benchmarks.intervals import mean_of
from benchmarks.papers.found import Found, Given, draw_bars
from workers.engines.base import GenerateRequest, generate
from workers.engines.fsdp.sharding import FsdpEngine
from workers.engines.hf.engine import HfEngine
from workers.engines.hf.weights import HfWeights
from workers.rows.packed_rows import Sequences
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Shape = tuple[int, int, int]
_SHAPES: dict[str, Shape] = {"": (512, 32, 8), "_gsm8k": (209, 500, 16)}
"""Ending of the keys -> P, R, K."""
_LAYERS = {"": 30, "_gsm8k": 6}
_ROUNDS = 1
"""Measured rounds, a minute each; one more warms up first."""
_CPU = torch.device("cpu")
_CLOCK = time.process_time
"""Of one thread, so other work on the machine does not count."""


def shared_prompts(given: Given) -> Found:
    """The trainer's gain of shared prompts over its count, and a whole step's gain."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in _SHAPES}
    with process_group():
        for name, shape in _SHAPES.items():
            model_dir = save_model(given.directory, _LAYERS[name])
            alone, shared = (open_engine(model_dir, shared_prompt=share) for share in (False, True))
            generator = _Generator(model_dir, shape[1])
            for seed in range(given.seeds):
                seconds = seconds_of_ways(alone, shared, shape, _ROUNDS, seed=seed, packed=False, clock=_CLOCK)
                others_s = generator.generate_s(shape, seed) + _update_s(shared)
                alone_s, shared_s = seconds["per_sample"], seconds["shared"]
                own = {
                    "x": alone_s / shared_s,
                    "of_count": alone_s / shared_s / counted_x(shape),
                    "step_x": (alone_s + others_s) / (shared_s + others_s),
                    "train_share": alone_s / (alone_s + others_s),
                }
                for key, value in own.items():
                    found[name].setdefault(key, []).append(value)
                say_when(f"seed {seed} {shape}: {own['of_count']:.3f} of the count, step {own['step_x']:.2f}x")
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    for name, (prompt, response, count) in _SHAPES.items():
        gains = {key: mean_of(values) for key, values in found[name].items()}
        counted = counted_x((prompt, response, count))
        texts = (gains["x"].text(2), f"{counted:.2f}", gains["of_count"].text(3), gains["step_x"].text(2))
        rows.append([f"{prompt}, {response}, {count}", *texts, f"{gains['train_share'].value:.2f}"])
        figures |= {
            f"shared_prompt_of_count{name}": gains["of_count"].value,
            f"shared_prompt_of_count_interval{name}": gains["of_count"].half_width,
            f"shared_prompt_x{name}": gains["x"].value, f"shared_prompt_tokens_x{name}": counted,
            f"shared_prompt_step_x{name}": gains["step_x"].value,
        }  # fmt: skip
    columns = (
        "P, R, K",
        "training part",
        "count K(P + R) / (P + K R)",
        "of the count",
        "whole step",
        "training's share",
    )
    title = f"Shared prompts: {given.seeds} seeds, mean and 95 % interval"
    return Found(title, columns, rows, figures, partial(_draw, list(_SHAPES.values()), found), (7.5, 4.2))


class _Generator:
    """Draws responses with the `hf` engine, which computes a group's prompt once."""

    def __init__(self, model_dir: Path, longest: int) -> None:
        sampling = SamplingConfig(engine="hf", batch_size=32, max_response_tokens=longest, temperature=1.0)
        self._engine = HfEngine(model_dir, ModelConfig(path=str(model_dir)), sampling=sampling, device=_CPU)
        weights, needs = HfWeights(model_dir), self._engine.weight_needs()
        self._engine.load_weights(
            {name: weights.read_rows(name, need.shape, 0, need.shape[0]) for name, need in needs.items()}
        )

    def generate_s(self, shape: Shape, seed: int) -> float:
        """Return how long a group's responses take (s)."""
        prompt, response, count = shape
        tokens = torch.randint(0, VOCABULARY, (prompt,), generator=torch.Generator().manual_seed(seed))
        asked = [GenerateRequest(k, tokens, seed=seed * count + k, ticket=k, max_tokens=response) for k in range(count)]
        began = _CLOCK()
        for _ in generate(self._engine, asked):
            pass
        return _CLOCK() - began


def _update_s(engine: FsdpEngine) -> float:
    """Return how long an update takes once gradients are there (s)."""
    tokens = torch.zeros(4, dtype=torch.int64)
    engine.forward_backward(Sequences.from_turns([tokens], [tokens]), loss)
    began = _CLOCK()
    engine.step(1.0)
    return _CLOCK() - began


def _draw(shapes: Sequence[Shape], found: dict[str, dict[str, list[float]]], figure: "Figure") -> None:
    axis = figure.subplots()
    axis.plot(range(len(shapes)), [counted_x(shape) for shape in shapes], "k_", markersize=40, label="count")
    for number, (key, label) in enumerate({"x": "training part", "step_x": "whole step"}.items()):
        places = [place + 0.3 * (number - 0.5) for place in range(len(shapes))]
        draw_bars(axis, places, [of_shape[key] for of_shape in found.values()], width=0.28, label=label)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(shapes)), [f"P {p}, R {r}, K {k}" for p, r, k in shapes])
    axis.set(ylabel="times response by response")
    axis.legend(frameon=False)
