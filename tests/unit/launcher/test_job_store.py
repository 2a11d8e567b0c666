"""What the launcher reads of the job store."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from asyncflow.sealed_store import SealedStore
from launcher.process.job_store import JobStore
from workers.rank.context import WorkerContext

SECRET = "5ec7e7"
RANKS = [("actor", 0), ("actor", 1), ("rollout-0", 0), ("rollout-1", 0)]


def rank_of(store: JobStore, gang: str, rank: int) -> WorkerContext:
    context: Any = object.__new__(WorkerContext)
    context.gang, context.rank = SimpleNamespace(name=gang), rank
    context._store = SealedStore(store.open_client(), bytes.fromhex(SECRET))
    return context  # type: ignore[no-any-return]


def test_warnings_of_all_ranks_of_all_gangs_are_told_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore(SECRET)
    early = rank_of(store, "rollout-0", 0)
    early.warn_user("a process held its event loop up")
    assert store.new_warnings(RANKS) == ["a process held its event loop up"]
    looks: list[Sequence[str]] = []
    look = store._store.get_existing
    monkeypatch.setattr(store._store, "get_existing", lambda keys: (looks.append(keys), look(keys))[1])
    monkeypatch.setattr(store._store, "set_first", None)  # once is enough
    assert store.new_warnings(RANKS) == []
    rank_of(store, "rollout-1", 0).warn_user("a process held its event loop up")
    other = rank_of(store, "actor", 1)
    other.warn_user("no room for a checkpoint")
    assert sorted(store.new_warnings(RANKS)) == ["a process held its event loop up", "no room for a checkpoint"]
    other.warn_user("")
    assert store.new_warnings(RANKS) == ["actor: that is over"]
    assert [len(keys) for keys in looks] == [4, 4, 4], "one look at all of them"


def test_a_strangers_warning_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    store = JobStore(SECRET)
    store.open_client().set("warning/actor/0", "nonsense")
    assert store.new_warnings(RANKS) == []
    assert "was not written by this job" in caplog.text
