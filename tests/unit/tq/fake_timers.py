"""Timers whose time is up when the test says so."""

from collections.abc import Callable

from tq.timers import Timer, Timers


class FakeTimers(Timers):
    """Notes deadlines; nothing runs by itself."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Timer]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback)
        self.set.append((delay_s, timer))
        return timer

    def live(self) -> list[float]:
        """Return the delays of what was not cancelled."""
        return [delay_s for delay_s, timer in self.set if timer.callback is not None]

    def close(self) -> None:
        self.set.clear()
