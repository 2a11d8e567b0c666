"""Coroutines whose results another thread waits for."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from asyncflow.errors import DeadlineExceeded
from workers.engines.response_tasks import ResponseTasks


@pytest.fixture
def tasks() -> Iterator[ResponseTasks[int]]:
    made: ResponseTasks[int] = ResponseTasks("responses")
    yield made
    made.close()


class Gate:
    """Coroutines that end when they are let."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.cancelled = threading.Event()

    async def give(self, value: int) -> int:
        self.entered.set()
        try:
            await asyncio.to_thread(self.open.wait, 60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return value


async def give(value: int) -> int:
    return value


def collect(tasks: ResponseTasks[int]) -> list[int]:
    found: list[int] = []
    while tasks.num_running:
        found += tasks.step(threading.Event())
    return sorted(found)


def test_results_come_in_any_order_and_count_until_they_are_taken(tasks: ResponseTasks[int]) -> None:
    tasks.start([(0, give(1)), (0, give(2)), (1, give(3))])
    assert tasks.num_running == 3
    assert collect(tasks) == [1, 2, 3]
    assert tasks.num_running == 0 and tasks.step(threading.Event()) == []


def test_answer_that_comes_just_after_the_deadline_counts(
    tasks: ResponseTasks[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when this process stood still: the wait is over and the answer is there."""

    class Late(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            if timeout is not None:
                self.set_result(7)
                raise TimeoutError
            return super().result()

    def start(coroutine: Coroutine[Any, Any, int], _: asyncio.AbstractEventLoop) -> Future[int]:
        coroutine.close()
        return Late()

    with monkeypatch.context() as patched:
        patched.setattr("workers.engines.response_tasks.asyncio.run_coroutine_threadsafe", start)
        assert tasks.run_coroutine(give(0), what="an answer", timeout_s=1.0) == 7


def test_progress_ends_a_step_without_results(tasks: ResponseTasks[int]) -> None:
    gate = Gate()
    tasks.start([(0, gate.give(7))])
    tasks.note_progress()
    assert tasks.step(threading.Event()) == [] and tasks.num_running == 1
    gate.open.set()
    assert collect(tasks) == [7]


def test_wake_ends_a_step(tasks: ResponseTasks[int]) -> None:
    gate, wake = Gate(), threading.Event()
    tasks.start([(0, gate.give(7))])
    wake.set()
    assert tasks.step(wake) == []
    gate.open.set()
    assert collect(tasks) == [7]


def test_failure_is_raised_by_step_once(tasks: ResponseTasks[int]) -> None:
    async def fail() -> int:
        raise ValueError("broken")

    tasks.start([(0, fail())])
    assert tasks.num_running == 1, "also when it has failed already"
    with pytest.raises(ValueError, match="broken"):
        collect(tasks)
    tasks.start([(0, give(1))])
    assert collect(tasks) == [1]


def test_abort_cancels_and_forgets(tasks: ResponseTasks[int]) -> None:
    gate = Gate()
    tasks.start([(0, gate.give(7)), (1, give(8))])
    assert gate.entered.wait(60)
    tasks.abort()
    assert tasks.num_running == 0
    assert gate.cancelled.is_set()
    gate.open.set()
    tasks.start([(0, give(1))])
    assert collect(tasks) == [1]


def test_cancel_ends_one_and_forgets_it_and_no_other(tasks: ResponseTasks[int]) -> None:
    gate, other = Gate(), Gate()
    tasks.start([(3, gate.give(7)), (4, other.give(8))])
    assert gate.entered.wait(60) and other.entered.wait(60)
    tasks.cancel_ticket(3)
    assert tasks.num_running == 1
    assert gate.cancelled.is_set() and not other.cancelled.is_set()
    tasks.cancel_ticket(3)
    other.open.set()
    assert collect(tasks) == [8]


def test_cancel_forgets_a_result_that_was_not_taken_yet(tasks: ResponseTasks[int]) -> None:
    ended = threading.Event()

    async def tell() -> int:
        ended.set()
        return 7

    tasks.start([(3, tell()), (4, give(8))])
    assert ended.wait(60)
    tasks.run_coroutine(give(0), what="the loop to come round", timeout_s=60)
    tasks.cancel_ticket(3)
    assert collect(tasks) == [8]


def test_deadline_of_a_call_names_what_was_waited_for(tasks: ResponseTasks[int]) -> None:
    with pytest.raises(DeadlineExceeded, match=r"0.05 s for the moon"):
        tasks.run_coroutine(asyncio.sleep(60), what="the moon", timeout_s=0.05)
    assert tasks.run_coroutine(give(5), what="five", timeout_s=60) == 5


def test_what_a_call_raises_is_not_taken_for_its_deadline(tasks: ResponseTasks[int]) -> None:
    async def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        tasks.run_coroutine(late(), what="it", timeout_s=60)
