"""Rewards that fail, in whole runs: what the user sees, what is left out, and when the run ends."""

import math
from pathlib import Path

import pytest

from . import command

SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=0", "--steps", "3")
SOMETIMES = """
import os

async def score(prompt, response, ground_truth):
    print("scored by", os.getpid())
    if len(response) == 1 and response != ground_truth:
        raise ValueError(f"no idea of {response!r}")
    return {"score": float(response == ground_truth), "short": float(len(response) < 3), "pred": response}
"""
LATER = """
import pathlib

def score(prompt, response, ground_truth):
    if response != ground_truth or pathlib.Path("now").exists():
        raise KeyError(response)
    pathlib.Path("now").touch()
    return 1.0
"""


ONLY_RIGHT = """
def score(response, ground_truth):
    if response != ground_truth:
        raise ValueError("wrong")
    return 1.0
"""


@pytest.mark.parametrize("roles", ["rollout:2,actor:1", "rollout:1,actor:1,reward:1,advantages:1"])
def test_responses_without_a_reward_are_counted_told_once_and_left_out(tmp_path: Path, roles: str) -> None:
    (tmp_path / "sometimes.py").write_text(SOMETIMES)
    function = ("--set", "reward.function=sometimes:score", "--set", "rollout.samples_per_step=8")
    function += ("--set", "reward.max_failed_share=1")
    finished = command.run("--run-dir", "run", "--roles", roles, *SMALL, *function, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    told = [line for line in finished.stdout.splitlines() if "warning: reward.function: sometimes:score raised" in line]
    assert len(told) == 1 and "ValueError: no idea of" in told[0] and "reward_failures" in told[0]
    metrics = command.lines(tmp_path / "run" / "metrics.jsonl")
    assert all(0 < line["reward_failures"] < line["samples"] for line in metrics)
    assert all(line["reward_mean"] == line["accuracy"] and math.isfinite(line["loss"]) for line in metrics)
    assert all(0 < line["reward/short_mean"] <= 1 and "reward/pred_mean" not in line for line in metrics)
    role = "reward" if "reward" in roles else "rollout"
    assert "scored by" in (tmp_path / "run" / "logs" / role / "0.log").read_text()


def test_a_step_in_which_every_reward_fails_ends_the_run_by_name(tmp_path: Path) -> None:
    (tmp_path / "later.py").write_text(LATER)  # fine when it is tried, broken from then on
    failed = command.run("--run-dir", "run", *SMALL, "--set", "reward.function=later:score", cwd=tmp_path)
    assert failed.returncode == 1
    last = failed.stderr.splitlines()[-1]
    assert (
        "UserCodeFailed: step 1: none of its responses could be scored; reward.function: later:score raised KeyError"
        in last
    )
    assert command.lines(tmp_path / "run" / "metrics.jsonl") == []
    assert (tmp_path / "run" / "updates.jsonl").read_text() == ""


def test_a_reward_that_raises_for_what_is_wrong_ends_the_run_and_what_was_trained_is_saved(tmp_path: Path) -> None:
    (tmp_path / "only_right.py").write_text(ONLY_RIGHT)
    function = ("--set", "reward.function=only_right:score", "--set", "reward.max_failed_share=0.1")
    failed = command.run("--run-dir", "run", *SMALL, *function, cwd=tmp_path)
    assert failed.returncode == 1
    last = failed.stderr.splitlines()[-1]
    assert (
        "responses could not be scored (reward.max_failed_share 0.1), so that what is left is not a fair sample" in last
    )
    assert "the last one: reward.function: only_right:score raised ValueError: wrong" in last
    steps = [line["step"] for line in command.lines(tmp_path / "run" / "metrics.jsonl")]
    saved = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")}
    assert saved == ({f"step_{steps[-1]:06d}"} if steps else set())
