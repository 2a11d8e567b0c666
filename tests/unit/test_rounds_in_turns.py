"""A trainer that shares its devices: when it gives them away, and when it takes them back."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import workers.trainer.actor as actor
from asyncflow.errors import ConfigError
from asyncflow.timeline import NoTimeline
from tq.columns import PackedBatch
from weightsync.version import Version
from workers.rank.device_turn import YieldRule
from workers.trainer.actor import RoundsInTurns, sleepers

BATCH = PackedBatch((), {})


class Devices:
    """Loader, turn and models of one rank; a script says what happens at each look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: tuple[bool, float, bool]) -> None:
        self.log: list[str] = []
        self.looks = iter(looks)
        self.news = threading.Event()
        self.news.set()
        self.held = True
        monkeypatch.setattr(actor, "gather", lambda _: [next(self.looks)])
        monkeypatch.setattr(actor, "wait_for_devices", lambda *_, **__: self.log.append("granted"))
        context: Any = SimpleNamespace(timeline=NoTimeline())
        turn: Any = SimpleNamespace(wanted=False, give=lambda version: self.log.append(f"give {version}"))
        self.rounds = RoundsInTurns(
            context, self, self, turn, self.news,  # type: ignore[arg-type]
            sleep=self._sleep, wake=lambda: self.log.append("wake"),
        )  # fmt: skip

    has_round, asking_s = True, 0.0
    largest_slice, stopped = 3, False

    def __iter__(self) -> Iterator[PackedBatch]:
        for number in (1, 2):
            self.log.append(f"round {number}")
            yield BATCH

    def _sleep(self) -> Version:
        self.log.append("sleep")
        return Version(0, 4)


HERE, PARKED, WANTED = (True, 0.0, False), (False, 9.0, False), (False, 9.0, True)


def test_it_keeps_the_devices_while_rounds_come_or_nobody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, HERE, PARKED, PARKED, HERE, HERE)
    assert len(list(devices.rounds)) == 2
    assert devices.log == ["round 1", "round 2"]
    assert (devices.rounds.largest_slice, devices.rounds.stopped) == (3, False)


def test_it_sleeps_while_no_round_is_ready_and_wakes_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, HERE, (False, 0.0, True), WANTED, PARKED, PARKED, HERE, HERE)
    assert len(list(devices.rounds)) == 2
    assert devices.log == ["round 1", "sleep", f"give {Version(0, 4)}", "granted", "wake", "round 2"]


def test_wanted_devices_are_not_given_away_while_an_answer_may_be_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = YieldRule.PARKED_S / 2
    devices = Devices(monkeypatch, (False, soon, True), HERE, HERE, HERE)
    assert len(list(devices.rounds)) == 2
    assert devices.log == ["round 1", "round 2"]


def test_a_model_that_cannot_sleep_is_refused_by_name() -> None:
    class Sleepless: ...

    class Sleeper:  # the methods that are looked for before a start, and no more
        def sleep(self) -> None: ...

        def wake(self) -> None: ...

    config: Any = SimpleNamespace(roles_text="rollout+actor:2")
    one = Sleeper()
    assert sleepers(config, [one, None]) == (one,)
    with pytest.raises(ConfigError, match="Sleepless cannot; give rollout and actor devices of their own"):
        sleepers(config, [one, Sleepless()])


def test_no_rank_begins_if_another_one_learned_of_a_stop_while_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one is gone: the others would wait for it in the first collective of their models."""
    said: list[bool] = []
    monkeypatch.setattr(actor, "meet_peers", lambda _: None)
    monkeypatch.setattr(actor, "open_turn", lambda *_, **__: object())
    monkeypatch.setattr(actor, "wait_for_devices", lambda *_, **__: True)
    monkeypatch.setattr(actor, "all_ranks", lambda value: said.append(value))
    monkeypatch.setattr(actor, "Actor", lambda *_: pytest.fail("it began"))
    context: Any = SimpleNamespace(stopping=threading.Event())
    actor.run_actor(context)
    assert said == [True]
