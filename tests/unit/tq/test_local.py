"""How the owner of a queue waits for its services, without any."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncflow.errors import TransportError
from asyncflow.process import ServiceThreads
from tq import local
from tq.local import LocalQueue


class Starter:
    """A client whose first requests are not answered."""

    def __init__(self, silent: int, then: Callable[[], None]) -> None:
        self.closed = False
        self._silent = silent
        self._then = then

    def stats(self) -> list[Any]:
        if self._silent:
            self._silent -= 1
            self._then()
            raise TransportError("controller-0 did not answer; is it running?")
        return [SimpleNamespace(units={"storage-0": 0})]

    def close(self) -> None:
        self.closed = True


@pytest.fixture(name="queue")
def _queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    queue: Any = object.__new__(LocalQueue)
    queue._store, queue.address, queue._keepers = None, Path("queue.json"), ServiceThreads("queue")
    queue._services = {"controller-0": None, "storage-0": None}
    monkeypatch.setattr(local.Directory, "is_published", lambda store: True)
    monkeypatch.setattr(local, "_POLL_S", 0.0)
    return queue


def test_controller_that_starts_for_longer_than_a_request_may_take_is_waited_for(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = Starter(2, lambda: None)
    monkeypatch.setattr(local, "connect", lambda *_, **__: starter)
    queue.wait_until_up(10.0)
    assert starter.closed


def test_controller_that_never_answers_is_given_up_at_the_deadline(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    starter = Starter(10**9, lambda: None)
    monkeypatch.setattr(local, "connect", lambda *_, **__: starter)
    with pytest.raises(TransportError, match="controller-0 storage-0 were not all up in time"):
        queue.wait_until_up(0.01)
    assert starter.closed


def test_service_that_is_not_started_again_is_named_at_once(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        queue._keepers.fail("keep-storage-0", TransportError("storage-0 failed 3 times"))

    monkeypatch.setattr(local, "connect", lambda *_, **__: Starter(10**9, fail))
    with pytest.raises(TransportError, match="storage-0 failed 3 times"):
        queue.wait_until_up(10.0)
