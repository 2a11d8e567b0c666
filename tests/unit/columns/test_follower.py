"""`actor_fwd`: ranks that share a copy of the policy compute with one version."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncflow.timeline import NoTimeline
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tq.columns import PackedBatch
from weightsync.version import Version
from workers.engines.sim.engine import SimFrozenModel
from workers.tasks.column_tasks import FollowerLogProbs


class Receiver:
    """Has whatever is waited for, and nothing newer."""

    adopts = False
    newest: Version | None = None
    inside = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def wait_for(self, step: int, *, stop: threading.Event, **_: Any) -> bool:
        if not stop.is_set():
            self.newest = Version(0, step)
        return not stop.is_set()

    def load(self, apply: Callable[[Mapping[str, Tensor]], None], *, newer_than: Version | None, **_: Any) -> Any:
        apply({})
        return self.newest


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> FollowerLogProbs:
    """One of two ranks; what the other one says is in `others`."""
    config = load_config(find_recipe("quickstart"), overrides=["ref.engine=fsdp", "ref.shards=2"])
    context: Any = SimpleNamespace(
        config=config, device=torch.device("cpu"), gang=SimpleNamespace(num_ranks=2), stopping=threading.Event(),
        job=SimpleNamespace(lineage=0), timeline=NoTimeline(), report_state=lambda *_, **__: None,
    )  # fmt: skip
    model = SimFrozenModel(config.sim, s_per_token=0.0)
    monkeypatch.setattr("workers.tasks.column_tasks.load_forward_model", lambda *_, **__: model)
    monkeypatch.setattr("workers.tasks.column_tasks.open_receiver", lambda *_, **__: Receiver())
    return FollowerLogProbs(context)


def test_a_rank_that_is_behind_takes_the_version_that_another_has(
    task: FollowerLogProbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.tasks.column_tasks.max_over_ranks", lambda own: max(own, 7))
    monkeypatch.setattr("workers.tasks.column_tasks.all_ranks", lambda own: own)
    task.take_weights(5)
    assert task.version == 7


def test_ranks_that_stop_wait_for_no_version(task: FollowerLogProbs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.tasks.column_tasks.max_over_ranks", lambda own: max(own, 7))
    monkeypatch.setattr("workers.tasks.column_tasks.all_ranks", lambda own: own)
    task._context.stopping.set()
    task.take_weights(5)
    assert task.version == 0


def test_ranks_compute_and_exchange_rows_where_no_broadcast_is_received(
    task: FollowerLogProbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver: Any = task._weights._receiver
    found: list[bool] = []

    def log_probs(*_: Any) -> Tensor:
        found.append(receiver.inside)
        return torch.zeros(1)

    monkeypatch.setattr(task._model, "log_probs", log_probs)
    monkeypatch.setattr("workers.tasks.column_tasks.drawn_column", lambda values, batch: values)
    monkeypatch.setattr("workers.tasks.column_tasks.sequences_of", lambda batch: batch)
    task.compute_columns(PackedBatch((), {}), 1)
    with task.computing():
        found.append(receiver.inside)
    assert (found, receiver.inside) == ([True, True], False)
