"""Spans of one process, and all processes' as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from weightsync.plan import Bucket
from weightsync.slot_memory import Region


class Span(NamedTuple):
    """What a thread did, from when to when (s, monotonic)."""

    name: str
    start: float
    end: float
    thread: str


class Spans:
    """Records; thread-safe."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the enclosed block."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._spans.append(Span(name, start, time.monotonic(), threading.current_thread().name))

    def record_checksums(self, name: str) -> None:
        """Record every bucket that this process takes a checksum of, for sealing and for checking."""
        checksum = Region.bucket_checksum

        def recorded(region: Region, bucket: Bucket) -> int:
            with self.span(f"{name} bucket {bucket.index}"):
                return checksum(region, bucket)

        Region.bucket_checksum = recorded  # type: ignore[method-assign, assignment]

    def take(self) -> list[Span]:
        """Return what was recorded, and forget it."""
        spans, self._spans = self._spans, []
        return spans


def chrome_trace(spans: Mapping[str, Sequence[Span]], *, begin: float, end: float) -> dict[str, Any]:
    """Return the spans of all processes that lie between two moments, in Chrome's trace format (microseconds)."""
    events: list[dict[str, Any]] = []
    for pid, (process, own) in enumerate(spans.items(), start=1):
        threads = {name: tid for tid, name in enumerate(sorted({span.thread for span in own}), start=1)}
        events.append(_name("process_name", process, pid, 0))
        events.extend(_name("thread_name", name, pid, tid) for name, tid in threads.items())
        for span in own:
            if span.end >= begin and span.start <= end:
                start_us, length_us = (span.start - begin) * 1e6, (span.end - span.start) * 1e6
                times = {"ph": "X", "ts": round(start_us, 1), "dur": round(length_us, 1)}
                events.append({"name": span.name, "pid": pid, "tid": threads[span.thread], **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
