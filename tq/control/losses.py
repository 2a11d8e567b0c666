"""Rows that were lost with a unit and must be put again, and the producers that watch for them. Pure."""

from collections.abc import Iterable, Sequence

from tq.control.live_rows import LiveRow
from tq.messages import LostRows, WatchLost


class Losses:
    """Reported losses, each under a sequence number, so that no watcher misses one or sees it twice."""

    def __init__(self, first: int) -> None:
        """Args:
        first: sequence numbers count up from here; a restarted controller starts above all earlier ones.
        """
        self.watchers: dict[int, WatchLost] = {}
        """By request."""
        self._sequence = first
        self._reported: dict[int, int] = {}

    def report(self, rows: Iterable[int]) -> list[int]:
        """These rows must be put again; returns those that were not reported yet."""
        new = [number for number in rows if number not in self._reported]
        if new:
            self._sequence += 1
            self._reported.update(dict.fromkeys(new, self._sequence))
        return new

    def unseen(self, after: int, table: dict[int, LiveRow]) -> LostRows | None:
        """Return the losses above a sequence number; None: there are none.

        Args:
            after: of the last report that a watcher has seen.
            table: live rows; what is not lost any more is forgotten.
        """
        for number in list(self._reported):
            if number not in table or not table[number].unit.lost:
                del self._reported[number]
        rows: Sequence[int] = sorted(number for number, sequence in self._reported.items() if sequence > after)
        if not rows:
            return None
        held = [table[number] for number in rows]
        return LostRows(self._sequence, [row.partition for row in held], list(rows), [row.group for row in held])

    def forget(self, rows: Iterable[int]) -> None:
        """Rows are somewhere again: when they get lost once more, that is another loss."""
        for number in rows:
            self._reported.pop(number, None)
