"""`asyncflow verify` and `status` on a real run: while it runs, after a crash, resumed, and tampered with."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from . import command

ASYNCFLOW = command.COMMAND.with_name("asyncflow")
SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=2", "--set", "actor.ppo_epochs=2")


def verify(run_dir: Path) -> tuple[int, dict[str, Any]]:
    """Run the command; returns its exit code and its report."""
    done = subprocess.run([ASYNCFLOW, "verify", run_dir, "--json"], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.gate
def test_run_that_was_killed_and_resumed_is_proved_at_every_moment(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with command.started("--run-dir", "run", "--steps", "100000", *SMALL, cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 5, "step 5")
        code, report = verify(run_dir)
        assert (code, report["live"]) == (0, True), report
        assert report["last_step"] >= 5
        said = subprocess.run([ASYNCFLOW, "status", run_dir, "--json"], capture_output=True, text=True, check=True)
        assert {"actor/0", "rollout-0/0", "ref-0/0"} <= set(json.loads(said.stdout)["ranks"])
        family = command.descendants(process.pid)
        process.kill()
        command.wait_until(lambda: not any(one.is_running() for one in family), "the end of workers", deadline_s=30)
    code, report = verify(run_dir)
    assert (code, report["live"]) == (0, False), report
    last = report["last_step"] + 2
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


def change_one_line(path: Path) -> None:
    """Say of one group that it had another prompt."""
    first, *rest = path.read_text().splitlines(keepends=True)
    line = json.loads(first)
    line["prompt_hash"] = "0" * 16
    path.write_text(json.dumps(line) + "\n" + "".join(rest))
