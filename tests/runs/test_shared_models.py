"""Runs whose reference, `actor_fwd` and reward model have several ranks each."""

import math
from pathlib import Path

import pytest

from . import command

pytestmark = pytest.mark.timeout(900)
SMALL = (
    "--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=0", "--set", "deterministic=true",
    "--set", "schedule.mode=periodic", "--set", "actor.ppo_epochs=2", "--set", "algorithm.kl_coef=0.1",
    "--steps", "3",
)  # fmt: skip
FIGURES = ("kl", "loss", "grad_norm", "reward_mean", "old_policy_kl")


def figures(cwd: Path, name: str, ranks: int, *settings: str) -> list[list[float]]:
    roles = ("--roles", f"rollout:1,actor:1,ref:{ranks},actor_fwd:{ranks},reward:{ranks}")
    options = [word for setting in settings for word in ("--set", setting)]
    done = command.run(
        "quickstart-reward-model-cpu", "--run-dir", name, *roles, *SMALL, *options, cwd=cwd, deadline_s=400
    )
    assert done.returncode == 0, done.stderr
    return [[line[figure] for figure in FIGURES] for line in command.lines(cwd / name / "metrics.jsonl")]


def test_a_run_with_shared_models_is_that_of_whole_ones(tmp_path: Path) -> None:
    whole = figures(tmp_path, "whole", 1)
    shared = figures(tmp_path, "shared", 2, "ref.engine=fsdp", "ref.shards=2", "reward.model.shards=2")
    again = figures(
        tmp_path, "again", 2, "ref.engine=fsdp", "ref.shards=2", "reward.model.shards=2", "tq.replica_fetch=each"
    )
    by_device = figures(
        tmp_path, "device", 2, "ref.engine=fsdp", "ref.shards=2", "reward.model.shards=2", "tq.replica_broadcast=device"
    )
    for found in (shared, again, by_device):
        assert len(whole) == len(found) == 3
        for one, other in zip(whole, found, strict=True):
            assert all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in zip(one, other, strict=True)), (
                one,
                other,
            )


def test_ranks_of_shared_models_receive_broadcasts_and_the_run_is_that_of_whole_ones(tmp_path: Path) -> None:
    follows = "algorithm.ref_update_interval=2"  # the reference of step 3 is the policy after step 2
    whole = figures(tmp_path, "whole", 1, follows)
    shared = figures(
        tmp_path, "shared", 2, "ref.engine=fsdp", "ref.shards=2", "reward.model.shards=2", follows,
        "weightsync.path=broadcast", "weightsync.timeout_s=120",
    )  # fmt: skip
    for one, other in zip(whole, shared, strict=True):
        assert all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in zip(one, other, strict=True))
    for rank in (f"{gang}-0-{rank}" for gang in ("actor_fwd", "ref") for rank in range(2)):
        spans = command.lines(tmp_path / "shared" / "timeline" / f"{rank}.jsonl")
        assert 2 in [span.get("version") for span in spans if span.get("name") == "receive weights"], rank
