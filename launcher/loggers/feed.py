"""Feeds one logger from a run's files, each step and evaluation once. Torch-free.

Its process is `python -m launcher.loggers.feed NAME RUN_DIR LAUNCHER_PID`; end of standard input means end of the run.

`loggers/NAME.json` records what a logger is about to get before it gets it. So a logger that dies, or a run that is
resumed, continues where it was, and nothing is logged twice. A run that goes back to a checkpoint repeats some steps: a
logger that can forgets the first ones (`rewind`); the others keep them and get no second ones.
"""

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.decoding import json_decoder
from asyncflow.errors import ConfigError, one_line
from asyncflow.json_lines import LineReader, replace_text
from asyncflow.process import die_with_parent, ignore_stop_signals
from asyncflow.run_files import EVALUATION_FILE, LOGGERS, LOGS, METRICS_FILE, SAMPLES
from launcher.loggers.backends import COLUMNS, Histogram, LoggedRun, Logger, make_logger
from workers.settings.run import LoggerConfig, RunConfig

HISTOGRAMS = "histograms"
SHOW_EVERY_S = 60.0
"""Shortest time between tables of samples, each of which costs a logger as much as ten steps (s)."""
_MOST_ROWS, _LONGEST_TEXT = 16, 4000
_POLL_S = 2.0


_Sample = msgspec.defstruct("_Sample", [("step", int), *((name, Any, None) for name in COLUMNS if name != "step")])
_decode_sample: Callable[[bytes], Any] = json_decoder(_Sample).decode


@dataclass
class LoggerProgress:
    """How far a logger is.

    Attributes:
        lineage, step: of the newest line of `metrics.jsonl` that was read.
        logged: highest step that it was given.
        evaluated: steps whose evaluations it was given.
        shown: samples up to this step were shown or skipped.
    """

    id: str = ""
    lineage: int = 0
    step: int = 0
    logged: int = 0
    evaluated: list[int] = field(default_factory=list)
    shown: int = 0

    @staticmethod
    def load(path: Path) -> "LoggerProgress":
        """Return what an earlier process of this logger left, or a fresh one.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            return LoggerProgress(**json.loads(path.read_text())) if path.exists() else LoggerProgress()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: {error}; restore it, or remove it to log the run anew") from error


class Feed:
    """Reads what is new in a run's files and gives it to one logger; records `progress` in the file `path`."""

    def __init__(self, run_dir: Path, logger: Logger, progress: LoggerProgress, path: Path) -> None:
        self._run_dir, self._logger, self._progress, self._path = run_dir, logger, progress, path
        self._save_progress()
        self._steps = LineReader(run_dir / METRICS_FILE)
        self._evaluations = LineReader(run_dir / EVALUATION_FILE)
        self._samples: dict[Path, LineReader[dict[str, Any] | None]] = {}
        self._rows: list[dict[str, Any]] = []
        self._histograms: dict[str, Histogram] = {}
        self._shown_at = -SHOW_EVERY_S

    def read(self, now: float, *, last: bool = False) -> None:
        """Give the logger what is new at the monotonic time `now` (s). `last`: the run has ended."""
        for line in self._steps.read():
            if (line["lineage"], line["step"]) > (self._progress.lineage, self._progress.step):
                self._step(line)
        # After the steps: a step that the run repeats forgets its old evaluation first.
        for line in self._evaluations.read():
            if line["step"] not in self._progress.evaluated:
                self._progress.evaluated.append(line["step"])
                self._save_progress()
                self._logger.log(line["step"], figures({"evaluation": line}))
        if (last or now - self._shown_at >= SHOW_EVERY_S) and self._histograms:
            self._show_samples(now)

    def _step(self, line: Mapping[str, Any]) -> None:
        progress, step = self._progress, int(line["step"])
        if step <= progress.logged and self._logger.rewind(step):
            progress.logged, progress.shown = step - 1, min(progress.shown, step - 1)
            progress.evaluated = [each for each in progress.evaluated if each < step]
        progress.lineage, progress.step = line["lineage"], step
        is_new = step > progress.logged
        progress.logged = max(progress.logged, step)
        # Before the logger gets the step: if it dies in between, a step is missing rather than logged twice.
        self._save_progress()
        if is_new:
            self._logger.log(step, {name: value for name, value in figures(line).items() if name != "step"})
            self._histograms = histograms(line)

    def _show_samples(self, now: float) -> None:
        newest, rows = self._progress.logged, self._rows
        for path in (self._run_dir / SAMPLES).glob("rollout-*.jsonl"):
            reader = self._samples.setdefault(path, LineReader(path, self._row_to_show))
            # Leniently: a process that was killed leaves half a line, and the next one goes on behind it.
            rows += [row for _, row in reader.read_lines().lines if row is not None]
        ready = [row for row in rows if self._progress.shown < row["step"] <= newest]
        ready.sort(key=lambda row: (row["step"], row["group"]))
        drawn, self._histograms = self._histograms, {}
        self._rows = [row for row in rows if row["step"] > newest]
        self._shown_at = now
        self._progress.shown = newest
        self._save_progress()
        self._logger.show(newest, ready[-_MOST_ROWS:], drawn)

    def _row_to_show(self, line: bytes) -> dict[str, Any] | None:
        """Return what is shown of a sample; None: nothing more. All samples of a long run are gigabytes."""
        sample = _decode_sample(line)
        if sample.step <= self._progress.shown:
            return None
        return {name: _cut(getattr(sample, name)) for name in COLUMNS}

    def _save_progress(self) -> None:
        replace_text(self._path, json.dumps(asdict(self._progress)))


def figures(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line by name; those of an inner object are named like `idle_fraction/rollout`."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping) and name != HISTOGRAMS:
            found |= {f"{name}/{inner}": each for inner, each in figures(value).items()}
        elif isinstance(value, int | float):
            found[name] = value
    return found


def histograms(line: Mapping[str, Any]) -> dict[str, Histogram]:
    """Return the non-empty histograms of a line of `metrics.jsonl`, named like `histograms/reward`."""
    each: Mapping[str, Mapping[str, int]] = line.get(HISTOGRAMS, {})
    sorted_ones = {name: sorted((float(value), count) for value, count in one.items()) for name, one in each.items()}
    return {f"{HISTOGRAMS}/{name}": dict(one) for name, one in sorted_ones.items() if one}


def main() -> None:
    """Feed a logger until standard input ends. If it fails, the last line on stderr says why."""
    name, run_dir, launcher_pid = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    die_with_parent(launcher_pid)
    ignore_stop_signals()  # the launcher ends loggers after the run has stopped
    run_end = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a library might wait for a password on stdin
    try:
        _feed(name, run_dir, run_end)
    except ConfigError as error:
        sys.exit(str(error))
    except Exception as error:  # the boundary of a process: libraries and users' classes raise anything
        logging.exception("the logger failed")
        sys.exit(one_line(error))


def _feed(name: str, run_dir: Path, run_end: int) -> None:
    config, path = RunConfig.load(run_dir), run_dir / LOGGERS / f"{name.replace(':', '.')}.json"
    own = next(each for each in config.loggers if each.name == name)
    progress = LoggerProgress.load(path)
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


# Processes that feed a run's loggers, one each, so that no logger can harm another or the run. A failure costs a
# warning: the process is started again and continues where it was.

RETRY_S = 60.0
"""Delay between the failure of a logger and its next start (s)."""
END_S = 60.0
"""How long a run that has ended waits for its loggers to send the rest (s)."""


@contextlib.contextmanager
def feeding(
    loggers: Sequence[LoggerConfig], run_dir: Path, say: Callable[[str], None], *, end_s: float = END_S
) -> Iterator[Callable[[float], None]]:
    """Feed a run's loggers inside the context; on leaving they get the rest. They die with the calling thread.

    Yields:
        A function to call twice a second with the monotonic time (s). It restarts loggers and reports failures.
    """
    processes = [LoggerProcess(logger.name, run_dir, say) for logger in loggers]

    def look(now: float) -> None:
        for process in processes:
            process.ensure_running(now)

    look(0.0)
    try:
        yield look
    finally:
        deadline = time.monotonic() + end_s
        for process in processes:
            process.announce_run_end()
        for process in processes:
            process.wait(deadline)


class LoggerProcess:
    """One logger's process, with its children."""

    def __init__(self, name: str, run_dir: Path, say: Callable[[str], None]) -> None:
        self._name, self._run_dir, self._say = name, run_dir, say
        self._log_file = run_dir / LOGS / f"logger-{name.replace(':', '.')}.log"
        self._told = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0

    def ensure_running(self, now: float) -> None:
        """Start the process when it is due, and report a failure unless the last one was the same."""
        if self._process is None and now >= self._start_at:
            self._start_at = now + RETRY_S
            try:
                self._start_process()
            except OSError as error:  # e.g. a full disk, or no more processes
                self._warn_once(f"cannot start: {error}")
        elif self._process is not None and self._process.poll() is not None:
            self._start_at = now + RETRY_S
            self._handle_exit(self._process)

    def announce_run_end(self) -> None:
        """Signal that the run has ended."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def wait(self, deadline: float) -> None:
        """Wait for its end; kill it at the deadline (monotonic s)."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
            self._handle_exit(self._process)

    def _start_process(self) -> None:
        (self._run_dir / LOGGERS).mkdir(exist_ok=True)
        module = [sys.executable, "-P", "-m", "launcher.loggers.feed"]
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*module, self._name, str(self._run_dir), str(os.getpid())],
                stdin=subprocess.PIPE, stdout=log, stderr=log,
                start_new_session=True,  # Ctrl-C is for the launcher only
            )  # fmt: skip

    def _handle_exit(self, process: subprocess.Popen[bytes]) -> None:
        """Report why the process ended, or that it hangs, and kill what is left of it and its children."""
        self.announce_run_end()
        code, self._process = process.poll(), None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if code is None:
            self._warn_once("did not end and was killed")
        elif code < 0:
            self._warn_once(f"ended with {signal.Signals(-code).name}")
        elif code:
            lines = []
            with contextlib.suppress(OSError):  # the log file may be gone
                lines = self._log_file.read_text(errors="replace").splitlines()
            self._warn_once(lines[-1] if lines else f"ended with code {code}")

    def _warn_once(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._say(f"warning: logger {self._name}: {text}; the run continues, see {self._log_file}")
