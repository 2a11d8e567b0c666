"""How many rows were ready for each task while `asyncflow view` watched a live run. Torch-free.

`status.json` has the newest snapshot only, so the history is in memory. It is bounded: its points are means over
1, 2, 4 ... snapshots.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


class QueueDepths:
    """The history of one run's queue.

    Args:
        most_points: an even number; as many points are merged by twos.
    """

    def __init__(self, most_points: int) -> None:
        self._most_points = most_points
        self._points: list[tuple[float, Mapping[str, float]]] = []
        self._open: list[Mapping[str, float]] = []  # snapshots of the point that is under way
        self._stride = 1
        self._since: float | None = None
        self._newest = -math.inf

    def add(self, at: float, ready: Mapping[str, float]) -> None:
        """Take in a snapshot: task -> rows. One that is known already changes nothing."""
        if at <= self._newest:
            return
        self._newest = at
        if self._since is None:
            self._since = at
        self._open.append(ready)
        if len(self._open) < self._stride:
            return
        self._points.append((at, _means(self._open)))
        self._open = []
        if len(self._points) == self._most_points:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(at, _means([first, second])) for (_, first), (at, second) in pairs]
            self._stride *= 2

    def news(self, stride: int, points: int) -> dict[str, Any]:
        """Return what a page with so many points of a stride lacks: {since, stride, from, times, values: task -> list}.

        Times are in seconds (unix time). `from`: where the page adds them; it drops what it has from there.
        """
        first = min(points, len(self._points)) if stride == self._stride else 0
        tasks = sorted({task for _, ready in self._points for task in ready})
        return {
            "since": self._since,
            "stride": self._stride,
            "from": first,
            "times": [round(at, 1) for at, _ in self._points[first:]],
            "values": {task: [ready.get(task) for _, ready in self._points[first:]] for task in tasks},
        }


def _means(snapshots: Sequence[Mapping[str, float]]) -> dict[str, float]:
    tasks = {task for one in snapshots for task in one}
    return {task: round(statistics.fmean(one[task] for one in snapshots if task in one), 1) for task in tasks}
