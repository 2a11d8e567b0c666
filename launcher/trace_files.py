"""Two pictures of a run's timeline: a Chrome trace (for ui.perfetto.dev) and a Gantt chart in one HTML file.

rollout-0  | generate 3 |load| generate 4 ...      one row per process, one colour per task,
actor-0    | fb | fb | opt | publish | fb ...      a line where weights of a step exist
"""

import html
import json
from collections.abc import Iterable, Sequence

from launcher.run_timeline import BESIDE, CATEGORIES, RunTimeline, Span
from workers.dataflow import SERVICES

_ROW, _LANE, _LEFT, _TOP = 22, 15, 120, 34
_COLOURS = {
    "generate": "#4c78a8", "load weights": "#e45756", "forward_backward": "#54a24b", "optimizer": "#2f6b2a",
    "publish weights": "#b279a2", "checkpoint": "#9d755d", "ref_log_probs": "#f58518", "rewards": "#eeca3b",
}  # fmt: skip
_OTHERS = ("#72b7b2", "#ff9da6", "#bab0ac", "#79706e", "#d67195")
_WAITING = "#ececec"
_ROLES = ("rollout", "ref", "reward", "critic", "actor_fwd", "advantages", "actor")
"""Rows from top to bottom; users' roles and services follow."""


def chrome_trace(timeline: RunTimeline) -> str:
    """Return the spans in Chrome's trace format, JSON: a process each, background threads beside it."""
    start, _ = timeline.window
    events: list[dict[str, object]] = []
    for pid, process in enumerate(_ordered(timeline.spans), start=1):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": process}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        for span in timeline.spans[process]:
            times = {"ts": round((span.start - start) * 1e6, 1), "dur": round((span.end - span.start) * 1e6, 1)}
            where = {"pid": pid, "tid": int(span.name in BESIDE)}
            events.append({"name": span.name, "ph": "X", **where, **times, "args": dict(span.attributes)})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def gantt(timeline: RunTimeline, *, title: str, width: int = 2400) -> str:
    """Return an HTML document that needs nothing else.

    Args:
        timeline: of the run.
        title: heading.
        width: of the whole run (pixels).
    """
    start, end = timeline.window
    scale = width / max(1e-9, end - start)
    processes = [each for each in _ordered(timeline.spans) if each.partition("-")[0] not in SERVICES]
    rows = []
    for number, process in enumerate(processes):
        top = _TOP + number * _ROW
        rows.append(f'<text x="4" y="{top + 12}">{html.escape(process)}</text>')
        rows.extend(_bar(span, top, start, end, scale) for span in timeline.spans[process])
    height = _TOP + len(processes) * _ROW
    for step, moment in timeline.step_ends.items():
        x = _LEFT + (moment - start) * scale
        rows.append(f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{height}" class="step"/>')
        rows.append(f'<text x="{x + 2:.1f}" y="{_TOP - 10}" class="number">{step}</text>')
    shown = sorted({span.name for process in processes for span in timeline.spans[process] if span.category == "busy"})
    legend = "".join(f'<span><i style="background:{_colour(name)}"></i>{html.escape(name)}</span>' for name in shown)
    return _PAGE.format(
        title=html.escape(title), legend=legend, width=width + _LEFT + 20, height=height + 10, rows="".join(rows),
        account=_account_table(timeline), seconds=f"{end - start:.1f}",
    )  # fmt: skip


def account_text(timeline: RunTimeline) -> str:
    """Return the account as a table for a terminal, in per cent."""
    account = timeline.account()
    lines = ["".join([f"{'':12}", *(f"{category:>24}" for category in CATEGORIES), f"{'sum':>8}"])]
    for role in _ordered(account):
        shares = [100 * account[role][category] for category in CATEGORIES]
        lines.append("".join([f"{role:12}", *(f"{share:24.1f}" for share in shares), f"{sum(shares):8.1f}"]))
    return "\n".join(lines)


def _account_table(timeline: RunTimeline) -> str:
    account = timeline.account()
    head = "".join(f"<th>{category}</th>" for category in CATEGORIES)
    rows = [
        f"<tr><th>{role}</th>" + "".join(f"<td>{100 * account[role][category]:.1f} %</td>" for category in CATEGORIES)
        for role in _ordered(account)
        if role not in SERVICES
    ]
    return f"<table><tr><th></th>{head}</tr>{'</tr>'.join(rows)}</tr></table>"


def _bar(span: Span, top: int, start: float, end: float, scale: float) -> str:
    if span.end <= start or span.start >= end:
        return ""
    left, right = max(span.start, start), min(span.end, end)
    x, wide = _LEFT + (left - start) * scale, max(0.3, (right - left) * scale)
    y, high = (top + _LANE, 3) if span.name in BESIDE else (top, _LANE)
    told = ", ".join([span.name, *(f"{key} {value}" for key, value in span.attributes.items())])
    told = html.escape(f"{told}: {span.end - span.start:.3f} s")
    colour = _WAITING if span.category != "busy" else _colour(span.name)
    return f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{high}" fill="{colour}"><title>{told}</title></rect>'


def _colour(name: str) -> str:
    return _COLOURS.get(name) or _OTHERS[sum(name.encode()) % len(_OTHERS)]


def _ordered(processes: Iterable[str]) -> Sequence[str]:
    def place(process: str) -> tuple[int, str]:
        role = process.partition("-")[0]
        return (_ROLES.index(role) if role in _ROLES else len(_ROLES), process)

    return sorted(processes, key=place)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 13px system-ui, sans-serif; margin: 16px; color: #222 }}
h1 {{ font-size: 16px }}
.chart {{ overflow-x: auto; border: 1px solid #ddd }}
svg text {{ font-size: 11px; fill: #333 }}
svg .number {{ fill: #888 }}
svg .step {{ stroke: #999; stroke-dasharray: 2 3 }}
.legend span {{ margin-right: 14px; white-space: nowrap }}
.legend i {{ display: inline-block; width: 11px; height: 11px; margin-right: 4px }}
table {{ border-collapse: collapse; margin-top: 14px }}
td, th {{ padding: 2px 10px; text-align: right; font-weight: normal }}
tr:first-child th {{ color: #777 }}
</style>
<h1>{title}</h1>
<p class="legend">{legend}<span><i style="background:#ececec"></i>waiting</span></p>
<div class="chart"><svg width="{width}" height="{height}">{rows}</svg></div>
<p>{seconds} s, from the first weights to the last. Dashed: weights of a step exist. Thin bars: background threads.</p>
{account}
</html>
"""
