"""Waits for what another process does, with which a test shares no event."""

import threading
import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], what: str, *, deadline_s: float) -> Any:
    """Return the condition's first true value; fails and names `what` when there is none in time."""
    deadline, never = time.monotonic() + deadline_s, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        never.wait(0.01)
    return value
