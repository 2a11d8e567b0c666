"""Waiting for futures and for the clock."""

import gc
import threading
import weakref
from concurrent.futures import Future
from functools import partial
from typing import Any

from tq.futures import Outcome, when_all, when_settled
from tq.timers import Timers


class Payload:
    """Something large."""


def futures(number: int) -> list[Future[Any]]:
    return [Future() for _ in range(number)]


def test_all_results_come_in_order() -> None:
    waiting, outcomes = futures(2), list[Outcome]()
    when_all(waiting, outcomes.append)
    waiting[1].set_result("b")
    assert outcomes == []
    waiting[0].set_result("a")
    when_all([], outcomes.append)
    assert outcomes == [["a", "b"], []]


def test_first_error_ends_the_wait_and_the_rest_is_not_heard() -> None:
    waiting, outcomes, errors = futures(3), list[Outcome](), list[list[BaseException]]()
    when_all(waiting, outcomes.append)
    when_settled(waiting, errors.append)
    first = ValueError("x")
    waiting[1].set_exception(first)
    waiting[0].set_exception(ValueError("y"))
    assert outcomes == [first]
    assert errors == []
    waiting[2].set_result(None)
    assert len(outcomes) == 1
    assert [str(error) for error in errors[0]] == ["y", "x"]


def test_what_waits_is_let_go_at_once_and_not_by_the_garbage_collector() -> None:
    gc.disable()
    try:
        waiting, payload = futures(2), Payload()
        gone = weakref.ref(payload)
        when_all(waiting, partial(lambda *_: None, payload, waiting))
        del payload
        for future in waiting:
            future.set_result(None)
        del future, waiting
        assert gone() is None
    finally:
        gc.enable()


def test_timers_run_in_order_unless_cancelled() -> None:
    timers, ran, finished = Timers("test"), list[str](), threading.Event()
    timers.after(0.05, finished.set)
    timers.after(0.02, partial(ran.append, "second"))
    timers.after(0.0, partial(ran.append, "first"))
    cancelled = timers.after(0.01, partial(ran.append, "never"))
    cancelled.cancel()
    assert finished.wait(10)
    assert ran == ["first", "second"]
    timers.close()
    timers.close()
