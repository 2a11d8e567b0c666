"""What a worker's surroundings do without a run."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from workers.context import WorkerContext


@pytest.mark.parametrize(("phase", "woken"), [("run", False), ("stop", True), ("exit", True)])
def test_whoever_waits_for_something_else_is_woken_to_stop(phase: str, woken: bool) -> None:
    context: Any = object.__new__(WorkerContext)
    context.gang = SimpleNamespace(role="rollout")
    context.stopping, context.exiting, context._woken_to_stop = threading.Event(), threading.Event(), []
    wake = threading.Event()
    context.wake_to_stop(wake)
    context._obey(phase)
    assert wake.is_set() == context.stopping.is_set() == woken
    wake.clear()
    context._obey(phase)  # with the next heartbeat: what was cleared just before it looked is set again
    assert wake.is_set() == woken
