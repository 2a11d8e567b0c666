"""The files of a run that loggers and reports read, written by hand."""

import json
from pathlib import Path
from typing import Any

from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe


def make_run(run_dir: Path, loggers: str) -> Path:
    """Make a directory with the quickstart's configuration and these loggers (YAML)."""
    for name in ("logs", "samples", "checkpoints"):
        (run_dir / name).mkdir(parents=True)
    own = [f"loggers={loggers}", f"code_directory={run_dir.parent}"]
    load_config(find_recipe("quickstart"), overrides=own).save(run_dir)
    return run_dir


def add_steps(run_dir: Path, first: int, last: int, *, lineage: int = 0, reward: float = 0.5) -> None:
    """Append the lines of steps, each with two samples that its own line names."""
    for step in range(first, last + 1):
        line = {
            "step": step,
            "lineage": lineage,
            "reward_mean": reward,
            "samples": 4,
            "loss": None,
            "idle_fraction": {"actor": 0.25},
            "histograms": {"reward": {"1": 1, "0.5": 3}, "response_tokens": {"12": 4}, "staleness": {}},
        }
        append(run_dir / "metrics.jsonl", line)
        for index in range(2):
            add_sample(run_dir, step, index)


def add_sample(run_dir: Path, step: int, index: int) -> None:
    """Append a sample."""
    line = {
        "step": step,
        "group": step,
        "prompt": "1+1=",
        "response": f"{index} | <b>",
        "ground_truth": "2",
        "reward": 0.5,
    }
    more = {"index": index, "response_tokens": 2, "truncated": False, "versions": [[0, 2]]}
    append(run_dir / "samples" / "rollout-0.jsonl", line | more)


def go_back(run_dir: Path, last: int) -> None:
    """Cut metrics and evaluations back to a step, as a restored run does."""
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        path = run_dir / name
        kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= last]
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(f"{line}\n" for line in kept))
        beside.replace(path)


def append(path: Path, line: dict[str, Any]) -> None:
    """Append a JSON line."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
