"""The schedules with engines that sleep: every group once, in its step or near it, within the staleness bound."""

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.config.paths import find_recipe

from . import command

STEPS, SAMPLES = 6, 32
ASYNCFLOW = Path(sys.executable).parent / "asyncflow"
QUICKSTART = find_recipe("quickstart").parent / "quickstart"


def recipe(mode: str, max_staleness: int) -> dict[str, Any]:
    """A step is some 0.4 s of work for each role."""
    return {
        "steps": STEPS,
        "roles": {"rollout": 2, "actor": 2, "ref": 1},
        "model": {"path": str(QUICKSTART / "model")},
        "data": {"path": str(QUICKSTART / "train.jsonl"), "max_prompt_tokens": 8},
        "schedule": {
            "mode": mode, "max_staleness": max_staleness, "rollout_batch_size": SAMPLES, "n_samples_per_prompt": 1,
        },
        "rollout": {"engine": "sim", "batch_size": 4, "max_response_tokens": 4096, "samples_per_step": 0},
        "actor": {"engine": "sim", "micro_batch_size": 4},
        "ref": {"engine": "sim", "micro_batch_size": 4},
        "algorithm": {"kl_coef": 0.001},
        "checkpoint": {"interval": 0, "export_hf": False},
        "sim": {
            "lengths": "lognormal", "sigma": 0.8, "mean_tokens": 100, "parameters": 10_000,
            "decode_s_per_token": 0.001, "ref_s_per_token": 0.00005, "train_s_per_token": 0.0002,
        },
    }  # fmt: skip


@pytest.mark.parametrize(("mode", "bound"), [("sync", 0), ("periodic", 0), ("async", 1), ("substep", 2)])
def test_every_group_is_trained_once_in_its_step_within_the_bound(tmp_path: Path, mode: str, bound: int) -> None:
    (tmp_path / "sim.yaml").write_text(yaml.safe_dump(recipe(mode, bound)))
    done = command.run("sim.yaml", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ledger = command.lines(tmp_path / "run" / "ledger.jsonl")
    assert Counter(line["group"] for line in ledger) == Counter(range(STEPS * SAMPLES))
    for line in ledger:
        assert line["step"] == line["group"] // SAMPLES + 1
        assert 0 <= line["staleness"] <= bound
        assert line["versions"][1] <= line["step"] - 1
    swapped_inside = [line for line in ledger if line["versions"][0] < line["versions"][1]]
    assert bool(swapped_inside) == (bound > 0), "responses go on over a swap"


@pytest.mark.parametrize(("copies", "interval"), [(1, 1), (2, 2)])
def test_reference_that_follows_the_policy_waits_for_no_rows_that_wait_for_it(
    tmp_path: Path, copies: int, interval: int
) -> None:
    """Long responses of a step are scored after short ones of the next, whose reference is of this step."""
    config = recipe("async", 1)
    config |= {"roles": {"rollout": 1, "actor": 1, "ref": copies}, "weightsync": {"timeout_s": 20}}
    config["algorithm"] |= {"ref_update_interval": interval}
    (tmp_path / "sim.yaml").write_text(yaml.safe_dump(config))
    done = command.run("sim.yaml", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout + done.stderr
    ledger = command.lines(tmp_path / "run" / "ledger.jsonl")
    assert Counter(line["group"] for line in ledger) == Counter(range(STEPS * SAMPLES))
    spans = [line for path in (tmp_path / "run" / "timeline").glob("ref-*.jsonl") for line in command.lines(path)]
    names = [span["name"] for span in spans if "name" in span]
    assert "wait for weights" in names, "what it waits for is told apart"
    assert len(list((tmp_path / "run" / "reference").iterdir())) == 2


def test_a_live_run_says_which_split_would_be_better(tmp_path: Path) -> None:
    config = recipe("async", 1)
    config |= {"steps": 40, "roles": {"rollout": 1, "actor": 4, "ref": 1}}
    config["sim"] |= {"lengths": "constant", "decode_s_per_token": 0.003, "train_s_per_token": 0.0001}
    (tmp_path / "sim.yaml").write_text(yaml.safe_dump(config))
    with command.started("sim.yaml", "--run-dir", "run", cwd=tmp_path) as process:
        picture = tmp_path / "run" / "status.json"
        command.wait_until(lambda: picture.exists() and json.loads(picture.read_text())["advice"] is not None, "advice")
        said = subprocess.run(
            [ASYNCFLOW, "status", tmp_path / "run"],
            capture_output=True,
            text=True,
            timeout=command.DEADLINE_S,
            check=True,
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(command.DEADLINE_S) == 75
    (line,) = [line for line in said.stdout.splitlines() if line.startswith("advice: ")]
    assert re.search(r"s predicted; .* rollout limits; --roles rollout:[34],actor:[12],ref:1 would take", line)
    assert "rollout limits; --roles rollout:" in (tmp_path / "run" / "logs" / "launcher.log").read_text()


def test_planned_roles_are_started_and_the_plan_is_kept(tmp_path: Path) -> None:
    (tmp_path / "sim.yaml").write_text(yaml.safe_dump(recipe("async", 1)))
    done = command.run("sim.yaml", "--roles", "auto:4", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["roles"] == yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["roles"]
    assert f"{plan['step_s']:.3g} s a step predicted" in done.stderr


def first_ready_recipe() -> dict[str, Any]:
    """Some responses are many times longer than the mean; an instance has places for less than a step of them."""
    config = recipe("async", 2)
    config["schedule"] |= {"fill": "first_ready", "rollout_batch_size": SAMPLES // 2, "n_samples_per_prompt": 2}
    config["rollout"] |= {"batch_size": 16}
    config["sim"] |= {"sigma": 1.2, "decode_s_per_token": 0.004}  # long enough for all to start meanwhile
    return config


def check_first_ready(run_dir: Path, *, steps: int) -> Counter[int]:
    """Every group once, every step full, none too late or too old; returns how much later groups were trained."""
    ledger = command.lines(run_dir / "ledger.jsonl")
    assert Counter(line["group"] for line in ledger) == Counter(range(steps * SAMPLES // 2))
    assert Counter(line["step"] for line in ledger) == dict.fromkeys(range(1, steps + 1), SAMPLES // 2)
    for line in ledger:
        assert line["step"] - line["admitted_step"] <= 1
        assert 0 <= line["staleness"] <= 2
    command.check_verified(run_dir, last=steps)
    return Counter(line["step"] - line["admitted_step"] for line in ledger)


def test_first_ready_fills_steps_with_what_is_finished_within_the_bound(tmp_path: Path) -> None:
    (tmp_path / "sim.yaml").write_text(yaml.safe_dump(first_ready_recipe()))
    done = command.run("sim.yaml", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    later = check_first_ready(tmp_path / "run", steps=STEPS)
    for line in command.lines(tmp_path / "run" / "ledger.jsonl"):
        assert line["admitted_step"] == line["group"] // (SAMPLES // 2) + 1
    assert max(later) == 1 and min(later) < 0, "some groups are late, and others early"
    metrics = command.lines(tmp_path / "run" / "metrics.jsonl")
    num_late = sum(line["late_fraction"] * line["samples"] for line in metrics)
    assert round(num_late) == 2 * later[1]
    assert metrics[0]["length_bias"] == 0 and metrics[0]["response_tokens_mean"] < 90, "short responses come first"


def test_first_ready_resumes_with_the_groups_that_were_not_trained(tmp_path: Path) -> None:
    """From the checkpoint of the first step that left long responses behind."""
    run_dir = tmp_path / "run"
    config = first_ready_recipe() | {"steps": 100_000}
    config["checkpoint"] |= {"interval": 1, "keep_last": 1000}
    (tmp_path / "sim.yaml").write_text(yaml.safe_dump(config))
    with command.started("sim.yaml", "--run-dir", "run", cwd=tmp_path) as process:
        command.wait_until(lambda: left_behind(run_dir) > 0, "a step that leaves groups behind")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=command.DEADLINE_S)
        assert process.returncode == 75, err
    step = left_behind(run_dir)
    roles = ("--roles", "rollout:1,actor:1,ref:1", "--set", "actor.micro_batch_size=16")
    checkpoint = f"run/checkpoints/step_{step:06d}"
    resumed = command.run("--resume", checkpoint, "--steps", str(step + 3), *roles, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    check_first_ready(run_dir, steps=step + 3)


def left_behind(run_dir: Path) -> int:
    """Return the first step that left groups to a later one; 0: none is known."""
    ledger = command.lines(run_dir / "ledger.jsonl")
    return min((line["admitted_step"] for line in ledger if line["step"] > line["admitted_step"]), default=0)
