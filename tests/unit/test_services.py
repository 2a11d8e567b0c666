"""What a service's worker does while the run ends."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from asyncflow.errors import RoleFailed
from asyncflow.process import ServiceThreads
from workers.roles import services


class FakeController:
    """A controller of which a thread dies as soon as it has been told of the stop."""

    def __init__(self, credentials: Any, name: str, **_: Any) -> None:
        self.threads = ServiceThreads(name)

    def stop(self) -> None:
        self.threads.fail("timers", KeyError("nobody thought of this"))

    def close(self) -> None:
        self.threads.close()


def test_controller_whose_thread_dies_after_the_stop_ends_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ControllerService": FakeController,
        "serve_only": lambda: None,
        "launched_tasks": lambda *_: (),
        "task_specs": lambda *_: [],
    }.items():
        monkeypatch.setattr(services, name, value)
    context: Any = SimpleNamespace(
        gang=SimpleNamespace(name="controller-1"),
        job=SimpleNamespace(last_step=1, lineage=0),
        config=SimpleNamespace(
            tq=SimpleNamespace(controllers=("controller-0", "controller-1")),
            schedule=SimpleNamespace(rollout_batch_size=1, live_rows=0),
            algorithm=SimpleNamespace(max_filtered=lambda _: 0),
            rollout=SimpleNamespace(samples_per_step=0),
        ),
        start_step=0,
        job_credentials=lambda: None,
        report_state=lambda _: None,
        stopping=threading.Event(),
        exiting=threading.Event(),
    )
    context.stopping.set()
    errors: list[Exception] = []

    def run() -> None:
        try:
            services.run_controller(context)
        except RoleFailed as error:
            errors.append(error)

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    worker.join(20)
    ended = not worker.is_alive()
    context.exiting.set()
    assert ended, "the others still ack and save, with a controller that does half of its work"
    assert [str(error) for error in errors] == ["controller-1: thread timers died: KeyError: 'nobody thought of this'"]
