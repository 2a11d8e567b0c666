"""Heartbeats go on whatever happens to one of them."""

import threading

import pytest

from asyncflow.transport.connection import Connection
from tq.client.heartbeat import Heartbeats


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
