"""A whole run whose versions are adapters: it learns, is evaluated, and loses nothing to kills and a stop."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from . import command

ADAPTER = (
    "--roles", "rollout:2,actor:1,ref:1,evaluate:1", "--set", "lora={rank: 8, alpha: 16}", "--set", "actor.lr=0.005",
    "--set", "checkpoint.interval=5", "--set", "evaluate.interval=10", "--set", "schedule.rollout_batch_size=16",
    "--set", "schedule.mode=sync",  # every step compares the engines' log-probabilities
    "--set", "weightsync.export={every: 5}",
)  # fmt: skip


@pytest.mark.timeout(900)
def test_run_on_adapters_learns_over_kills_and_a_resume(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with command.started("--run-dir", "run", "--steps", "30", *ADAPTER, cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 6, "step 6")
        command.kill_gang(process.pid, run_dir, "rollout-0")
        command.wait_until(lambda: command.last_step(run_dir) >= 12, "step 12")
        command.kill_gang(process.pid, run_dir, "actor")
        _, err = process.communicate(timeout=4 * command.DEADLINE_S)
        assert process.returncode == 0, err
    done = command.run("--resume", "run", "--steps", "60", cwd=tmp_path, deadline_s=4 * command.DEADLINE_S)
    assert done.returncode == 0, done.stderr
    command.check_ledger(run_dir, groups_per_step=16, last=60)
    metrics = command.lines(run_dir / "metrics.jsonl")
    # Generators that lacked the adapter, or had another one, would be far beyond rounding.
    found = [line["rollout_log_prob_diff_max"] for line in metrics if line["rollout_log_prob_diff_max"] is not None]
    assert len(found) > 50 and max(found) < 1e-4
    accuracy = [line["accuracy"] for line in metrics]
    assert accuracy[0] < 0.5 and sum(accuracy[-5:]) / 5 > 0.85
    held_out = command.lines(run_dir / "evaluation.jsonl")
    assert held_out[-1]["step"] == 60 and held_out[-1]["accuracy"] > held_out[0]["accuracy"]
    exported = load_file(run_dir / "weights" / "latest" / "adapter_model.safetensors")
    assert exported and all(name.startswith("base_model.model.") for name in exported)
