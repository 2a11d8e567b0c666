"""The wall clock: is it plausible, does it run evenly, is it kept by NTP. Times in logs and of files rest on it."""

import ctypes
import threading
import time
from dataclasses import dataclass

from launcher.doctor.finding import Finding
from launcher.doctor.needs import Needs

CHECK = "clock"
_WATCHED_S = 0.2
_LARGEST_DRIFT_S = 0.05
_OLDEST = 1_735_689_600.0  # 2025-01-01
_TIME_ERROR = 5
_MICRO = 1e-6


@dataclass(frozen=True)
class ClockFacts:
    """What the clocks said.

    Attributes:
        now: unix time (s).
        drift_s: by how much wall and monotonic clock differed over the time that they were watched.
        synchronised: whether the kernel says so; None: it does not tell.
        error_s: the kernel's bound of the error; 0: not known.
    """

    now: float
    drift_s: float
    synchronised: bool | None
    error_s: float = 0.0


class _Timex(ctypes.Structure):
    """The first fields of `struct timex`, adjtimex(2), and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("rest", ctypes.c_byte * 256),
    )


def check(needs: Needs) -> list[Finding]:
    """Look and judge."""
    return judge(gather(), needs)


def gather() -> ClockFacts:
    """Watch both clocks for a moment, and ask the kernel, as timedatectl does."""
    wall, monotonic = time.time(), time.monotonic()
    threading.Event().wait(_WATCHED_S)
    drift = (time.time() - wall) - (time.monotonic() - monotonic)
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    synchronised = None if state < 0 else state != _TIME_ERROR
    return ClockFacts(time.time(), drift, synchronised, timex.maxerror * _MICRO if synchronised else 0.0)


def judge(facts: ClockFacts, needs: Needs) -> list[Finding]:
    """Say what is wrong with them."""
    remedy = "timedatectl set-ntp true; or systemctl enable --now chronyd"
    findings = []
    if facts.now < _OLDEST:
        day = time.strftime("%Y-%m-%d", time.gmtime(facts.now))
        findings.append(Finding.error(CHECK, f"it is {day} here", remedy))
    if abs(facts.drift_s) > _LARGEST_DRIFT_S:
        text = f"the wall clock jumped by {facts.drift_s:+.2f} s while it was watched for {_WATCHED_S} s"
        findings.append(Finding.warning(CHECK, text, f"see who sets it: journalctl -u chronyd; {remedy}"))
    if facts.synchronised is False and needs.num_nodes > 1:
        text = "the clock is not synchronised by NTP, so times in logs and of files may differ between nodes"
        findings.append(Finding.warning(CHECK, text, remedy))
    kept = {True: f"kept by NTP, error up to {facts.error_s:.3f} s", False: "not kept by NTP", None: "NTP unknown"}
    extra = " (several nodes would need it)" if facts.synchronised is False else ""
    return findings or [Finding.ok(CHECK, f"runs evenly, {kept[facts.synchronised]}{extra}")]
