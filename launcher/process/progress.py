"""Shows the progress of a run: a line per step and, in a terminal, below it what every role is doing now. Torch-free.

`launcher.run.run_job` feeds it statuses and finished steps; it decides nothing. The upper half is pure text, also used
by `asyncflow status` and `--dry-run`; the lower half writes to the terminal. Only this module and the command line
print.
"""

import logging
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from asyncflow.job import GangSpec
from launcher.process.run_events import FAILED, RESUMABLE

STARTING = "starting"
SAVING = "saving"
"""The state of a rank that is not yet at work; every other state counts as at work."""
PASSIVE = frozenset({"idle", "serving"})
"""States, besides `waiting for ...`, of a rank that has nothing to do until it is asked."""
SILENT_S = 10.0
"""A rank without news for this long is shown as silent (s)."""
VERSIONED_ROLES = frozenset({"rollout", "actor", "critic", "actor_fwd", "ref", "evaluate"})
ROLE_ORDER = (
    "rollout", "actor", "critic", "actor_fwd", "ref", "reward", "advantages", "evaluate",
    "controller", "storage", "weights",
)  # fmt: skip

Metrics = Mapping[str, Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """What one rank reports about itself, in the store key `status/GANG/RANK`.

    Attributes:
        state: what it does, in a few words, e.g. `starting`, `generating`, `waiting for weights`.
        detail: more about it, e.g. `48/64 responses`; shown when all ranks of the role agree.
        step: the step it works for; 0 before the first.
        version: step of the weights it holds; negative when it holds none.
        time: when it reported this (unix time, s).
        idle_s: time since it last made progress (s).
        rollouts: of an instance whose rollouts are functions: `workers.rollout.rollouts.Rollouts.figures`.
    """

    state: str
    detail: str = ""
    step: int = 0
    version: int = -1
    time: float = 0.0
    pid: int = 0
    idle_s: float = 0.0
    rollouts: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "Status":
        """Build one from the store's JSON; unknown fields are ignored, so workers may report more."""
        return Status(**{name: fields[name] for name in Status.__dataclass_fields__ if name in fields})

    @property
    def at_work(self) -> bool:
        """Whether the rank has finished starting."""
        return self.state != STARTING

    @property
    def waits(self) -> bool:
        """Whether it waits for others; a rank that starts may wait for devices that another role has."""
        starts_later = self.state == STARTING and self.detail.startswith("wait")
        return self.state.startswith("wait") or self.state in PASSIVE or starts_later


Statuses = Mapping[tuple[str, int], Status]


def role_rows(gangs: Iterable[GangSpec], statuses: Statuses, now: float) -> list[tuple[str, str, str, str]]:
    """Summarise the ranks of each role.

    Returns:
        One (role, number of ranks, what they do, weight versions) per role, e.g. `("rollout", "8", "6 generating, 2
            waiting for weights", "v12")`.
    """
    ranks: dict[str, list[Status | None]] = {}
    for gang in gangs:
        ranks.setdefault(gang.role, []).extend(statuses.get((gang.name, rank)) for rank in range(gang.num_ranks))
    roles = sorted(ranks, key=lambda role: (ROLE_ORDER.index(role) if role in ROLE_ORDER else len(ROLE_ORDER), role))
    return [(role, str(len(ranks[role])), _activity(ranks[role], now), _versions(role, ranks[role])) for role in roles]


def _activity(ranks: Sequence[Status | None], now: float) -> str:
    states = Counter(STARTING if status is None else status.state for status in ranks)
    known = [status for status in ranks if status is not None]
    details = {status.detail for status in known}
    if len(states) == 1:
        text = next(iter(states))
        if len(known) == len(ranks) and len(details) == 1 and (detail := details.pop()):
            text += f" {detail}"
    else:
        text = ", ".join(f"{count} {state}" for state, count in states.most_common())
    silence = max((now - status.time for status in known), default=0.0)
    return f"{text} (no news for {silence:.0f} s)" if silence > SILENT_S else text


def _versions(role: str, ranks: Sequence[Status | None]) -> str:
    versions = [status.version for status in ranks if status is not None and status.version >= 0]
    if role not in VERSIONED_ROLES or not versions:
        return ""
    low, high = min(versions), max(versions)
    return f"v{low}" if low == high else f"v{low}-{high}"


def headline(
    metrics: Metrics | None, last_step: int, elapsed_s: float, evaluation: Metrics | None = None
) -> tuple[str, ...]:
    """Return at most two lines: the newest step with what it learned, and its pace. Missing figures are left out."""
    step = 0 if metrics is None else metrics["step"]
    learned = [] if metrics is None else _learned(metrics)
    pace = [] if metrics is None else _pace(metrics)
    if evaluation is not None:
        pace.append(f"held out {evaluation['accuracy']:.3f} (step {evaluation['step']})")
    lines = ([f"step {step}/{last_step}", _clock(elapsed_s), *learned], pace)
    return tuple(" · ".join(line) for line in lines if line)


def step_line(metrics: Metrics, last_step: int) -> str:
    duration = metrics.get("step_time_s")
    figures = [*_learned(metrics), *_pace(metrics), *([] if duration is None else [f"{duration:.2f} s"])]
    return f"step {metrics['step']}/{last_step}  " + "  ".join(figures)


def _learned(metrics: Metrics) -> list[str]:
    figures = (
        ("reward_mean", "reward", ".3f"), ("accuracy", "accuracy", ".3f"), ("loss", "loss", ".3f"),
        ("kl", "kl", ".4f"), ("response_tokens_mean", "length", ".1f"),
    )  # fmt: skip
    learned = [f"{label} {metrics[key]:{form}}" for key, label, form in figures if metrics.get(key) is not None]
    return learned + _failures(metrics)


def _failures(metrics: Metrics) -> list[str]:
    # The figures shown before leave failures out, and may look perfect because of that.
    counts = (
        ("reward_failures", "rewards failed of", metrics.get("samples")),
        ("rollout_failures", "rollouts failed of", metrics.get("samples")),
        ("dead_letter_groups", "groups failed and were replaced", None),
    )
    texts = [(metrics.get(key), label, of) for key, label, of in counts]
    return [f"{number} {label}{'' if of is None else f' {of}'}" for number, label, of in texts if number]


def _pace(metrics: Metrics) -> list[str]:
    mean, highest = metrics.get("staleness_mean"), metrics.get("staleness_max")
    staleness = [] if mean is None else [f"staleness {mean:.2f}" + ("" if highest is None else f" (max {highest:g})")]
    rate = metrics.get("train_tokens_per_s")
    return staleness + ([] if rate is None else [f"{rate:,.0f} tokens/s"])


def evaluation_line(evaluation: Metrics, last_step: int) -> str:
    failed = evaluation.get("reward_failures")
    parts = [
        f"held out, step {evaluation['step']}/{last_step}",
        f"reward {evaluation['reward_mean']:.3f}",
        f"accuracy {accuracy_text(evaluation)}",
        *([f"{failed} rewards failed of {evaluation['num_samples']}"] if failed else []),
        f"{evaluation['num_prompts']} prompts",
        f"{evaluation['seconds']:.2f} s",
    ]
    return "  ".join(parts)


def accuracy_text(evaluation: Metrics) -> str:
    """Return the accuracy of an evaluation with its 95 % interval."""
    low, high = evaluation["accuracy_low"], evaluation["accuracy_high"]
    return f"{evaluation['accuracy']:.3f} ({low:.3f} to {high:.3f})"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def final_lines(
    code: int,
    message: str,
    *,
    step: int,
    last_step: int,
    elapsed_s: float,
    run_dir: Path,
    resumable: bool,
    evaluation: Metrics | None = None,
) -> list[str]:
    """Return the command's last lines: where the run is, how to continue it, and, last of all, how it ended.

    Args:
        code, message: the supervisor's `Finish`.
        step: the newest finished step; 0 if this start finished none.
        resumable: whether there is a checkpoint.
        evaluation: of the newest version that this start evaluated.
    """
    lines = [f"run directory: {run_dir}"]
    if evaluation is not None:
        lines.append(f"held-out accuracy: {accuracy_text(evaluation)} at step {evaluation['step']}")
    progress = f"step {step}/{last_step}, {_clock(elapsed_s)}"
    if code == RESUMABLE or (code == FAILED and resumable):
        lines.append(f"resume with: asyncflow-launch --resume {shlex.quote(str(run_dir))}")
    if code == RESUMABLE and not resumable:
        lines.append("there is no checkpoint yet: resumed, it starts again from step 1")
    if code == FAILED:
        lines += [f"logs: {run_dir / 'logs'}", f"failed ({progress}): {message}"]
    elif code == RESUMABLE:
        lines.append(f"stopped ({progress})" + ("" if message == "stopped" else f": {message}"))
    else:
        lines.append(f"done ({progress})" + ("" if message == "done" else f": {message}"))
    return lines


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as lines of aligned columns; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join((*cells, row[-1])).rstrip())
    return "\n".join(lines)


class Progress:
    """The command's output during a run; a context manager around it.

    Args:
        last_step: number of the run's last step.
        started_at: when the command started (unix time, s).
        console: None: the terminal.
        clock: unix time (s) that advances evenly even if the wall clock is set.
    """

    def __init__(
        self,
        gangs: Sequence[GangSpec],
        *,
        last_step: int,
        started_at: float,
        console: Console | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._gangs = gangs
        self._last_step = last_step
        self._started_at = started_at
        self._clock = clock
        self._console = console or Console(highlight=False)
        self._metrics: Metrics | None = None
        self._evaluation: Metrics | None = None
        self._statuses: Statuses = {}
        self._note = ""
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        # A dumb terminal cannot move its cursor: rich would show nothing there until the end.
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self._render_status(), console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with _even_if_closed(self._console.file):
                self._live.stop()

    @property
    def last_finished_step(self) -> int:
        """The newest finished step of this start; 0 before the first."""
        return 0 if self._metrics is None else int(self._metrics["step"])

    @property
    def last_evaluation(self) -> Metrics | None:
        """The evaluation of the newest version that this start evaluated."""
        return self._evaluation

    def ready(self, num_workers: int) -> None:
        """Say that all ranks are at work."""
        self.print_event(f"started {num_workers} workers in {self._clock() - self._started_at:.1f} s")

    def step(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.print_event(step_line(metrics, self._last_step))

    def report_evaluation(self, evaluation: Metrics) -> None:
        if self._evaluation is None or evaluation["step"] > self._evaluation["step"]:
            self._evaluation = evaluation
        self.print_event(evaluation_line(evaluation, self._last_step))

    def show_note(self, text: str) -> None:
        """Show what the user should know now, e.g. that a stop is under way."""
        self._note = text
        if self._live is None:
            self.print_event(text)

    def update(self, statuses: Statuses) -> None:
        """Show what the ranks report; called about twice a second."""
        self._statuses = statuses
        if self._live is not None:
            with _even_if_closed(self._console.file):
                self._live.update(self._render_status(), refresh=True)

    def print_event(self, text: str) -> None:
        """Print a line for the record, e.g. that a process starts again."""
        if self._live is not None:
            with _even_if_closed(self._console.file):
                self._live.console.print(text, markup=False, soft_wrap=True)
        else:
            print_line(text)

    def _render_status(self) -> Group:
        now = time.time()  # statuses carry wall-clock times
        rows = Table.grid(padding=(0, 2))
        for role, count, activity, version in role_rows(self._gangs, self._statuses, now):
            rows.add_row(
                Text(role, style="bold"),
                Text(count),
                Text(activity, no_wrap=True, overflow="ellipsis"),
                Text(version, style="cyan"),
            )
        figures = headline(self._metrics, self._last_step, self._clock() - self._started_at, self._evaluation)
        # One row each, whatever the width: a line that wraps would make the block jump.
        lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in figures]
        return Group(*lines, rows, *([Text(self._note, style="yellow")] if self._note else []))


def print_line(text: str, *, err: bool = False) -> None:
    """Print to stdout or stderr; a closed terminal or pipe is not an error."""
    with _even_if_closed(sys.stderr if err else sys.stdout):
        click.echo(text, err=err)


@contextmanager
def _even_if_closed(stream: IO[str]) -> Iterator[None]:
    """If the output behind `stream` is closed, discard further text and continue."""
    try:
        yield
    except OSError as error:
        logger.warning("nobody reads the output any more (%s); the run continues without it", error)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
