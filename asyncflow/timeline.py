"""Spans of one process: what it did, when, for which step. One JSON object per line in `timeline/PROCESS.jsonl`."""

#     with timeline.span("generate", step=3, rows=64): ...
#
#     {"name":"generate","start":1700000000.25,"end":1700000001.5,"step":3,"rows":64}
#     {"process":"rollout-0-0","cpu_s":12.3,"spans":4711}
#
# Times are unix seconds on the host's clock. Spans named `wait ...` are idle time; at most one of them is open at a
# time. The last line is not a span but the number of spans and the CPU time of the process (s), from which the cost of
# recording is computed; a killed process has no such line.

import contextlib
import logging
import statistics
import tempfile
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from asyncflow.clock import HostClock
from asyncflow.json_lines import open_spare

_FLUSH_EVERY = 64
_BATCHES, _BATCH = 5, 4000

logger = logging.getLogger(__name__)


class Spans(Protocol):
    def span(self, name: str, **attributes: int | float | str) -> AbstractContextManager[None]: ...

    def record_span(self, name: str, seconds: float, **attributes: int | float | str) -> None: ...


class NoTimeline:
    """Records nothing, for a component that runs outside of a run."""

    def span(self, name: str, **attributes: int | float | str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record_span(self, name: str, seconds: float, **attributes: int | float | str) -> None:
        """Do nothing."""


class Timeline:
    """Writes spans; thread-safe. A span costs two or three microseconds, since lines are buffered.

    Appends to `path`, whose stem is the process's name. If that is impossible, spans are only counted.
    """

    def __init__(self, path: Path, clock: HostClock) -> None:
        self._process = path.stem
        self._file = open_spare(path, what="timeline", loss="records no spans")
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._num_spans = 0
        self._waiting_s = 0.0
        self._waiting_since: float | None = None

    @property
    def waiting_s(self) -> float:
        """Seconds inside spans named `wait ...` so far, including an open one."""
        with self._lock:
            open_s = 0.0 if self._waiting_since is None else self._clock.now() - self._waiting_since
            return self._waiting_s + open_s

    def span(self, name: str, **attributes: int | float | str) -> AbstractContextManager[None]:
        return _OpenSpan(self, name, attributes)

    def record_span(self, name: str, seconds: float, **attributes: int | float | str) -> None:
        """Record a span that ends now, for work that is not a `with` block."""
        self._end_span(name, self._clock.now() - seconds, attributes)

    def flush(self) -> None:
        with self._lock:
            self._write_lines()

    def close(self) -> None:
        """Write the number of spans, flush and close; idempotent."""
        with self._lock:
            told = {"process": self._process, "cpu_s": round(time.process_time(), 3), "spans": self._num_spans}
            self._lines.append(msgspec.json.encode(told))
            self._write_lines()
            self._file.close()

    def _begin_span(self, name: str) -> float:
        start = self._clock.now()
        if name.startswith("wait "):
            self._waiting_since = start
        return start

    def _end_span(self, name: str, start: float, attributes: dict[str, int | float | str]) -> None:
        end = self._clock.now()
        line = msgspec.json.encode({"name": name, "start": start, "end": end, **attributes})
        with self._lock:
            if name.startswith("wait "):
                self._waiting_s += end - start
                self._waiting_since = None
            self._num_spans += 1
            self._lines.append(line)
            if len(self._lines) >= _FLUSH_EVERY:
                self._write_lines()

    def _write_lines(self) -> None:
        """Write what is buffered; a full disk costs the spans, not the run."""
        lines, self._lines = self._lines, []
        if not lines or self._file.closed:
            return
        try:
            self._file.write(b"\n".join(lines) + b"\n")
            self._file.flush()
        except OSError as error:
            logger.warning("timeline: %s; this process records no more spans", error)
            with contextlib.suppress(OSError):
                self._file.close()


class _OpenSpan:
    """A span that has begun. A class, since a generator's context manager costs another microsecond."""

    __slots__ = ("_attributes", "_name", "_start", "_timeline")

    def __init__(self, timeline: Timeline, name: str, attributes: dict[str, int | float | str]) -> None:
        self._timeline, self._name, self._attributes = timeline, name, attributes

    def __enter__(self) -> None:
        self._start = self._timeline._begin_span(self._name)

    def __exit__(self, *_: object) -> None:
        self._timeline._end_span(self._name, self._start, self._attributes)


def measure_span_cost() -> float:
    """Return the CPU time (s) of recording one span here, writing included: the median of some batches."""
    costs = []
    with tempfile.TemporaryDirectory(prefix="asyncflow-") as directory:
        timeline = Timeline(Path(directory) / "spans.jsonl", HostClock.from_wall_clock())
        for _ in range(_BATCHES):
            began = time.thread_time()
            for step in range(_BATCH):
                with timeline.span("generate", step=step, version=0, rows=64):
                    pass
            timeline.flush()
            costs.append((time.thread_time() - began) / _BATCH)
        timeline.close()
    return statistics.median(costs)
