"""`colocated_vs_separate_max_abs`: the same run, `sync` and `deterministic`, with `hf`, in both forms.

With 1 + 1 and with 2 + 2 ranks: the largest absolute difference between any two parameters at the end. Also compared is
what every group's responses were; a difference there is an error.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks import say_when
from benchmarks.chaos.launched_run import LaunchedRun, overrides

STEPS, SHORT_STEPS = 10, 3
_DEADLINE_S = 1800.0


def run(*, directory: Path, short: bool = False, **_: Any) -> dict[str, float]:
    """Train each form; compare."""
    steps, largest = SHORT_STEPS if short else STEPS, 0.0
    for ranks in (1,) if short else (1, 2):
        found = {}
        for name, roles in (("colocated", f"rollout+actor:{ranks}"), ("separate", f"rollout:{ranks},actor:{ranks}")):
            say_when(f"separate: {roles}")
            found[name] = train(directory / f"{name}-{ranks}", roles, steps)
        assert found["colocated"][1] == found["separate"][1], f"{ranks} ranks: other responses"
        largest = max(largest, max_abs(found["colocated"][0], found["separate"][0]))
    return {"colocated_vs_separate_max_abs": largest}


def train(run_dir: Path, roles: str, steps: int) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Return the parameters at the end, and the responses of every group."""
    settings = overrides(
        deterministic="true", schedule__mode="sync", algorithm__kl_coef=0.01, rollout__batch_size=128,
        checkpoint__interval=0,
    )  # fmt: skip
    with LaunchedRun(run_dir) as launched:
        launched.start("quickstart", "--roles", roles, "--steps", str(steps), *settings)
        launched.end_with(0, deadline_s=_DEADLINE_S)
        responses = sorted((line["step"], line["group"], line["token_hash"]) for line in launched.lines("ledger.jsonl"))
    return load_file(run_dir / "checkpoints" / f"step_{steps:06d}" / "hf" / "model.safetensors"), responses


def max_abs(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys(), "other parameters"
    return max(float((one[name] - other[name]).abs().max()) for name in one)
