"""The four schedules with engines that sleep: every group once, in its step, within the staleness bound."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from launcher.recipes import find_recipe

from . import command

STEPS, SAMPLES = 6, 32
QUICKSTART = find_recipe("quickstart").parent / "quickstart"


def recipe(mode: str, max_staleness: int) -> dict[str, object]:
    """A step is some 0.4 s of work for each role."""
    return {
        "steps": STEPS,
        "roles": {"rollout": 2, "actor": 2, "ref": 1},
        "model": {"path": str(QUICKSTART / "model")},
        "data": {"path": str(QUICKSTART / "train.jsonl"), "max_prompt_tokens": 8},
        "schedule": {
            "mode": mode, "max_staleness": max_staleness, "rollout_batch_size": SAMPLES, "n_samples_per_prompt": 1,
        },
        "rollout": {"engine": "sim", "batch_size": 4, "max_response_tokens": 4096, "samples_per_step": 0},
        "actor": {"engine": "sim", "micro_batch_size": 4},
        "ref": {"engine": "sim", "micro_batch_size": 4},
        "algorithm": {"kl_coef": 0.001},
        "checkpoint": {"interval": 0, "export_hf": False},
        "sim": {
            "lengths": "lognormal", "sigma": 0.8, "mean_tokens": 100, "parameters": 10_000,
            "decode_s_per_token": 0.001, "ref_s_per_token": 0.00005, "train_s_per_token": 0.0002,
        },
    }  # fmt: skip


@pytest.mark.parametrize(("mode", "bound"), [("sync", 0), ("periodic", 0), ("async", 1), ("substep", 2)])
def test_every_group_is_trained_once_in_its_step_within_the_bound(tmp_path: Path, mode: str, bound: int) -> None:
    (tmp_path / "sim.yaml").write_text(yaml.safe_dump(recipe(mode, bound)))
    done = command.run("sim.yaml", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ledger = command.lines(tmp_path / "run" / "ledger.jsonl")
    assert Counter(line["group"] for line in ledger) == Counter(range(STEPS * SAMPLES))
    for line in ledger:
        assert line["step"] == line["group"] // SAMPLES + 1
        assert 0 <= line["staleness"] <= bound
        assert line["versions"][1] <= line["step"] - 1
    swapped_inside = [line for line in ledger if line["versions"][0] < line["versions"][1]]
    assert bool(swapped_inside) == (bound > 0), "answers go on over a swap"
