"""Steps of several optimizer updates: the old policy in the actor or in a role of its own, a stop in between."""

import math
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from launcher.config.paths import find_recipe

from . import command

UPDATES = ("--set", "actor.num_mini_batches=2", "--set", "actor.ppo_epochs=2", "--set", "actor.micro_batch_size=16")
SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=0", "--steps", "4")
QUICKSTART = find_recipe("quickstart").parent / "quickstart"


@pytest.mark.parametrize("roles", ["rollout:1,actor:2", "rollout:1,actor:1,actor_fwd:1"])
def test_the_old_policy_is_the_one_that_the_step_found(tmp_path: Path, roles: str) -> None:
    finished = command.run("--run-dir", "run", "--roles", roles, *SMALL, *UPDATES, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    metrics = command.lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert all(line["num_updates"] == 4 and line["samples"] == 128 for line in metrics)
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in metrics)
    assert all(line["clip_fraction"] > 0 for line in metrics), "later updates are off the policy that the step found"
    for line in metrics:  # on-policy, what training computes of the old policy is what generation did
        assert (line["old_policy_kl"] < 1e-8) == (line["staleness_max"] == 0)
    assert metrics[0]["staleness_max"] == 0 < metrics[-1]["staleness_max"]
    command.check_ledger(tmp_path / "run", groups_per_step=8, last=4)


def test_a_stop_between_updates_finishes_the_step(tmp_path: Path) -> None:
    """The sleeping engine's weights count updates, so half a step would be seen in them."""
    recipe = {
        "steps": 1000,
        "roles": {"rollout": 1, "actor": 2},
        "model": {"path": str(QUICKSTART / "model")},
        "data": {"path": str(QUICKSTART / "train.jsonl"), "max_prompt_tokens": 8},
        "schedule": {"mode": "async", "max_staleness": 1, "rollout_batch_size": 8, "n_samples_per_prompt": 1},
        "rollout": {"engine": "sim", "batch_size": 8, "max_response_tokens": 64, "samples_per_step": 0},
        "actor": {"engine": "sim", "micro_batch_size": 2, "num_mini_batches": 2, "ppo_epochs": 2},
        "checkpoint": {"interval": 0},
        "sim": {"lengths": "constant", "mean_tokens": 20, "decode_s_per_token": 0.001, "train_s_per_token": 0.01},
    }  # a step has four updates of some 0.4 s, and its rows are there long before
    (tmp_path / "sim.yaml").write_text(yaml.safe_dump(recipe))
    run_dir = tmp_path / "run"
    with command.started("sim.yaml", "--run-dir", "run", cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 2, "step 2")
        command.wait_until(lambda: _updates(run_dir, 3) >= 1, "the first update of step 3")
        process.terminate()
        _, err = process.communicate(timeout=command.DEADLINE_S)
        assert process.returncode == 75, err
    last = command.last_step(run_dir)
    assert last >= 3, "from the first update on, a step is finished"
    _check_whole_steps(run_dir, last)
    resumed = command.run("--resume", "latest", "--run-dir", "run", "--steps", str(last + 2), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    _check_whole_steps(run_dir, last + 2)


def _updates(run_dir: Path, step: int) -> int:
    spans = command.lines(run_dir / "timeline" / "actor-0.jsonl")
    return sum(1 for span in spans if span["name"] == "optimizer" and span["step"] == step)


def _check_whole_steps(run_dir: Path, last: int) -> None:
    (checkpoint,) = (run_dir / "checkpoints").glob(f"step_{last:06d}")
    values = load_file(checkpoint / "hf" / "model.safetensors")
    assert float(values["sim.layers.0.weight"][0, 0]) == 4 * last
    command.check_ledger(run_dir, groups_per_step=8, last=last)
