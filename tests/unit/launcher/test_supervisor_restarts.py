"""What starts again after a failure, with whom, and when that has been too often."""

import random
from typing import Any

import pytest

from asyncflow.job import GangSpec
from launcher.process.run_events import (
    AllReady,
    Arm,
    AtWork,
    DumpStacks,
    Event,
    Finish,
    GangExited,
    Instruction,
    KillGang,
    LastStepDone,
    NodeLost,
    Note,
    Phase,
    RankStuck,
    Restore,
    Restored,
    RestoreFailed,
    RunTimer,
    SetPhase,
    StartGang,
    StopRequested,
    TimerExpired,
)
from launcher.run.supervisor import FirstStarts, RestartBudget, Supervisor

NAMES = ("controller-0", "storage-0", "weights-0", "actor", "rollout-0", "rollout-1", "ref-0", "evaluate-0")
WITH_THE_ACTOR = ("controller-0", "storage-0", "actor", "evaluate-0")
KILLED = -9


def new_run(
    *,
    reference_follows: bool = False,
    external: tuple[str, ...] = (),
    names: tuple[str, ...] = NAMES,
    **limits: Any,
) -> Supervisor:
    gangs = [GangSpec(name, name.partition("-")[0], int(name.partition("-")[2] or 0), 1, ("cpu",)) for name in names]
    book = RestartBudget(**{"max_restarts": 2, "max_global_restarts": 1, "window_s": 600} | limits)
    return Supervisor(
        gangs,
        restarts=book,
        start_timeout_s=300.0,
        max_start_s=7200.0,
        evaluate_timeout_s=600.0,
        stop_timeout_s=30.0,
        reference_follows=reference_follows,
        external=external,
    )


def working_run(**settings: object) -> Supervisor:
    supervisor = new_run(**settings)  # type: ignore[arg-type]
    for name in supervisor._gangs:
        supervisor.handle(AtWork(name))
    supervisor.handle(AllReady())
    return supervisor


def dies(gang: str) -> GangExited:
    return GangExited(gang, KILLED, "ended by SIGKILL", 0, 10.0)


def silent(instructions: list[Instruction]) -> list[Instruction]:
    """Without what is only told."""
    return [instruction for instruction in instructions if not isinstance(instruction, Note)]


def told(instructions: list[Instruction]) -> str:
    return " ".join(instruction.text for instruction in instructions if isinstance(instruction, Note))


@pytest.mark.parametrize("gang", NAMES)
def test_what_fails_alike_at_its_first_two_starts_ends_the_run_with_the_cause(gang: str) -> None:
    """Also where all the others were at work meanwhile: a gang that is gone is not waited for."""
    supervisor = new_run(max_restarts=3, max_global_restarts=3)
    for other in NAMES:
        if other != gang:
            supervisor.handle(AtWork(other))
    supervisor.handle(dies(gang))
    supervisor.handle(AllReady())
    for other in WITH_THE_ACTOR if gang == "actor" else ():
        supervisor.handle(dies(other))
    supervisor.handle(Restored(0, 1) if gang == "actor" else TimerExpired(RunTimer.RESTART, gang=gang))
    supervisor.handle(dies(gang))
    instructions: list[Instruction] = []
    for other in NAMES:
        instructions += supervisor.handle(GangExited(other, 0))
    instructions += supervisor.handle(TimerExpired(RunTimer.EXIT))
    (finish,) = [one for one in instructions if isinstance(one, Finish)]
    assert finish.code == 1
    assert finish.message.endswith(
        "rank 1 failed: ended by SIGKILL (at both of its starts, before it worked)"
        if gang == "rollout-1"
        else "rank 0 failed: ended by SIGKILL (at both of its starts, before it worked)"
    )


def test_what_fails_otherwise_the_second_time_starts_again() -> None:
    supervisor = new_run()
    supervisor.handle(dies("ref-0"))
    supervisor.handle(TimerExpired(RunTimer.RESTART, gang="ref-0"))
    other = supervisor.handle(GangExited("ref-0", -11, "ended by SIGSEGV"))
    assert silent(other) == [Arm(RunTimer.RESTART, 1.0, "ref-0")]


def test_numbers_in_an_error_do_not_make_it_another_one() -> None:
    starts = FirstStarts()
    assert not starts.fails_again("ref-0", 1, "OSError: port 4711 is taken by process 12")
    assert not starts.fails_again("ref-1", 1, "OSError: port 4711 is taken by process 12")
    assert starts.fails_again("ref-0", 1, "OSError: port 4712 is taken by process 13")
    assert not starts.fails_again("ref-0", 1, "OSError: no space left")
    assert not starts.fails_again("ref-0", -9, "OSError: no space left")


def test_what_once_worked_has_all_its_restarts() -> None:
    supervisor = new_run(max_restarts=3)
    supervisor.handle(AtWork("ref-0"))
    for wait_s in (0.0, 1.0, 2.0):
        assert silent(supervisor.handle(dies("ref-0"))) == [Arm(RunTimer.RESTART, wait_s, "ref-0")]
        assert supervisor.handle(TimerExpired(RunTimer.RESTART, gang="ref-0"))


def test_start_that_takes_too_long_names_the_last_failure() -> None:
    supervisor = new_run()
    supervisor.handle(dies("ref-0"))
    supervisor.handle(TimerExpired(RunTimer.RESTART, gang="ref-0"))
    *_, finish = supervisor.handle(TimerExpired(RunTimer.START, "ref-0 rank 0"))
    assert finish == Finish(
        1,
        "ref-0 rank 0: no progress for 300 s of its start (launcher.start_timeout_s); "
        "the last failure: ref rank 0 failed: ended by SIGKILL",
    )


@pytest.mark.parametrize("gang", ["critic", "actor", "storage-0", "controller-0"])
def test_critic_goes_back_with_the_actor_and_with_what_the_queue_lost(gang: str) -> None:
    supervisor = new_run(names=(*NAMES, "critic"))
    supervisor.handle(AllReady())
    together = [name for name in (*WITH_THE_ACTOR, "critic") if name != gang]
    out = supervisor.handle(dies(gang))
    assert sorted(silent(out), key=str) == sorted([KillGang(name) for name in together], key=str)
    assert "it starts again from the last checkpoint" in told(out)
    for name in together[:-1]:
        assert supervisor.handle(dies(name)) == []
    assert supervisor.handle(dies(together[-1])) == [Restore()]


@pytest.mark.parametrize("gang", ["rollout-1", "ref-0", "storage-0", "controller-0", "weights-0", "evaluate-0"])
def test_gang_that_dies_starts_again_by_itself(gang: str) -> None:
    supervisor = working_run()
    out = supervisor.handle(dies(gang))
    assert silent(out) == [Arm(RunTimer.RESTART, 0.0, gang)]
    assert "ended by SIGKILL; it starts again" in told(out)
    assert supervisor.handle(TimerExpired(RunTimer.RESTART, gang=gang)) == [StartGang(gang, 1)]


def test_gang_that_dies_before_all_are_at_work_starts_again() -> None:
    assert silent(new_run().handle(dies("rollout-0"))) == [Arm(RunTimer.RESTART, 0.0, "rollout-0")]


def test_second_restart_waits_a_little() -> None:
    supervisor = working_run()
    supervisor.handle(dies("rollout-0"))
    supervisor.handle(TimerExpired(RunTimer.RESTART, gang="rollout-0"))
    assert silent(supervisor.handle(dies("rollout-0"))) == [Arm(RunTimer.RESTART, 1.0, "rollout-0")]


def test_failures_long_ago_do_not_count() -> None:
    now = [0.0]
    supervisor = working_run(max_restarts=1, clock=lambda: now[0])
    for now[0] in (0.0, 1000.0, 2000.0):
        assert silent(supervisor.handle(dies("rollout-0"))) == [Arm(RunTimer.RESTART, 0.0, "rollout-0")]
        supervisor.handle(TimerExpired(RunTimer.RESTART, gang="rollout-0"))


def test_set_wall_clock_changes_nothing_about_restarts() -> None:
    """Times of failures are the wall's: they order what failed at about the same time, and count nothing."""
    supervisor = working_run(max_restarts=1)
    supervisor.handle(GangExited("rollout-0", KILLED, "ended by SIGKILL", 0, at=10_000.0))
    supervisor.handle(TimerExpired(RunTimer.RESTART, gang="rollout-0"))
    out = supervisor.handle(GangExited("rollout-0", KILLED, "ended by SIGKILL", 0, at=0.0))
    assert KillGang("actor") in out, "the second failure within the window, whatever the clock says"


def test_dead_actor_takes_with_it_what_follows_its_weights_and_rollouts_stay() -> None:
    supervisor = working_run()
    kills = silent(supervisor.handle(dies("actor")))
    assert kills == [KillGang(name) for name in WITH_THE_ACTOR if name != "actor"]
    assert supervisor.handle(dies("controller-0")) == supervisor.handle(dies("evaluate-0")) == []
    assert supervisor.handle(dies("storage-0")) == [Restore()]
    out = supervisor.handle(Restored(20, 1))
    assert silent(out) == [StartGang(name, 1) for name in WITH_THE_ACTOR]
    assert "from step 20" in told(out)


def test_reference_that_follows_the_policy_starts_again_with_the_actor() -> None:
    supervisor = working_run(reference_follows=True)
    assert KillGang("ref-0") in supervisor.handle(dies("actor"))


def test_gang_that_waits_for_its_restart_joins_that_of_the_actor() -> None:
    supervisor = working_run()
    supervisor.handle(dies("storage-0"))
    supervisor.handle(dies("actor"))
    assert supervisor.handle(TimerExpired(RunTimer.RESTART, gang="storage-0")) == []
    supervisor.handle(dies("controller-0"))
    assert supervisor.handle(dies("evaluate-0")) == [Restore()]
    assert StartGang("storage-0", 1) in supervisor.handle(Restored(0, 1))


def test_rollout_that_dies_during_a_restore_starts_again_by_itself() -> None:
    supervisor = working_run()
    supervisor.handle(dies("actor"))
    assert silent(supervisor.handle(dies("rollout-0"))) == [Arm(RunTimer.RESTART, 0.0, "rollout-0")]
    assert supervisor.handle(TimerExpired(RunTimer.RESTART, gang="rollout-0")) == [StartGang("rollout-0", 1)]


def test_gang_that_fails_too_often_takes_everything_with_it() -> None:
    supervisor = working_run()
    for _ in range(2):
        supervisor.handle(dies("rollout-0"))
        supervisor.handle(TimerExpired(RunTimer.RESTART, gang="rollout-0"))
    kills = silent(supervisor.handle(dies("rollout-0")))
    assert kills == [KillGang(name) for name in NAMES if name != "rollout-0"]
    *_, last = [supervisor.handle(dies(name)) for name in NAMES if name != "rollout-0"]
    assert last == [Restore()]
    starts = silent(supervisor.handle(Restored(20, 1)))
    assert {start.gang for start in starts if isinstance(start, StartGang)} == set(NAMES)


def test_everything_that_fails_too_often_ends_the_run_and_names_the_cause() -> None:
    supervisor = working_run(max_restarts=0, max_global_restarts=0)
    out = supervisor.handle(GangExited("rollout-1", 1, "ValueError: no", 0, 10.0))
    assert out == [SetPhase(Phase.STOP), Arm(RunTimer.STOP, 30.0)]
    for name in (*NAMES[3:5], *NAMES[6:], *NAMES[:3]):
        last = supervisor.handle(GangExited(name, 0))
    assert last == [Finish(1, "rollout rank 1 failed: ValueError: no")]


def test_error_that_would_come_again_ends_the_run() -> None:
    supervisor = working_run()
    out = supervisor.handle(GangExited("actor", 1, "TrainingDiverged: loss is NaN", 0, 10.0, final=True))
    assert SetPhase(Phase.EXIT) in out


def test_exception_before_anybody_worked_ends_the_run() -> None:
    out = new_run().handle(GangExited("rollout-0", 1, "OSError: no such file", 0, 10.0))
    assert SetPhase(Phase.EXIT) in out


def test_gang_that_others_start_is_not_started_again() -> None:
    supervisor = working_run(external=("rollout-1",))
    assert SetPhase(Phase.STOP) in supervisor.handle(dies("rollout-1"))


def test_run_that_has_nothing_to_go_back_to_fails() -> None:
    supervisor = working_run()
    supervisor.handle(dies("actor"))
    for name in WITH_THE_ACTOR:
        supervisor.handle(dies(name))
    assert SetPhase(Phase.EXIT) in supervisor.handle(RestoreFailed("no checkpoint can be read"))
    for name in ("rollout-0", "rollout-1", "ref-0"):
        assert supervisor.handle(GangExited(name, 0)) == []
    assert supervisor.handle(GangExited("weights-0", 0)) == [
        Finish(1, "actor rank 0 failed: no checkpoint can be read")
    ]


def test_stuck_rank_is_asked_where_it_is_and_then_killed() -> None:
    supervisor = working_run()
    out = supervisor.handle(RankStuck("rollout-0", 0, "no progress for 1801 s with: generating"))
    assert out == [DumpStacks(), Arm(RunTimer.KILL, 1.0, "rollout-0")]
    assert supervisor.handle(RankStuck("rollout-0", 0, "still none")) == []
    assert supervisor.handle(TimerExpired(RunTimer.KILL, gang="rollout-0")) == [KillGang("rollout-0")]
    out = supervisor.handle(dies("rollout-0"))
    assert "no progress for 1801 s with: generating; it starts again" in told(out)


def test_stacks_are_written_when_a_deadline_passed() -> None:
    out = working_run().handle(GangExited("ref-0", 1, "TransportError: late", 0, 10.0, deadline=True))
    assert out[0] == DumpStacks()


def test_lost_node_ends_the_run_resumably() -> None:
    supervisor = working_run()
    assert SetPhase(Phase.EXIT) in supervisor.handle(NodeLost("node 2 (n2)"))
    finish = supervisor.handle(TimerExpired(RunTimer.EXIT))[-1]
    assert finish == Finish(75, "node 2 (n2) is gone, and its processes with it")


def test_stop_during_a_restore_starts_nobody_again() -> None:
    supervisor = working_run()
    supervisor.handle(dies("actor"))
    assert SetPhase(Phase.STOP) in supervisor.handle(StopRequested(1))
    out = []
    for name in ("controller-0", "storage-0", "evaluate-0", "rollout-0", "rollout-1", "ref-0"):
        out += supervisor.handle(dies(name))
    assert not any(isinstance(instruction, StartGang | Restore) for instruction in out)
    assert isinstance(supervisor.handle(GangExited("weights-0", 0))[-1], Finish)


def test_unit_that_dies_while_the_actor_saves_starts_again() -> None:
    supervisor = working_run()
    supervisor.handle(StopRequested(1))
    assert silent(supervisor.handle(dies("storage-0"))) == [Arm(RunTimer.RESTART, 0.0, "storage-0")]
    assert supervisor.handle(TimerExpired(RunTimer.RESTART, gang="storage-0")) == [StartGang("storage-0", 1)]


def test_rollout_that_dies_after_the_last_step_is_not_started_again() -> None:
    supervisor = working_run()
    supervisor.handle(LastStepDone())
    assert supervisor.handle(dies("rollout-0")) == []


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_the_run_ends_and_nobody_runs_twice(seed: int) -> None:
    """Random deaths, stops, stuck ranks; the model keeps who runs. In the end everybody is told to leave."""
    random_ = random.Random(seed)
    supervisor = new_run(max_restarts=random_.randrange(4), max_global_restarts=random_.randrange(3))
    running, attempts = set(NAMES), dict.fromkeys(NAMES, 0)
    timers: list[TimerExpired] = []
    killed: set[str] = set()
    phase, finish, now = Phase.RUN, None, 0.0
    lineage = 0

    def apply(instructions: list[Instruction]) -> None:
        nonlocal phase, finish, lineage
        for instruction in instructions:
            assert finish is None, "nothing follows the end"
            match instruction:
                case StartGang(gang=gang, attempt=attempt):
                    assert gang not in running
                    assert attempt == attempts[gang] + 1
                    assert phase in (Phase.RUN, Phase.EVALUATE, Phase.STOP)
                    running.add(gang)
                    attempts[gang] = attempt
                case KillGang(gang=gang):
                    assert gang in running
                    killed.add(gang)
                case Arm(timer=timer, gang=gang):
                    timers.append(TimerExpired(timer, gang=gang))
                case SetPhase(phase=new):
                    phase = new
                case Restore():
                    lineage += 1
                    failed = random_.random() < 0.05
                    apply(supervisor.handle(RestoreFailed("none") if failed else Restored(0, lineage)))
                case Finish():
                    finish = instruction

    def exits(gang: str, code: int) -> GangExited:
        running.discard(gang)
        killed.discard(gang)
        return GangExited(gang, code, "ended" if code else "", 0, now, final=code > 0 and random_.random() < 0.1)

    def event() -> Event:
        if killed and random_.random() < 0.7:
            return exits(random_.choice(sorted(killed)), KILLED)
        if timers and random_.random() < 0.3:
            return timers.pop(random_.randrange(len(timers)))
        if phase in (Phase.STOP, Phase.EXIT) and running and random_.random() < 0.6:
            return exits(random_.choice(sorted(running)), 0)
        choice = random_.random()
        if choice < 0.1:
            return AllReady()
        if choice < 0.15:
            return StopRequested(1)
        if choice < 0.3 and running:
            return RankStuck(random_.choice(sorted(running)), 0, "stuck")
        return exits(random_.choice(sorted(running)), random_.choice([KILLED, 1])) if running else AllReady()

    apply(supervisor.start())
    for _ in range(2000):
        if finish is not None:
            break
        now += random_.random() * 50
        apply(supervisor.handle(event()))
    assert finish is not None
