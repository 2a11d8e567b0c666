"""What a Gantt chart of a run shows and where: rows, bars, colours, step numbers. Pure; the HTML page and the picture
draw it (`trace_files.py`, `gantt_png.py`). Times are seconds from the window's start, heights are in rows.

rollout-0  | generate 3 |load| generate 4 ...      one row per process, one colour per task, grey while it waits,
actor      | fb | fb | opt | publish | fb ...      thin bars for background threads, a line where a step's weights exist
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from launcher.run_timeline import BESIDE, RunTimeline, Span
from workers.dataflow import SERVICES

WAITING = "#e4e4e4"
_COLOURS = {
    "generate": "#4c78a8", "load weights": "#e45756",
    "rewards": "#eeca3b", "ref_log_probs": "#f58518", "compute_advantages_and_returns": "#72b7b2",
    "evaluate": "#a0a03c",
    "forward_backward": "#54a24b", "optimizer": "#2f6b2a", "publish weights": "#b279a2", "checkpoint": "#9d755d",
    "write checkpoint": "#d6c1b4",
    "copy weights": "#d9b8d2", "seal weights": "#7f5a83", "receive weights": "#f7c1be", "check weights": "#ee9490",
}  # fmt: skip
_OTHERS = ("#8c9fc7", "#bab0ac", "#79706e", "#d67195")
_ROLES = ("rollout", "ref", "reward", "critic", "actor_fwd", "advantages", "actor", "evaluate")
"""Rows from top to bottom; users' roles follow."""
_SWAP = "load weights"
_SWAP_SHARE, _SWAP_SHARE_OF_STEP = 1 / 800, 1 / 10
"""A swap of the weights is drawn at least so long, in the window, but never longer in a step."""
_ROLE_GAP = 0.45
CAPTION = (
    "Lines: the weights of a step exist. Numbers in bars: the step that answers are generated for. Thin bars: "
    "background threads. Red: an instance takes new weights (drawn wide enough to be seen)."
)


class Bar(NamedTuple):
    """What a process did.

    Attributes:
        start, end: when (s).
        colour: of the task, or grey.
        told: what it was, in words.
        number: of the step, if the bar should show it where there is room; else "".
    """

    start: float
    end: float
    colour: str
    told: str
    number: str = ""


@dataclass(frozen=True)
class Row:
    """A process.

    Attributes:
        label: its name.
        role: its role.
        top: its place in the chart (rows).
        bars: in the order in which they are drawn.
        beside: those of background threads.
    """

    label: str
    role: str
    top: float
    bars: Sequence[Bar]
    beside: Sequence[Bar]


@dataclass(frozen=True)
class GanttChart:
    """The chart.

    Attributes:
        title: of the run.
        duration_s: of the window.
        rows: from top to bottom.
        height: of all rows and gaps (rows).
        legend: tasks that are shown, with their colours.
        step_ends: when the weights of each step existed (s).
        account: per role, the share of its time in each category.
    """

    title: str
    duration_s: float
    rows: Sequence[Row]
    height: float
    legend: Sequence[tuple[str, str]]
    step_ends: Mapping[int, float]
    account: Mapping[str, Mapping[str, float]]

    @staticmethod
    def of(timeline: RunTimeline, account: Mapping[str, Mapping[str, float]], *, title: str) -> "GanttChart":
        """Lay out a run.

        Args:
            timeline: of the run.
            account: `timeline.account()`.
            title: heading.
        """
        start, end = timeline.window
        shown = {
            process: [span for span in timeline.spans[process] if span.end > start and span.start < end]
            for process in in_order(timeline.spans)
            if role_of(process) not in SERVICES
        }
        least_swap_s = (end - start) * min(_SWAP_SHARE, _SWAP_SHARE_OF_STEP / max(1, len(timeline.step_ends) - 1))
        rows: list[Row] = []
        top = 0.0
        for process, spans in shown.items():
            role = role_of(process)
            if rows:
                top += 1 if role == rows[-1].role else 1 + _ROLE_GAP
            bars = [_bar(span, start, end, least_swap_s) for span in _swaps_last(spans) if span.name not in BESIDE]
            beside = [_bar(span, start, end, 0.0) for span in spans if span.name in BESIDE]
            rows.append(Row(_label(process, shown), role, top, bars, beside))
        return GanttChart(
            title=title,
            duration_s=max(1e-6, end - start),
            rows=rows,
            height=top + 1,
            legend=_legend(span for spans in shown.values() for span in spans),
            step_ends={step: moment - start for step, moment in timeline.step_ends.items()},
            account={role: account[role] for role in in_order(account) if role not in SERVICES},
        )

    @property
    def summary(self) -> str:
        """Say how long the window is."""
        return f"{max(0, len(self.step_ends) - 1)} steps in {self.duration_s:.1f} s"

    def numbers(self, *, at_most: float) -> list[tuple[int, float]]:
        """Return the steps whose numbers have room above the chart, each with the middle of its time (s).

        Args:
            at_most: so many have room beside each other.
        """
        ends = list(self.step_ends.items())
        every = _round_up(max(1.0, 2 * len(ends) / at_most))
        placed: list[tuple[int, float]] = []
        for (_, before), (step, moment) in itertools.pairwise(ends):
            middle = (before + moment) / 2
            if step % every == 0 and (not placed or middle - placed[-1][1] >= self.duration_s / at_most):
                placed.append((step, middle))
        return placed

    def lines(self, *, at_most: float) -> list[float]:
        """Return the ends of steps (s) to draw: all, or, of too many, those of round steps."""
        every = _round_up(max(1.0, len(self.step_ends) / at_most))
        return [moment for step, moment in self.step_ends.items() if step % every == 0]

    def ticks(self, *, at_most: float) -> list[float]:
        """Return the times (s) to write below the chart."""
        every = _round_up(self.duration_s / at_most)
        return [number * every for number in range(1 + math.floor(self.duration_s / every + 1e-9))]


def in_order(names: Iterable[str]) -> list[str]:
    """Return processes (or roles) from the top row to the bottom, `rollout-2` before `rollout-10`."""

    def place(name: str) -> tuple[int, list[str | int]]:
        role = role_of(name)
        parts = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
        return (_ROLES.index(role) if role in _ROLES else len(_ROLES), parts)

    return sorted(names, key=place)


def role_of(process: str) -> str:
    """Return the role of a process, from its name: of `rollout-1-0`, `rollout`."""
    return process.partition("-")[0]


def _label(process: str, processes: Iterable[str]) -> str:
    """Return the gang's name where it has one process only, else the process's."""
    gang = process.rpartition("-")[0]
    ranks = [each for each in processes if each.rpartition("-")[0] == gang]
    return gang if len(ranks) == 1 else process


def _swaps_last(spans: Sequence[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: span.name == _SWAP)


def _bar(span: Span, start: float, end: float, least_swap_s: float) -> Bar:
    left, right = max(span.start, start), min(span.end, end)
    if span.name == _SWAP:
        right = max(right, left + least_swap_s)
    words = ", ".join([span.name, *(f"{key} {value}" for key, value in span.attributes.items())])
    colour = _colour(span.name) if span.category == "busy" else WAITING
    number = str(span.attributes.get("step", "")) if span.name == "generate" else ""
    return Bar(left - start, right - start, colour, f"{words}: {span.end - span.start:.3f} s", number)


def _legend(spans: Iterable[Span]) -> list[tuple[str, str]]:
    names = {span.name for span in spans if span.category == "busy"}
    known = [name for name in _COLOURS if name in names]
    return [(name, _colour(name)) for name in [*known, *sorted(names - _COLOURS.keys())]] + [("waiting", WAITING)]


def _colour(name: str) -> str:
    return _COLOURS.get(name) or _OTHERS[sum(name.encode()) % len(_OTHERS)]


def _round_up(value: float) -> float:
    """Return the least of ..., 0.5, 1, 2, 5, 10, ... that is not below."""
    scale = 10.0 ** math.floor(math.log10(value))
    return next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= value * (1 - 1e-9))
