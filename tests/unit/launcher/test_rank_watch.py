"""Ranks that live and do not get on."""

from typing import Any

from launcher.progress import STARTING, Status
from launcher.rank_watch import RankWatch

WORKERS = {"actor": True, "rollout-0": True, "weights-0": False}


def new_watch() -> RankWatch:
    return RankWatch(start_timeout_s=300.0, operation_timeout_s=60.0, silence_timeout_s=20.0, deadlock_timeout_s=30.0)


def status(state: str, *, idle_s: float = 0.0, at: float = 1.0) -> Status:
    return Status(state, time=at, idle_s=idle_s)


def look(watch: RankWatch, now: float, **states: Status) -> list[tuple[str, int, str]]:
    statuses = {}
    for name, one in states.items():
        gang, _, rank = name.rpartition("_")
        statuses[gang.replace("_", "-"), int(rank)] = one
    return [(one.gang, one.rank, one.why) for one in watch.look(statuses, workers=WORKERS, now=now)]


def test_rank_that_works_without_progress_is_stuck_after_its_deadline() -> None:
    watch = new_watch()
    assert look(watch, 0.0, actor_0=status("training", idle_s=60.0)) == []
    assert look(watch, 1.0, actor_0=status("training", idle_s=61.0, at=2.0)) == [
        ("actor", 0, "no progress for 61 s with: training")
    ]


def test_rank_that_waits_or_starts_has_other_deadlines() -> None:
    busy = status("generating")
    for waiting in ("waiting for rows", "serving"):
        assert look(new_watch(), 0.0, actor_0=status(waiting, idle_s=1e6), rollout_0_0=busy) == []
    assert look(new_watch(), 0.0, actor_0=status(STARTING, idle_s=300.0)) == []
    assert look(new_watch(), 0.0, actor_0=status(STARTING, idle_s=301.0)) != []


def test_rank_without_a_word_is_stuck_whatever_it_said_last() -> None:
    watch = new_watch()
    assert look(watch, 0.0, weights_0_0=status("serving")) == []
    assert look(watch, 20.0, weights_0_0=status("serving")) == []
    assert look(watch, 21.0, weights_0_0=status("serving")) == [
        ("weights-0", 0, "no sign of life for 21 s; last: serving")
    ]


def test_a_word_with_a_time_that_was_set_back_is_a_word() -> None:
    watch = new_watch()
    look(watch, 0.0, actor_0=status("training", at=5000.0))
    assert look(watch, 19.0, actor_0=status("training", at=1400.0)) == []
    assert look(watch, 38.0, actor_0=status("training", at=1400.0)) == []
    assert look(watch, 40.0, actor_0=status("training", at=1400.0)) != []


def test_whoever_is_stuck_for_longest_is_named_first() -> None:
    ranks: Any = {
        "actor_0": status("training", idle_s=61.0),
        "actor_1": status("training", idle_s=75.0),
        "rollout_0_0": status("generating", idle_s=70.0),
    }
    assert [one[:2] for one in look(new_watch(), 0.0, **ranks)] == [("actor", 1), ("rollout-0", 0), ("actor", 0)]


def test_when_everybody_waits_whoever_has_waited_longest_is_named() -> None:
    ranks: Any = {"actor_0": status("waiting for rows", idle_s=31.0), "rollout_0_0": status("idle", idle_s=40.0)}
    (found,) = look(new_watch(), 0.0, **ranks)
    assert found == ("rollout-0", 0, "everybody waits: it for 40 s, idle; actor waiting for rows")
    ranks["actor_0"] = status("training", idle_s=0.0)
    assert look(new_watch(), 0.0, **ranks) == []


def test_gang_that_starts_again_is_judged_by_its_new_words() -> None:
    watch = new_watch()
    look(watch, 0.0, actor_0=status("training"))
    watch.forget("actor")
    assert look(watch, 30.0, actor_0=status("training")) == []


def test_gangs_that_need_not_work_are_not_judged() -> None:
    statuses = {("evaluate-0", 0): status("evaluating", idle_s=1e6)}
    assert new_watch().look(statuses, workers=WORKERS, now=0.0) == []
