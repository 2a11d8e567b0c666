"""Waiting for futures."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from tq.unit.controller_link import Outcome, when_all, when_completed


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
    when_completed(waiting, errors.append)
    first = ValueError("x")
    waiting[1].set_exception(first)
    waiting[0].set_exception(ValueError("y"))
    assert outcomes == [first]
    assert errors == []
    waiting[2].set_result(None)
    assert len(outcomes) == 1
    assert [str(error) for error in errors[0]] == ["y", "x"]


def test_some_errors_may_be_results_and_the_others_end_the_wait() -> None:
    waiting, outcomes = futures(2), list[Outcome]()
    when_all(waiting, outcomes.append, tolerated=(ValueError,))
    mild = ValueError("x")
    waiting[1].set_exception(mild)
    assert outcomes == []
    waiting[0].set_result("a")
    assert outcomes == [["a", mild]]
    waiting = futures(2)
    when_all(waiting, outcomes.append, tolerated=(ValueError,))
    fatal = KeyError("y")
    waiting[0].set_exception(fatal)
    assert outcomes[1:] == [fatal]


@pytest.mark.parametrize("wait", [when_all, when_completed])
def test_what_waits_is_let_go_at_once_and_not_by_the_garbage_collector(wait: Callable[..., None]) -> None:
    gc.disable()
    try:
        waiting, payload = futures(2), Payload()
        gone = weakref.ref(payload)
        wait(waiting, partial(lambda *_: None, payload, waiting))
        del payload
        for future in waiting:
            future.set_result(None)
        del future, waiting
        assert gone() is None
    finally:
        gc.enable()
