"""How much was done by when, and how fast that is: pure."""

import bisect


class Throughput:
    """A count that grows, looked at now and then."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._counts: list[float] = []

    def add(self, time_s: float, count: float) -> None:
        """At this time it was so much; times ascend."""
        self._times.append(time_s)
        self._counts.append(count)

    def rate(self, start: float, end: float) -> float:
        """Return how much was added per second between two times; between two looks it grew evenly."""
        return (self._at(end) - self._at(start)) / (end - start)

    def back_at(self, since: float, *, rate: float, window_s: float) -> float | None:
        """Return the end of the first window, from `since` on, in which it grew that fast; None: there is none yet."""
        ends = [time_s for time_s in self._times if time_s >= since + window_s]
        return next((end for end in ends if self.rate(end - window_s, end) >= rate), None)

    def _at(self, time_s: float) -> float:
        place = min(max(bisect.bisect_left(self._times, time_s), 1), len(self._times) - 1)
        before, after = self._times[place - 1], self._times[place]
        share = min(1.0, max(0.0, (time_s - before) / (after - before)))
        return self._counts[place - 1] + share * (self._counts[place] - self._counts[place - 1])
