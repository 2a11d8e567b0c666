"""When a consumer that waits speaks, and when it gives up."""

import logging

import pytest

from asyncflow.errors import ProducersGone, TransportError
from tq.client.session import StallMonitor
from tq.messages import NoRows, NoRowsReason

ALIVE = NoRows(NoRowsReason.DEADLINE, 0, "column y")
ALONE = NoRows(NoRowsReason.DEADLINE, 0, "column y", producers_alive=False)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(name="clock")
def _clock() -> Clock:
    return Clock()


def wait(monitor: StallMonitor, clock: Clock, answer: NoRows, *, times: int) -> None:
    """Let `times` requests pass their deadline of 20 s."""
    for _ in range(times):
        monitor.ask("train", 20)
        clock.now_s += 20
        monitor.note_no_rows(answer)


def test_gives_up_when_producers_are_gone_without_a_break(clock: Clock) -> None:
    monitor = StallMonitor(producers_timeout_s=60, clock=clock)
    wait(monitor, clock, ALONE, times=3)
    wait(monitor, clock, ALIVE, times=1)
    wait(monitor, clock, ALONE, times=3)
    monitor.note_served()
    wait(monitor, clock, ALONE, times=3)
    with pytest.raises(ProducersGone, match=r"train: waits for column y, but for 60 s no process was connected"):
        wait(monitor, clock, ALONE, times=1)


def test_the_error_names_the_setting_as_the_user_knows_it(clock: Clock) -> None:
    for given, named in (
        ({}, "producers_timeout_s"),
        ({"setting": "launcher.start_timeout_s"}, "launcher.start_timeout_s"),
    ):
        with pytest.raises(ProducersGone, match=rf", or raise {named} if they only start slowly"):
            wait(StallMonitor(producers_timeout_s=60, clock=clock, **given), clock, ALONE, times=4)


def test_waits_for_ever_when_told_so(clock: Clock) -> None:
    wait(StallMonitor(producers_timeout_s=0, clock=clock), clock, ALONE, times=1000)


def test_requests_park_no_longer_than_the_next_word_is_due() -> None:
    assert StallMonitor(producers_timeout_s=0).ask("train", 60) == 30
    assert StallMonitor(producers_timeout_s=5).ask("train", 60) == 5
    assert StallMonitor(producers_timeout_s=60).ask("train", 1) == 1


def test_says_what_it_waits_for_but_not_often(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    monitor = StallMonitor(producers_timeout_s=0, clock=clock)
    wait(monitor, clock, ALIVE, times=1)
    assert caplog.messages == []
    wait(monitor, clock, ALIVE, times=3)
    assert caplog.messages == [f"train: still waits for column y, for {seconds} s so far" for seconds in (40, 80)]


def test_one_rank_narrates(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    wait(StallMonitor(producers_timeout_s=0, narrates=False, clock=clock), clock, ALIVE, times=5)
    assert caplog.messages == []


def test_unreadable_rows_are_an_error_after_a_while(clock: Clock) -> None:
    monitor = StallMonitor(producers_timeout_s=60, clock=clock)
    gone = TransportError("storage-0 is gone")
    monitor.note_unreadable(gone)
    clock.now_s += 59
    monitor.note_unreadable(gone)
    monitor.note_served()
    clock.now_s += 59
    monitor.note_unreadable(gone)
    clock.now_s += 60
    with pytest.raises(TransportError, match="storage-0"):
        monitor.note_unreadable(gone)
