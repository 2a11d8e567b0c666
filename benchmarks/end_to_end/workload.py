"""What both sides train on: the same prompts, responses and optimizer updates."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_PROMPTS = 64
RESPONSES, TOKENS = 8, 32
"""Responses to a prompt, of at most so many tokens; one prompt an update."""
STALENESS = 2
"""Of our data, at most (steps): three prompts' responses are decoded together, which costs little more than one's."""


@dataclass(frozen=True)
class Workload:
    """Attributes:
    model: Hugging Face directory.
    prompts: JSONL file.
    dtype: `float32` or `bfloat16`.
    steps: optimizer updates.
    threads: that each side may compute with at a time, in all its processes.
    """

    model: Path
    prompts: Path
    dtype: str
    steps: int
    threads: int


def write_prompts(path: Path) -> None:
    """Write sums of two numbers up to 20, the same every time."""
    chance = random.Random(0)
    pairs = [(chance.randint(1, 20), chance.randint(1, 20)) for _ in range(NUM_PROMPTS)]
    lines = [json.dumps({"prompt": f"What is {a}+{b}?", "answer": str(a + b)}) for a, b in pairs]
    path.write_text("\n".join(lines) + "\n")


def our_config(workload: Workload, *, engine: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run that does what the peer does.

    Args:
        workload: to run.
        engine: that generates.
        settings: `section.name` -> value, over the rest.
    """
    config: dict[str, Any] = {
        "name": "end-to-end",
        "steps": workload.steps,
        "roles": {"rollout": 1, "actor": 1},
        "model": {"path": str(workload.model), "dtype": workload.dtype},
        "data": {"path": str(workload.prompts), "chat_template": True, "max_prompt_tokens": 96},
        "reward": {"function": "math"},
        "schedule": {
            "mode": "async", "max_staleness": STALENESS, "rollout_batch_size": 1, "n_samples_per_prompt": RESPONSES,
        },
        "rollout": {
            "engine": engine, "on_swap": "keep", "batch_size": (STALENESS + 1) * RESPONSES,
            "max_response_tokens": TOKENS, "samples_per_step": 0,
        },
        "algorithm": {"kl_coef": 0.0},
        "actor": {"micro_batch_size": RESPONSES, "lr": 1e-6, "autocast": workload.dtype},
        "checkpoint": {"interval": 0, "export_hf": False},
        "launcher": {"threads_per_worker": max(1, workload.threads // 2)},  # generation and training share them
    }  # fmt: skip
    for name, value in settings.items():
        section, _, key = name.partition(".")
        config[section][key] = value
    return config
