"""Deadlines of one process."""

import threading
import weakref
from collections.abc import Iterator
from functools import partial

import pytest

from tq.timers import Timers

FAR_S = 3600.0


@pytest.fixture(name="timers")
def _timers() -> Iterator[Timers]:
    timers = Timers("test")
    yield timers
    timers.close()


def test_timers_run_in_order_unless_cancelled(timers: Timers) -> None:
    ran, finished = list[str](), threading.Event()
    with timers._changed:  # nothing runs before all are set
        timers.call_later(0.4, finished.set)
        timers.call_later(0.2, partial(ran.append, "second"))
        timers.call_later(0.0, partial(ran.append, "first"))
        cancelled = timers.call_later(0.1, partial(ran.append, "never"))
        cancelled.cancel()
        cancelled.cancel()
    assert finished.wait(10)
    assert ran == ["first", "second"]


def test_earlier_deadline_is_kept_though_the_thread_waits_for_a_later_one(timers: Timers) -> None:
    finished = threading.Event()
    timers.call_later(FAR_S, finished.clear)
    timers.call_later(0.0, finished.set)
    assert finished.wait(10)


def test_thread_is_woken_only_by_an_earlier_deadline(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[None] = []
    monkeypatch.setattr(timers._changed, "notify", lambda: woken.append(None))
    with timers._changed:  # the thread drops nothing that is cancelled meanwhile
        timers.call_later(FAR_S, woken.clear)
        assert len(woken) == 1
        for _ in range(100):
            timers.call_later(FAR_S + 1, woken.clear).cancel()
        timers.call_later(FAR_S - 1, woken.clear).cancel()
        timers.call_later(FAR_S - 0.5, woken.clear)
        assert len(woken) == 2


def test_cancelled_deadlines_do_not_pile_up_and_their_callbacks_are_let_go(timers: Timers) -> None:
    timers.call_later(FAR_S, threading.Event().set)
    events = [threading.Event() for _ in range(10)]
    refs = [weakref.ref(event) for event in events]
    for event in events:
        timers.call_later(FAR_S, event.set).cancel()
    del event, events
    assert [ref() for ref in refs] == [None] * 10
    for _ in range(10_000):
        timers.call_later(FAR_S, threading.Event().set).cancel()
    assert len(timers._heap) < 3000


def test_callback_that_fails_is_reported_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    errors, finished = list[Exception](), threading.Event()
    timers = Timers("test", failed=errors.append)
    timers.call_later(0.0, {}.popitem)
    timers.call_later(0.001, finished.set)
    assert finished.wait(10)
    assert [type(error) for error in errors] == [KeyError]
    assert "a callback failed" in caplog.text
    timers.close()


def test_closed_timers_keep_nothing_and_close_again() -> None:
    timers, ran = Timers("test"), threading.Event()
    timers.call_later(FAR_S, ran.set)
    timers.close()
    timers.close()
    timers.call_later(0.0, ran.set)
    assert timers._heap == []
