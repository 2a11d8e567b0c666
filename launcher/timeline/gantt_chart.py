"""A Gantt chart of a run: rows, bars, colours and step numbers, and the HTML page that draws them. Pure.

    rollout-0  | generate 3 |load| generate 4 ...   one row per process, one colour per task, grey while it waits;
    actor      | fb | fb | opt | publish | fb ...   thin bars for background threads; a line when a step's weights exist

Times are seconds from the start of the window; heights are in rows.
"""

import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from launcher.timeline.run_timeline import BESIDE, CATEGORIES, ROLLOUTS, RunTimeline, Span, in_order, role_of
from workers.settings.dataflow import SERVICES

WAITING = "#e4e4e4"
_COLOURS = {
    "generate": "#4c78a8", "load weights": "#e45756",
    "rewards": "#eeca3b", "ref_log_probs": "#f58518", "compute_advantages_and_returns": "#72b7b2",
    "teacher_log_probs": "#d67195",
    "evaluate": "#a0a03c",
    "forward_backward": "#54a24b", "optimizer": "#2f6b2a", "publish weights": "#b279a2", "checkpoint": "#9d755d",
    "write checkpoint": "#d6c1b4",
    "write export": "#e6d8cf",
    "copy weights": "#d9b8d2", "seal weights": "#7f5a83", "receive weights": "#f7c1be", "check weights": "#ee9490",
    "pause for weights": "#f2a39f",
    "sleep": "#c9a6e0", "wake up": "#9467bd",
}  # fmt: skip
_OTHERS = ("#8c9fc7", "#bab0ac", "#79706e", "#d67195")
_SWAP = "load weights"
_SWAP_SHARE, _SWAP_SHARE_OF_STEP = 1 / 800, 1 / 10
"""Shortest drawn length of a weight swap, as shares of the window and (upper limit) of a mean step."""
_ROLE_GAP = 0.45
CAPTION = (
    "Lines: the weights of a step exist. Numbers in bars: the step that responses are generated for. Thin bars: "
    "background threads. Red: an instance takes new weights (drawn wide enough to be seen)."
)

_ROW_HIGH, _BAR_HIGH, _THIN, _LEFT, _TOP, _GAP_FROM = 22, 15, 3, 120, 26, 6
_TICK, _NUMBER, _BETWEEN_LINES = 150, 40, 12
"""Pixels that a time, a step's number, and two neighbouring lines of steps need."""


class Bar(NamedTuple):
    """What a process did in an interval (s): `told` in words, with the step's number to show if there is room."""

    start: float
    end: float
    colour: str
    told: str
    number: str = ""


@dataclass(frozen=True)
class ProcessRow:
    """A process. `top` is its place in the chart (rows), and `beside` has the bars of background threads."""

    label: str
    role: str
    top: float
    bars: Sequence[Bar]
    beside: Sequence[Bar]


@dataclass(frozen=True)
class GanttChart:
    """The chart.

    Attributes:
        height: of all rows and gaps (rows).
        legend: (task, colour) of what is shown.
        step_ends: step -> when its weights existed (s).
        account: role -> category -> share of its time.
    """

    title: str
    duration_s: float
    rows: Sequence[ProcessRow]
    height: float
    legend: Sequence[tuple[str, str]]
    step_ends: Mapping[int, float]
    account: Mapping[str, Mapping[str, float]]

    @staticmethod
    def from_timeline(timeline: RunTimeline, account: Mapping[str, Mapping[str, float]], *, title: str) -> "GanttChart":
        """Lay out a run; `account` is `timeline.account()`."""
        start, end = timeline.window
        shown = {
            process: [
                span
                for span in timeline.spans[process]
                if span.end > start and span.start < end and span.name not in ROLLOUTS
            ]
            for process in in_order(timeline.spans)
            if role_of(process) not in SERVICES
        }
        least_swap_s = (end - start) * min(_SWAP_SHARE, _SWAP_SHARE_OF_STEP / max(1, len(timeline.step_ends) - 1))
        rows: list[ProcessRow] = []
        top = 0.0
        for process, spans in shown.items():
            role = role_of(process)
            if rows:
                top += 1 if role == rows[-1].role else 1 + _ROLE_GAP
            # Swaps are drawn on top: they lie inside other spans, and are lengthened to be visible.
            bars = [_bar(span, start, end, least_swap_s) for span in _swaps_last(spans) if span.name not in BESIDE]
            beside = [_bar(span, start, end, 0.0) for span in spans if span.name in BESIDE]
            rows.append(ProcessRow(_label(process, shown), role, top, bars, beside))
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
        return f"{max(0, len(self.step_ends) - 1)} steps in {self.duration_s:.1f} s"

    def step_numbers(self, *, at_most: float) -> list[tuple[int, float]]:
        """Return (step, middle of its time in s) for step numbers to show; `at_most` fit next to each other."""
        ends = list(self.step_ends.items())
        every = _round_up(max(1.0, 2 * len(ends) / at_most))
        placed: list[tuple[int, float]] = []
        for (_, before), (step, moment) in itertools.pairwise(ends):
            middle = (before + moment) / 2
            if step % every == 0 and (not placed or middle - placed[-1][1] >= self.duration_s / at_most):
                placed.append((step, middle))
        return placed

    def step_lines(self, *, at_most: float) -> list[float]:
        """Return the ends of steps to draw (s): all, or those of round step numbers if there are too many."""
        every = _round_up(max(1.0, len(self.step_ends) / at_most))
        return [moment for step, moment in self.step_ends.items() if step % every == 0]

    def time_ticks(self, *, at_most: float) -> list[float]:
        """Return the times to write below the chart (s)."""
        every = _round_up(self.duration_s / at_most)
        return [number * every for number in range(1 + math.floor(self.duration_s / every + 1e-9))]


def gantt_html(chart: GanttChart, *, width: int) -> str:
    """Return a chart as an HTML document, which is also well-formed XML. `width` is that of the window (pixels)."""
    scale = width / chart.duration_s
    bottom = _TOP + round(chart.height * _ROW_HIGH)
    parts = [
        f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{bottom}" class="step"/>'
        for x in (_LEFT + moment * scale for moment in chart.step_lines(at_most=width / _BETWEEN_LINES))
    ]
    for row in chart.rows:
        top = _TOP + row.top * _ROW_HIGH
        parts.append(f'<text x="4" y="{top + 12:.1f}">{html.escape(row.label)}</text>')
        parts.extend(_rectangle(bar, top, _BAR_HIGH, scale) for bar in row.bars)
        parts.extend(_rectangle(bar, top + _BAR_HIGH, _THIN, scale) for bar in row.beside)
    above = [(seconds, _TOP - 10, f"{step}") for step, seconds in chart.step_numbers(at_most=width / _NUMBER)]
    below = [(seconds, bottom + 14, f"{seconds:g} s") for seconds in chart.time_ticks(at_most=width / _TICK)]
    for seconds, y, text in [*above, *below]:
        parts.append(f'<text x="{_LEFT + seconds * scale:.1f}" y="{y}" class="number">{text}</text>')
    return _PAGE.format(
        title=html.escape(chart.title),
        legend="".join(_legend_entry(name, colour) for name, colour in chart.legend),
        width=width + _LEFT + 30,
        height=bottom + 20,
        chart="".join(parts),
        account=_account_table(chart.account),
        summary=chart.summary,
        caption=CAPTION,
    )


def _label(process: str, processes: Iterable[str]) -> str:
    """Return the gang's name if it has only one process, else the process's."""
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
    """Return the smallest of ..., 0.5, 1, 2, 5, 10, ... that is not less than `value`."""
    scale = 10.0 ** math.floor(math.log10(value))
    return next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= value * (1 - 1e-9))


def _account_table(account: Mapping[str, Mapping[str, float]]) -> str:
    head = "".join(f"<th>{category}</th>" for category in CATEGORIES)
    rows = []
    for role, shares in account.items():
        cells = "".join(f"<td>{100 * shares[category]:.1f} %</td>" for category in CATEGORIES)
        rows.append(f"<tr><th>{html.escape(role)}</th>{cells}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _rectangle(bar: Bar, top: float, high: int, scale: float) -> str:
    x, wide = _LEFT + bar.start * scale, max(0.3, (bar.end - bar.start) * scale)
    if wide > _GAP_FROM and bar.colour != WAITING:
        wide -= 1  # so that bars of one colour can be told apart
    place = f'x="{x:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high}"'
    drawn = f'<rect {place} fill="{bar.colour}"><title>{html.escape(bar.told)}</title></rect>'
    if not bar.number or wide < _NUMBER:
        return drawn
    return f'{drawn}<text x="{x + wide / 2:.1f}" y="{top + 11:.1f}" class="inside">{html.escape(bar.number)}</text>'


def _legend_entry(name: str, colour: str) -> str:
    return f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>'


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<title>{title}</title>
<style>
body {{ font: 13px system-ui, sans-serif; margin: 16px; color: #222 }}
h1 {{ font-size: 16px }}
.chart {{ overflow-x: auto; border: 1px solid #ddd }}
svg text {{ font-size: 11px; fill: #333 }}
svg .number {{ fill: #888; text-anchor: middle }}
svg .inside {{ font-size: 10px; fill: #fff; text-anchor: middle; pointer-events: none }}
svg .step {{ stroke: #999 }}
.legend span {{ margin-right: 14px; white-space: nowrap }}
.legend i {{ display: inline-block; width: 11px; height: 11px; margin-right: 4px }}
table {{ border-collapse: collapse; margin-top: 14px }}
td, th {{ padding: 2px 10px; text-align: right; font-weight: normal }}
tr:first-child th {{ color: #777 }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="legend">{legend}</p>
<div class="chart"><svg width="{width}" height="{height}">{chart}</svg></div>
<p>{summary}. {caption}</p>
{account}
</body>
</html>
"""
