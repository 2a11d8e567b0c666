"""A run whose actor keeps reference and older policies, and cuts micro-batches by tokens."""

from pathlib import Path

from . import command

TRI = ("--set", "actor.tri_model=true", "--set", "algorithm.kl_coef=0.1")
BY_TOKENS = ("--set", "actor.max_tokens_per_micro_batch=100", "--set", "actor.micro_batch_size=64")
SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=0", "--steps", "3")


def test_kl_begins_exact_and_moves_with_the_weights(tmp_path: Path) -> None:
    finished = command.run(
        "--run-dir", "run", "--roles", "rollout:1,actor:2", *SMALL, *TRI, *BY_TOKENS, cwd=tmp_path
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    first, *_, last = command.lines(tmp_path / "run" / "metrics.jsonl")
    assert (first["kl"], first["staleness_max"]) == (0.0, 0)
    assert first["behaviour_kl"] < 1e-8, "the generating engine rounds otherwise"
    assert last["kl"] > 0 and last["samples"] == 128
    assert (last["behaviour_kl"] > 1e-8) == (last["staleness_max"] > 0)
    command.check_ledger(tmp_path / "run", groups_per_step=8, last=3)


def test_a_role_for_the_reference_has_nothing_to_do(tmp_path: Path) -> None:
    refused = command.run("--dry-run", "--roles", "rollout:1,actor:1,ref:1", *TRI, cwd=tmp_path)
    assert refused.returncode == 2
    assert "roles: 'ref' has nothing to do: actor.tri_model" in refused.stderr
