"""One clock for all processes of a host: its monotonic clock, aligned to unix time once, by the launcher.

The wall clock may be set between the starts of two processes; the monotonic clock, which all of them share, is not. On
several hosts the unix time is that of node 0: each other launcher measures its own monotonic clock against it.
"""

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class RoundTrip:
    """A question to a host whose clock is known, and its answer.

    Attributes:
        asked, heard: when it left and when the answer came, by the asking host's monotonic clock (s).
        arrived, answered: when it came and when the answer left, in the other host's unix time (s).
    """

    asked: float
    arrived: float
    answered: float
    heard: float

    @property
    def delay_s(self) -> float:
        """Seconds on the way, there and back."""
        return (self.heard - self.asked) - (self.answered - self.arrived)

    @property
    def offset_s(self) -> float:
        """The other host's unix time minus this one's monotonic time, off by at most half the delay (RFC 5905, 8)."""
        return ((self.arrived - self.asked) + (self.answered - self.heard)) / 2


@dataclass(frozen=True)
class HostClock:
    """What turns the monotonic clock of one host into unix time.

    Attributes:
        host: whose monotonic clock this is: its kernel's boot, so that two containers of a host are one.
        offset_s: unix time minus monotonic time.
    """

    host: str
    offset_s: float

    @staticmethod
    def measure(wall: Callable[[], float] = time.time) -> "HostClock":
        """Align this host's monotonic clock to `wall` (unix time, s)."""
        return HostClock(_this_host(), wall() - time.monotonic())

    @staticmethod
    def aligned(trips: Sequence[RoundTrip]) -> "HostClock":
        """Align this host's monotonic clock to another host by the round trip with the least delay."""
        return HostClock(_this_host(), min(trips, key=lambda trip: trip.delay_s).offset_s)

    @staticmethod
    def of_this_host(clocks: Iterable["HostClock"], wall: Callable[[], float] = time.time) -> "HostClock":
        """Return the first of these that was measured on this host; if none was, one that is measured now."""
        here = _this_host()
        return next((clock for clock in clocks if clock.host == here), None) or HostClock.measure(wall)

    def now(self) -> float:
        """Return unix time (s); on the host where it was measured."""
        return time.monotonic() + self.offset_s


def _this_host() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()
