"""Heartbeats go on whatever happens to one of them."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from asyncflow.transport.server import Connection
from tq.client.session import QueueSession
from tq.messages import Alive, Heartbeat
from tq.service_channels import Heartbeats


def test_declared_outputs_are_told_to_every_controller_before_anything_is_put() -> None:
    told: dict[str, list[str]] = {}
    both = threading.Event()

    class Controller:
        def __init__(self, name: str) -> None:
            self.name = name

        def submit(self, message: Heartbeat) -> "Future[Any]":
            told[self.name] = message.writes
            if len(told) == 2:
                both.set()
            answered: Future[Any] = Future()
            answered.set_result((Alive(True, {}, [], 0), b""))
            return answered

    def join(service: str) -> Any:
        return Controller(service)

    session: Any = SimpleNamespace(
        beats=Heartbeats("me@1", 0.01, join=join, rejoin=lambda service: None),
        directory=SimpleNamespace(controllers=("controller-0", "controller-1")),
    )
    QueueSession.declare_outputs(session, ("tokens", "truncated"))
    assert both.wait(20)
    session.beats.close()
    assert told == {name: ["tokens", "truncated"] for name in ("controller-0", "controller-1")}


def test_beat_that_fails_unexpectedly_is_logged_and_the_next_one_follows(caplog: pytest.LogCaptureFixture) -> None:
    again = threading.Event()
    joins: list[str] = []

    def join(service: str) -> Connection:
        joins.append(service)
        if len(joins) > 1:
            again.set()
        raise ValueError("nobody thought of this")

    beats = Heartbeats("me@1", 0.01, join=join, rejoin=joins.append)
    beats.watch("controller-0")
    assert again.wait(20)
    beats.close()
    assert "me@1: a heartbeat to controller-0 failed" in caplog.text
    assert "nobody thought of this" in caplog.text
