"""What `asyncflow timeline` writes and prints as text: a Chrome trace (for ui.perfetto.dev), a Gantt chart in one HTML
file that needs nothing else, and the account of idle time.
"""

import html
import json
import math
from collections.abc import Mapping

from launcher.gantt_chart import CAPTION, WAITING, Bar, GanttChart, in_order
from launcher.run_timeline import BESIDE, CATEGORIES, RunTimeline

_ROW, _BAR, _THIN, _LEFT, _TOP, _GAP_FROM = 22, 15, 3, 120, 26, 6
_TICK, _NUMBER, _BETWEEN_LINES = 150, 40, 12
"""Room (pixels) for a time, for a step's number, between two steps' lines."""


def chrome_trace(timeline: RunTimeline) -> str:
    """Return the spans in Chrome's trace format, JSON: a process each, background threads beside it."""
    start, _ = timeline.window
    events: list[dict[str, object]] = []
    for pid, process in enumerate(in_order(timeline.spans), start=1):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": process}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        for span in timeline.spans[process]:
            times = {"ts": round((span.start - start) * 1e6, 1), "dur": round((span.end - span.start) * 1e6, 1)}
            where = {"pid": pid, "tid": int(span.name in BESIDE)}
            events.append({"name": span.name, "ph": "X", **where, **times, "args": dict(span.attributes)})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def gantt_html(chart: GanttChart, *, width: int) -> str:
    """Return a chart as an HTML document, which is well-formed XML, too.

    Args:
        chart: of the run.
        width: of the whole run (pixels).
    """
    scale = width / chart.duration_s
    bottom = _TOP + round(chart.height * _ROW)
    parts = [
        f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{bottom}" class="step"/>'
        for x in (_LEFT + moment * scale for moment in chart.lines(at_most=width / _BETWEEN_LINES))
    ]
    for row in chart.rows:
        top = _TOP + row.top * _ROW
        parts.append(f'<text x="4" y="{top + 12:.1f}">{html.escape(row.label)}</text>')
        parts.extend(_rectangle(bar, top, _BAR, scale) for bar in row.bars)
        parts.extend(_rectangle(bar, top + _BAR, _THIN, scale) for bar in row.beside)
    above = [(seconds, _TOP - 10, f"{step}") for step, seconds in chart.numbers(at_most=width / _NUMBER)]
    below = [(seconds, bottom + 14, f"{seconds:g} s") for seconds in chart.ticks(at_most=width / _TICK)]
    for seconds, y, text in [*above, *below]:
        parts.append(f'<text x="{_LEFT + seconds * scale:.1f}" y="{y}" class="number">{text}</text>')
    return _PAGE.format(
        title=html.escape(chart.title),
        legend="".join(_legend(name, colour) for name, colour in chart.legend),
        width=width + _LEFT + 30,
        height=bottom + 20,
        chart="".join(parts),
        account=_account_table(chart.account),
        summary=chart.summary,
        caption=CAPTION,
    )


def account_text(account: Mapping[str, Mapping[str, float]]) -> str:
    """Return the account as a table for a terminal, in per cent."""
    lines = ["".join([f"{'% of time':12}", *(f"{category:>24}" for category in CATEGORIES), f"{'sum':>8}"])]
    for role in in_order(account):
        shares = [100 * account[role][category] for category in CATEGORIES]
        lines.append("".join([f"{role:12}", *(f"{share:24.1f}" for share in shares), f"{sum(shares):8.1f}"]))
    return "\n".join(lines)


def recording_text(timeline: RunTimeline, span_cost_s: float) -> str:
    """Say what recording cost, in one line."""
    share = timeline.overhead(span_cost_s)
    if math.isnan(share):
        return "recording: no process has said yet how many spans it recorded"
    return f"recording: {100 * share:.2f} % of a process's CPU time at most ({1e6 * span_cost_s:.1f} us a span)"


def _account_table(account: Mapping[str, Mapping[str, float]]) -> str:
    head = "".join(f"<th>{category}</th>" for category in CATEGORIES)
    rows = []
    for role, shares in account.items():
        cells = "".join(f"<td>{100 * shares[category]:.1f} %</td>" for category in CATEGORIES)
        rows.append(f"<tr><th>{role}</th>{cells}</tr>")
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


def _legend(name: str, colour: str) -> str:
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
