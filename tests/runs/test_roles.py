"""Every role on its own, fused into its host, and started by hand."""

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from launcher.config.paths import packaged_recipes

from . import command

SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=0", "--steps", "3")


@pytest.mark.parametrize("roles", ["rollout:1,actor:1", "rollout:1,actor:2,ref:1,reward:1,advantages:1"])
def test_tasks_run_in_their_role_or_in_their_host(tmp_path: Path, roles: str) -> None:
    finished = command.run("--run-dir", "run", "--roles", roles, *SMALL, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    metrics = command.lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert metrics[1]["kl"] > 0  # the reference was asked, wherever it ran
    command.check_ledger(tmp_path / "run", groups_per_step=8, last=3)


def test_the_same_rewards_whatever_the_layout(tmp_path: Path) -> None:
    """Random numbers belong to (seed, group, sample), so the first step does not depend on who generates."""
    first = []
    for roles in ("rollout:1,actor:1", "rollout:3,actor:2"):
        directory = f"run-{len(first)}"
        finished = command.run("--run-dir", directory, "--roles", roles, *SMALL, "--steps", "1", cwd=tmp_path)
        assert finished.returncode == 0, finished.stderr
        first.append(command.lines(tmp_path / directory / "metrics.jsonl")[0]["reward_mean"])
    assert first[0] == first[1]


def test_a_gang_starts_by_the_torchrun_line_that_dry_run_prints(tmp_path: Path) -> None:
    # The only rollout: without it there is nothing to train.
    external = ("--roles", "rollout:1,actor:1,ref:1", "--set", "launcher.external_gangs=[rollout-0]")
    dry = command.run("--run-dir", "run", *SMALL, *external, "--dry-run", cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    (line,) = [text for text in dry.stdout.splitlines() if "torch.distributed.run" in text and "rollout-0" in text]
    assert not re.search(r"secret", line)
    with command.started("--run-dir", "run", *SMALL, *external, cwd=tmp_path) as process:
        command.wait_until((tmp_path / "run" / "job.json").exists, "job.json")
        by_hand = subprocess.Popen(
            ["bash", "-c", f"exec {line}" if not line.startswith("PY") else f"export {_exported(line)}"],
            cwd=tmp_path,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, err = process.communicate(timeout=command.DEADLINE_S)
            assert process.returncode == 0, err
            _, by_hand_err = by_hand.communicate(timeout=60)
            assert by_hand.returncode == 0, by_hand_err
        finally:
            if by_hand.poll() is None:
                os.killpg(by_hand.pid, signal.SIGKILL)
                by_hand.communicate()
    assert command.last_step(tmp_path / "run") == 3
    assert (tmp_path / "run" / "timeline" / "rollout-0-0.jsonl").stat().st_size > 0


def _exported(line: str) -> str:
    """Turn `A=1 B=2 command` into `A=1 B=2; exec command`, so that the shell itself becomes the command."""
    words = shlex.split(line, posix=False)
    variables = [word for word in words if re.fullmatch(r"[A-Z_]+=\S*", word)]
    return f"{' '.join(variables)}; exec {line[len(' '.join(variables)) :]}"


@pytest.mark.parametrize("roles", ["rollout:1,actor:1", "rollout:1,actor:1,safety:2"])
def test_a_task_of_the_users_own_weighs_responses(tmp_path: Path, roles: str) -> None:
    examples = Path(__file__).parents[2] / "examples"
    shown = ("--set", "rollout.samples_per_step=16", "--steps", "3", "--run-dir", str(tmp_path / "run"))
    finished = command.run("safety_filter.yaml", "--roles", roles, *shown, cwd=examples)
    assert finished.returncode == 0, finished.stderr
    samples = command.lines(tmp_path / "run" / "samples" / "rollout-0.jsonl")
    for line in command.lines(tmp_path / "run" / "metrics.jsonl"):
        responses = [sample["response"] for sample in samples if sample["step"] == line["step"]]
        assert len(responses) == 256
        assert line["masked_fraction"] == sum("13" in response for response in responses) / 256
    assert any("13" in sample["response"] for sample in samples)
    command.check_ledger(tmp_path / "run", groups_per_step=16, last=3)


@pytest.mark.parametrize("roles", ["rollout:1,actor:1", "rollout:1,actor:1,safety:1"])
def test_a_task_that_raises_ends_the_run_and_is_named(tmp_path: Path, roles: str) -> None:
    (tmp_path / "broken_filter.py").write_text("def keep(row):\n    raise ValueError('no idea')\n")
    task = "tasks=[{name: safety, function: 'broken_filter:keep', output: loss_weights}]"
    failed = command.run("--run-dir", "run", *SMALL, "--set", task, "--roles", roles, cwd=tmp_path)
    assert failed.returncode == 1
    assert "task safety: broken_filter:keep raised ValueError: no idea on response" in failed.stderr.splitlines()[-1]


def test_a_reward_of_the_users_own_beside_the_configuration(tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"
    quickstart = packaged_recipes()["quickstart"]
    recipe = yaml.safe_load(quickstart.read_text())
    for section in ("model", "data", "evaluate"):
        recipe[section]["path"] = str(quickstart.parent / recipe[section]["path"])
    recipe["reward"]["function"] = "custom_reward:score"
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "recipe" / "custom_reward.py").write_text((examples / "custom_reward.py").read_text())
    arguments = ("recipe/mine.yaml", "--run-dir", "run", *SMALL, "--steps", "1")
    finished = command.run(*arguments, "--set", "rollout.samples_per_step=8", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    samples = [
        line for file in (tmp_path / "run" / "samples").iterdir() for line in command.lines(file) if line["step"] == 1
    ]
    assert {sample["reward"] for sample in samples} <= {0.0, 0.1, 1.0}
    assert all(sample["correct"] == (sample["reward"] == 1.0) for sample in samples)
    assert any(sample["reward"] == 1.0 for sample in samples)
