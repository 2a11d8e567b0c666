"""`asyncflow verify` and `status` on a real run: while it runs, after a crash, resumed, and tampered with."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import configs
from launcher.verify.verify_report import verify_run

from . import command

ASYNCFLOW = command.COMMAND.with_name("asyncflow")
SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=2", "--set", "actor.ppo_epochs=2")
SLOW_REWARD = """
import time

def score(response, ground_truth):
    time.sleep(0.005)  # so that a run beside what looks at it leaves it the cores
    return float(response.strip() == ground_truth)
"""


def verify(run_dir: Path) -> tuple[int, dict[str, Any]]:
    """Run the command; returns its exit code and its report."""
    done = subprocess.run([ASYNCFLOW, "verify", run_dir, "--json"], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.gate
def test_run_that_was_killed_and_resumed_is_proved_at_every_moment(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "slow_rewards.py").write_text(SLOW_REWARD)
    slow = (*SMALL, "--set", "reward.function=slow_rewards:score", "--roles", "rollout:1,actor:1")
    with command.started("--run-dir", "run", "--steps", "100000", *slow, cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 3, "step 3")
        found = verify_run(run_dir)
        assert (found.exit_code, found.live) == (0, True), found.as_text()
        assert found.last_step >= 3
        said = subprocess.run([ASYNCFLOW, "status", run_dir, "--json"], capture_output=True, text=True, check=True)
        assert {"actor/0", "rollout-0/0"} <= set(json.loads(said.stdout)["ranks"])
        family = command.descendants(process.pid)
        process.kill()
        command.wait_until(lambda: not any(one.is_running() for one in family), "the end of workers", deadline_s=30)
    found = verify_run(run_dir)
    assert (found.exit_code, found.live) == (0, False), found.as_text()
    last = found.last_step + 2
    resumed = command.run("--resume", "run", "--steps", str(last), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    command.check_ledger(run_dir, groups_per_step=8, last=last)
    updates = command.lines(run_dir / "updates.jsonl")
    assert [line["optimizer_updates"] for line in updates] == list(range(1, 2 * last + 1))
    assert len({line["pid"] for line in updates}) == 2
    change_one_line(run_dir / "ledger.jsonl")
    code, report = verify(run_dir)
    assert code == 1
    assert [one["name"] for one in report["checks"] if not one["ok"]] == ["prompts"]


def test_template_that_knows_the_time_is_told_one_time_by_a_run_its_resume_and_verify(tmp_path: Path) -> None:
    """Of seconds: each process that asked the clock would have prompts of its own."""
    model = Path(shutil.copytree(Path(configs.__path__[0]) / "quickstart" / "model", tmp_path / "model"))
    (model / "chat_template.jinja").write_text("{{ strftime_now('%H%M%S') }}+{{ messages[0].content }}")
    settings = (
        "--set",
        f"model.path={model}",
        "--set",
        "data.chat_template=true",
        "--set",
        "data.max_prompt_tokens=12",
    )
    common = ("quickstart", "--roles", "rollout:1,actor:1", *SMALL, *settings)
    done = command.run(*common, "--run-dir", "run", "--steps", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = command.run(*common, "--resume", "run", "--steps", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    command.check_verified(tmp_path / "run", last=4)
    with (tmp_path / "run/samples").joinpath("rollout-0.jsonl").open() as file:
        times = {json.loads(line)["prompt"].partition("+")[0] for line in file}
    assert len(times) == 1
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    done = command.run("--resume", "run", "--steps", "5", cwd=tmp_path)
    assert (done.returncode, "chat_template.jinja of" in done.stderr) == (2, True), done.stderr
    code, report = verify(tmp_path / "run")
    assert code == 0, "nobody can say"
    assert "is not what the run began with" in json.dumps(report)


def change_one_line(path: Path) -> None:
    """Say of one group that it had another prompt."""
    first, *rest = path.read_text().splitlines(keepends=True)
    line = json.loads(first)
    line["prompt_hash"] = "0" * 16
    path.write_text(json.dumps(line) + "\n" + "".join(rest))
