"""Spans of one process: what it did, when, for which step. One JSON object a line in `timeline/PROCESS.jsonl`.

    with timeline.span("generate", step=3, rows=64): ...

    {"name": "generate", "start": 1700000000.25, "end": 1700000001.5, "step": 3, "rows": 64}

Times are unix seconds, taken from a monotonic clock that was aligned once at the start. Spans named `wait ...` are
idle time; at most one of them is open at a time.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

_FLUSH_EVERY = 64

logger = logging.getLogger(__name__)


class Spans(Protocol):
    """What records spans: a `Timeline`, or `NoTimeline`."""

    def span(self, name: str, **attributes: int | float | str) -> AbstractContextManager[None]: ...


class NoTimeline:
    """Records nothing, for a component that runs outside of a run."""

    def span(self, name: str, **attributes: int | float | str) -> AbstractContextManager[None]:
        """Do nothing around the enclosed block."""
        return contextlib.nullcontext()


class Timeline:
    """Writes spans; thread-safe. Costs a few microseconds a span: lines are buffered."""

    def __init__(self, path: Path) -> None:
        """Append to `path`, whose directory exists."""
        self._file = path.open("a")
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._offset = time.time() - time.monotonic()
        self._waiting_s = 0.0
        self._waiting_since: float | None = None

    def now(self) -> float:
        """Return unix time (s) on this timeline's clock."""
        return time.monotonic() + self._offset

    @property
    def waiting_s(self) -> float:
        """Seconds inside spans named `wait ...` so far, the open one included."""
        with self._lock:
            open_s = 0.0 if self._waiting_since is None else self.now() - self._waiting_since
            return self._waiting_s + open_s

    @contextmanager
    def span(self, name: str, **attributes: int | float | str) -> Iterator[None]:
        """Record the enclosed block."""
        waits = name.startswith("wait")
        start = self.now()
        if waits:
            self._waiting_since = start
        try:
            yield
        finally:
            self._record(name, start, self.now(), attributes, waits=waits)

    def _record(
        self, name: str, start: float, end: float, attributes: Mapping[str, int | float | str], *, waits: bool
    ) -> None:
        line = json.dumps({"name": name, "start": round(start, 6), "end": round(end, 6), **attributes})
        with self._lock:
            if waits:
                self._waiting_s += end - start
                self._waiting_since = None
            self._lines.append(line)
            if len(self._lines) >= _FLUSH_EVERY:
                self._write()

    def flush(self) -> None:
        """Write what is buffered."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Flush and close; idempotent."""
        with self._lock:
            self._write()
            self._file.close()

    def _write(self) -> None:
        """Write what is buffered; a full disk costs the spans, not the run."""
        lines, self._lines = self._lines, []
        if not lines or self._file.closed:
            return
        try:
            self._file.write("\n".join(lines) + "\n")
            self._file.flush()
        except OSError as error:
            logger.warning("timeline: %s; this process records no more spans", error)
            with contextlib.suppress(OSError):
                self._file.close()
