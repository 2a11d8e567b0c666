"""Calls that are not answered yet."""

from typing import Any

import torch
from fake_timers import FakeTimers

from asyncflow.transport.server import Call, ChannelSession
from tq.control.controller import PendingRequests
from tq.messages import FetchRows, Join, WatchLost


def call(message: Any, session: int = 1) -> Call:
    return Call(None, 0, ChannelSession(session, "client"), message, torch.empty(0))  # type: ignore[arg-type]


def fetch(owner: str = "ref@a", task: str = "ref") -> FetchRows:
    return FetchRows(task, owner, 1, 0, 9.0)


def test_answered_call_is_taken_once_and_its_deadline_is_off() -> None:
    timers = FakeTimers()
    calls = PendingRequests(timers, lambda _: None)
    first, second = call(fetch()), call(fetch())
    numbers = [calls.add_call(first), calls.add_call(second)]
    for number in numbers:
        calls.set_deadline(number, 20.0)
    assert calls.take_call(numbers[0]) is first
    assert calls.take_call(numbers[0]) is None
    assert timers.live() == [20.0]
    calls.set_deadline(numbers[0], 20.0)
    assert timers.live() == [20.0], "answered at once: no deadline"


def test_time_is_up_for_the_request_and_patience_has_limits() -> None:
    timers, expired = FakeTimers(), list[int]()
    calls = PendingRequests(timers, expired.append)
    number = calls.add_call(call(fetch()))
    calls.set_deadline(number, 1e9)
    calls.set_deadline(calls.add_call(call(fetch())), -1.0)
    assert timers.live() == [3600.0, 0.0]
    assert timers.set[0][1].callback is not None
    timers.set[0][1].callback()
    assert expired == [number]


def test_ended_channel_takes_its_calls_along() -> None:
    timers = FakeTimers()
    calls = PendingRequests(timers, lambda _: None)
    numbers = [calls.add_call(call(message, session)) for session in (1, 2) for message in (fetch(), WatchLost(0, 9.0))]
    for number in numbers:
        calls.set_deadline(number, 9.0)
    assert calls.drop_session(1) == numbers[:2]
    assert timers.live() == [9.0, 9.0]
    assert calls.take_call(numbers[0]) is None and calls.take_call(numbers[2]) is not None


def test_fetches_are_found_by_owner_and_the_oldest_by_task() -> None:
    calls = PendingRequests(FakeTimers(), lambda _: None)
    numbers = [calls.add_call(call(fetch(owner, task))) for owner, task in (("a", "ref"), ("b", "ref"), ("a", "train"))]
    calls.add_call(call(Join("a", [])))
    assert calls.fetches_of("a") == [numbers[0], numbers[2]]
    first = calls.waiting_since()
    assert set(first) == {"ref", "train"}
    calls.take_call(numbers[0])
    assert calls.waiting_since()["ref"] >= first["ref"]
