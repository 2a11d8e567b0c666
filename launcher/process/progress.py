"""Shows the progress of a run: a line per step and, in a terminal, below them a live region. Torch-free.

`launcher.run.run_job` feeds it statuses and finished steps; it decides nothing. The upper half is pure text, also used
by `asyncflow status` and `--dry-run`: a `Screen` is all that the live region shows, and `draw_screen` makes its lines.
The lower half writes to the terminal. Only this module and the command line print.
"""

import json
import logging
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import IO, Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from asyncflow.job import PAUSING, GangSpec
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
    "rollout", "actor", "critic", "actor_fwd", "ref", "teacher", "reward", "advantages", "evaluate",
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
        pause: of the lead controller, where admission is: how far a pause is; "": there is none, as it knows.
    """

    state: str
    detail: str = ""
    step: int = 0
    version: int = -1
    time: float = 0.0
    pid: int = 0
    idle_s: float = 0.0
    rollouts: Mapping[str, float] = field(default_factory=dict)
    pause: str = ""

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


def pause_text(asked: bool, lead: Status | None) -> str:
    """Return one line about a pause, of which `PAUSED` or `PAUSING` is the first word; "": none was asked for.

    `lead` is the status of the lead controller; None: it has said nothing.
    """
    said = "" if lead is None else lead.pause
    return (said or PAUSING) if asked else ""


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


_COLUMNS = (
    ("reward", "reward_mean", ".3f", 7), ("acc", "accuracy", ".3f", 6), ("loss", "loss", ".3f", 7),
    ("kl", "kl", ".4f", 7), ("length", "response_tokens_mean", ".1f", 8), ("stale", "staleness_mean", ".2f", 6),
    ("tokens/s", "train_tokens_per_s", ",.0f", 10), ("s", "step_time_s", ".2f", 8),
)  # fmt: skip
"""Of a step's line: heading, key in `metrics.jsonl`, format, width. With six digits of steps they fill 77 columns."""


def step_heading(last_step: int) -> str:
    """Return what stands above steps' lines."""
    return "".join(["step".ljust(_step_width(last_step)), *(name.rjust(width) for name, _, _, width in _COLUMNS)])


def step_line(metrics: Metrics, last_step: int) -> str:
    """Return a step's line of aligned columns; what the step does not have is a dash."""
    cells = [_cell(metrics.get(key), form, width) for _, key, form, width in _COLUMNS]
    return "".join([f"step {metrics['step']}/{last_step}".ljust(_step_width(last_step)), *cells])


def _step_width(last_step: int) -> int:
    return len(f"step {last_step}/{last_step}")


def _cell(value: float | None, form: str, width: int) -> str:
    if value is None:
        return "-".rjust(width)
    # A number that is too large for its column loses digits, not the alignment.
    texts = (f"{value:{form}}", f"{value:.1f}", f"{value:.0f}", f"{value:.1e}".replace("e+0", "e").replace("e+", "e"))
    return next((text for text in texts if len(text) < width), texts[-1]).rjust(width)


def failures_line(metrics: Metrics) -> str:
    """Return what failed in a step: the figures leave it out, and may look perfect because of that; "": nothing."""
    counts = (
        ("reward_failures", "rewards failed of", metrics.get("samples")),
        ("rollout_failures", "rollouts failed of", metrics.get("samples")),
        ("dead_letter_groups", "groups failed and were replaced", None),
    )
    texts = [(metrics.get(key), label, of) for key, label, of in counts]
    found = [f"{number} {label}{'' if of is None else f' {of}'}" for number, label, of in texts if number]
    return f"step {metrics['step']}: {', '.join(found)}" if found else ""


def evaluation_line(evaluation: Metrics, last_step: int) -> str:
    failed = evaluation.get("reward_failures")
    return (
        f"held out, step {evaluation['step']}/{last_step}: accuracy {accuracy_text(evaluation)}, reward "
        f"{evaluation['reward_mean']:.3f}{f', {failed} rewards failed' if failed else ''}"
    )


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
    model: Path | None = None,
) -> list[str]:
    """Return the command's last lines: where the run and its model are, what to type next, and, last of all, how it
    ended.

    Args:
        code, message: the supervisor's `Finish`.
        step: the newest finished step, perhaps of an earlier start; 0: none.
        last_step: 0: the command trains nothing, so there is nothing to resume.
        resumable: whether there is a checkpoint.
        evaluation: of the newest version that this start evaluated.
        model: the directory that `transformers` loads, if the newest checkpoint has it.
    """
    run = shlex.quote(str(run_dir))
    lines = [f"run directory: {run_dir}"]
    if evaluation is not None:
        lines.append(f"held-out accuracy: {accuracy_text(evaluation)} at step {evaluation['step']}")
    if resumable:
        lines.append(f"model: asyncflow export {run}" if model is None else f"model: {model}")
    progress = f"step {step}/{last_step}, {_clock(elapsed_s)}" if last_step else _clock(elapsed_s)
    if last_step and (code == RESUMABLE or (code == FAILED and resumable)):
        lines.append(f"resume with: asyncflow-launch --resume {run}")
    if last_step and code == RESUMABLE and not resumable:
        lines.append("there is no checkpoint yet: resumed, it starts again from step 1")
    if code == FAILED:
        lines += [f"logs: {run_dir / 'logs'}", f"failed ({progress}): {message}"]
    elif code == RESUMABLE:
        lines.append(f"stopped ({progress})" + ("" if message == "stopped" else f": {message}"))
    else:
        lines += [
            f"look at it: asyncflow view {run}",
            f"done ({progress})" + ("" if message == "done" else f": {message}"),
        ]
    return lines


def plain(text: str) -> str:
    """Return a text without control and direction characters, which could command a terminal; line breaks stay."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as lines of aligned columns; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join((*cells, row[-1])).rstrip())
    return "\n".join(lines)


# The live region.

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Screen:
    """All that the live region shows.

    Attributes:
        now: unix time (s), as statuses have it.
        elapsed_s: since the command started.
        rewards, step_times: of the newest steps, the oldest first; seconds.
        metrics, evaluation: the newest; None: there is none yet.
        sample: the newest kept rollout, as `samples/` has it.
        num_warnings, warning: so far, and the newest.
        note: what the user should know now; "": nothing.
        pause: see `pause_text`.
        first_step: the step that a resumed run continues from.
    """

    gangs: Sequence[GangSpec]
    last_step: int
    now: float = 0.0
    elapsed_s: float = 0.0
    statuses: Statuses = field(default_factory=dict)
    metrics: Metrics | None = None
    evaluation: Metrics | None = None
    rewards: tuple[float, ...] = ()
    step_times: tuple[float, ...] = ()
    sample: Fields | None = None
    num_warnings: int = 0
    warning: str = ""
    note: str = ""
    pause: str = ""
    first_step: int = 0

    def with_step(self, metrics: Metrics) -> "Screen":
        reward, took_s = metrics.get("reward_mean"), metrics.get("step_time_s")
        return replace(
            self,
            metrics=metrics,
            rewards=(*self.rewards, *([] if reward is None else [reward]))[-_SPARKS:],
            step_times=(*self.step_times, *([] if took_s is None else [took_s]))[-_TIMED_STEPS:],
        )

    @property
    def step(self) -> int:
        return self.first_step if self.metrics is None else int(self.metrics["step"])


_SPARKS = 24
_TIMED_STEPS = 10
_LEVELS = {True: "▁▂▃▄▅▆▇█", False: "_.-=+*%#"}
_BAR = {True: ("━", "─"), False: ("#", ".")}
_CUT = {True: "…", False: "~"}


def draw_screen(screen: Screen, width: int, *, unicode: bool = True) -> list[Text]:
    """Return the live region's lines, each at most `width` columns; `unicode`: whether the terminal shows blocks."""
    lines = [Text(_progress_line(screen, width, unicode)), *map(Text, _figure_lines(screen, unicode))]
    lines += _role_lines(screen, width, unicode)
    if screen.sample is not None:
        lines.append(Text(_sample_line(screen.sample), style="dim"))
    if screen.num_warnings:
        count = "1 warning" if screen.num_warnings == 1 else f"{screen.num_warnings} warnings, the last"
        lines.append(Text(f"{count}: {plain(screen.warning)}", style="yellow"))
    lines += [Text(plain(text), style="bold") for text in (screen.pause, screen.note) if text]
    for line in lines:
        # One row each, whatever the width: a line that wraps would make the block jump.
        line.plain = line.plain.replace("\n", " ")
        line.truncate(width, overflow="ellipsis" if unicode else "crop")
    return lines


def _progress_line(screen: Screen, width: int, unicode: bool) -> str:
    left = screen.last_step - screen.step
    times = _clock(screen.elapsed_s)
    if left and screen.step_times and not screen.pause:
        times += f", about {_clock(left * fmean(screen.step_times))} left"
    before, after = f"step {screen.step}/{screen.last_step} ", f" {times}"
    room = max(4, min(40, width - len(before) - len(after)))
    done = room * min(1.0, screen.step / max(1, screen.last_step))
    full, empty = _BAR[unicode]
    return f"{before}{full * int(done)}{empty * (room - int(done))}{after}"


def sparkline(values: Sequence[float], *, unicode: bool = True) -> str:
    """Return a character per value, between the smallest and the largest of them."""
    low, high = min(values), max(values)
    levels = _LEVELS[unicode]
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((value - low) * scale)] for value in values)


def _figure_lines(screen: Screen, unicode: bool) -> list[str]:
    """Return what was learned, and how fast; figures that are missing are left out."""
    metrics, evaluation = screen.metrics or {}, screen.evaluation

    def figure(label: str, key: str, form: str) -> list[str]:
        return [] if metrics.get(key) is None else [f"{label} {metrics[key]:{form}}"]

    reward = figure("reward", "reward_mean", ".3f")
    if reward and len(screen.rewards) > 1:
        reward = [f"{reward[0]} {sparkline(screen.rewards, unicode=unicode)}"]
    held_out = [] if evaluation is None else [f"held out {evaluation['accuracy']:.3f} (step {evaluation['step']})"]
    highest = metrics.get("staleness_max")
    stale = [f"{text} (max {highest:g})" if highest is not None else text
             for text in figure("staleness", "staleness_mean", ".2f")]  # fmt: skip
    rate = metrics.get("train_tokens_per_s")
    pace = [
        *figure("kl", "kl", ".4f"), *figure("length", "response_tokens_mean", ".1f"), *stale,
        *([] if rate is None else [f"{rate:,.0f} tokens/s"]),
    ]  # fmt: skip
    learned = [*reward, *figure("accuracy", "accuracy", ".3f"), *held_out]
    return ["  ".join(line) for line in (learned, pace) if line]


def _role_lines(screen: Screen, width: int, unicode: bool) -> list[Text]:
    rows = role_rows(screen.gangs, screen.statuses, screen.now)
    idle = (screen.metrics or {}).get("idle_fraction") or {}
    names = max((len(row[0]) for row in rows), default=0)
    counts = max((len(row[1]) for row in rows), default=0)
    versions = max((len(row[3]) for row in rows), default=0)
    waits = {role: f"idle {100 * share:3.0f} %" for role, share in idle.items()}
    room = max(8, width - names - counts - versions - 6 - (12 if waits else 0))
    lines = []
    for role, count, activity, version in rows:
        what = plain(activity).replace("\n", " ")
        what = what if len(what) <= room else what[: room - 1] + _CUT[unicode]
        lines.append(
            Text.assemble(
                (role.ljust(names), "bold"), f"  {count.rjust(counts)}  {what.ljust(room)}  ",
                (version.ljust(versions), "cyan"), f"  {waits.get(role, '')}".rstrip(),
            )
        )  # fmt: skip
    return lines


def _sample_line(sample: Fields) -> str:
    reward = sample.get("reward")
    scored = "no reward" if reward is None else f"reward {reward:g}"
    prompt, response = (" ".join(plain(str(sample.get(name) or "")).split()) for name in ("prompt", "response"))
    return f"row {sample.get('index')}, {scored}: {_shortened(prompt, 24)} -> {response}"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"...{text[3 - most :]}"


# Writing to the terminal.


class Output(StrEnum):
    """What a command prints: lines and, in a terminal, a live region; only warnings and its end; a JSON object per step
    (the line of `metrics.jsonl`), with everything else on stderr."""

    LINES = "lines"
    QUIET = "quiet"
    JSON = "json"

    @property
    def say(self) -> Callable[[str], None]:
        """Print what a command does before its run goes on."""
        return _say_nothing if self is Output.QUIET else partial(print_line, err=self is Output.JSON)


def _say_nothing(_: str) -> None:
    pass


_HEADING_EVERY = 20


class Progress:
    """The command's output during a run; a context manager around it.

    Args:
        last_step: number of the run's last step.
        first_step: the step that a resumed run continues from.
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
        first_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.time,
        output: Output = Output.LINES,
    ) -> None:
        self._screen = Screen(gangs, last_step, first_step=first_step)
        self._started_at = started_at
        self._clock = clock
        self._console = console or Console(highlight=False)
        self._output = output
        self._num_lines = 0
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        # A dumb terminal cannot move its cursor: rich would show nothing there until the end.
        shows = self._console.is_terminal and not self._console.is_dumb_terminal and self._console.width > 0
        if self._output is Output.LINES and shows:  # (COLUMNS=0 in the environment leaves no room)
            live = Live(console=self._console, auto_refresh=False, transient=True)
            with _even_if_closed(self._console.file):
                live.start()
                self._live = live
            self._refresh()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with _even_if_closed(self._console.file):
                self._live.stop()

    @property
    def is_live(self) -> bool:
        """Whether there is a live region, which shows samples."""
        return self._live is not None

    @property
    def last_finished_step(self) -> int:
        """The newest finished step; before the first one of this start, the one that the run continues from."""
        return self._screen.step

    @property
    def last_evaluation(self) -> Metrics | None:
        """The evaluation of the newest version that this start evaluated."""
        return self._screen.evaluation

    def ready(self, num_workers: int) -> None:
        """Say that all ranks are at work."""
        self.print_event(f"started {num_workers} workers in {self._clock() - self._started_at:.1f} s")

    def step(self, metrics: Metrics) -> None:
        self._screen = self._screen.with_step(metrics)
        if self._output is Output.JSON:
            print_line(json.dumps(metrics), breaks=False)
            return
        if self._num_lines % _HEADING_EVERY == 0:
            self.print_event(step_heading(self._screen.last_step))
        self._num_lines += 1
        self.print_event(step_line(metrics, self._screen.last_step))
        if failed := failures_line(metrics):
            self.print_event(failed)

    def report_evaluation(self, evaluation: Metrics) -> None:
        newest = self._screen.evaluation
        if newest is None or evaluation["step"] > newest["step"]:
            self._screen = replace(self._screen, evaluation=evaluation)
        self.print_event(evaluation_line(evaluation, self._screen.last_step))

    def show_sample(self, sample: Fields | None) -> None:
        self._screen = replace(self._screen, sample=sample)

    def show_note(self, text: str) -> None:
        """Show what the user should know now, e.g. that a stop is under way; "": nothing any more."""
        self._screen = replace(self._screen, note=text)
        if self._live is None and text:
            self.print_event(text)
        self._refresh()

    def show_pause(self, text: str) -> None:
        """Show how far a pause is (`pause_text`); "": there is none."""
        self._screen = replace(self._screen, pause=text)
        self._refresh()

    def update(self, statuses: Statuses) -> None:
        """Show what the ranks report; called about twice a second."""
        self._screen = replace(self._screen, statuses=statuses)
        self._refresh()

    def print_event(self, text: str) -> None:
        """Print a line for the record, e.g. that a process starts again."""
        if self._output is not Output.QUIET:
            self._print(text)

    def print_warning(self, text: str) -> None:
        """Print what the user should see in any case: a failure, or a warning."""
        self._screen = replace(
            self._screen, num_warnings=self._screen.num_warnings + 1, warning=text.removeprefix("warning: ")
        )
        self._print(text)

    def _print(self, text: str) -> None:
        if self._live is None:
            print_line(text, err=self._output is Output.JSON)
            return
        with _even_if_closed(self._console.file):
            for line in fit(plain(text), self._console.width):
                self._live.console.print(line, markup=False, soft_wrap=True)

    def _refresh(self) -> None:
        if self._live is None:
            return
        screen = replace(self._screen, now=time.time(), elapsed_s=self._clock() - self._started_at)
        unicode = "utf" in self._console.encoding.lower()
        with _even_if_closed(self._console.file):
            # Asked anew each time: the user may have changed the size of the window.
            self._live.update(Group(*draw_screen(screen, self._console.width, unicode=unicode)), refresh=True)


def fit(text: str, width: int) -> list[str]:
    """Return a text as lines that break between words; a path that is longer than a line stays whole, to be copied."""
    lines: list[str] = []
    for line in text.split("\n"):
        whole = len(line) <= width
        lines += [line] if whole else textwrap.wrap(
            line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )  # fmt: skip
    return lines


def print_line(text: str, *, err: bool = False, breaks: bool = True) -> None:
    """Print to stdout or stderr; a closed terminal or pipe is not an error, and none obeys what a text has in it.

    A terminal would break a long line in the middle of a word; `breaks`: it is broken between words there.
    """
    stream = sys.stderr if err else sys.stdout
    with _even_if_closed(stream):
        lines = fit(plain(text), shutil.get_terminal_size().columns) if breaks and stream.isatty() else [plain(text)]
        click.echo("\n".join(lines), err=err)


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
