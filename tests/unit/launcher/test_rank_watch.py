"""Which ranks are taken for stuck."""

from launcher.process.progress import STARTING, Status
from launcher.process.run_events import RankStuck
from launcher.run.rank_watch import RankWatch
from workers.rank.device_turn import WAITING

WORKERS = {"rollout-0": True, "actor": True, "storage-0": False}


def new_watch() -> RankWatch:
    return RankWatch(
        start_timeout_s=300.0,
        max_start_s=900.0,
        operation_timeout_s=1000.0,
        silence_timeout_s=100.0,
        deadlock_timeout_s=200.0,
    )


def says(state: str, *, at: float, idle_s: float = 0.0, detail: str = "") -> Status:
    return Status(state, detail, time=at, idle_s=idle_s)


def look(watch: RankWatch, now: float, *, paused: bool = False, **statuses: Status) -> list[RankStuck]:
    named = {(name.replace("_", "-"), 0): status for name, status in statuses.items()}
    return watch.find_stuck_ranks(named, workers=WORKERS, now=now, paused=paused)


def look_until(watch: RankWatch, first: int, last: int, **statuses: Status) -> list[RankStuck]:
    """Look every second, at the same; nobody is stuck before the last look."""
    for now in range(first, last):
        assert look(watch, now, **statuses) == []
    return look(watch, last, **statuses)


def test_rank_that_gets_on_or_waits_is_not_stuck() -> None:
    watch = new_watch()
    for now in range(0, 5000, 50):
        working = says("generating", at=now, idle_s=900.0)
        assert look(watch, now, rollout_0=working, actor=says("waiting for rows", at=now, idle_s=now)) == []


def test_rank_that_works_without_progress_is_stuck() -> None:
    stuck = look(new_watch(), 0.0, rollout_0=says("generating", at=1.0, idle_s=1001.0, detail="64 responses"))
    assert stuck == [RankStuck("rollout-0", 0, "no progress for 1001 s with: generating 64 responses")]


def test_rank_that_starts_has_a_deadline_of_its_own() -> None:
    assert look(new_watch(), 0.0, actor=says(STARTING, at=1.0, idle_s=299.0)) == []
    (stuck,) = look(new_watch(), 0.0, actor=says(STARTING, at=1.0, idle_s=301.0))
    assert stuck.gang == "actor"


def test_rank_whose_new_start_has_no_end_is_stuck_however_much_it_reads() -> None:
    watch = new_watch()
    for now in range(0, 901, 50):
        assert look(watch, now, actor=says(STARTING, at=now)) == []
    stuck = RankStuck("actor", 0, "still starting after 950 s (launcher.max_start_s)")
    assert look(watch, 950, actor=says(STARTING, at=950)) == [stuck]
    watch.forget_gang("actor")
    assert look(watch, 1000, actor=says(STARTING, at=1000)) == []


def test_rank_that_waits_for_devices_that_another_role_has_is_not_stuck() -> None:
    watch = new_watch()
    for now in range(0, 5000, 50):
        starting = says(STARTING, at=now, idle_s=now, detail=WAITING)
        assert look(watch, now, rollout_0=starting, actor=says("training", at=now, idle_s=900.0)) == []
    assert not starting.at_work, "it still has to load its model"
    (stuck,) = look(watch, 5000.0, rollout_0=says(WAITING, at=5000.0, idle_s=5000.0), actor=says("training", at=5000.0,
                    idle_s=1001.0))  # fmt: skip
    assert stuck.gang == "actor", "who has them is judged as ever"


def test_rank_that_says_nothing_more_is_stuck_whatever_it_said() -> None:
    watch = new_watch()
    last = says("waiting for rows", at=7.0)
    (stuck,) = look_until(watch, 50, 151, actor=last)
    assert "no sign of life for 101 s" in stuck.why


def test_silence_while_the_launcher_stood_still_is_nobodys() -> None:
    """What they said meanwhile is read after this look."""
    watch = new_watch()
    last = says("generating", at=7.0)
    assert look_until(watch, 0, 60, rollout_0=last) == []
    assert look(watch, 1000.0, rollout_0=last) == []
    (stuck,) = look_until(watch, 1001, 1036, rollout_0=last)
    assert "no sign of life for 101 s" in stuck.why


def test_silence_counts_in_the_time_of_whoever_listens() -> None:
    """The rank's own clock may jump."""
    watch = new_watch()
    for first, at in ((0, 5000.0), (90, 10.0), (180, 9.0)):
        assert look_until(watch, first, first + 89, actor=says("training", at=at)) == []


def test_everybody_who_waits_for_too_long_waits_for_nobody() -> None:
    watch = new_watch()
    rollout, actor = says("waiting for prompts", at=1.0, idle_s=201.0), says("waiting for rows", at=1.0, idle_s=205.0)
    (stuck,) = look(watch, 0.0, rollout_0=rollout, actor=actor)
    assert stuck.gang == "actor"
    assert (
        "deadlock: all ranks are waiting; this one for 205 s (waiting for rows); rollout-0 waiting for prompts"
        in stuck.why
    )
    assert look(watch, 0.0, rollout_0=says("generating", at=2.0, idle_s=201.0), actor=actor) == []


def test_all_may_wait_for_a_service_that_works() -> None:
    """A slow source, or sampler, of tasks."""
    waiting = says("waiting for prompts", at=1.0, idle_s=500.0)
    (stuck,) = look(new_watch(), 0.0, rollout_0=waiting, actor=waiting, storage_0=says("serving", at=1.0))
    assert "deadlock: all ranks are waiting" in stuck.why
    making = says("making tasks", at=1.0, idle_s=20.0)
    assert look(new_watch(), 0.0, rollout_0=waiting, actor=waiting, storage_0=making) == []


def test_services_wait_by_nature() -> None:
    assert look(new_watch(), 0.0, storage_0=says("serving", at=1.0, idle_s=1e6)) == []


def test_gang_that_is_away_is_not_looked_at() -> None:
    statuses = {("rollout-1", 0): says("generating", at=1.0, idle_s=1e6)}
    assert new_watch().find_stuck_ranks(statuses, workers=WORKERS, now=0.0) == []


def test_gang_that_starts_again_begins_anew() -> None:
    watch = new_watch()
    last = says("training", at=7.0)
    assert look_until(watch, 0, 60, actor=last) == []
    watch.forget_gang("actor")
    assert look_until(watch, 61, 150, actor=last) == []


def test_whoever_is_stuck_for_longest_comes_first() -> None:
    rollout, actor = says("generating", at=1.0, idle_s=1500.0), says("training", at=1.0, idle_s=1001.0)
    assert [stuck.gang for stuck in look(new_watch(), 0.0, actor=actor, rollout_0=rollout)] == ["rollout-0", "actor"]
    rollout = says("generating", at=1.0, idle_s=1000.5)
    assert [stuck.gang for stuck in look(new_watch(), 0.0, actor=actor, rollout_0=rollout)] == ["actor", "rollout-0"]


def test_ranks_that_wait_in_a_pause_are_no_deadlock_nor_are_they_right_after_it() -> None:
    watch = new_watch()

    def rest(now: int, *, paused: bool) -> list[RankStuck]:
        rollout, actor = (says(f"waiting for {what}", at=now, idle_s=now) for what in ("prompts", "rows"))
        return look(watch, now, paused=paused, rollout_0=rollout, actor=actor, storage_0=says("serving", at=now))

    for now in range(0, 5000, 50):
        assert rest(now, paused=True) == []
    for now in range(5000, 5151, 50):
        assert rest(now, paused=False) == [], "the waits of the pause do not count"
    (stuck,) = rest(5151, paused=False)
    assert stuck.why.startswith("deadlock")


def test_rank_that_is_stuck_in_work_is_found_in_a_pause_too() -> None:
    (stuck,) = look(new_watch(), 0.0, paused=True, actor=says("saving", at=1.0, idle_s=1001.0))
    assert stuck.gang == "actor"
