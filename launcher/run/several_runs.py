"""Looking over runs: `asyncflow ls`, `asyncflow diff`, and the log lines of one, `asyncflow logs`. Torch-free.

Everything is read from the runs' files; a live run notices nothing.
"""

import contextlib
import json
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from asyncflow.decoding import json_step
from asyncflow.errors import AsyncFlowError, ConfigError
from asyncflow.json_lines import LineReader
from asyncflow.run_files import CONFIG_FILE, LOGS, METRICS_FILE
from launcher.config.load_config import flatten, read_yaml
from launcher.process.progress import plain, table
from launcher.process.run_events import DONE, RESUMABLE
from launcher.report.report import Curves, TimeSpent, number_text, read_curves
from launcher.run.rundir import RUNS, check_run_dir, newest_run
from launcher.run.status import RunEnd, is_live, live_state
from workers.settings.dataflow import OBSERVERS

LAST_STEPS = 10
"""A final figure is the mean over this many steps."""
FIGURES = ("reward_mean", "cross_entropy", "accuracy", "evaluation/accuracy", "kl", "entropy", "response_tokens_mean",
           "truncated_fraction", "staleness_mean", "train_tokens_per_s", "step_time_s")  # fmt: skip
_POLL_S = 0.2
_BLOCK_BYTES = 64 * 1024


@dataclass(frozen=True)
class RunLine:
    """One run in a list.

    Attributes:
        state: running, paused, done, stopped (resumable), failed, killed, or unknown (its record is damaged).
        step, steps: the last finished step, and the run's last; see `last_step`.
        reward: mean reward of the last steps; None: no step is finished.
        changed_at: when the run last finished a step, or began (unix time, s).
        problem: what of its metrics cannot be read; the figures are of the other lines.
    """

    path: Path
    state: str
    step: int
    steps: int
    reward: float | None
    changed_at: float
    problem: str = ""

    @staticmethod
    def read(run_dir: Path) -> "RunLine":
        """Read a run's files. What is missing or damaged is left out, so that one run hides no other."""
        metrics, problem = _lines_of(run_dir / METRICS_FILE)
        rewards = [line["reward_mean"] for line in metrics[-LAST_STEPS:] if _is_number(line.get("reward_mean"))]
        try:
            steps = last_step(read_yaml(run_dir / CONFIG_FILE).values)
        except ConfigError:
            steps = 0
        changed = [path.stat().st_mtime for name in (METRICS_FILE, CONFIG_FILE) if (path := run_dir / name).is_file()]
        return RunLine(
            run_dir,
            live_state(run_dir) if is_live(run_dir) else end_state(RunEnd.read(run_dir)),
            max((int(line["step"]) for line in metrics), default=0),
            steps,
            statistics.fmean(rewards) if rewards else None,
            max(changed, default=0.0),
            problem,
        )

    def as_dict(self) -> dict[str, Any]:
        return {"run_dir": str(self.path), "state": self.state, "step": self.step, "steps": self.steps,
                "reward": self.reward, "changed_at": self.changed_at, "problem": self.problem}  # fmt: skip


def last_step(settings: Mapping[str, Any]) -> int:
    """Return a run's last step; 0: it is not known, or there are none, since `asyncflow evaluate` trains nothing."""
    steps, roles = settings.get("steps"), settings.get("roles")
    trains = not isinstance(roles, Mapping) or any(role not in OBSERVERS for role in roles)
    return steps if isinstance(steps, int) and (trains or not roles) else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _lines_of(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the lines of a file that can be read, and what is wrong with the first of the others."""
    try:
        found = LineReader(path, json_step).read_lines()
    except AsyncFlowError as error:
        return [], str(error)
    wrong = [f"{path.name}:{number}: {what}" for number, what in found.wrong]
    more = f" (and {len(wrong) - 1} more lines)" if len(wrong) > 1 else ""
    return [line for _, line in found.lines], f"{wrong[0]}{more}" if wrong else ""


def end_state(end: RunEnd | None) -> str:
    """Return the state of a run that is not live."""
    if end is not None and not end.readable:
        return "unknown"
    if end is None or end.code is None:
        return "killed"
    return {DONE: "done", RESUMABLE: "stopped"}.get(end.code, "failed")


def list_runs(root: Path) -> list[RunLine]:
    """Return the runs in a directory, the newest last. Raises ConfigError if there is none."""
    found = [file.parent for file in root.glob(f"*/{CONFIG_FILE}") if (file.parent / LOGS).is_dir()]
    if not found:
        raise ConfigError(f"DIRECTORY: there is no run in {root.resolve()}; name the directory that holds runs")
    return sorted((RunLine.read(path) for path in found), key=lambda line: line.changed_at)


def list_text(runs: Sequence[RunLine]) -> str:
    """Return a table that fits 80 columns unless a run's name does not."""
    rows: list[tuple[str, ...]] = [("RUN", "STATE", "STEP", "REWARD", "CHANGED")]
    for run in runs:
        reward = "-" if run.reward is None else f"{run.reward:.3f}"
        changed = datetime.fromtimestamp(run.changed_at).strftime("%d %b %H:%M")
        step = f"{run.step}/{run.steps or '?'}" if run.step or run.steps else "-"
        rows.append((plain(run.path.name), run.state, step, reward, changed))
    told = [f"{plain(run.path.name)}: left out is {plain(run.problem)}" for run in runs if run.problem]
    return "\n".join([table(rows), *(textwrap.fill(line, 80, subsequent_indent="  ") for line in told)])


def diff_text(runs: Sequence[Path], *, width: int = 80) -> str:
    """Return the settings in which runs differ, and their figures over the last steps that all of them finished.

    A table with more than `width` columns becomes one block of lines per setting or figure.

    Raises:
        ConfigError: one of them is not a run, or has no finished step.
    """
    names = run_names(check_runs(runs))
    differences = setting_differences([read_yaml(run / CONFIG_FILE).values for run in runs])
    rows: list[tuple[str, ...]] = [("SETTING", *names), *((key, *values) for key, values in differences)]
    text = _table_or_blocks(rows, width) if differences else "The settings are the same."
    curves = [read_curves(run) for run in runs]
    last = min(max(one["step"]) for one in curves)
    first = max(1, last - LAST_STEPS + 1)
    figures: list[tuple[str, ...]] = [(f"STEPS {first} TO {last}", *names)]
    for name in FIGURES:
        cells = [_cell([value for step, value in one.get(name, {}).items() if first <= step <= last]) for one in curves]
        if any(cell != "-" for cell in cells):
            figures.append((name, *cells))
    figures.append(("steps finished", *(str(int(max(one["step"]))) for one in curves)))
    figures.append(("minutes to that step", *(_minutes(one, last) for one in curves)))
    return plain(f"{text}\n\n{_table_or_blocks(figures, width)}\nMean over these steps, and their standard deviation.")


def _minutes(curves: Curves, last: int) -> str:
    spent = TimeSpent()
    for step in curves["step"]:
        if step <= last:
            spent.add_step({name: curve.get(step) for name, curve in curves.items()})
    return f"{spent.total / 60:.1f}" if spent.total else "-"


def _table_or_blocks(rows: Sequence[tuple[str, ...]], width: int) -> str:
    text = table(rows)
    if max(map(len, text.splitlines())) <= width:
        return text
    (heading, *names), *others = rows
    longest = max(map(len, names))
    blocks = [
        "\n".join([name, *(f"  {run:<{longest}}  {cell}" for run, cell in zip(names, cells, strict=True))])
        for name, *cells in others
    ]
    return "\n".join([heading, *blocks])


_ABSENT = object()
_STAMPS = frozenset({"data.template_time"})
"""What each start sets by itself, and no comparison is about."""


def setting_differences(settings: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the keys in which configurations differ, each with the value of every one, shortened; -: it has none."""
    flat = [flatten(one) for one in settings]
    rows = []
    for key in sorted({key for one in flat for key in one} - _STAMPS):
        values = [one.get(key, _ABSENT) for one in flat]
        if any(value != values[0] for value in values):
            rows.append((key, ["-" if value is _ABSENT else _short(value) for value in values]))
    return rows


def check_runs(runs: Sequence[Path]) -> Sequence[Path]:
    """Return the directories. Raises ConfigError if one is no run's."""
    for run in runs:
        check_run_dir(run)
    return runs


def run_names(runs: Sequence[Path]) -> list[str]:
    """Return what to call each run: its directory's name, or its path if two have the same name."""
    names = [plain(run.resolve().name) for run in runs]
    return names if len(set(names)) == len(names) else [plain(str(run)) for run in runs]


def _short(value: Any) -> str:
    text = plain(value if isinstance(value, str) else json.dumps(value, default=str))
    return text if len(text) <= 40 else f"...{text[-37:]}"


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" +- {number_text(statistics.stdev(values), 2)}" if len(values) > 1 else ""
    return f"{number_text(statistics.fmean(values), 4)}{spread}"


# Log lines

_WHO = re.compile(r"[\w.-]+(?:/\d+)?")


@dataclass
class LogFile:
    """One process' log, read from a position on."""

    label: str
    path: Path
    position: int = 0
    partial: bytes = field(default=b"", repr=False)

    def read_lines(self) -> list[str]:
        """Return the complete lines since the last call; a file that was cut is read anew."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self.position:
                    self.position, self.partial = 0, b""
                file.seek(self.position)
                data = file.read()
                self.position = file.tell()
        except FileNotFoundError:
            return []
        *lines, self.partial = (self.partial + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def skip_to_last(self, number: int) -> None:
        """Go to where so many lines, or a few more, are left: a log may have gigabytes."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            place, found = file.seek(0, 2), 0
            while place and found <= number:
                size = min(place, _BLOCK_BYTES)
                place -= size
                file.seek(place)
                found += file.read(size).count(b"\n")
            self.position = place

    def read_rest(self) -> list[str]:
        """Return what follows the last complete line: the last words of a killed process, or a progress bar."""
        rest, self.partial = self.partial, b""
        return [rest.decode(errors="replace")] if rest else []


def find_logs(run_dir: Path, who: str | None) -> list[LogFile]:
    """Return the logs of a role, of one of its ranks (`rollout/2`), or of the launcher.

    Args:
        who: None: of all.

    Raises:
        ConfigError: the run has no such log.
    """
    root = run_dir / LOGS
    if not root.is_dir():
        check_run_dir(run_dir)
        raise ConfigError(f"RUN: {run_dir} has no {LOGS}/; name another run, e.g. of `asyncflow ls`")
    files = sorted((path for path in root.rglob("*.log") if path.is_file()), key=lambda path: _by_rank(path, root))
    logs = [LogFile(str(path.relative_to(root).with_suffix("")), path) for path in files]
    if who is None:
        return logs
    chosen = [log for log in logs if log.label == who or log.label.startswith(f"{who}/")]
    if not chosen:
        roles = sorted({log.label.partition("/")[0] for log in logs})
        raise ConfigError(f"ROLE: {who!r} has no log in {run_dir}; one of {' '.join(roles)}, or ROLE/RANK")
    return chosen


def run_and_role(run_dir: Path | None, role: str | None) -> tuple[Path, str | None]:
    """Return what the words of `asyncflow logs` mean: one that is no directory may be a role of the newest run.

    Raises:
        ConfigError: it is neither, or there is no run.
    """
    if run_dir is None or role is not None or run_dir.exists() or _WHO.fullmatch(str(run_dir)) is None:
        return run_dir or newest_run("RUN_DIR", "name a run directory"), role
    name = str(run_dir)
    if not any(RUNS.glob(f"*/{CONFIG_FILE}")):
        raise ConfigError(
            f"RUN_DIR: {name} does not exist, and there is no run in {RUNS.resolve()} of which it could be a role; "
            f"name a run directory"
        )
    newest = newest_run()
    try:
        find_logs(newest, name)
    except ConfigError as error:
        raise ConfigError(f"RUN_DIR: {name} does not exist, nor is it a role of the newest run: {error}") from error
    return newest, name


def _by_rank(path: Path, root: Path) -> tuple[Any, ...]:
    return tuple(
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.relative_to(root).with_suffix("").parts
    )


def log_lines(
    logs: Sequence[LogFile],
    *,
    number: int,
    follow: Callable[[], bool] | None = None,
    find: Callable[[], Sequence[LogFile]] = lambda: (),
) -> Iterator[str]:
    """Yield the last lines of each log, with its name in front if there are several.

    Args:
        number: how many of each.
        follow: goes on with new lines as long as this says True; None: does not.
        find: finds the logs again, since those of a run that is just starting come one by one.
    """
    width = _width_of(logs)
    for log in logs:
        log.skip_to_last(number)
        lines = log.read_lines() + (log.read_rest() if follow is None else [])
        yield from (_labelled(log, line, width) for line in lines[max(0, len(lines) - number) :])
    while follow is not None:
        goes_on = follow()
        known = {log.path for log in logs}
        logs = [*logs, *(log for log in find() if log.path not in known)]
        width = _width_of(logs)
        new = [_labelled(log, line, width) for log in logs for line in log.read_lines()]
        yield from new
        if not goes_on:
            yield from (_labelled(log, line, width) for log in logs for line in log.read_rest())
            return
        if not new:
            time.sleep(_POLL_S)


def _width_of(logs: Sequence[LogFile]) -> int:
    return max(len(log.label) for log in logs) if len(logs) > 1 else 0


def _labelled(log: LogFile, line: str, width: int) -> str:
    return f"{log.label.ljust(width)}  {plain(line)}" if width else plain(line)
