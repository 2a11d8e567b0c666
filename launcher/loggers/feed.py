"""Feeds one logger from a run's files, each step and evaluation once. Its process is `python -m launcher.loggers.feed
NAME RUN_DIR LAUNCHER_PID`, whose standard input ends with the run. Torch-free.

How far a logger is stands in `loggers/NAME.json` before it is given anything, so a logger that dies, or a run that is
resumed, goes on where it was, and nothing is logged twice. When a run goes back to a checkpoint it does some steps
again. A logger that can forgets them (`rewind`); of the others the first time stays.
"""

import json
import logging
import os
import select
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncflow.errors import ConfigError, one_line
from asyncflow.json_lines import LineTail, replace_text
from asyncflow.process import die_with_parent, ignore_stop_signals
from asyncflow.run_files import EVALUATION_FILE, LOGGERS, METRICS_FILE, SAMPLES
from launcher.loggers.backends import make_logger
from launcher.loggers.base import COLUMNS, Histogram, LoggedRun, Logger
from workers.settings.run import RunConfig

HISTOGRAMS = "histograms"
SHOW_EVERY_S = 60.0
"""A table of samples costs a logger as much as ten steps."""
_MOST_ROWS, _LONGEST_TEXT = 16, 4000
_POLL_S = 2.0


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
    def load(path: Path) -> "Progress":
        """Return what an earlier process of this logger left, or that of a new one.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            return Progress(**json.loads(path.read_text())) if path.exists() else Progress()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: {error}; restore it, or remove it to log the run anew") from error


class Feed:
    """What is new in the run's files, to one logger; keeps `progress` in a file."""

    def __init__(self, run_dir: Path, logger: Logger, progress: Progress, path: Path) -> None:
        self._run_dir, self._logger, self._progress, self._path = run_dir, logger, progress, path
        self._save()
        self._steps = LineTail(run_dir / METRICS_FILE)
        self._evaluations = LineTail(run_dir / EVALUATION_FILE)
        self._samples: dict[Path, LineTail] = {}
        self._rows: list[dict[str, Any]] = []
        self._histograms: dict[str, Histogram] = {}
        self._shown_at = -SHOW_EVERY_S

    def read(self, now: float, *, last: bool = False) -> None:
        """Give the logger what is new at a time (monotonic s); `last`: the run has ended."""
        for line in self._steps.read():
            if (line["lineage"], line["step"]) > (self._progress.lineage, self._progress.step):
                self._step(line)
        for line in self._evaluations.read():  # after the steps: one that is done again makes way for its evaluation
            if line["step"] not in self._progress.evaluated:
                self._progress.evaluated.append(line["step"])
                self._save()
                self._logger.log(line["step"], figures({"evaluation": line}))
        if (last or now - self._shown_at >= SHOW_EVERY_S) and self._histograms:
            self._show(now)

    def _step(self, line: Mapping[str, Any]) -> None:
        progress, step = self._progress, int(line["step"])
        if step <= progress.logged and self._logger.rewind(step):
            progress.logged, progress.shown = step - 1, min(progress.shown, step - 1)
            progress.evaluated = [each for each in progress.evaluated if each < step]
        progress.lineage, progress.step = line["lineage"], step
        is_new = step > progress.logged
        progress.logged = max(progress.logged, step)
        self._save()
        if is_new:
            self._logger.log(step, {name: value for name, value in figures(line).items() if name != "step"})
            self._histograms = histograms(line)

    def _show(self, now: float) -> None:
        newest, rows = self._progress.logged, self._rows
        for path in (self._run_dir / SAMPLES).glob("rollout-*.jsonl"):
            for line in self._samples.setdefault(path, LineTail(path)).read():
                rows.append({name: _cut(line.get(name)) for name in COLUMNS})
        ready = [row for row in rows if self._progress.shown < row["step"] <= newest]
        ready.sort(key=lambda row: (row["step"], row["group"]))
        drawn, self._histograms = self._histograms, {}
        self._rows = [row for row in rows if row["step"] > newest]
        self._shown_at = now
        self._progress.shown = newest
        self._save()
        self._logger.show(newest, ready[-_MOST_ROWS:], drawn)

    def _save(self) -> None:
        replace_text(self._path, json.dumps(asdict(self._progress)))


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
    """Return those of a line of `metrics.jsonl` that are not empty, as `histograms/reward`."""
    each: Mapping[str, Mapping[str, int]] = line.get(HISTOGRAMS, {})
    sorted_ones = {name: sorted((float(value), count) for value, count in one.items()) for name, one in each.items()}
    return {f"{HISTOGRAMS}/{name}": dict(one) for name, one in sorted_ones.items() if one}


def main() -> None:
    """Feed a logger until standard input ends; when it fails, the last line on stderr says why."""
    name, run_dir, launcher_pid = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    die_with_parent(launcher_pid)
    ignore_stop_signals()  # the run is stopped by the launcher, and only then its loggers
    run_end = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a library may ask for a password
    try:
        _feed(name, run_dir, run_end)
    except ConfigError as error:
        sys.exit(str(error))
    except Exception as error:  # the boundary of a process: libraries, and users' classes, raise anything
        logging.exception("the logger failed")
        sys.exit(one_line(error))


def _feed(name: str, run_dir: Path, run_end: int) -> None:
    config, path = RunConfig.load(run_dir), run_dir / LOGGERS / f"{name.replace(':', '.')}.json"
    own = next(each for each in config.loggers if each.name == name)
    progress = Progress.load(path)
    logger = make_logger(own, LoggedRun(run_dir, config.name, config.model_dump(mode="json"), progress.id))
    progress.id = logger.id
    feed = Feed(run_dir, logger, progress, path)
    while not select.select([run_end], [], [], _POLL_S)[0]:
        feed.read(time.monotonic())
    feed.read(time.monotonic(), last=True)
    logger.close()


def _cut(value: Any) -> Any:
    return value if not isinstance(value, str) or len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]} ..."


if __name__ == "__main__":
    main()
