"""The queue's settings in a run: several controllers, a policy, retention; and `asyncflow status` while it lasts."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import command

STATUS = Path(sys.executable).parent / "asyncflow"
SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=0")
ROLES = ("--roles", "rollout:2,actor:2,ref:1")


def status(run_dir: Path, *, newest: int = 0) -> dict[str, Any]:
    """Ask a live run until all services answer and weights of step `newest` are there; the picture is seconds old."""
    fields: dict[str, Any] = {}

    def complete() -> bool:
        done = subprocess.run(
            [STATUS, "status", run_dir, "--json"],
            capture_output=True, text=True, timeout=command.DEADLINE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        fields.update(json.loads(done.stdout))
        versions = [agent["newest"] or (0, 0) for agent in fields["weights"].values()]
        return bool(versions and fields["controllers"] and fields["units"]) and min(versions)[1] >= newest

    command.wait_until(complete, "answers of all services")
    return fields


def test_status_of_a_live_run_with_two_controllers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "of-other-jobs")  # on one node everybody is on loopback, the launcher too
    queue = ("--set", "tq.num_controllers=2", "--set", "tq.policy=token-balanced")
    with command.started("--run-dir", "run", "--steps", "100000", *SMALL, *ROLES, *queue, cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 2, "step 2")
        seen = status(run_dir, newest=2)
        process.terminate()
        assert process.wait(command.DEADLINE_S) == 75
    served = [[task["task"] for task in controller["tasks"]] for controller in seen["controllers"]]
    assert sorted(name for names in served for name in names) == ["actor_rollout", "actor_train", "ref_log_probs"]
    assert all(served)
    lead = seen["controllers"][0]
    assert lead["row_limit"] == 8 * 16 * 2
    assert 0 < lead["live_rows"] <= lead["row_limit"]
    assert all(unit["wire_channels"] == 0 < unit["shared_channels"] for unit in seen["units"].values())
    assert {name.partition("-")[0] for name in (rank.partition("/")[0] for rank in seen["ranks"])} == {
        "actor", "controller", "ref", "rollout", "storage", "weights",
    }  # fmt: skip
    (agent,) = seen["weights"].values()
    assert agent["newest"][1] >= 2
    assert {name.partition("-")[0] for name in agent["serving"]} == {"rollout"}
    assert agent["fetched_bytes"] == 0
    command.check_ledger(run_dir, groups_per_step=8, last=command.last_step(run_dir))


def test_rounds_under_a_token_budget_keep_to_it(tmp_path: Path) -> None:
    """A prompt has four tokens and each of its 16 responses one or more, so two groups never fit together."""
    budget = ("--set", "tq.policy=token-budget", "--set", "actor.max_tokens_per_micro_batch=150")
    done = command.run("--run-dir", "run", "--steps", "2", *SMALL, *budget, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    command.check_ledger(tmp_path / "run", groups_per_step=8, last=2)
    spans = command.lines(tmp_path / "run" / "timeline" / "actor-0.jsonl")
    rounds = [span["rows"] for span in spans if span.get("name") == "compute_advantages_and_returns"]
    assert rounds == [16] * 16, "rounds of four groups (actor.micro_batch_size) would be too long"


def test_rows_kept_for_a_checkpoint_ask_for_one_and_leave_with_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keep = ("--set", "tq.retain_until_checkpoint=true", "--set", "tq.spill_after_bytes=20000")
    with command.started("--run-dir", "run", "--steps", "100000", *SMALL, *keep, cwd=tmp_path) as process:
        command.wait_until(lambda: any((run_dir / "checkpoints").glob("step_*")), "an early checkpoint")
        command.wait_until(lambda: command.last_step(run_dir) >= 40, "step 40")
        held = [unit["num_bytes"] for unit in status(run_dir)["units"].values()]
        process.terminate()
        assert process.wait(command.DEADLINE_S) == 75
    assert max(held) < 400_000, "rows of all steps are still there"


def pids(launcher: int, run_dir: Path, *roles: str) -> list[int]:
    """Return the processes of services, by where their output goes."""
    logs = [(run_dir / "logs" / role).resolve() for role in roles]
    found = []
    for one in command.descendants(launcher):
        with contextlib.suppress(OSError):
            output = Path(f"/proc/{one.pid}/fd/1").readlink()
            found += [one.pid] if any(output.is_relative_to(log) for log in logs) else []
    return found


def test_run_goes_on_when_its_whole_queue_was_killed_and_trains_every_group_once(tmp_path: Path) -> None:
    """No service is left that knew which rows there were: the launcher keeps what units noted."""
    run_dir = tmp_path / "run"
    with command.started("--run-dir", "run", "--steps", "9", *SMALL, *ROLES, cwd=tmp_path) as process:
        for step in (2, 5):
            command.wait_until(lambda step=step: command.last_step(run_dir) >= step, f"step {step}")  # type: ignore[misc]
            services = pids(process.pid, run_dir, "controller", "storage")
            assert len(services) == 3
            for pid in services:
                os.kill(pid, signal.SIGKILL)
        out, err = process.communicate(timeout=2 * command.DEADLINE_S)
    assert process.returncode == 0, out + err
    command.check_ledger(run_dir, groups_per_step=8, last=9)
    logs = [path.read_text() for path in (run_dir / "logs" / "storage").rglob("*") if path.is_file()]
    assert any("an earlier life ended with" in text for text in logs) and not any("no journal" in text for text in logs)
