"""Turns the signals that users and schedulers send into requests to stop."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from asyncflow.lifeline import STOP_SIGNALS

SAME_PRESS_S = 0.5
"""Wrappers such as `timeout` deliver one Ctrl-C twice; a second one counts only after so long (s)."""


@contextlib.contextmanager
def stop_signals(request: Callable[[int], None]) -> Iterator[None]:
    """Call `request(count)` for SIGINT, SIGTERM, SIGUSR1 and SIGHUP; only a repeated Ctrl-C counts beyond the first.

    SIGHUP comes when the terminal is closed; under `nohup` it stays ignored. Outside the main thread nothing changes.

    Args:
        request: is called inside a signal handler, so it may only do what is safe there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0
    last_at = 0.0

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal count, last_at
        now = time.monotonic()
        if count == 0 or (number == signal.SIGINT and now - last_at > SAME_PRESS_S):
            count += 1
            last_at = now
            request(count)

    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in STOP_SIGNALS if not (under_nohup and number is signal.SIGHUP)]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
