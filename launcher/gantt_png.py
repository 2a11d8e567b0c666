"""A Gantt chart as a picture. Needs matplotlib (the extra `plot`), which nothing else imports; draws on a canvas of its
own, so it neither opens a window nor changes what `pyplot` of the same process draws.
"""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from launcher.gantt_chart import CAPTION, WAITING, Bar, GanttChart

_DPI = 150
_MARGIN, _ROW, _TITLE, _LEGEND_LINE, _NUMBERS, _TIMES, _CAPTION_LINE = 0.15, 0.23, 0.32, 0.2, 0.24, 0.3, 0.14
"""Heights (inches)."""
_CHAR, _SWATCH, _SHARE = 0.066, 0.4, 0.8
"""Widths (inches): of a letter, of a patch of colour with the space around it, of what stands on the right."""
_TICK, _NUMBER, _BETWEEN_LINES = 0.9, 0.25, 0.08
"""Room (inches) for a time, for a step's number, between two steps' lines."""
_BAR, _BESIDE = (0.08, 0.68), (0.79, 0.15)
"""Top and height of a row's bars, and of those of its background threads (rows)."""
_DARK, _PALE, _LINE = "#333333", "#808080", "#9a9a9a"
_LARGE, _MEDIUM, _SMALL = 11, 8, 6.5
_GAP, _GAP_FROM, _NUMBER_FROM = 0.01, 0.04, 0.16
"""A thin gap after a bar (inches); how wide the bar has to be for it, and for the number of its step."""


def write_gantt_png(chart: GanttChart, path: Path, *, width: int) -> None:
    """Draw a chart into `path`; as high as its rows need.

    Args:
        chart: of the run.
        path: the file.
        width: of the picture (pixels).
    """
    left = 2 * _MARGIN + _CHAR * max((len(row.label) for row in chart.rows), default=0)
    plot_width = width / _DPI - left - _SHARE
    columns = _legend_columns(chart, plot_width)
    above = _MARGIN + _TITLE + _LEGEND_LINE * math.ceil(len(chart.legend) / columns)
    caption = textwrap.wrap(CAPTION, math.floor(plot_width / _CHAR))
    below = _TIMES + _CAPTION_LINE * len(caption) + _MARGIN
    height = above + _NUMBERS + _ROW * chart.height + below
    figure = Figure(figsize=(width / _DPI, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    inch_x, inch_y = _DPI / width, 1 / height
    top = 1 - _MARGIN * inch_y
    title = figure.text(left * inch_x, top, chart.title, va="top", fontsize=_LARGE, color=_DARK, weight="bold")
    title.set_parse_math(False)
    figure.text((left + plot_width) * inch_x, top, chart.summary, va="top", ha="right", fontsize=_MEDIUM, color=_PALE)
    figure.text(left * inch_x, _MARGIN * inch_y, "\n".join(caption), va="bottom", fontsize=_MEDIUM, color=_PALE)
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in chart.legend], ncols=columns,
        loc="upper left", bbox_to_anchor=(left * inch_x, top - _TITLE * inch_y), borderaxespad=0, borderpad=0,
        frameon=False, fontsize=_MEDIUM, labelcolor=_DARK, handlelength=1.1, handleheight=0.9, columnspacing=1.4,
    )  # fmt: skip
    place = (left * inch_x, below * inch_y, plot_width * inch_x, _ROW * chart.height * inch_y)
    _draw(figure.add_axes(place), chart, plot_width)
    figure.savefig(path, format="png")


def _legend_columns(chart: GanttChart, width: float) -> int:
    """Return how many columns fit: all entries beside each other, else as many as the longest ones would allow."""
    lengths = [_SWATCH + _CHAR * len(name) for name, _ in chart.legend]
    return len(lengths) if sum(lengths) <= width else max(1, math.floor(width / max(lengths)))


def _draw(axes: Axes, chart: GanttChart, inches: float) -> None:
    axes.set_xlim(0, chart.duration_s)
    axes.set_ylim(chart.height, 0)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(_LINE)
    ticks = chart.ticks(at_most=inches / _TICK)
    axes.set_xticks(ticks, [f"{seconds:g} s" for seconds in ticks])
    axes.set_yticks([row.top + _BAR[0] + _BAR[1] / 2 for row in chart.rows], [row.label for row in chart.rows])
    axes.tick_params(axis="x", labelsize=_MEDIUM, color=_LINE, labelcolor=_PALE, length=3)
    axes.tick_params(axis="y", labelsize=_MEDIUM, labelcolor=_DARK, length=0)
    for row in chart.rows:
        _draw_bars(axes, row.bars, row.top, _BAR, inches / chart.duration_s)
        _draw_bars(axes, row.beside, row.top, _BESIDE, inches / chart.duration_s)
    _draw_steps(axes, chart, inches)
    _draw_shares(axes, chart)


def _draw_bars(axes: Axes, bars: Sequence[Bar], top: float, place: tuple[float, float], inches_per_s: float) -> None:
    places = []
    for bar in bars:
        seconds = bar.end - bar.start
        inches = seconds * inches_per_s
        gap = _GAP if inches > _GAP_FROM and bar.colour != WAITING else 0.0
        places.append((bar.start, seconds - gap / inches_per_s))
        if bar.number and inches > _NUMBER_FROM + _CHAR * len(bar.number):
            middle = bar.start + seconds / 2, top + place[0] + place[1] / 2
            axes.text(*middle, bar.number, ha="center", va="center_baseline", fontsize=_SMALL, color="white")
    colours = [bar.colour for bar in bars]
    axes.broken_barh(places, (top + place[0], place[1]), facecolors=colours, linewidths=0, zorder=2)


def _draw_steps(axes: Axes, chart: GanttChart, inches: float) -> None:
    """Draw where each step ends, behind the bars, and the numbers of the steps."""
    lines = chart.lines(at_most=inches / _BETWEEN_LINES)
    axes.vlines(lines, -0.35, chart.height, colors=_LINE, linewidths=0.8, clip_on=False, zorder=1)
    for step, seconds in chart.numbers(at_most=inches / _NUMBER):
        axes.text(seconds, -0.35, f"{step}", ha="center", va="bottom", fontsize=_MEDIUM, color=_PALE)
    if lines:
        _note(axes, "step", (0, -0.35), right=False)


def _draw_shares(axes: Axes, chart: GanttChart) -> None:
    """Write beside each role how much of its time it is busy."""
    for role, shares in chart.account.items():
        tops = [row.top for row in chart.rows if row.role == role]
        if tops:
            middle = (tops[0] + tops[-1]) / 2 + _BAR[0] + _BAR[1] / 2
            _note(axes, f"{100 * shares['busy']:.0f} % busy", (chart.duration_s, middle), right=True)


def _note(axes: Axes, text: str, place: tuple[float, float], *, right: bool) -> None:
    """Write something beside the plot."""
    axes.annotate(
        text, place, (6 if right else -4, 0), textcoords="offset points", annotation_clip=False,
        ha="left" if right else "right", va="center" if right else "bottom", fontsize=_MEDIUM, color=_PALE,
    )  # fmt: skip
