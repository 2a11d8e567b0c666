"""Runs whose responses are scored by a reward model, in a role of its own."""

import math
import statistics
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import configs

from . import command

DEADLINE_S = 270
"""Of one run, also on a machine that others use."""
pytestmark = pytest.mark.timeout(900)
RECIPE = "quickstart-reward-model-cpu"
REWARD_DIR = Path(configs.__path__[0]) / "quickstart" / "reward_model"
SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "algorithm.kl_coef=0", "--set", "checkpoint.interval=0")
ROLES = ("--roles", "rollout:1,actor:1,reward:2")


@torch.no_grad()
def model_scores(texts: list[str]) -> list[float]:
    """What transformers says to each text, one after another."""
    model = AutoModelForSequenceClassification.from_pretrained(REWARD_DIR)
    tokenizer = AutoTokenizer.from_pretrained(REWARD_DIR)
    scores = {text: float(model(torch.tensor([tokenizer(text)["input_ids"]])).logits) for text in dict.fromkeys(texts)}
    return [scores[text] for text in texts]


def workers(launcher: int, run_dir: Path) -> dict[str, psutil.Process]:
    """Return the living workers of a run by their gangs."""
    named = {command.gang_of(one.pid, run_dir): one for one in command.descendants(launcher)}
    return {name: one for name, one in named.items() if name}


def test_reward_is_the_model_s_score_and_accuracy_the_function_s_word(tmp_path: Path) -> None:
    """Against a run that scores with the function alone: the first step's responses are the same."""
    one_step = (*SMALL, "--steps", "1")
    function = ("--roles", "rollout:1,actor:1", "--set", "reward.function=exact", "--set", "rollout.samples_per_step=8")
    plain = command.run("--run-dir", "plain", *one_step, *function, cwd=tmp_path, deadline_s=DEADLINE_S)
    assert plain.returncode == 0, plain.stderr
    mixed = ("--set", "reward.model.weight=0.5", "--set", "reward.model.function_weight=2")
    scored = command.run(RECIPE, "--run-dir", "model", *one_step, *ROLES, *mixed, cwd=tmp_path, deadline_s=DEADLINE_S)
    assert scored.returncode == 0, scored.stderr
    samples = command.lines(tmp_path / "plain" / "samples" / "rollout-0.jsonl")
    assert len(samples) == 128
    ends = ["" if sample["truncated"] else "<eos>" for sample in samples]
    texts = [sample["prompt"] + sample["response"] + end for sample, end in zip(samples, ends, strict=True)]
    pairs = zip(model_scores(texts), samples, strict=True)
    expected = [0.5 * score + 2 * sample["reward"] for score, sample in pairs]
    ((line,), (plain_line,)) = (command.lines(tmp_path / name / "metrics.jsonl") for name in ("model", "plain"))
    assert line["accuracy"] == plain_line["accuracy"] == plain_line["reward_mean"]
    assert line["reward_mean"] == pytest.approx(statistics.mean(expected), abs=1e-3)
    assert line["reward_std"] == pytest.approx(statistics.pstdev(expected), rel=1e-2)
    ranks = line["train_tokens_per_s"] / line["train_tokens_per_s_per_device"]
    assert math.isclose(ranks, 4, rel_tol=0.02)  # the rewards' ranks have a model each, so they count


def test_resumed_run_ends_with_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    exact = (RECIPE, *SMALL, *ROLES, "--set", "deterministic=true", "--set", "schedule.mode=periodic")
    for name, steps in (("whole", "4"), ("parts", "2")):
        done = command.run("--run-dir", name, "--steps", steps, *exact, cwd=tmp_path, deadline_s=DEADLINE_S)
        assert done.returncode == 0, done.stderr
    resumed = command.run("--resume", "parts", "--steps", "4", cwd=tmp_path, deadline_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr
    weights = [
        tmp_path / name / "checkpoints" / "step_000004" / "hf" / "model.safetensors" for name in ("whole", "parts")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    rewards = [
        [line["reward_mean"] for line in command.lines(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "parts")
    ]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 4
    command.check_ledger(tmp_path / "parts", groups_per_step=8, last=4)


def test_model_alone_teaches_the_task_though_its_only_rank_dies(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    roles = (
        "--roles",
        "rollout:1,actor:1,reward:1",
        "--set",
        "rollout.samples_per_step=0",
        "--set",
        "algorithm.kl_coef=0",
    )
    with command.started(RECIPE, "--run-dir", "run", *roles, "--steps", "16", cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 2, "step 2")
        before = workers(process.pid, run_dir)
        command.kill(before["reward-0"])
        command.wait_until(lambda: command.last_step(run_dir) >= 6, "step 6", deadline_s=DEADLINE_S)
        after = workers(process.pid, run_dir)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert "reward rank 0 failed: ended by SIGKILL; it starts again" in out
    assert {name for name, one in after.items() if before[name] != one} == {"reward-0"}
    accuracy = [line["accuracy"] for line in command.lines(run_dir / "metrics.jsonl")]
    assert accuracy[0] < 0.4
    assert sum(accuracy[-3:]) / 3 > accuracy[0] + 0.2
    command.check_ledger(run_dir, groups_per_step=32, last=16)
