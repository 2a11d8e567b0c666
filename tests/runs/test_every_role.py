"""Every role in processes of its own, in one run of PPO."""

from pathlib import Path

import pytest

from . import command

ROLES = "rollout:1,actor:1,critic:1,ref:1,actor_fwd:1,reward:1,advantages:1,evaluate:1"
# Roles of columns, or the critic: a task that each of them computes itself.
OWN = {
    "ref-0": "ref_log_probs", "actor_fwd-0": "actor_log_probs", "reward-0": "rewards",
    "advantages-0": "compute_advantages_and_returns", "critic": "values",
}  # fmt: skip
SMALL = (
    "--set", "schedule.rollout_batch_size=8", "--set", "rollout.batch_size=32", "--set", "actor.micro_batch_size=8",
    "--set", "critic.micro_batch_size=8", "--set", "evaluate.interval=2", "--set", "checkpoint.interval=2",
    "--set", "actor.ppo_epochs=2",
)  # fmt: skip


@pytest.mark.timeout(900)
def test_every_role_does_its_part_in_a_run_of_ppo(tmp_path: Path) -> None:
    arguments = ("quickstart-ppo-cpu", "--run-dir", "run", "--steps", "4", "--roles", ROLES, *SMALL)
    finished = command.run(*arguments, cwd=tmp_path, deadline_s=400)
    assert finished.returncode == 0, finished.stderr
    run_dir = tmp_path / "run"
    command.check_ledger(run_dir, groups_per_step=8, last=4)
    metrics = command.lines(run_dir / "metrics.jsonl")
    assert [line["num_updates"] for line in metrics] == [0, 2, 2, 2], "the critic learns first"
    assert all(line["critic_num_updates"] == 2 for line in metrics)
    assert metrics[-1]["kl"] != 0, "the reference was asked"
    spans = {
        role: {line.get("name") for line in command.lines(run_dir / "timeline" / f"{role}-0.jsonl")} for role in OWN
    }
    assert {role: name in spans[role] for role, name in OWN.items()} == dict.fromkeys(OWN, True), spans
    assert command.lines(run_dir / "evaluation.jsonl")[-1]["step"] == 4
    assert {path.name for path in (run_dir / "checkpoints" / "step_000004").iterdir()} >= {"critic", "dcp", "hf"}
