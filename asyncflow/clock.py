"""Time: one clock for all processes of a host, and waits that do not count while this process stood still."""

# The wall clock may be set between the starts of two processes; the monotonic clock, which they share, is not. So the
# launcher aligns it to unix time once. On several hosts that is node 0's unix time: each other launcher measures its
# own monotonic clock against it.
#
# A process stands still on an overloaded or suspended host. The peer it waits for stood still as well, or answered
# without being heard yet, and must not be blamed.

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class RoundTrip:
    """A question to a host whose clock is known, and its answer."""

    asked: float  # when the question left, on the asking host's monotonic clock (s)
    arrived: float  # when the question came, in the other host's unix time (s)
    answered: float  # when the answer left, in the other host's unix time (s)
    heard: float  # when the answer came, on the asking host's monotonic clock (s)

    @property
    def delay_s(self) -> float:
        return (self.heard - self.asked) - (self.answered - self.arrived)

    @property
    def offset_s(self) -> float:
        """The other host's unix time minus this one's monotonic time, off by at most half the delay (RFC 5905, 8)."""
        return ((self.arrived - self.asked) + (self.answered - self.heard)) / 2


@dataclass(frozen=True)
class HostClock:
    """Turns the monotonic clock of one host into unix time."""

    host: str  # the boot id of the kernel whose clock this is, so two containers of a host are one
    offset_s: float  # unix time minus monotonic time

    @staticmethod
    def from_wall_clock(wall: Callable[[], float] = time.time) -> "HostClock":
        return HostClock(_this_host(), wall() - time.monotonic())

    @staticmethod
    def from_round_trips(trips: Sequence[RoundTrip]) -> "HostClock":
        """Align this host's monotonic clock to another host, by the round trip with the least delay."""
        return HostClock(_this_host(), min(trips, key=lambda trip: trip.delay_s).offset_s)

    @staticmethod
    def of_this_host(clocks: Iterable["HostClock"], wall: Callable[[], float] = time.time) -> "HostClock":
        """Return the first of these that was measured on this host; if none was, measure one now."""
        here = _this_host()
        return next((clock for clock in clocks if clock.host == here), None) or HostClock.from_wall_clock(wall)

    def now(self) -> float:
        """Return unix time (s); only on the host where it was measured."""
        return time.monotonic() + self.offset_s


def _this_host() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


R = TypeVar("R")

_LONGEST_S = 1.0
_FEWEST = 4


def awake_slices(timeout_s: float) -> Iterator[float]:
    """Yield how long to wait next (s), until `timeout_s` is over: `any(event.wait(s) for s in awake_slices(10.0))`.

    A slice lasts at most a second and a quarter of the whole, and counts for no more, however late the caller comes
    back.
    """
    longest_s = min(_LONGEST_S, timeout_s / _FEWEST)
    left_s = timeout_s
    while left_s > 0:
        slice_s = min(longest_s, left_s)
        began = time.monotonic()
        yield slice_s
        left_s -= min(time.monotonic() - began, slice_s)


def awake_result(future: "Future[R]", timeout_s: float) -> R:
    """Return a future's result or raise its error; raises TimeoutError if none came within `timeout_s`."""
    for slice_s in awake_slices(timeout_s):
        try:
            return future.result(slice_s)
        except TimeoutError:
            # A TimeoutError may also be the future's own.
            if future.done():
                return future.result()
    return future.result(0.0)


K = TypeVar("K")


class HeartbeatMonitor(Generic[K]):
    """How long each peer has been silent, for an owner that checks repeatedly and decides what silence means.

    Pure: times are passed in (monotonic, s). `longest_look_s` is how much of the time between two checks counts. In a
    longer one this process stood still itself, and heartbeats may lie unread.
    """

    def __init__(self, longest_look_s: float) -> None:
        self._longest_look_s = longest_look_s
        self._heard: dict[K, float] = {}
        self._looked_at = 0.0

    def hear(self, peer: K, now: float) -> None:
        """Note a sign of life, the first of which begins the watch."""
        self._heard[peer] = now

    def forget(self, peer: K) -> None:
        self._heard.pop(peer, None)

    def silences(self, now: float) -> dict[K, float]:
        """Return how long each peer has been silent while this process ran (s)."""
        excused_s = max(0.0, now - self._looked_at - self._longest_look_s)
        self._looked_at = now
        self._heard = {peer: min(now, heard + excused_s) for peer, heard in self._heard.items()}
        return {peer: now - heard for peer, heard in self._heard.items()}
