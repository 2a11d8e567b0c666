"""Feeds one logger from a run's directory: each step, each evaluation and some samples, once. Torch-free.

What a logger was given is written to `loggers/NAME.json` before it is given, so a logger that dies, or a run that is
resumed, goes on where it was, and nothing is logged twice: what is under way when its process dies is not logged.

When a run goes back to a checkpoint it does some steps again. A logger that can forgets what it had of them
(`rewind`); for the others the first time counts, and they go on with the first step that they have not seen.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncflow.json_lines import LineTail
from asyncflow.run_files import EVALUATION_FILE, LOGGERS, METRICS_FILE, SAMPLES
from launcher.loggers.base import COLUMNS, Histogram, Logger

HISTOGRAMS = "histograms"
TABLE_EVERY_S = 60.0
"""A table of samples costs a logger as much as ten steps."""
_MOST_ROWS, _LONGEST_TEXT = 16, 4000


@dataclass
class Progress:
    """How far a logger is.

    Attributes:
        id: of its own run.
        lineage, step: of the newest line of `metrics.jsonl` that was looked at.
        logged: the highest step that it was given.
        evaluated: steps whose evaluations it was given.
        shown: samples of steps up to this one were shown, or passed over.
    """

    id: str = ""
    lineage: int = 0
    step: int = 0
    logged: int = 0
    evaluated: list[int] = field(default_factory=list)
    shown: int = 0

    @staticmethod
    def load(run_dir: Path, name: str) -> "Progress":
        """Return what an earlier process of this logger left, or that of a new one."""
        path = _progress_file(run_dir, name)
        return Progress(**json.loads(path.read_text())) if path.exists() else Progress()

    def save(self, run_dir: Path, name: str) -> None:
        """Write it down."""
        path = _progress_file(run_dir, name)
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(asdict(self)))
        beside.replace(path)


class Feed:
    """What is new in the run's files, to one logger."""

    def __init__(self, run_dir: Path, name: str, logger: Logger, progress: Progress) -> None:
        self._run_dir = run_dir
        self._name = name
        self._logger = logger
        self._progress = progress
        self._steps = LineTail(run_dir / METRICS_FILE)
        self._evaluations = LineTail(run_dir / EVALUATION_FILE)
        self._samples: dict[Path, LineTail] = {}
        self._rows: list[dict[str, Any]] = []
        self._table_at = -TABLE_EVERY_S

    def read(self, now: float, *, last: bool = False) -> None:
        """Give the logger what is new.

        Args:
            now: monotonic seconds.
            last: the run has ended.
        """
        for line in self._steps.read():
            if (line["lineage"], line["step"]) > (self._progress.lineage, self._progress.step):
                self._step(line)
        for line in self._evaluations.read():  # after the steps: a step that is done again makes way for its evaluation
            if line["step"] not in self._progress.evaluated:
                self._progress.evaluated.append(line["step"])
                self._save()
                self._logger.log(line["step"], figures({"evaluation": line}), {})
        if last or now - self._table_at >= TABLE_EVERY_S:
            self._show_samples(now)

    def _step(self, line: Mapping[str, Any]) -> None:
        progress, step = self._progress, int(line["step"])
        if step <= progress.logged and self._logger.rewind(step):
            progress.logged = step - 1
            progress.shown = min(progress.shown, step - 1)
            progress.evaluated = [each for each in progress.evaluated if each < step]
        progress.lineage, progress.step = line["lineage"], step
        is_first = step > progress.logged
        progress.logged = max(progress.logged, step)
        self._save()
        if is_first:
            metrics = {name: value for name, value in figures(line).items() if name != "step"}
            self._logger.log(step, metrics, histograms(line))

    def _show_samples(self, now: float) -> None:
        newest = self._progress.logged
        for path in (self._run_dir / SAMPLES).glob("rollout-*.jsonl"):
            for line in self._samples.setdefault(path, LineTail(path)).read():
                if line["step"] > self._progress.shown:
                    self._rows.append({name: _cut(line.get(name)) for name in COLUMNS})
        rows = [row for row in self._rows if self._progress.shown < row["step"] <= newest]
        if not rows:
            return
        self._rows = [row for row in self._rows if row["step"] > newest]
        self._table_at, self._progress.shown = now, newest
        self._save()
        rows.sort(key=lambda row: (row["step"], row["group"]))
        self._logger.table(newest, rows[-_MOST_ROWS:])

    def _save(self) -> None:
        self._progress.save(self._run_dir, self._name)


def figures(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line by name, those of an object inside as `idle_fraction/rollout`."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping) and name != HISTOGRAMS:
            found |= {f"{name}/{inner}": each for inner, each in figures(value).items()}
        elif isinstance(value, int | float):
            found[name] = value
    return found


def histograms(line: Mapping[str, Any]) -> dict[str, Histogram]:
    """Return those of a line of `metrics.jsonl`; of steps that an earlier release made there are none."""
    each: Mapping[str, Mapping[str, int]] = line.get(HISTOGRAMS, {})
    return {
        name: dict(sorted((float(value), count) for value, count in counts.items()))
        for name, counts in each.items()
        if counts
    }


def _progress_file(run_dir: Path, name: str) -> Path:
    return run_dir / LOGGERS / f"{name.replace(':', '.')}.json"


def _cut(value: Any) -> Any:
    return value if not isinstance(value, str) or len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]} ..."
