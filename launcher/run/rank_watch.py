"""Finds ranks that are alive but make no progress, from the status that each reports twice a second. Pure.

    a rank works without progress longer than `operation_timeout_s`   it is stuck (while starting: `start_timeout_s`)
    a rank starts for longer than `max_start_s`                       it is stuck in something without an end
    a rank says nothing for `silence_timeout_s`                       it is stuck in something that lets no thread run
    all ranks wait for longer than `deadlock_timeout_s`               the run is stuck; the longest wait is named. The
                                                                      time of a pause does not count

`launcher.process.gang` finds dead and stopped processes. Waits have deadlines of their own.
"""

import math
from collections.abc import Mapping

from asyncflow.clock import HeartbeatMonitor
from launcher.process.progress import Status, Statuses
from launcher.process.run_events import RankStuck

Place = tuple[str, int]

_LONGEST_LOOK_S = 5.0
"""Longest time between two polls that counts (s); launchers are stopped by Ctrl-Z, and jobs are suspended."""


class RankWatch:
    """Looks at every status; one instance per run.

    Args:
        start_timeout_s: longest time without progress of a rank that starts (s).
        max_start_s: longest start of a rank (s).
        operation_timeout_s: longest time without progress of a rank that works (s).
        silence_timeout_s: longest time without a report (s).
        deadlock_timeout_s: longest time in which all ranks wait (s).
    """

    def __init__(
        self,
        *,
        start_timeout_s: float,
        max_start_s: float,
        operation_timeout_s: float,
        silence_timeout_s: float,
        deadlock_timeout_s: float,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self._max_start_s = max_start_s
        self._operation_timeout_s = operation_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._deadlock_timeout_s = deadlock_timeout_s
        self._monitor: HeartbeatMonitor[Place] = HeartbeatMonitor(_LONGEST_LOOK_S)
        self._last: dict[Place, float] = {}  # when each rank wrote its last status, by its own clock
        self._paused_at = -math.inf  # when this was last called in a pause (monotonic, s)
        self._starting: dict[Place, float] = {}  # since when ranks that start again do, by this host's clock

    def forget_gang(self, gang: str) -> None:
        """Drop the statuses of a gang that ended or starts again."""
        for place in [place for place in self._last if place[0] == gang]:
            del self._last[place]
            self._starting.pop(place, None)
            self._monitor.forget(place)

    def find_stuck_ranks(
        self, statuses: Statuses, *, workers: Mapping[str, bool], now: float, paused: bool = False
    ) -> list[RankStuck]:
        """Return the stuck ranks, the longest stuck first, since others may wait for it.

        Args:
            statuses: the newest of each rank.
            workers: gang that should be at work -> whether the run needs its work to end; False: it serves others, and
                waits by nature.
            now: monotonic (s).
            paused: the user paused the run, so that all may wait.
        """
        if paused:
            self._paused_at = now
        stuck: list[tuple[float, RankStuck]] = []
        waiting = []
        silences = self._monitor.silences(now)
        for (gang, rank), status in sorted(statuses.items()):
            if gang not in workers:
                continue
            if self._last.get((gang, rank)) != status.time:
                self._last[gang, rank] = status.time
                # Counted from a report's arrival here: its own timestamp may be another host's.
                self._monitor.hear((gang, rank), now)
                silences[gang, rank] = 0.0
            silent_s = silences[gang, rank]
            if status.waits:  # for devices that another role has: its start goes on when it gets them
                self._starting[gang, rank] = now
            start_s = 0.0 if status.at_work else now - self._starting.setdefault((gang, rank), now)
            if silent_s > self._silence_timeout_s:
                why = f"no sign of life for {silent_s:.0f} s; last: {status.state}"
                stuck.append((silent_s, RankStuck(gang, rank, why)))
            elif not status.waits and status.idle_s + silent_s > self._timeout_s(status):
                doing = f"{status.state} {status.detail}".rstrip()
                why = f"no progress for {status.idle_s + silent_s:.0f} s with: {doing}"
                stuck.append((status.idle_s + silent_s, RankStuck(gang, rank, why)))
            elif start_s > self._max_start_s:
                stuck.append(
                    (start_s, RankStuck(gang, rank, f"still starting after {start_s:.0f} s (launcher.max_start_s)"))
                )
            elif workers[gang] or not status.waits:  # others also wait for a service that is busy
                waited_s = min(status.idle_s + silent_s, now - self._paused_at) if status.waits else 0.0
                waiting.append((waited_s, gang, rank, status.state))
        if not stuck and waiting and min(waiting)[0] > self._deadlock_timeout_s:
            seconds, gang, rank, state = max(waiting)
            others = ", ".join(f"{name} {doing}" for _, name, _, doing in waiting if name != gang)
            why = f"deadlock: all ranks are waiting; this one for {seconds:.0f} s ({state}); {others}"
            stuck.append((seconds, RankStuck(gang, rank, why)))
        return [one for _, one in sorted(stuck, key=lambda each: -each[0])]

    def _timeout_s(self, status: Status) -> float:
        return self._operation_timeout_s if status.at_work else self._start_timeout_s
