"""Waits, and silence of others, of which a standstill of this process takes little."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from asyncflow.clock import HeartbeatMonitor, awake_result, awake_slices


@pytest.fixture(name="now")
def _now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("asyncflow.clock.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def waited(now: list[float], timeout_s: float, *, still_s: float = 0.0) -> list[float]:
    """Wait in slices that nothing ends; this process stands still in the second one."""
    slices = []
    for slice_s in awake_slices(timeout_s):
        slices.append(slice_s)
        now[0] += slice_s + (still_s if len(slices) == 2 else 0.0)
    return slices


@pytest.mark.parametrize(("timeout_s", "expected"), [(2.5, [0.625] * 4), (4.5, [1.0, 1.0, 1.0, 1.0, 0.5]), (0.0, [])])
def test_slices_are_as_long_as_the_wait(now: list[float], timeout_s: float, expected: list[float]) -> None:
    assert waited(now, timeout_s) == expected
    assert now[0] == 100.0 + timeout_s


def test_standstill_counts_as_one_slice(now: list[float]) -> None:
    assert waited(now, 10.0, still_s=3600.0) == [1.0] * 10


def test_what_ends_a_slice_early_leaves_the_rest(now: list[float]) -> None:
    slices = awake_slices(8.0)
    assert next(slices) == 1.0
    now[0] += 0.25
    assert len(list(zip(slices, range(9), strict=False))) == 9, "time stands still here"


class Woken(Future[int]):
    """Its waiter stands still in the first slice; the reply is read in the next one."""

    def __init__(self, now: list[float]) -> None:
        super().__init__()
        self.now = now
        self.waits: list[float | None] = []

    def result(self, timeout: float | None = None) -> int:
        self.waits.append(timeout)
        if len(self.waits) == 1:
            self.now[0] += 3600.0
            raise TimeoutError
        self.set_result(7)
        return super().result(0.0)


def test_reply_that_lay_unread_while_this_process_stood_still_is_taken(now: list[float]) -> None:
    future = Woken(now)
    assert awake_result(future, 60.0) == 7
    assert future.waits == [1.0, 1.0]


def test_result_that_does_not_come_and_error_of_its_own() -> None:
    waiting, failed = Future[int](), Future[int]()
    with pytest.raises(TimeoutError):
        awake_result(waiting, 0.02)
    with pytest.raises(TimeoutError):
        awake_result(waiting, -1.0)
    failed.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        awake_result(failed, 10.0)


def silences(monitor: HeartbeatMonitor[str], first: int, last: int) -> list[float]:
    """Look every second; returns how long `peer` was silent at each look."""
    return [monitor.silences(float(now))["peer"] for now in range(first, last + 1)]


def test_silence_counts_from_the_last_heartbeat() -> None:
    monitor: HeartbeatMonitor[str] = HeartbeatMonitor(1.0)
    monitor.hear("peer", 100.0)
    assert silences(monitor, 100, 103) == [0.0, 1.0, 2.0, 3.0]
    monitor.hear("peer", 103.5)
    assert silences(monitor, 104, 105) == [0.5, 1.5]
    monitor.forget("peer")
    assert monitor.silences(106.0) == {}


def test_silence_while_this_process_stood_still_is_nobodys() -> None:
    monitor: HeartbeatMonitor[str] = HeartbeatMonitor(1.0)
    monitor.hear("peer", 100.0)
    assert silences(monitor, 100, 101) == [0.0, 1.0]
    assert silences(monitor, 3600, 3602) == [2.0, 3.0, 4.0]
