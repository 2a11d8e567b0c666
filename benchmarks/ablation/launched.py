"""One run of the real command with `sim` engines, and what it wrote."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.ablation.workloads import MICRO_BATCH, SCHEDULES, Workload
from launcher.config.paths import find_recipe
from launcher.timeline.run_timeline import RunTimeline
from workers.records.ledger_file import read_ledger

_MODULE = "from launcher.cli.launch import launch; launch()"
_REF_ROWS = 4
_COMPUTES = frozenset({"forward_backward", "ref_log_probs", "generate"})


@dataclass(frozen=True)
class Ran:
    """A finished run.

    Attributes:
        ends: unix time at which each step's weights existed (s), from step 0.
        staleness: of every sample that was trained.
        timeline: of all processes.
    """

    ends: list[float]
    staleness: list[int]
    timeline: RunTimeline

    def step_s(self, skip: int) -> float:
        """Return the mean seconds per step after the first ones."""
        return (self.ends[-1] - self.ends[skip]) / (len(self.ends) - 1 - skip)

    def idle(self, role: str, skip: int) -> float:
        """Return the share of the time after the first steps in which a role's processes do not compute."""
        start, end = self.ends[skip], self.ends[-1]
        shares = []
        for process, spans in self.timeline.spans.items():
            if process.startswith(f"{role}-"):
                inside = [(max(start, span.start), min(end, span.end)) for span in spans if span.name in _COMPUTES]
                shares.append(sum(max(0.0, stop - begin) for begin, stop in inside) / (end - start))
        return 1 - sum(shares) / len(shares)


def launch(workload: Workload, schedule: str, directory: Path, *, steps: int, seed: int) -> Ran:
    """Run one schedule on one workload.

    Raises:
        SystemExit: the run failed; says what it printed.
    """
    return launch_values(run_values(workload, SCHEDULES[schedule], steps, seed), directory)


def launch_values(values: Mapping[str, Any], directory: Path) -> Ran:
    """Run what these values of a configuration say.

    Raises:
        SystemExit: the run failed; says what it printed.
    """
    directory.mkdir(parents=True)
    source = directory / "ablation.yaml"
    source.write_text(yaml.safe_dump(dict(values), sort_keys=False))
    command = [sys.executable, "-c", _MODULE, str(source), "--run-dir", str(directory / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{directory.name}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return read_run(directory / "run")


def run_values(workload: Workload, schedule: Mapping[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """Return the configuration of a run; `schedule` are the mode and its staleness."""
    quickstart = find_recipe("quickstart").parent / "quickstart"
    return {
        "name": "ablation",
        "seed": seed,
        "steps": steps,
        "roles": asdict(workload.cluster),
        "model": {"path": str(quickstart / "model")},
        "data": {"path": str(quickstart / "train.jsonl"), "max_prompt_tokens": 8},
        "schedule": {**schedule, "rollout_batch_size": workload.samples, "n_samples_per_prompt": 1},
        "rollout": {
            "engine": "sim", "batch_size": workload.slots // workload.cluster.rollout, "max_response_tokens": 1 << 14,
            "samples_per_step": 0,
        },
        "actor": {"engine": "sim", "micro_batch_size": MICRO_BATCH},
        "ref": {"engine": "sim", "micro_batch_size": _REF_ROWS},
        "algorithm": {"kl_coef": 0.001},
        "tq": {"policy": "token-balanced"},
        "weightsync": {"max_updating": 1} if schedule["mode"] == "substep" else {},
        "checkpoint": {"interval": 0, "export_hf": False},
        "sim": workload.sim(),
    }  # fmt: skip


def read_run(run: Path) -> Ran:
    staleness = [line.staleness for _, line in read_ledger(run).trained for _ in line.indices]
    timeline = RunTimeline.read(run)
    return Ran(list(timeline.step_ends.values()), staleness, timeline)
