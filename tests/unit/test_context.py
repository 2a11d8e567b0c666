"""What a worker's surroundings do without a run."""

import json
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from asyncflow.clock import HostClock
from asyncflow.job import NO_PAUSE, PAUSED, PAUSING
from asyncflow.sealed_store import SealedStore
from launcher.process.progress import Status
from workers.rank.context import REWARD, ROLLOUT, WorkerContext, _Status


def forget_pauses(context: Any) -> None:
    context.pausing, context._told_of_pauses, context._pause_progress = threading.Event(), [], ""
    context._paused_since, context._paused_s = None, 0.0


@pytest.mark.parametrize(("phase", "woken"), [("run", False), ("stop", True), ("exit", True)])
def test_whoever_waits_for_something_else_is_woken_to_stop(phase: str, woken: bool) -> None:
    context: Any = object.__new__(WorkerContext)
    context.gang = SimpleNamespace(role="rollout")
    context.stopping, context.exiting, context._woken_to_stop = threading.Event(), threading.Event(), []
    wake = threading.Event()
    context.wake_to_stop(wake)
    context._obey_phase(phase)
    assert wake.is_set() == context.stopping.is_set() == woken
    wake.clear()
    context._obey_phase(phase)  # with the next heartbeat: what was cleared just before it looked is set again
    assert wake.is_set() == woken


def test_rank_that_waited_does_again_what_it_did_before() -> None:
    """A trainer that waits for its reference in the middle of a step is not taken for stuck, nor for waiting after."""
    context: Any = object.__new__(WorkerContext)
    context._status = _Status("training", "step 3", 3, 2)
    with context.reporting("waiting for weights", step=4):
        said = Status.from_json(vars(context._status))
        assert (said.state, said.step, said.version, said.waits) == ("waiting for weights", 4, 2, True)
    assert context._status == _Status("training", "step 3", 3, 2)


def test_phase_that_a_stranger_wrote_is_not_obeyed(caplog: pytest.LogCaptureFixture) -> None:
    store, said = HashStore(), threading.Event()
    sealed = SealedStore(store, b"secret")
    context: Any = object.__new__(WorkerContext)
    context.name, context.rank, context.gang = "actor/0", 0, SimpleNamespace(name="actor", role="actor")
    context.stopping, context.exiting, context._woken_to_stop = threading.Event(), threading.Event(), []
    forget_pauses(context)
    context._status, context._progress_at, context._closed = _Status("training"), 0.0, threading.Event()
    context.timeline = SimpleNamespace(waiting_s=0.0, flush=said.set)
    context._clock = SimpleNamespace(now=lambda: 1.5e9)  # the head's, not this host's own
    context.sealed_store = lambda _: sealed
    store.set("phase", "exit")
    heart = threading.Thread(target=context._beat, daemon=True)
    heart.start()
    for _ in range(3):  # the second one comes after the first look at the phase
        assert said.wait(30)
        said.clear()
    assert not context.stopping.is_set() and not context.exiting.is_set()
    assert json.loads(sealed.get("status/actor/0"))["time"] == 1.5e9
    assert "the value of 'phase' was not written by this job" in caplog.text
    sealed.set("phase", "stop")
    assert context.stopping.wait(30)
    assert not context.exiting.is_set()
    context._closed.set()
    heart.join(30)


def test_rank_that_just_starts_again_has_not_waited_yet() -> None:
    """The launcher says so in its place; a trainer that asks then, at the end of a step, goes on."""
    context: Any = object.__new__(WorkerContext)
    gangs = [
        SimpleNamespace(name=name, role="rollout", num_ranks=1) for name in ("rollout-0", "rollout-1", "rollout-2")
    ]
    context.job, context._store = SimpleNamespace(gangs=gangs), SealedStore(HashStore(), b"secret")
    context._store.set("status/rollout-0/0", json.dumps({"state": "generating", "time": 2.0, "waiting_s": 1.5}))
    context._store.set("status/rollout-1/0", json.dumps({"state": "starting", "time": 3.0}))
    assert context.waiting_seconds() == {"rollout": [(2.0, 1.5)]}


class LateStore:
    """A client of a store: like PyTorch's, it has written for sure only when its next call is answered."""

    def __init__(self, server: HashStore) -> None:
        self._server, self._sent, self.num_swaps = server, list[tuple[str, Any]](), 0

    def set(self, key: str, value: bytes) -> None:
        self._sent.append((key, value))

    def check(self, keys: list[str]) -> bool:
        for key, value in self._sent:
            self._server.set(key, value)
        self._sent.clear()
        return bool(self._server.check(keys))

    def compare_set(self, key: str, old: Any, new: Any) -> bytes:
        self.num_swaps += 1
        return self._server.compare_set(key, old, new)


@pytest.mark.parametrize("kind", [REWARD, ROLLOUT])
def test_a_failure_is_there_for_the_trainer_when_its_rows_are(kind: str) -> None:
    server = HashStore()
    scoring, training = LateStore(server), object.__new__(WorkerContext)
    context: Any = object.__new__(WorkerContext)
    context._store, context._told_failures = SealedStore(cast(Any, scoring), b"secret"), set()
    training._store = SealedStore(server, b"secret")
    failed = context.reward_failed if kind == REWARD else context.rollout_failed
    for why in ("first", "second"):
        failed(why)
        assert training.last_failure(kind) == why
    assert scoring.num_swaps == 1, "the first failure is said once"
    assert training.last_failure(ROLLOUT if kind == REWARD else REWARD) == ""


def test_a_pause_is_told_when_it_is_asked_for_and_lasts_from_when_everything_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context: Any = object.__new__(WorkerContext)
    forget_pauses(context)
    told, spans, now = list[bool](), list[tuple[str, float]](), [100.0]
    context.timeline = SimpleNamespace(record_span=lambda name, seconds: spans.append((name, seconds)))
    context.on_pause(lambda: told.append(context.pausing.is_set()))
    monkeypatch.setattr("workers.rank.context.time.monotonic", lambda: now[0])
    lasted = []
    for said in (NO_PAUSE, PAUSING, PAUSING, PAUSED, PAUSED, PAUSING, PAUSED, NO_PAUSE, NO_PAUSE):
        context._obey_pause(said)
        lasted.append(context.paused_s)
        now[0] += 1.0
    assert told == [True, False]
    assert lasted == [0, 0, 0, 0, 1, 2, 2, 3, 3], "the lead may have to train lost steps again"
    assert spans == [("paused", 2.0), ("paused", 1.0)]


def test_what_admission_says_of_a_pause_stays_whatever_its_rank_reports_next() -> None:
    """The lead starts again in a pause: admission may be at work before the controller says that it serves."""
    context: Any = object.__new__(WorkerContext)
    forget_pauses(context)
    context.gang, context.rank = SimpleNamespace(name="controller-0"), 0
    context.timeline, context._status = SimpleNamespace(waiting_s=0.0, flush=lambda: None), _Status("starting")
    context._start_work = SimpleNamespace(advanced=lambda: False)
    context._progress_at, context._clock = 0.0, HostClock.from_wall_clock()
    context.report_pause("paused after step 3")
    context.report_state("serving")
    store = SealedStore(HashStore(), b"secret")
    context._write_status(store)
    said = Status.from_json(json.loads(store.get("status/controller-0/0")))
    assert (said.state, said.pause) == ("serving", "paused after step 3")
