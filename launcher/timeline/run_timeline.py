"""What every process of a run did: spans read from its `timeline/`, accounted for, and written as text or Chrome trace.

Chrome traces can be viewed at ui.perfetto.dev. Spans of one process may be nested (a weight swap inside a generation);
the innermost one counts. Spans of background threads (`BESIDE`) are shown but not accounted for, since the process does
something else meanwhile. The same holds for rollouts of users' functions and their turns; in the trace, concurrent ones
have lanes of their own.
"""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from asyncflow.decoding import UNREADABLE, json_object
from asyncflow.errors import ConfigError
from asyncflow.job import PAUSED
from asyncflow.json_lines import LineReader
from asyncflow.run_files import TIMELINE

ROLLOUTS = frozenset({"rollout", "turn"})
"""Spans of users' functions and agents, many at a time; those with the same `id` belong to one rollout."""
BESIDE = ROLLOUTS | {
    "copy weights",
    "seal weights",
    "check weights",
    "receive weights",
    "pause for weights",
    "write checkpoint",
    "write export",
    PAUSED,
}
STEP_ENDS = "publish weights"
"""Span of the actor's rank 0 that ends when the weights of its `step` exist."""
_WAITS = {
    "wait for prompts": "waiting for admission",
    "wait for weights": "waiting for weights",
    "wait for peers": "waiting for peers",
    "wait for rows": "waiting for data",
    "wait for checkpoint": "waiting for disk",
    "wait for devices": "waiting for devices",
    "asleep": "waiting for devices",
}
_DEVICES = "waiting for devices"
CATEGORIES = ("busy", *dict.fromkeys(_WAITS.values()), PAUSED, "other")
"""`paused`: waits in a pause that the user asked for; every process has a span of it."""
_HEADINGS = {
    category: ("waits", category.removeprefix("waiting for ")) if category in _WAITS.values() else ("", category)
    for category in CATEGORIES
}
"""Categories of an account; `other`: no span covers the time."""

_ENDS_BYTES, _BLOCK_BYTES = 2**20, 2**12

_ROLES = ("rollout", "ref", "teacher", "reward", "critic", "actor_fwd", "advantages", "actor", "evaluate")
"""Order of rows from top to bottom; users' roles follow."""


@dataclass(frozen=True)
class Span:
    """What a process did between `start` and `end` (unix time, s); attributes are step, rows, version and the like."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, object]

    @property
    def category(self) -> str:
        """One of `CATEGORIES`."""
        if self.name == PAUSED:
            return PAUSED
        for prefix, category in _WAITS.items():
            if self.name.startswith(prefix):
                return category
        return "busy"


@dataclass(frozen=True)
class Recorded:
    """How much a process recorded, over all its starts that ended regularly.

    Attributes:
        num_spans: number of recorded spans.
        cpu_s: CPU time of the whole process (s).
    """

    num_spans: int
    cpu_s: float


@dataclass(frozen=True)
class RunTimeline:
    """All spans of a run.

    Attributes:
        spans: process, e.g. `rollout-1-0` -> its spans by start, outer ones first.
        step_ends: step -> when its weights existed (unix time, s), since the run's last start.
        recorded: process -> how much it recorded; processes that were killed are missing.
    """

    spans: Mapping[str, Sequence[Span]]
    step_ends: Mapping[int, float]
    recorded: Mapping[str, Recorded]

    @staticmethod
    def read(run_dir: Path) -> "RunTimeline":
        """Read a run's timeline leniently: lines that a killed process left unfinished are skipped.

        Raises:
            ConfigError: the run has no timeline.
        """
        spans: dict[str, list[Span]] = {}
        recorded: dict[str, Recorded] = {}
        for path in sorted((run_dir / TIMELINE).glob("*.jsonl")):
            lines = [line for _, line in LineReader(path).read_lines().lines]
            if own := sorted(filter(None, map(_span, lines)), key=_order):
                spans[path.stem] = own
            if told := list(filter(None, map(_recorded, lines))):
                recorded[path.stem] = Recorded(sum(each.num_spans for each in told), sum(each.cpu_s for each in told))
        if not spans:
            raise ConfigError(f"RUN_DIR: {run_dir} has no timeline; name the directory of a run that has begun")
        ends: dict[int, float] = {}
        for span in spans.get("actor-0", []):
            step = span.attributes.get("step")
            if span.name == STEP_ENDS and isinstance(step, int):
                if any(step <= earlier for earlier in ends):
                    ends = {}  # the run was resumed: only its last start counts
                ends[step] = span.end
        return RunTimeline(spans, ends, recorded)

    def recording_overhead(self, span_cost_s: float) -> float:
        """Return the largest share of a process's CPU time that recording took; NaN if every process was killed.

        `span_cost_s` is the CPU time per span (s), see `asyncflow.timeline.measure_span_cost`.
        """
        return max((each.num_spans * span_cost_s / each.cpu_s for each in self.recorded.values()), default=math.nan)

    @property
    def window(self) -> tuple[float, float]:
        """From when to when (unix time, s) the run worked: since its last start, beginning with its first weights."""
        if len(self.step_ends) > 1:
            return min(self.step_ends.values()), max(self.step_ends.values())
        every = [span for own in self.spans.values() for span in own]
        return min(span.start for span in every), max(span.end for span in every)

    def account_by_role(self) -> dict[str, dict[str, float]]:
        """Return role -> category -> share of the window that its processes spent in it; shares add up to 1."""
        start, end = self.window
        by_role: dict[str, list[dict[str, float]]] = {}
        for process, own in self.spans.items():
            if any(span.name not in BESIDE and span.end > start and span.start < end for span in own):
                by_role.setdefault(process.partition("-")[0], []).append(account(own, start, end))
        return {
            role: {category: sum(each[category] for each in parts) / len(parts) for category in CATEGORIES}
            for role, parts in by_role.items()
        }


def newest_spans(run_dir: Path, last_s: float) -> dict[str, list[Span]]:
    """Return process -> its spans of the last `last_s` seconds before the newest end, from the ends of the files.

    Long ones are cut (`_ENDS_BYTES` together), so it may be less than that. Spans beside others are left out.
    """
    sizes = {path: path.stat().st_size for path in sorted((run_dir / TIMELINE).glob("*.jsonl"))}
    share = min(1.0, _ENDS_BYTES / max(1, sum(sizes.values())))
    spans: dict[str, list[Span]] = {}
    for path, size in sizes.items():
        with path.open("rb") as file:
            start = int(size * (1 - share))
            file.seek(start)
            lines = file.read().split(b"\n")
        whole = lines[start > 0 : -1]  # the first may be half a line, the last is one that is being written
        if own := _spans_in(whole):
            spans[path.stem] = own
    newest = max((span.end for own in spans.values() for span in own), default=0.0)
    kept = {name: sorted((s for s in own if s.end >= newest - last_s), key=_order) for name, own in spans.items()}
    return {name: kept[name] for name in in_order(kept) if kept[name]}


def spans_between(run_dir: Path, start: float, end: float) -> dict[str, list[Span]]:
    """Return process -> its spans that touch a stretch of time (unix time, s), as `newest_spans`.

    A process appends its spans as they end, so where a stretch begins is found without reading all of a file. A long
    stretch is cut, as there, but at its end.
    """
    paths = sorted((run_dir / TIMELINE).glob("*.jsonl"))
    spans: dict[str, list[Span]] = {}
    for path in paths:
        with path.open("rb") as file:
            if place := _place_of(file, path.stat().st_size, start):
                file.seek(place)
                file.readline()
            else:
                file.seek(0)
            lines = file.read(max(4 * _BLOCK_BYTES, _ENDS_BYTES // len(paths))).split(b"\n")[:-1]
        if own := [span for span in _spans_in(lines) if span.end >= start and span.start <= end]:
            spans[path.stem] = sorted(own, key=_order)
    return {name: spans[name] for name in in_order(spans)}


def _spans_in(lines: Iterable[bytes]) -> list[Span]:
    """Return the spans in some lines, without those beside others."""
    spans = (_span(_values(line)) for line in lines)
    return [span for span in spans if span is not None and (span.name not in BESIDE or span.name == PAUSED)]


def _place_of(file: BinaryIO, size: int, time: float) -> int:
    """Return a place in a file some lines before its first span that ends at a time or later."""
    low, high = 0, size
    while high - low > _BLOCK_BYTES:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        span = None
        while span is None and file.tell() < high and (line := file.readline()):
            span = _span(_values(line))
        low, high = (middle, high) if span is not None and span.end < time else (low, middle)
    return max(0, low - _BLOCK_BYTES)


def end_of_step(run_dir: Path, step: int) -> float | None:
    """Return when the weights of a step existed (unix time, s), the last time that it was trained; None: unknown."""
    found = None
    with contextlib.suppress(OSError), (run_dir / TIMELINE / "actor-0.jsonl").open("rb") as file:
        for line in file:
            span = _span(_values(line)) if STEP_ENDS.encode() in line else None
            if span is not None and span.name == STEP_ENDS and span.attributes.get("step") == step:
                found = span.end
    return found


def _values(line: bytes) -> Mapping[str, object]:
    try:
        return json_object(line)
    except UNREADABLE:
        return {}


def account(spans: Iterable[Span], start: float, end: float) -> dict[str, float]:
    """Return category -> share of a window for one process; of nested spans the one that began last counts."""
    inside = [span for span in spans if span.end > start and span.start < end]
    pauses = [span for span in inside if span.name == PAUSED]
    inside = [span for span in inside if span.name not in BESIDE]
    each = [*inside, *pauses]
    edges = sorted({start, end, *(max(start, span.start) for span in each), *(min(end, span.end) for span in each)})
    begins = sorted(inside, key=_order)
    shares = dict.fromkeys(CATEGORIES, 0.0)
    open_spans: list[Span] = []
    number = 0
    # A sweep over all edges: between two of them nothing begins or ends.
    for left, right in itertools.pairwise(edges):
        while number < len(begins) and begins[number].start <= left:
            open_spans.append(begins[number])
            number += 1
        open_spans = [span for span in open_spans if span.end > left]
        category = open_spans[-1].category if open_spans else "other"
        if category != "busy" and any(span.start <= left < span.end for span in pauses):
            category = PAUSED
        shares[category] += (right - left) / (end - start)
    return shares


def chrome_trace(timeline: RunTimeline) -> str:
    """Return the spans in Chrome's trace format (JSON), each process with its background threads in a second lane."""
    start, _ = timeline.window
    events: list[dict[str, object]] = []
    for pid, process in enumerate(in_order(timeline.spans), start=1):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": process}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        lanes = _lanes(timeline.spans[process])
        for span in timeline.spans[process]:
            times = {"ts": round((span.start - start) * 1e6, 1), "dur": round((span.end - span.start) * 1e6, 1)}
            where = {"pid": pid, "tid": lanes.get(_rollout_of(span), int(span.name in BESIDE))}
            events.append({"name": span.name, "ph": "X", **where, **times, "args": dict(span.attributes)})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _lanes(spans: Iterable[Span]) -> dict[object, int]:
    """Return rollout -> lane, from 2 up; a lane is free again when its rollout has ended."""
    times: dict[object, tuple[float, float]] = {}
    for span in spans:
        if (rollout := _rollout_of(span)) is not None:
            start, end = times.get(rollout, (span.start, span.end))
            times[rollout] = min(start, span.start), max(end, span.end)
    ends: list[float] = []
    lanes = {}
    for rollout, (start, end) in sorted(times.items(), key=lambda item: item[1]):
        # The first lane that is free, else a new one. Lanes 0 and 1 are the process and its background threads.
        lane = next((number for number, until in enumerate(ends) if until <= start), len(ends))
        ends[lane : lane + 1] = [end]
        lanes[rollout] = 2 + lane
    return lanes


def _rollout_of(span: Span) -> object:
    return span.attributes.get("id") if span.name in ROLLOUTS else None


def account_text(account: Mapping[str, Mapping[str, float]]) -> str:
    """Return the account as a table for a terminal, in percent; it fits 80 columns unless a role's name does not."""
    names = max(12, *(len(role) + 1 for role in account)) if account else 12
    # Few runs have roles that wait for devices, or were paused.
    rare = {_DEVICES, PAUSED}
    shown = [name for name in CATEGORIES if name not in rare or any(shares[name] for shares in account.values())]
    width = 9 if len(shown) <= len(CATEGORIES) - len(rare) else 8 if len(shown) < len(CATEGORIES) else 7
    columns = [(name, *_HEADINGS[name], max(width, len(_HEADINGS[name][1]) + 1)) for name in shown]
    lines = [
        "".join([" " * names, *(above.rjust(width) for _, above, _, width in columns)]).rstrip(),
        "".join(["% of time".ljust(names), *(below.rjust(width) for _, _, below, width in columns)]),
    ]
    for role in in_order(account):
        shares = (f"{100 * account[role][name]:{width}.1f}" for name, _, _, width in columns)
        lines.append("".join([role.ljust(names), *shares]))
    return "\n".join(lines)


def recording_text(timeline: RunTimeline, span_cost_s: float) -> str:
    """Return one line about the cost of recording."""
    share = timeline.recording_overhead(span_cost_s)
    if math.isnan(share):
        return "recording: no process has reported yet how many spans it recorded"
    return f"recording: {100 * share:.2f} % of a process's CPU time at most ({1e6 * span_cost_s:.1f} us a span)"


def in_order(names: Iterable[str]) -> list[str]:
    """Return processes or roles in the order of rows, with `rollout-2` before `rollout-10`."""

    def place(name: str) -> tuple[int, list[str | int]]:
        role = role_of(name)
        parts = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
        return (_ROLES.index(role) if role in _ROLES else len(_ROLES), parts)

    return sorted(names, key=place)


def role_of(process: str) -> str:
    """Return the role in a process's name, e.g. `rollout` of `rollout-1-0`."""
    return process.partition("-")[0]


def _span(values: Mapping[str, object]) -> Span | None:
    match values:
        case {"name": str(name), "start": int() | float() as start, "end": int() | float() as end, **attributes}:
            if math.isfinite(start) and start <= end < math.inf:  # a damaged line may hold any number
                return Span(name, start, end, attributes)
    return None


def _recorded(values: Mapping[str, object]) -> Recorded | None:
    match values:
        case {"process": str(), "spans": int(num_spans), "cpu_s": int() | float() as cpu_s} if cpu_s > 0:
            return Recorded(num_spans, cpu_s)
    return None


def _order(span: Span) -> tuple[float, float]:
    return span.start, -span.end  # of spans that begin together, the outer one first
