"""One run as JSON for the page: `asyncflow view` asks for what is new, the report for all of it. Torch-free.

    metrics.jsonl     a column of floats per figure; sent as means over equal numbers of steps, the open one again
    evaluation.jsonl  a row per evaluation
    status.json       while the run is live; the queue's history, of which it has the newest moment, is in memory
    end.json          once it has ended; plan.json, config.yaml
    samples/, trace/  an index in memory; conversations and log-probabilities are read when asked for
    logs/             the ends, and what follows; the newest stacks in those of processes that failed
    timeline/         the ends; what the account needs is read whole

Each file is read from where the last call stopped. Nothing is written (but `trace` keeps an index of its own), and no
process of the run is asked. A file that is missing or damaged costs its panel and a line that says so, since a run is
looked at most when something is wrong with it. One thread at a time asks for `samples`, `stacks`, `account`,
`timeline` and `trace`, and one for everything else.
"""

import codecs
import contextlib
import math
import os
import re
import statistics
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy

from asyncflow.decoding import UNREADABLE, json_decoder, json_object, json_step
from asyncflow.errors import AsyncFlowError, ConfigError
from asyncflow.job import GangSpec
from asyncflow.json_lines import LineReader, finite_fields
from asyncflow.run_files import (
    CONFIG_FILE,
    END_FILE,
    EVALUATION_FILE,
    LOGS,
    METRICS_FILE,
    SAMPLES,
    TIMELINE,
    TRACE,
    checkpoint_path,
    list_checkpoints,
)
from launcher.config.load_config import read_yaml
from launcher.loggers.feed import HISTOGRAMS, figures
from launcher.process.progress import role_rows
from launcher.report.report import KeptRow, TimeSpent, has_text, number_text
from launcher.run.rundir import is_inside, read_plan
from launcher.run.several_runs import LogFile, end_state, last_step
from launcher.run.status import RunEnd, RunStatus, is_live
from launcher.timeline.run_timeline import CATEGORIES, RunTimeline, end_of_step, in_order, newest_spans, spans_between
from launcher.view.failure_stack import FailureStack
from launcher.view.queue_depths import QueueDepths
from launcher.view.row_trace import RowTrace, log_prob_gaps

Fields = dict[str, Any]

MOST_POINTS = 1000
"""Most points of a curve; those of longer runs are means over several steps."""
_LOG_BYTES = 64 * 1024
_MOST_STACKS = 24
_MOST_PROBLEMS = 4  # lines of one file that are named
_TIMELINE_BYTES = 32 * 2**20
_NOT_CURVES = frozenset({"step", "lineage"})
# Quantiles of Student's t for a 95 % interval of a mean, by number of values.
_STUDENT_95 = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


@dataclass(frozen=True)
class Have:
    """What a page has already: which life of the curves, how many steps to a point, points and evaluations; of the
    queue's history, how many snapshots to a point, and points."""

    generation: int = -1
    stride: int = 0
    points: int = 0
    evaluations: int = 0
    queue_stride: int = 0
    queue_points: int = 0


class Curves:
    """Every figure of `metrics.jsonl` by step, as columns.

    A run that goes back to a checkpoint cuts the file and repeats steps. Its file is then read anew, and `generation`
    grows: a page forgets what it has.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.generation = 0
        self.problems: list[str] = []
        self.last: Mapping[str, Any] = {}
        self._forget()

    def _forget(self) -> None:
        self._lines = LineReader(self._path, json_step)
        self._columns: dict[str, array[float]] = {}
        self._steps: array[int] = array("q")
        self.problems = []
        self.last = {}
        self.time_spent = TimeSpent()

    def read(self) -> None:
        """Take in the steps that finished since the last call."""
        found = self._lines.read_lines()
        news = [line for _, line in found.lines]
        # A cut file may have grown beyond the cursor again: then the next step, or its lineage, is another one.
        if self._steps and (found.wrong or (news and not self._follows(news))):
            self.generation += 1
            self._forget()
            found = self._lines.read_lines()
            news = [line for _, line in found.lines]
        self.problems += found.problems
        newest: dict[int, Fields] = {}
        for line in news:
            newest.pop(line["step"], None)
            newest[line["step"]] = line
        for step in sorted(newest):
            self._append(step, newest[step])

    def _follows(self, news: Sequence[Mapping[str, Any]]) -> bool:
        steps = [self.last.get("step"), *(line["step"] for line in news)]
        lineages = {line.get("lineage", 0) for line in (self.last, *news)}
        return len(lineages) == 1 and all(a < b for a, b in pairwise(steps))

    def _append(self, step: int, line: Fields) -> None:
        self._steps.append(step)
        every = figures(line)
        values = {name: value for name, value in every.items() if name not in _NOT_CURVES}
        for name in sorted(values.keys() - self._columns.keys()):
            self._columns[name] = array("d", [math.nan] * (len(self._steps) - 1))
        for name, column in self._columns.items():
            column.append(values.get(name, math.nan))
        self.time_spent.add_step(every)
        self.last = line

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def news(self, have: Have) -> Fields:
        """Return the points that a page lacks: {generation, stride, from, steps, values: name -> list}.

        Each point is the mean over `stride` steps, at the last of them. `from`: the page drops what it has from there.
        """
        stride = 1
        while self.num_steps > stride * MOST_POINTS:
            stride *= 2
        same = (have.generation, have.stride) == (self.generation, stride)
        # The page's last point may have been open.
        first = max(0, min(have.points, math.ceil(self.num_steps / stride)) - 1) if same else 0
        return {
            "generation": self.generation,
            "stride": stride,
            "from": first,
            "steps": list(self._steps[first * stride :])[stride - 1 :: stride] + self._open_step(stride),
            "values": {
                name: _means(numpy.frombuffer(column)[first * stride :], stride)
                for name, column in self._columns.items()
            },
        }

    def _open_step(self, stride: int) -> list[int]:
        return [self._steps[-1]] if self.num_steps % stride else []

    def time_of(self, step: int) -> float | None:
        """Return `time_s` of a step."""
        place, times = bisect_left(self._steps, step), self._columns.get("time_s", array("d"))
        found = place < min(len(self._steps), len(times)) and self._steps[place] == step
        return times[place] if found and math.isfinite(times[place]) else None

    def newest(self) -> dict[str, float]:
        return {name: value for name, value in figures(self.last).items() if name not in _NOT_CURVES}

    def last_values(self, name: str, number: int) -> list[float]:
        """Return a figure's values in the last steps, without those in which it has none."""
        return [value for value in self._columns.get(name, array("d"))[-number:] if math.isfinite(value)]


def _means(values: "numpy.ndarray[Any, Any]", stride: int) -> list[float | None]:
    if stride > 1:
        padded = numpy.concatenate([values, numpy.full(-len(values) % stride, math.nan)]).reshape(-1, stride)
        there = numpy.isfinite(padded)
        counts = there.sum(axis=1)
        sums = numpy.where(there, padded, 0.0).sum(axis=1)
        values = numpy.where(counts > 0, sums / numpy.maximum(counts, 1), math.nan)
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


# Samples


_Number = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]  # fits the columns


class _SampleLine(msgspec.Struct):
    step: _Number
    lineage: _Number = 0
    group: _Number = 0
    index: _Number = 0
    reward: float | None = None


_decode_sample = json_decoder(_SampleLine).decode


@dataclass
class _IndexedFile:
    path: Path
    number: int
    identity: tuple[int, int] | None = None
    read: int = 0  # bytes


class _LineIndex:
    """Where each line of some files stands, so that some are read without the others: columns of 48 bytes for each."""

    def __init__(self, run_dir: Path, pattern: str) -> None:
        self._run_dir = run_dir
        self._pattern = pattern
        self._forget()

    def _forget(self) -> None:
        self._files: dict[Path, _IndexedFile] = {}
        self._steps, self._groups, self._rows = array("q"), array("q"), array("q")
        self._rewards = array("d")
        self._lineages, self._numbers, self._offsets = array("i"), array("i"), array("q")
        self.num_unreadable = 0

    def read(self) -> None:
        """Take in the lines that were added since the last call; all of them if a file was cut or replaced."""
        for path in sorted(self._run_dir.glob(self._pattern)):
            if not is_inside(path, self._run_dir):
                continue
            try:
                with path.open("rb") as file:
                    facts = os.fstat(file.fileno())
                    known = self._files.setdefault(path, _IndexedFile(path, len(self._files)))
                    identity = (facts.st_dev, facts.st_ino)
                    if facts.st_size < known.read or known.identity not in (None, identity):
                        self._forget()
                        self.read()
                        return
                    known.identity = identity
                    self._read_file(known, file)
            except OSError:
                continue

    def _read_file(self, known: _IndexedFile, file: BinaryIO) -> None:
        file.seek(known.read)
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                one = _decode_sample(line)
                self._steps.append(one.step)
                self._groups.append(one.group)
                self._rows.append(one.index)
                self._rewards.append(math.nan if one.reward is None else one.reward)
                self._lineages.append(one.lineage)
                self._numbers.append(known.number)
                self._offsets.append(known.read)
            except (*UNREADABLE, OverflowError):
                self.num_unreadable += 1  # a crash may have torn it
            known.read += len(line)

    def _read_lines(self, places: Sequence[int]) -> Iterator[tuple[int, Fields]]:
        """Yield (place, line with the name of its file, which says who wrote it)."""
        paths = [known.path for known in self._files.values()]
        with contextlib.ExitStack() as stack:
            files: dict[int, BinaryIO] = {}
            for place in places:
                number = self._numbers[place]
                try:
                    if number not in files:
                        files[number] = stack.enter_context(paths[number].open("rb"))
                    files[number].seek(self._offsets[place])
                    yield place, {**json_object(files[number].readline()), "file": paths[number].stem}
                except (OSError, *UNREADABLE):
                    continue  # it was cut since

    def lines_of(self, rows: Sequence[int]) -> dict[int, list[Fields]]:
        """Return row -> its lines."""
        found: dict[int, list[Fields]] = {row: [] for row in rows}
        places = numpy.flatnonzero(numpy.isin(numpy.asarray(self._rows), rows)).tolist()
        for place, line in self._read_lines(places):
            found[self._rows[place]].append(line)
        return found


class SampleIndex(_LineIndex):
    """The kept rollouts."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, f"{SAMPLES}/*.jsonl")
        self._trained = _LineIndex(run_dir, f"{TRACE}/trained-*.jsonl")
        self._sorted: tuple[str, int, numpy.ndarray[Any, Any]] | None = None  # order, lines that there were, places

    def read(self) -> None:
        super().read()
        self._trained.read()

    @property
    def steps(self) -> tuple[int, int] | None:
        return (min(self._steps), max(self._steps)) if self._steps else None

    def find(self, *, steps: tuple[int, int] | None, search: str, order: str, skip: int, number: int) -> Fields:
        """Return {total, rows}: rollouts of some steps, those with a text, by reward or by step. A row that was drawn
        again, since the run went back, counts as it was drawn last.

        Args:
            steps: the first and the last; None: all.
            search: in any case, anywhere in prompt, conversations, response or ground truth.
            order: best, worst or newest.
            skip, number: which of them.
        """
        step, places = numpy.asarray(self._steps), self._places_by(order)
        if steps is not None:
            places = places[(steps[0] <= step[places]) & (step[places] <= steps[1])]
        if search:
            # All of them, so as they stand in the files: in another order each would cost a read of its own.
            there = numpy.sort(places).tolist()
            found = [place for place, row in self._read_lines(there) if has_text(row, search)]
            places = places[numpy.isin(places, found)]
        rows = [_shown(row) for _, row in self._read_lines(places[skip : skip + number].tolist())]
        self._add_gaps(rows)
        return {"total": len(places), "rows": rows}

    def _places_by(self, order: str) -> "numpy.ndarray[Any, Any]":
        """Return the places of all lines in an order; sorting a million takes longer than all the rest."""
        if self._sorted is None or self._sorted[:2] != (order, len(self._steps)):
            step, rewards = numpy.asarray(self._steps), numpy.asarray(self._rewards)
            if order == "newest":
                places = numpy.lexsort((numpy.asarray(self._rows), numpy.asarray(self._groups), -step))
            else:
                places = numpy.lexsort((-step, -rewards if order == "best" else rewards))  # no reward: the last ones
            if self._lineages and min(self._lineages) < max(self._lineages):
                places = places[self._counts()[places]]
            self._sorted = order, len(self._steps), places
        return self._sorted[2]

    def _counts(self) -> "numpy.ndarray[Any, Any]":
        """Return of each line whether no later lineage drew its row again; evaluations number their rows anew."""
        rows, lineages = numpy.asarray(self._rows), numpy.asarray(self._lineages)
        counts = numpy.ones(len(rows), dtype=bool)
        drawn = numpy.isin(self._numbers, [one.number for one in self._files.values() if _is_rollout(one.path.stem)])
        known, place = numpy.unique(rows[drawn], return_inverse=True)
        newest = numpy.full(len(known), lineages.min())
        numpy.maximum.at(newest, place, lineages[drawn])
        counts[drawn] = lineages[drawn] == newest[place]
        return counts

    def _add_gaps(self, rows: Sequence[Fields]) -> None:
        """Add the generating engine's log-probability minus the trainer's of each token that has both, as `gaps`.

        A resumed run draws and trains some rows again. Which drawing was trained is not known then, and they have none.
        """
        drawn = {row["index"]: row for row in rows if _is_drawn(row)}
        computed, again = self._trained.lines_of(list(drawn)), self.lines_of(list(drawn))
        for number, row in drawn.items():
            if len(computed[number]) == 1 == sum(map(_is_drawn, again[number])):
                values = computed[number][0].get("log_probs")
                if isinstance(values, list):
                    row["gaps"] = [gap and round(gap, 4) for gap in log_prob_gaps(row["log_probs"], values)]


def _shown(row: Fields) -> Fields:
    """Return a row as the page can show it: one of the wrong form says so."""
    try:
        msgspec.convert(row, KeptRow)
        return row
    except msgspec.ValidationError as error:
        known = {name: row.get(name) for name in ("step", "group", "index", "file")}
        return {**known, "reward": None, "response": f"this line is damaged: {error}"}


def _is_rollout(stem: str) -> bool:
    """Return whether a file of samples is of a rollout, not of an evaluation."""
    return stem.startswith("rollout")


def _is_drawn(row: Fields) -> bool:
    """Return whether a line is of a rollout with log-probabilities."""
    known = isinstance(row.get("index"), int) and isinstance(row.get("log_probs"), list)
    return known and _is_rollout(str(row["file"]))


# The run


def _log_label(gang: GangSpec | None, rank: int) -> str:
    """Return what the log of a gang's rank is called; see `launcher.process.gang.RankFiles`."""
    return "" if gang is None else f"{gang.role}/{gang.rank_in_role(rank)}"


class RunReader:
    """A run's files as JSON; see the module. `name` is what the page calls it."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self.run_dir = run_dir
        self.name = name
        self._curves = Curves(run_dir / METRICS_FILE)
        self._evaluation_lines = LineReader(run_dir / EVALUATION_FILE, json_step)
        self._evaluations: dict[int, Fields] = {}
        self._evaluation_problems: list[str] = []
        self._evaluation_generation = 0
        self._queue_depths = QueueDepths(MOST_POINTS)
        self._samples = SampleIndex(run_dir)
        self._settings: Mapping[str, Any] = {}
        self._settings_of: tuple[int, int, int] | None = None
        self._settings_problem = ""
        self._account: Fields = {}
        self._account_due = 0.0

    def state(self, have: Have | None = None) -> Fields:
        """Return what a page that has `have` lacks, and everything that is short."""
        have = have or Have()
        problems: list[str] = []
        try:
            self._curves.read()
            self._read_evaluations()
        except AsyncFlowError as error:
            problems.append(str(error))
        state, end = self._state_and_end()
        live = self._watched() if state == "running" else None
        same = (have.generation, have.evaluations) == (self._curves.generation, len(self._evaluations))
        return {
            "name": self.name,
            "path": str(self.run_dir),
            "state": state,
            "steps": last_step(self.settings()) or None,
            "step": self._curves.last.get("step", 0),
            "time_s": self._curves.time_spent.total or None,
            "curves": self._curves.news(have),
            "newest": finite_fields(self._curves.newest()),
            HISTOGRAMS: self._curves.last.get(HISTOGRAMS, {}),
            "evaluations": None if same else [finite_fields(line) for _, line in sorted(self._evaluations.items())],
            "live": live,
            "queue_depths": self._queue_depths.news(have.queue_stride, have.queue_points),
            "end": end,
            "plan": finite_fields(self._plan()),
            "problems": [*problems, *self._problems()],
            "at": time.time(),
        }

    def _problems(self) -> list[str]:
        """Return what cannot be read, the first lines of each file."""
        problems = [self._settings_problem] if self._settings_problem else []
        for of_file in (self._curves.problems, self._evaluation_problems):
            problems += of_file[:_MOST_PROBLEMS]
            if len(of_file) > _MOST_PROBLEMS:
                problems.append(f"and {len(of_file) - _MOST_PROBLEMS} more lines of that file")
        return problems

    def _read_evaluations(self) -> None:
        if self._curves.generation != self._evaluation_generation:  # the run went back, and cut this file, too
            self._evaluation_generation = self._curves.generation
            self._evaluation_lines = LineReader(self.run_dir / EVALUATION_FILE, json_step)
            self._evaluations, self._evaluation_problems = {}, []
        found = self._evaluation_lines.read_lines()
        self._evaluations |= {line["step"]: line for _, line in found.lines}
        self._evaluation_problems += found.problems

    def settings(self) -> Mapping[str, Any]:
        """Return the configuration, which a resumed run writes anew; {} if there is none yet, or it cannot be read."""
        path = self.run_dir / CONFIG_FILE
        try:
            facts = path.stat()
            now = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
            if now != self._settings_of and is_inside(path, self.run_dir):
                self._settings, self._settings_of = dict(read_yaml(path, argument=CONFIG_FILE).values), now
            self._settings_problem = ""
        except FileNotFoundError:
            pass
        except (ConfigError, OSError, TypeError, ValueError) as error:  # for a moment also while it is being written
            self._settings_problem = str(error)
        return self._settings

    def _plan(self) -> Fields:
        settings = self.settings()
        roles, colocated = settings.get("roles"), settings.get("colocated")
        return read_plan(self.run_dir, roles, colocated or ()) if isinstance(roles, Mapping) else {}

    def settings_text(self) -> str:
        """Return `config.yaml` as it is, or why it is not shown."""
        path = self.run_dir / CONFIG_FILE
        try:
            if path.exists() and not is_inside(path, self.run_dir):
                return f"{CONFIG_FILE} is a link out of the run's directory"
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"{CONFIG_FILE} cannot be read: {error.strerror}"

    def watch_queue(self) -> None:
        """Add to the history of the queue, if the run is live. To be called every few seconds."""
        with contextlib.suppress(OSError):
            if is_live(self.run_dir):
                self._watched()

    def _watched(self) -> Fields | None:
        live = self._live()
        if live is not None and live["queue"]:
            ready: Counter[str] = Counter()
            for task in live["queue"]:  # each controller has some rows of a task
                ready[task["task"]] += task["ready"]
            self._queue_depths.add(live["at"], ready)
        return live

    def _live(self) -> Fields | None:
        try:
            return self._fields_of(RunStatus.read(self.run_dir))
        except (AsyncFlowError, OSError, ValueError, KeyError, TypeError):
            return None  # it is starting, or of another version

    @staticmethod
    def _fields_of(status: RunStatus) -> Fields:
        roles = role_rows(status.gangs, status.ranks, time.time())
        gangs = {gang.name: gang for gang in status.gangs}
        return {
            "at": status.at,
            "pause": status.pause,
            "turn": status.turn,
            "roles": [dict(zip(("role", "ranks", "does", "weights"), row, strict=True)) for row in roles],
            "ranks": [
                {
                    "name": f"{gang}/{rank}",
                    "log": _log_label(gangs.get(gang), rank),
                    "state": one.state,
                    "detail": one.detail,
                    "step": one.step,
                    "version": one.version if one.version >= 0 else None,
                    "idle_s": one.idle_s + max(0.0, status.at - one.time),  # a rank that hangs reports nothing
                    "restarts": status.restarts.gangs.get(gang, 0),
                    "rollouts": dict(one.rollouts),
                }
                for (gang, rank), one in sorted(status.ranks.items())
            ],
            "queue": [
                {
                    name: task[name]
                    for name in ("task", "controller", "waiting", "ready", "leased", "acked", "rows_per_s")
                }
                for stats in status.controllers
                for task in stats["tasks"]
            ],
            "room": [
                {name: stats[name] for name in ("live_rows", "row_limit", "live_bytes", "waiting_puts", "lost_rows")}
                for stats in status.controllers[:1]
            ],
            "restarts": status.restarts.to_summary(),
            "failures": dict(status.failures),
            "advice": None if status.advice is None else status.advice.get("text"),
        }

    def _state_and_end(self) -> tuple[str, Fields | None]:
        """Return the run's state and, if it is not live, how it ended."""
        if is_live(self.run_dir):
            return "running", None
        end = RunEnd.read(self.run_dir) if (self.run_dir / END_FILE).exists() else None
        end = end or RunEnd.killed(self.run_dir, self._curves.last.get("step", 0))
        return end_state(end), {
            "lines": list(end.lines), "code": end.code, "at": end.at, "restarts": end.restarts.to_summary(),
        }  # fmt: skip

    # What a page asks for when somebody looks at it.

    def samples(
        self, *, steps: tuple[int, int] | None = None, search: str = "", order: str = "newest", skip: int = 0,
        number: int = 20,
    ) -> Fields:  # fmt: skip
        """Return {total, steps, unreadable, rows}; see `SampleIndex.find`. `unreadable`: lines that are none."""
        self._samples.read()
        found = self._samples.find(steps=steps, search=search, order=order, skip=skip, number=number)
        return {"steps": self._samples.steps, "unreadable": self._samples.num_unreadable, **found}

    def logs(self) -> list[LogFile]:
        """Return the logs that are inside the run's directory, by name."""
        root = self.run_dir / LOGS
        paths = [path for path in sorted(root.rglob("*.log")) if path.is_file() and is_inside(path, self.run_dir)]
        return [LogFile(str(path.relative_to(root).with_suffix("")), path) for path in paths]

    def log_tail(self, label: str, position: int | None = None) -> Fields | None:
        """Return {text, position}: the end of a log, or what follows `position`; None: the run has no such log."""
        log = next((one for one in self.logs() if one.label == label), None)
        if log is None:
            return None
        try:
            with log.path.open("rb") as file:
                size = file.seek(0, 2)
                follows = position is not None and 0 <= position <= size and size - position <= _LOG_BYTES
                start = position if follows and position is not None else max(0, size - _LOG_BYTES)
                file.seek(start)
                data = file.read(_LOG_BYTES)
        except OSError as error:
            return {"text": f"cannot be read: {error.strerror}", "position": 0, "follows": False}
        position = start + len(data)
        if start and not follows:
            data = data[data.find(b"\n") + 1 :]  # the first line may be half a line
        # The last line may have no end: the last words of a process that was killed, or a progress bar.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = decoder.decode(data)
        return {"text": text, "position": position - len(decoder.getstate()[0]), "follows": follows}

    def stacks(self) -> Fields:
        """Return {stacks: [{log, what, after, text}]}: the newest stack in the log of each process that failed.

        That one did is told by its error file, which its next start removes, by restarts of its role, and in a run that
        failed by a log that ends in a stack.
        """
        state, end = self._state_and_end()
        restarts = (end or self._live() or {}).get("restarts", {})
        again = {re.sub(r"-\d+$", "", gang) for gang in restarts.get("gangs", ())}
        found: list[Fields] = []
        for log in self.logs():
            failed = log.label.partition("/")[0] in again or log.path.with_suffix(".error.json").is_file()
            if not failed and state not in ("failed", "killed"):
                continue
            stack = FailureStack.newest(log.path)
            if stack is not None and (failed or stack.at_end):
                found.append({"log": log.label, "what": stack.what, "after": stack.after, "text": stack.text})
            if len(found) == _MOST_STACKS:
                break
        return {"stacks": found}

    def account(self) -> Fields:
        """Return {categories, roles: role -> category -> share of the time}, or {why}: there is none.

        It may be some time old: reading the whole timeline takes at most 1 % of the time.
        """
        began = time.monotonic()
        if began >= self._account_due:
            self._account = self._read_account()
            self._account_due = time.monotonic() + 100 * (time.monotonic() - began)
        return self._account

    def timeline(self, last_s: float, stretch: tuple[float, float] | None = None) -> Fields:
        """Return {origin, end, categories, processes: [{name, spans: [[start, length, name, category, details]]}]}.

        Starts and lengths are in seconds since `origin` (unix time), categories places in the list of them.

        Args:
            last_s: how much of the run's end.
            stretch: from when to when (unix time, s), instead.
        """
        try:
            processes = spans_between(self.run_dir, *stretch) if stretch else newest_spans(self.run_dir, last_s)
        except OSError as error:
            return {"why": f"the timeline cannot be read: {error.strerror}"}
        every = [span for own in processes.values() for span in own]
        if not every:
            return {"why": "no process has a span then" if stretch else "no spans yet"}
        newest = max(span.end for span in every)
        origin, end = stretch or (max(newest - last_s, min(span.start for span in every)), newest)
        categories = {name: place for place, name in enumerate(CATEGORIES)}
        return {
            "origin": origin,
            "end": round(end - origin, 4),
            "categories": list(CATEGORIES),
            "processes": [
                {
                    "name": name,
                    "spans": [
                        [
                            round(max(span.start, origin) - origin, 4), round(span.end - max(span.start, origin), 4),
                            span.name, categories[span.category],
                            ", ".join(f"{key} {value}" for key, value in span.attributes.items()),
                        ]
                        for span in own
                    ],
                }
                for name, own in processes.items()
            ],
        }  # fmt: skip

    def trace(self, row: int) -> Fields:
        """Return {text, moments}: where a row was, see `RowTrace`, or {why}: there is nothing.

        `moments`: [[when (unix time, s), what, process]]; []: it is not known when the run's clock began.
        """
        try:
            trace = RowTrace.read(self.run_dir, row)
            return {"text": trace.as_text(), "moments": self._moments(trace)}
        except (AsyncFlowError, OSError) as error:
            return {"why": str(error)}

    def _moments(self, trace: RowTrace) -> list[list[Any]]:
        # Times of a row count from the start of the command, which no file has once the run has ended. A step has both
        # its time since then and, in the timeline, the moment at which its weights existed.
        step_line = trace.trained[-1] if trace.trained else self._curves.last
        step, lineage = step_line.get("step", 0), step_line.get("lineage", 0)
        time_s = self._curves.time_of(step)
        ended = None if time_s is None else end_of_step(self.run_dir, step)
        if time_s is None or ended is None:
            return []
        moments = trace.moments(lineage)
        if trace.trained:
            moments.append((time_s, f"the weights of step {step} exist", "actor-0"))
        return [[round(ended - time_s + at, 3), what, process] for at, what, process in moments]

    def _read_account(self) -> Fields:
        try:
            size = sum(path.stat().st_size for path in (self.run_dir / TIMELINE).glob("*.jsonl"))
            if not size:
                return {"why": "no spans yet"}
            if size > _TIMELINE_BYTES:
                return {"why": f"the timeline has {size / 2**20:.0f} MB; use: asyncflow timeline {self.run_dir}"}
            account = RunTimeline.read(self.run_dir).account_by_role()
        except (AsyncFlowError, OSError, ValueError) as error:
            return {"why": str(error)}
        return {"categories": list(CATEGORIES), "roles": {role: account[role] for role in in_order(account)}}

    # The summary of the report.

    def final_figures(self, names: Mapping[str, str], number: int) -> list[tuple[str, str]]:
        """Return (label, text) of figures that the run has: the mean over its last steps with its 95 % interval.

        `names`: figure -> label; `number`: of steps, up to ten.
        """
        rows = []
        for name, label in names.items():
            values = self._curves.last_values(name, number)
            if len(values) > 1:
                half = _STUDENT_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
                mean = number_text(statistics.fmean(values), 4)
                rows.append((label, f"{mean} ± {number_text(half, 2)} (last {len(values)} steps)"))
            elif values:
                rows.append((label, f"{number_text(values[0], 4)} (one step)"))
        return rows

    def newest_evaluation(self) -> Fields | None:
        return self._evaluations[max(self._evaluations)] if self._evaluations else None

    def newest_model(self) -> Path | None:
        """Return the newest directory that `transformers` loads; None: nothing is saved."""
        steps = reversed(list_checkpoints(self.run_dir))
        paths = (checkpoint_path(self.run_dir, step) / "hf" for step in steps)
        return next((path for path in islice(paths, 20) if path.is_dir()), None)
