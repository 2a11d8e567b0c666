"""One clock for all processes of a host: its monotonic clock, aligned to unix time once, by the launcher.

The wall clock may be set between the starts of two processes; the monotonic clock, which all of them share, is not.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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

    def here(self, wall: Callable[[], float] = time.time) -> "HostClock":
        """Return this clock on the host where it was measured, on any other one that host's own, measured now."""
        return self if self.host == _this_host() else HostClock.measure(wall)

    def now(self) -> float:
        """Return unix time (s); on the host where it was measured."""
        return time.monotonic() + self.offset_s


def _this_host() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()
