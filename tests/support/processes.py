"""Other processes: waited for with a deadline, ended by id."""

import signal
import threading
import time
from collections.abc import Callable

import psutil

DEADLINE_S = 180.0


def kill(process: psutil.Process) -> None:
    """Send SIGKILL if it still lives."""
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return


def wait_until(
    condition: Callable[[], bool], what: str, *, deadline_s: float = DEADLINE_S, every_s: float = 0.05
) -> float:
    """Wait for what other processes bring about; return the seconds that it took."""
    began = time.monotonic()
    never = threading.Event()  # unrelated processes share no event to wait on
    while not condition():
        waited = time.monotonic() - began
        assert waited < deadline_s, f"{what}: not within {deadline_s:g} s"
        never.wait(every_s)
    return time.monotonic() - began
