"""One run of a recipe by the installed command, and what it wrote."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncflow.json_lines import LineReader
from asyncflow.run_files import EVALUATION_FILE, METRICS_FILE

COMMAND = Path(sys.executable).parent / "asyncflow-launch"


@dataclass(frozen=True)
class RecipeRun:
    """A finished run.

    Attributes:
        directory: of the run.
        metrics: lines of its steps.
        evaluations: lines of its evaluations, by step; empty without the role.
    """

    directory: Path
    metrics: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]

    @property
    def began_s(self) -> float:
        """When step 1 began, since the command (s)."""
        return float(self.metrics[0]["time_s"] - self.metrics[0]["step_time_s"])

    def column(self, key: str) -> list[float]:
        """Return a figure of every step."""
        return [float(line[key]) for line in self.metrics]

    def times_s(self) -> list[float]:
        """Return when each step ended, since step 1 began (s)."""
        return [time_s - self.began_s for time_s in self.column("time_s")]

    def held_out(self) -> tuple[list[float], list[float]]:
        """Return when the weights of each evaluation existed, since step 1 began (s), and their held-out accuracy."""
        ends = {0: 0.0} | dict(zip(map(int, self.column("step")), self.times_s(), strict=True))
        steps = [int(line["step"]) for line in self.evaluations]
        return [ends[step] for step in steps], [float(line["accuracy"]) for line in self.evaluations]


def schedule_settings(mode: str, max_staleness: int) -> tuple[str, str]:
    return f"schedule.mode={mode}", f"schedule.max_staleness={max_staleness}"


def run_recipe(recipe: str, directory: Path, settings: Sequence[str], *, steps: int, roles: str = "") -> RecipeRun:
    """Run a recipe to its end.

    Args:
        recipe: its name.
        directory: of the run, new.
        settings: `section.name=value` each.
        roles: like `--roles`; "": the recipe's.

    Raises:
        SystemExit: the run failed; says what it printed.
    """
    options = [part for setting in settings for part in ("--set", setting)]
    placed = ["--roles", roles] if roles else []
    command = [str(COMMAND), recipe, "--steps", str(steps), "--run-dir", str(directory), *placed, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{directory.name}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    lines = LineReader(directory / EVALUATION_FILE).read() if (directory / EVALUATION_FILE).is_file() else []
    evaluations = sorted(lines, key=lambda line: int(line["step"]))
    return RecipeRun(directory, LineReader(directory / METRICS_FILE).read(), evaluations)
