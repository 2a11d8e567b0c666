"""The supervisor's answers to what can happen where nothing starts again; see `test_supervisor_restarts`."""

import pytest

from asyncflow.job import GangSpec
from launcher.process.run_events import (
    AllReady,
    Arm,
    Finish,
    GangExited,
    Instruction,
    KillGang,
    LastStepDone,
    Note,
    Phase,
    RunDirLost,
    RunTimer,
    SetPhase,
    StopRequested,
    TimerExpired,
)
from launcher.run.supervisor import RestartBudget, Supervisor

STOP = [SetPhase(Phase.STOP), Arm(RunTimer.STOP, 30.0)]
EXIT = [SetPhase(Phase.EXIT), Arm(RunTimer.EXIT, 5.0)]
EXIT_IN_PEACE = [SetPhase(Phase.EXIT), Arm(RunTimer.EXIT, 30.0)]
EVALUATE = [SetPhase(Phase.EVALUATE), Arm(RunTimer.EVALUATE, 600.0)]
NAMES = ("controller", "storage-0", "rollout-0", "rollout-1", "actor")
EVALUATORS = ("evaluate-0", "evaluate-1")


def new_run(*more: str) -> Supervisor:
    def gang(name: str, num_ranks: int = 1) -> GangSpec:
        role, _, index = name.partition("-")
        return GangSpec(name, role, int(index or 0), num_ranks, ("cpu",) * num_ranks)

    gangs = [gang(name, 4 if name == "actor" else 1) for name in (*NAMES, *more)]
    never = RestartBudget(max_restarts=0, max_global_restarts=0, window_s=600.0)
    return Supervisor(
        gangs, restarts=never, start_timeout_s=300.0, max_start_s=900.0, evaluate_timeout_s=600.0, stop_timeout_s=30.0
    )


def started_run(*more: str) -> Supervisor:
    supervisor = new_run(*more)
    assert supervisor.handle(AllReady()) == []
    return supervisor


def leave(supervisor: Supervisor, *names: str) -> list[Instruction]:
    return [instruction for name in names for instruction in supervisor.handle(GangExited(name, 0))]


def test_run_begins_in_phase_run_with_a_deadline_for_the_start() -> None:
    assert new_run().start() == [SetPhase(Phase.RUN), Arm(RunTimer.START, 300.0)]


def test_services_leave_after_the_work_and_the_run_is_done() -> None:
    supervisor = started_run()
    assert supervisor.handle(LastStepDone()) == []
    assert leave(supervisor, "rollout-0", "rollout-1") == []
    assert leave(supervisor, "actor") == [*STOP, *EXIT_IN_PEACE]
    assert leave(supervisor, "controller") == []
    assert leave(supervisor, "storage-0") == [Finish(0, "done")]


def test_rollouts_are_told_to_leave_when_the_actor_has_left() -> None:
    supervisor = started_run()
    assert leave(supervisor, "actor") == STOP
    assert leave(supervisor, "rollout-0", "rollout-1") == EXIT_IN_PEACE


def test_requested_stop_is_resumable() -> None:
    supervisor = started_run()
    assert supervisor.handle(StopRequested(1)) == STOP
    assert leave(supervisor, "rollout-0", "rollout-1", "actor") == EXIT_IN_PEACE
    assert leave(supervisor, "controller", "storage-0") == [Finish(75, "stopped")]


def test_stop_after_the_last_step_is_done() -> None:
    supervisor = started_run()
    supervisor.handle(LastStepDone())
    assert supervisor.handle(StopRequested(1)) == STOP
    assert leave(supervisor, *reversed(NAMES))[-1] == Finish(0, "done")


def test_stop_before_the_start_ends_at_once() -> None:
    """Nobody has anything to save yet, and some wait for others that would never come."""
    assert new_run().handle(StopRequested(1)) == [*(KillGang(name) for name in NAMES), Finish(75, "stopped")]


def test_failure_before_the_start_gives_the_others_little_time() -> None:
    supervisor = new_run()
    failure = GangExited("rollout-1", 1, "ConfigError: no such model", 0, 10.0)
    assert supervisor.handle(failure) == [SetPhase(Phase.EXIT), Arm(RunTimer.EXIT, 3.0)]
    finish = supervisor.handle(TimerExpired(RunTimer.EXIT))[-1]
    assert finish == Finish(1, "rollout rank 1 failed: ConfigError: no such model")


@pytest.mark.parametrize("stopping", [False, True])
def test_run_whose_directory_is_gone_fails_at_once(stopping: bool) -> None:
    supervisor = started_run()
    if stopping:
        supervisor.handle(StopRequested(1))
    *kills, finish = supervisor.handle(RunDirLost("/runs/one"))
    assert kills == [KillGang(name) for name in NAMES]
    assert isinstance(finish, Finish) and finish.code == 1
    assert "/runs/one was removed or moved" in finish.message


def test_second_stop_kills_at_once() -> None:
    supervisor = started_run()
    supervisor.handle(StopRequested(1))
    leave(supervisor, "rollout-0")
    assert supervisor.handle(StopRequested(2)) == [
        KillGang("controller"),
        KillGang("storage-0"),
        KillGang("rollout-1"),
        KillGang("actor"),
        Finish(75, "stopped"),
    ]


def test_stop_that_takes_too_long_kills_and_stays_resumable() -> None:
    supervisor = started_run()
    supervisor.handle(StopRequested(1))
    leave(supervisor, "rollout-0", "rollout-1")
    assert supervisor.handle(TimerExpired(RunTimer.STOP)) == [
        KillGang("controller"),
        KillGang("storage-0"),
        KillGang("actor"),
        Finish(
            75,
            "actor: still running 30 s after the stop (launcher.stop_timeout_s); killed",
        ),
    ]


def test_failed_rollout_lets_the_actor_save() -> None:
    supervisor = started_run()
    assert supervisor.handle(GangExited("rollout-1", 1, "ValueError: no", 0, 10.0)) == STOP
    assert leave(supervisor, "rollout-0", "actor") == EXIT
    assert leave(supervisor, "controller", "storage-0") == [Finish(1, "rollout rank 1 failed: ValueError: no")]


def test_failed_actor_ends_the_run_at_once() -> None:
    supervisor = started_run()
    assert supervisor.handle(GangExited("actor", -9, "ended by SIGKILL", 2, 10.0)) == EXIT
    last = leave(supervisor, "rollout-0", "rollout-1", "controller", "storage-0")
    assert last == [Finish(1, "actor rank 2 failed: ended by SIGKILL")]


def test_failed_service_ends_the_run_at_once() -> None:
    assert started_run().handle(GangExited("storage-0", 1, "OSError: full", 0, 10.0)) == EXIT


def test_actor_that_fails_while_it_saves_ends_the_run_at_once() -> None:
    supervisor = started_run()
    assert supervisor.handle(GangExited("rollout-0", 1, "ValueError: no", 0, 10.0)) == STOP
    assert supervisor.handle(GangExited("actor", 1, "OSError: disk full", 0, 11.0)) == EXIT


def test_service_that_leaves_too_early_is_a_failure() -> None:
    supervisor = started_run()
    assert supervisor.handle(GangExited("controller", 0, at=10.0)) == EXIT
    last = leave(supervisor, "rollout-0", "rollout-1", "actor", "storage-0")
    assert last == [Finish(1, "controller rank 0 failed: it left during the run")]


def test_cause_is_named_before_its_consequences() -> None:
    supervisor = started_run()
    supervisor.handle(GangExited("rollout-0", 1, "TransportError: storage-0 closed", 0, 10.0))
    supervisor.handle(GangExited("actor", 1, "TransportError: storage-0 closed", 0, 9.9))
    supervisor.handle(GangExited("storage-0", -9, "ended by SIGKILL", 0, 10.2))
    last = leave(supervisor, "rollout-1", "controller")
    assert last == [Finish(1, "storage rank 0 failed: ended by SIGKILL (then 2 more gangs)")]


def test_first_of_several_exceptions_is_named() -> None:
    supervisor = started_run()
    supervisor.handle(GangExited("rollout-0", 1, "later", 0, 11.0))
    supervisor.handle(GangExited("rollout-1", 1, "first", 0, 10.0))
    assert leave(supervisor, "actor", "controller", "storage-0")[-1] == Finish(
        1, "rollout rank 1 failed: first (then 1 more gang)"
    )


def test_failure_of_who_is_leaving_is_told_and_the_run_stays_resumable() -> None:
    supervisor = started_run()
    supervisor.handle(StopRequested(1))
    supervisor.handle(GangExited("rollout-0", 1, "ValueError: no", 0, 10.0))
    told = Finish(75, "rollout rank 0 failed while it left: ValueError: no")
    assert supervisor.handle(StopRequested(2))[-1] == told


def test_workers_that_never_start_are_killed_and_named() -> None:
    supervisor = new_run()
    *kills, finish = supervisor.handle(TimerExpired(RunTimer.START, "rollout-1 rank 0"))
    assert kills == [KillGang(name) for name in NAMES]
    assert finish == Finish(
        1, "rollout-1 rank 0: no progress for 300 s of its start (launcher.start_timeout_s); see logs/"
    )


def test_start_that_gets_on_is_waited_for_until_its_last_progress_is_too_long_ago() -> None:
    supervisor = new_run()
    expired = TimerExpired(RunTimer.START, "rollout-1 rank 0", more_s=290.0)
    assert supervisor.handle(expired) == [Arm(RunTimer.START, 290.0)]
    assert isinstance(supervisor.handle(TimerExpired(RunTimer.START, "rollout-1 rank 0"))[-1], Finish)


def test_start_that_gets_on_for_ever_ends_at_its_own_limit() -> None:
    supervisor = new_run()
    reads = TimerExpired(RunTimer.START, "rollout-1 rank 0", more_s=290.0)
    armed = [supervisor.handle(reads) for _ in range(3)]
    assert armed == [[Arm(RunTimer.START, seconds)] for seconds in (290.0, 290.0, 20.0)]
    *kills, finish = supervisor.handle(reads)
    assert kills == [KillGang(name) for name in NAMES]
    assert finish == Finish(1, "rollout-1 rank 0: still starting after 900 s (launcher.max_start_s); see logs/")


def test_stop_waits_for_a_save_as_long_as_the_scheduler_grants() -> None:
    supervisor = started_run()
    supervisor.handle(StopRequested(1))
    note, armed = supervisor.handle(TimerExpired(RunTimer.STOP, more_s=75.0))
    assert isinstance(note, Note) and "still saving" in note.text and not note.failure
    assert armed == Arm(RunTimer.STOP, 30.0)
    assert supervisor.handle(TimerExpired(RunTimer.STOP, more_s=45.0)) == [Arm(RunTimer.STOP, 30.0)]
    assert supervisor.handle(TimerExpired(RunTimer.STOP, more_s=15.0)) == [Arm(RunTimer.STOP, 15.0)]
    assert supervisor.handle(TimerExpired(RunTimer.STOP, more_s=-0.5))[-1] == Finish(
        75,
        "rollout-0, rollout-1, actor: still running 105 s after the stop (launcher.stop_timeout_s); killed",
    )


def test_second_stop_ends_a_save_that_is_waited_for() -> None:
    supervisor = started_run()
    supervisor.handle(StopRequested(1))
    supervisor.handle(TimerExpired(RunTimer.STOP, more_s=75.0))
    assert supervisor.handle(StopRequested(2))[-1] == Finish(75, "stopped")


@pytest.mark.parametrize("timer", [RunTimer.START, RunTimer.STOP])
def test_deadlines_of_a_phase_that_is_over_mean_nothing(timer: RunTimer) -> None:
    supervisor = started_run()
    supervisor.handle(GangExited("actor", 1, "RuntimeError: no", 0, 10.0))
    assert supervisor.handle(TimerExpired(timer)) == []


def test_start_deadline_means_nothing_once_all_are_at_work() -> None:
    assert started_run().handle(TimerExpired(RunTimer.START)) == []


def test_service_that_does_not_leave_is_killed_and_the_run_is_done() -> None:
    supervisor = started_run()
    supervisor.handle(LastStepDone())
    leave(supervisor, "rollout-0", "rollout-1", "actor", "controller")
    assert supervisor.handle(TimerExpired(RunTimer.EXIT)) == [KillGang("storage-0"), Finish(0, "done")]


def test_rollout_that_outlives_an_actor_without_a_last_step_fails_the_run() -> None:
    supervisor = started_run()
    leave(supervisor, "actor", "rollout-0")
    finish = supervisor.handle(TimerExpired(RunTimer.STOP))[-1]
    assert isinstance(finish, Finish)
    assert finish.code == 1
    assert "rollout-1" in finish.message


def test_nothing_follows_the_end() -> None:
    supervisor = started_run()
    supervisor.handle(StopRequested(1))
    supervisor.handle(StopRequested(2))
    assert supervisor.handle(GangExited("actor", -9, "ended by SIGKILL")) == []
    assert supervisor.handle(StopRequested(3)) == []


def trained_run() -> Supervisor:
    """A run whose last step is trained and saved, while evaluators and a rollout are still there."""
    supervisor = started_run(*EVALUATORS)
    supervisor.handle(LastStepDone())
    assert leave(supervisor, "rollout-0") == []
    assert leave(supervisor, "actor") == EVALUATE
    return supervisor


def test_trained_run_waits_for_its_evaluators() -> None:
    supervisor = trained_run()
    assert leave(supervisor, "rollout-1", "evaluate-1") == []
    assert leave(supervisor, "evaluate-0") == [*STOP, *EXIT_IN_PEACE]
    assert leave(supervisor, "controller", "storage-0") == [Finish(0, "done")]


def test_rollouts_that_are_left_when_the_last_evaluator_ends_get_the_usual_deadline() -> None:
    supervisor = trained_run()
    assert leave(supervisor, *EVALUATORS) == STOP
    assert leave(supervisor, "rollout-1") == EXIT_IN_PEACE


def test_evaluators_that_have_left_are_not_waited_for() -> None:
    supervisor = started_run(*EVALUATORS)
    assert leave(supervisor, *EVALUATORS) == [], "they had nothing left to do"
    supervisor.handle(LastStepDone())
    assert leave(supervisor, "actor") == STOP


def test_evaluators_that_take_too_long_are_given_up_and_the_run_is_done() -> None:
    supervisor = trained_run()
    leave(supervisor, "rollout-1", "evaluate-0")
    assert supervisor.handle(TimerExpired(RunTimer.EVALUATE)) == STOP
    assert leave(supervisor, "evaluate-1") == EXIT_IN_PEACE
    why = "evaluate-1: not ready 600 s after the last step (evaluate.timeout_s); given up"
    assert leave(supervisor, "controller", "storage-0") == [Finish(0, why)]


def test_stuck_evaluators_are_killed_in_the_end() -> None:
    supervisor = trained_run()
    leave(supervisor, "rollout-1", "evaluate-0")
    supervisor.handle(TimerExpired(RunTimer.EVALUATE))
    *kills, finish = supervisor.handle(TimerExpired(RunTimer.STOP))
    assert KillGang("evaluate-1") in kills
    assert finish == Finish(0, "evaluate-1: still running 30 s after the stop (launcher.stop_timeout_s); killed")


def test_interrupted_run_does_not_wait_for_evaluators() -> None:
    supervisor = started_run(*EVALUATORS)
    assert supervisor.handle(StopRequested(1)) == STOP
    assert leave(supervisor, "rollout-0", "rollout-1", "actor") == []
    assert supervisor.handle(TimerExpired(RunTimer.EVALUATE)) == []
    assert leave(supervisor, *EVALUATORS) == EXIT_IN_PEACE
    assert leave(supervisor, "controller", "storage-0") == [Finish(75, "stopped")]


def test_stop_while_evaluators_work_gives_them_up() -> None:
    supervisor = trained_run()
    assert supervisor.handle(StopRequested(1)) == STOP
    assert leave(supervisor, "rollout-1", *EVALUATORS, "controller", "storage-0")[-1] == Finish(0, "done")


def test_failed_run_does_not_wait_for_evaluators() -> None:
    supervisor = started_run(*EVALUATORS)
    assert supervisor.handle(GangExited("rollout-1", 1, "ValueError: no", 0, 10.0)) == STOP
    supervisor.handle(LastStepDone())
    assert leave(supervisor, "actor") == []


def test_failed_evaluator_lets_the_actor_save() -> None:
    supervisor = started_run(*EVALUATORS)
    assert supervisor.handle(GangExited("evaluate-1", -9, "ended by SIGKILL", 0, 10.0)) == STOP
    last = leave(supervisor, "rollout-0", "rollout-1", "actor", "evaluate-0", "controller", "storage-0")
    assert last[-1] == Finish(1, "evaluate rank 1 failed: ended by SIGKILL")


def test_failure_of_an_evaluator_after_the_last_step_is_told() -> None:
    supervisor = trained_run()
    assert supervisor.handle(GangExited("evaluate-1", 1, "ValueError: no", 0, 10.0)) == STOP
    last = leave(supervisor, "rollout-1", "evaluate-0", "controller", "storage-0")
    assert last[-1] == Finish(1, "evaluate rank 1 failed: ValueError: no")
