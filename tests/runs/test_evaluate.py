"""The role `evaluate`: held-out prompts while training goes on, which waits for nobody."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

import configs

from . import command

SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=0")
ROLES = "rollout:1,actor:1,evaluate:1"
EVALUATED = ("--run-dir", "run", "--roles", ROLES)
SLOW_REWARD = """
import threading
from workers.rewards.load_reward import digits_reward


def score(prompt: str, response: str, ground_truth: str) -> float:
    if (3 * int(prompt[0]) + int(prompt[2])) % 5 == 0:  # held out
        threading.Event().wait({seconds})
    return digits_reward(prompt, response, ground_truth).reward
"""


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of the evaluations; each version has one, and what is missing was told."""
    found = command.lines(run_dir / "evaluation.jsonl")
    steps = [line["step"] for line in found]
    assert len(steps) == len(set(steps))
    return found


def check_steps(run_dir: Path, due: list[int]) -> None:
    """All due versions were evaluated, but for those whose log says that newer ones came first; the last one always."""
    steps = {line["step"] for line in evaluations(run_dir)}
    logs = "".join(path.read_text() for path in (run_dir / "logs" / "evaluate").iterdir())
    told = [line for line in logs.splitlines() if "were replaced before they could be evaluated" in line]
    missing = [step for step in due if step not in steps]
    assert steps <= set(due)
    assert due[-1] in steps
    assert all(any(f"{step}" in line for line in told) for step in missing), (missing, told)


def test_held_out_prompts_are_evaluated_and_a_resumed_run_goes_on_with_it(tmp_path: Path) -> None:
    every_2 = ("--set", "evaluate.interval=2", "--set", "rollout.samples_per_step=2")
    first = command.run(*EVALUATED, "--steps", "6", *every_2, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    run_dir = tmp_path / "run"
    check_steps(run_dir, [0, 2, 4, 6])
    before = evaluations(run_dir)
    for line in before:
        assert (line["lineage"], line["num_prompts"], line["num_samples"]) == (0, 20, 20)
        assert 0 <= line["accuracy_low"] <= line["accuracy"] <= line["accuracy_high"] <= 1
    assert f"held-out accuracy: {before[-1]['accuracy']:.3f}" in first.stdout
    assert "held out, step 6/6" in first.stdout
    samples = command.lines(run_dir / "samples" / "evaluate-0.jsonl")
    assert all(line["version"] == line["step"] for line in samples)
    assert len(samples) == 2 * len(before)
    command.check_ledger(run_dir, groups_per_step=32, last=6)

    more = ("--roles", "rollout:1,actor:1,evaluate:2", "--set", "evaluate.temperature=1.0")
    second = command.run(
        "--resume", "run", "--steps", "11", *more, "--set", "evaluate.n_samples_per_prompt=4", cwd=tmp_path
    )
    assert second.returncode == 0, second.stderr
    after = evaluations(run_dir)
    assert after[: len(before)] == before
    check_steps(run_dir, [0, 2, 4, 6, 8, 10, 11])
    assert all((line["lineage"], line["num_samples"]) == (1, 80) for line in after[len(before) :])
    assert all(line["step"] > 6 for line in after[len(before) :])


def check_not_held_up(metrics: list[dict[str, Any]]) -> None:
    """No step, but for one in which the machine was busy, waited as long as an evaluation takes."""
    waits = sorted(line["sync_exposed_s"] for line in metrics)
    assert all(seconds < 1.0 for seconds in waits[:-1]), waits


@pytest.mark.parametrize("path", ["staged", "broadcast"])
def test_slow_evaluation_holds_up_neither_weights_nor_steps(tmp_path: Path, path: str) -> None:
    """It has a due version at hand in shared memory (another type on the wire: nothing is adopted) the whole time."""
    (tmp_path / "slow.py").write_text(SLOW_REWARD.format(seconds=1.0))
    tight = (
        "--set",
        "weightsync.num_slots=2",
        "--set",
        "weightsync.dtype=bfloat16",
        "--set",
        f"weightsync.path={path}",
    )
    slow = ("--set", "reward.function=slow:score", "--set", "evaluate.interval=5", "--set", "evaluate.max_prompts=16")
    done = command.run(*EVALUATED, *SMALL, "--steps", "20", *tight, *slow, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = command.lines(tmp_path / "run" / "metrics.jsonl")
    check_not_held_up(metrics)
    check_steps(tmp_path / "run", [0, 5, 10, 15, 20])
    found = evaluations(tmp_path / "run")
    assert all(line["seconds"] > 3.5 for line in found)
    trained_s = metrics[-1]["time_s"]
    assert found[-1]["time_s"] > trained_s, "the end of the run waits for the last version's evaluation"


def test_stopped_evaluator_holds_up_nobody(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    quick = ("--set", "evaluate.interval=1", "--set", "weightsync.num_slots=2", "--set", "launcher.stop_timeout_s=3")
    with command.started(*EVALUATED, *SMALL, "--steps", "100000", *quick, cwd=tmp_path) as process:
        command.wait_until(lambda: len(command.lines(run_dir / "evaluation.jsonl")) >= 2, "an evaluation")
        evaluator = next(
            one for one in command.descendants(process.pid) if command.gang_of(one.pid, run_dir) == "evaluate-0"
        )
        evaluator.suspend()
        reached = command.last_step(run_dir)
        command.wait_until(lambda: command.last_step(run_dir) >= reached + 20, "20 more steps")
        metrics = command.lines(run_dir / "metrics.jsonl")
        process.send_signal(signal.SIGINT)
        assert process.wait(command.DEADLINE_S) == 75
    check_not_held_up(metrics[reached:])


def test_interrupted_run_leaves_an_evaluation_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_REWARD.format(seconds=4.0))
    run_dir = tmp_path / "run"
    slow = ("--set", "reward.function=slow:score", "--set", "reward.concurrency=1")
    with command.started(*EVALUATED, *SMALL, "--steps", "100000", *slow, cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 3, "step 3")
        family = [psutil.Process(process.pid), *command.descendants(process.pid)]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=command.DEADLINE_S)
        assert process.returncode == 75, err
        assert command.HUNG not in out + err
        command.wait_until(lambda: not any(one.is_running() for one in family), "the end of all processes")
    assert evaluations(run_dir) == []


def test_evaluation_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_REWARD.format(seconds=4.0))
    slow = ("--set", "reward.function=slow:score", "--set", "evaluate.timeout_s=1")
    done = command.run(*EVALUATED, *SMALL, "--steps", "2", *slow, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "evaluate-0: not ready 1 s after the last step (evaluate.timeout_s); given up" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "step_000002").is_dir()


def test_a_model_is_evaluated_without_training_as_a_run_evaluates_it(tmp_path: Path) -> None:
    """The same seeds draw the same responses, whoever asks and however many share the prompts."""
    sampled = ("--set", "evaluate.n_samples_per_prompt=4", "--set", "evaluate.temperature=0.8")
    placed = ("--roles", "rollout:1,actor:1,evaluate:1", "--steps", "4", "--set", "evaluate.interval=4")
    done = command.run("quickstart", "--run-dir", "run", *placed, *sampled, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = command.lines(tmp_path / "run/evaluation.jsonl")
    model = Path(configs.__path__[0]) / "quickstart" / "model"
    asyncflow = command.COMMAND.with_name("asyncflow")
    figures = ("accuracy", "reward_mean", "pass_at_4", "response_tokens_mean", "truncated_fraction", "num_samples")
    for what, ranks, expected in (
        ([str(model), "quickstart", *sampled], "1", first),
        ([str(model), "quickstart", *sampled], "3", first),
        (["run"], "1", last),  # its own settings, its newest checkpoint
    ):
        told = subprocess.run(
            [asyncflow, "evaluate", *what, "--ranks", ranks, "--json"],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=command.DEADLINE_S,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
        line = json.loads(told.stdout)  # all else is on stderr
        assert {name: line[name] for name in figures} == {name: expected[name] for name in figures}


def test_an_instance_that_is_killed_answers_its_share_again(tmp_path: Path) -> None:
    model = Path(configs.__path__[0]) / "quickstart" / "model"
    slow = "import time\n\ndef score(response, ground_truth):\n    time.sleep(0.2)\n    return 1.0\n"
    (tmp_path / "slow_score.py").write_text(slow)
    given = [str(model), "quickstart", "--set", "reward.function=slow_score:score", "--run-dir", "out", "--ranks", "2"]
    process = subprocess.Popen(
        [command.COMMAND.with_name("asyncflow"), "evaluate", *given, "--json"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        command.wait_until((tmp_path / "out/timeline").is_dir, "processes")
        command.wait_until(lambda: bool(gang_of_evaluator(process.pid, tmp_path / "out")), "an evaluator")
        command.kill_gang(process.pid, tmp_path / "out", "evaluate-1")
        out, err = process.communicate(timeout=command.DEADLINE_S)
    finally:
        family = command.descendants(process.pid) if process.poll() is None else []
        process.kill()
        process.wait()
        for one in family:
            command.kill(one)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["num_samples"] == 20


def gang_of_evaluator(launcher: int, run_dir: Path) -> list[int]:
    return [one.pid for one in command.descendants(launcher) if command.gang_of(one.pid, run_dir) == "evaluate-1"]
