"""Runs with `sim` engines, drawn by a seed from stated ranges: what the plan says of each, and what it took.

roles       rollout 2 to 6, actor 1 to 3, ref none to 2
schedule    every mode, staleness 1 to 2, 8 to 16 groups a rank of the actor, of 2 or 4 responses
lengths     log-normal, sigma 0.3 to 1.0, at most 6 means
times       a step's work of the busiest role is 2 to 4 s; the others have 0.4 to 1 of it; decoding is up to twice as
            slow with all places taken
"""

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.ablation.launched import Ran, read_run
from launcher.config.paths import find_recipe
from launcher.plan.scenario import Scenario, Times
from launcher.plan.world import simulate
from workers.settings.run import RunConfig

_MODULE = "from launcher.cli.launch import launch; launch()"
_MEAN_TOKENS = 200


def draw(seed: int, number: int, *, steps: int) -> dict[str, Any]:
    """Return the number-th configuration."""
    chance = random.Random(f"{seed}/{number}")
    ref = chance.randint(0, 2)
    roles = {"rollout": chance.randint(2, 6), "actor": chance.randint(1, 3)} | ({"ref": ref} if ref else {})
    mode = chance.choice(["sync", "periodic", "async", "substep"])
    overlapped = mode in ("async", "substep")
    staleness = chance.randint(1, 2) if overlapped else 0
    batch, samples = 2 * chance.randint(4, 8) * roles["actor"], chance.choice([2, 4])
    schedule = {
        "mode": mode,
        "max_staleness": staleness,
        "rollout_batch_size": batch,
        "n_samples_per_prompt": samples,
    }
    slots = chance.choice([4, 8, 16])
    period_s, shares = chance.uniform(2, 4), [chance.uniform(0.4, 1) for _ in range(3)]
    rollout, actor, scored = (period_s * share / max(shares) for share in shares)
    step_tokens = batch * samples * _MEAN_TOKENS
    decode_s = rollout * roles["rollout"] * slots / step_tokens
    fastest = decode_s / chance.uniform(1, 2)
    return {
        "name": "planned",
        "seed": number,
        "steps": steps,
        "roles": roles,
        "schedule": schedule,
        "rollout": {"engine": "sim", "batch_size": slots, "max_response_tokens": 1 << 14, "samples_per_step": 0},
        "actor": {"engine": "sim", "micro_batch_size": 2 * samples},
        "ref": {"engine": "sim", "micro_batch_size": 4},
        "algorithm": {"kl_coef": 0.001 if ref else 0.0},
        "tq": {"policy": chance.choice(["fifo", "token-balanced"])},
        "weightsync": {"max_updating": 1} if mode == "substep" else {},
        "checkpoint": {"interval": 0, "export_hf": False},
        "sim": {
            "sigma": chance.uniform(0.3, 1.0),
            "mean_tokens": _MEAN_TOKENS,
            "decode_s_by_batch": {1: fastest, slots: decode_s},
            "ref_s_per_token": scored * max(1, ref) / step_tokens,
            "train_s_per_token": actor * roles["actor"] / step_tokens,
        },
    }


def with_data(values: dict[str, Any]) -> dict[str, Any]:
    """Return it with the quickstart's model and prompts, which `sim` engines do not compute with."""
    quickstart = find_recipe("quickstart").parent / "quickstart"
    data = {"path": str(quickstart / "train.jsonl"), "max_prompt_tokens": 8}
    return values | {"model": {"path": str(quickstart / "model")}, "data": data}


def predicted_s(values: dict[str, Any], *, skip: int) -> float:
    """Return the planner's step time (s)."""
    config = RunConfig.model_validate(with_data(values))
    return simulate(Scenario.from_config(config, Times.of_sim(config, prompt_tokens=0)), steps=config.steps).step_s(
        skip
    )


def run(values: dict[str, Any], directory: Path) -> Ran:
    """Run it by the real command.

    Raises:
        SystemExit: it failed; says what it printed.
    """
    directory.mkdir(parents=True)
    source = directory / "planned.yaml"
    source.write_text(yaml.safe_dump(with_data(values), sort_keys=False))
    return launch([str(source)], directory / "run")


def launch(arguments: Sequence[str], run_dir: Path) -> Ran:
    """Run `asyncflow-launch` with these arguments.

    Raises:
        SystemExit: it failed; says what it printed.
    """
    command = [sys.executable, "-c", _MODULE, *arguments, "--run-dir", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return read_run(run_dir)
