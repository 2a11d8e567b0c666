"""Runs whose environment rewards each turn: a calculator is called for a product, and the product is said."""

import signal
from pathlib import Path
from typing import Any

import pytest

from . import command

pytestmark = pytest.mark.slow

GAME = """
from workers.agents import Environment, Reply, Task, tool


class Product(Environment):
    def reset(self, task: Task) -> str:
        self.asked, self.answer, self.tries = task["prompt"], task["answer"], 0
        return self.asked

    @tool
    def multiply(self, a: int, b: int) -> int:
        "Return the product of two numbers."
        return a * b

    def step(self, reply: Reply) -> tuple[str, float, bool]:
        self.tries += 1
        right = reply.text == self.answer
        return self.asked, 1.0 if right else -0.5, right or self.tries == 2
"""
SMALL = (
    "rollout.function=product_game:Product", "rollout.tools=[]", "rollout.max_turns=3", "checkpoint.interval=2",
    "schedule.rollout_batch_size=8", "schedule.n_samples_per_prompt=8", "actor.micro_batch_size=16",
)  # fmt: skip
CREDITS = {
    "grpo": ("algorithm.credit=turn", "algorithm.gamma=0.9"),
    "ppo": (
        "algorithm.name=ppo",
        "algorithm.credit=turn",
        "algorithm.gae_timestep_unit=turn",
        "critic.max_tokens_per_micro_batch=2048",
    ),
}


@pytest.mark.parametrize("credit", CREDITS)
def test_turns_are_rewarded_trained_and_written_down_before_and_after_a_resume(tmp_path: Path, credit: str) -> None:
    (tmp_path / "product_game.py").write_text(GAME)
    settings = [part for setting in (*SMALL, *CREDITS[credit]) for part in ("--set", setting)]
    run_dir = tmp_path / "run"
    with command.started(
        "quickstart-tools", "--run-dir", "run", "--steps", "100000", *settings, cwd=tmp_path
    ) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 3, "step 3")
        command.kill_gang(process.pid, run_dir, "rollout-0")
        trained = command.last_step(run_dir)
        command.wait_until(lambda: command.last_step(run_dir) > trained + 2, "steps after the kill")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=command.DEADLINE_S)
        assert process.returncode == 75, err
    last = command.last_step(run_dir) + 2
    resumed = command.run("--resume", "run", "--steps", str(last), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    command.check_ledger(run_dir, groups_per_step=8, last=last)
    samples = command.lines(run_dir / "samples" / "rollout-0.jsonl")
    several = [line for line in samples if len(line["turn_rewards"]) > 1]
    assert several
    for line in samples:
        check_sample(line)
    for line in command.lines(run_dir / "metrics.jsonl"):
        assert -0.5 <= line["reward/turn_1_mean"] <= 1


def check_sample(line: dict[str, Any]) -> None:
    """As many rewards as replies, whose sum is the rollout's."""
    replies = [message for message in line["conversations"][0] if message["role"] == "assistant"]
    assert len(line["turn_rewards"]) == len(replies) == line["turns"]
    assert line["reward"] == sum(line["turn_rewards"])
