"""Decides how a run continues when something happens to it: events in, instructions out. Pure: no clock, no sockets.

`launcher.run.run_job` feeds it events and carries out its instructions. A run moves through phases, only forwards:

    run ----------> stop ----> exit ----> Finish(0 done | 75 stopped, resumable | 1 failed)
     | '-> evaluate -^  |       ^  services leave
     |                  '- the actor saves
     '--------------------------'  no rank can save, all leave at once

In `evaluate` the last step is saved and held-out prompts are still being answered: only a run that trained to its end
gets there, and every other work gang leaves meanwhile. Work gangs leave in `stop`. Services leave only in `exit`, when
no work gang is left.

A gang that fails while it should be at work starts again; one that was told to leave does not. The restart rules say
which gangs start again with it, and when failures are too frequent. A gang whose first two starts fail alike does not
get a third.

    rollout, ref, unit, ...   RestartBudget -> wait -> StartGang
    actor, or everything      KillGang of all that follow -> all gone -> Restore -> Restored -> StartGang of all
"""

import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from asyncflow.job import GangSpec
from launcher.process.run_events import (
    DONE,
    FAILED,
    RESUMABLE,
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
    RunDirLost,
    RunTimer,
    SetPhase,
    StartGang,
    StopRequested,
    TimerExpired,
)
from workers.settings.dataflow import CONTROLLER, OBSERVERS, SERVICES, STORAGE, TRAINERS

# Restart rules: which gangs start again together, how soon, and when to give up; and their record. Pure.
#
# a gang fails            itself, in place; the trainer: with all that follows its weights, from the last checkpoint
# again, and again        after 1, 2, 4 ... s
# `max_restarts` times    everything, from the last checkpoint
# also too often         nothing: the run ends
# twice alike, and it was never at work       nothing: it would fail again

FOLLOWERS = TRAINERS | OBSERVERS | {CONTROLLER, STORAGE, "actor_fwd"}
"""What starts again with the trainer, because it holds samples, columns or figures of discarded steps. Rollouts are
not among them: they drop their running responses and take the new lineage's weights."""
_QUEUE = frozenset({CONTROLLER, STORAGE})
"""With a separate critic role, the queue cannot simply be refilled after a loss: a response that the critic has seen
but the actor has not would reach the actor as a different one."""
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0


class Scope(StrEnum):
    """How much starts again."""

    GANG = "gang"
    """The failed gang and its followers."""
    ALL = "all"
    NONE = "none"
    """Nothing: it has failed too often."""


@dataclass(frozen=True)
class Restart:
    """What to do about a failure: `wait_s` is the delay (s), `count` the gang's failures within the window so far."""

    scope: Scope
    wait_s: float = 0.0
    count: int = 1


class RestartBudget:
    """Counts failures per gang and decides how much starts again.

    Args:
        max_restarts: a gang that fails more often within the window takes all others with it.
        max_global_restarts: restarts of everything allowed within the window.
        window_s: older failures do not count (s).
        clock: monotonic time (s).
    """

    def __init__(
        self,
        *,
        max_restarts: int,
        max_global_restarts: int,
        window_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_restarts = max_restarts
        self._max_global = max_global_restarts
        self._window_s = window_s
        self._clock = clock
        self._failures: defaultdict[str, deque[float]] = defaultdict(deque)
        self._globals: deque[float] = deque()

    def count_failure(self, gang: str) -> Restart:
        """Count a failure that just happened."""
        at = self._clock()
        mine = self._failures[gang]
        mine.append(at)
        self._drop_old_times(mine, at)
        count = len(mine)
        # The first restart comes at once; then the wait doubles.
        if count <= self._max_restarts:
            wait_s = 0.0 if count == 1 else min(_FIRST_WAIT_S * 2.0 ** (count - 2), _LONGEST_WAIT_S)
            return Restart(Scope.GANG, wait_s, count)
        self._drop_old_times(self._globals, at)
        if len(self._globals) >= self._max_global:
            return Restart(Scope.NONE, count=count)
        self._globals.append(at)
        # Everything starts again, so every gang gets a fresh budget.
        self._failures.clear()
        return Restart(Scope.ALL, count=count)

    def _drop_old_times(self, times: deque[float], now: float) -> None:
        while times and times[0] <= now - self._window_s:
            times.popleft()


class FirstStarts:
    """Tells which gangs fail alike at their first two starts: a gang that never worked would keep failing. Pure."""

    def __init__(self) -> None:
        self._worked: set[str] = set()
        self._failed_with: dict[str, tuple[int, str]] = {}

    def mark_worked(self, gang: str) -> None:
        """Record that all ranks of a gang are, or were, at work."""
        self._worked.add(gang)

    def fails_again(self, gang: str, code: int, error: str) -> bool:
        """Record a failure; return whether the gang has never worked and its previous start failed alike."""
        if gang in self._worked:
            return False
        # Ports, process ids and times differ between two starts.
        how = code, re.sub(r"\d+", "#", error)
        before, self._failed_with[gang] = self._failed_with.get(gang), how
        return before == how


def restarts_with(gang: GangSpec, gangs: Iterable[GangSpec], *, reference_follows: bool) -> tuple[str, ...]:
    """Return the names of the gangs that start again when `gang` fails.

    `reference_follows`: the reference's weights are earlier ones of the policy.
    """
    gangs = tuple(gangs)
    if gang.role not in TRAINERS and not (gang.role in _QUEUE and any(one.role == "critic" for one in gangs)):
        return (gang.name,)
    roles = FOLLOWERS | {"ref"} if reference_follows else FOLLOWERS
    return tuple(one.name for one in gangs if one.role in roles)


@dataclass
class RestartLog:
    """What failed and what was started again since this start of the command, for `asyncflow status`.

    Attributes:
        gangs: gang -> restarts.
        restores: how often the run went back to a checkpoint.
        last_error: the last failure and what follows from it; "" if there was none.
        last_error_at: unix time (s).
    """

    gangs: Counter[str] = field(default_factory=Counter)
    lineage: int = 0
    restores: int = 0
    last_error: str = ""
    last_error_at: float = 0.0

    def started_again(self, gang: str) -> None:
        self.gangs[gang] += 1

    def count_restore(self, lineage: int) -> None:
        """Count a return to a checkpoint."""
        self.restores += 1
        self.lineage = lineage

    def record_failure(self, text: str) -> None:
        self.last_error, self.last_error_at = text, time.time()

    @staticmethod
    def from_summary(fields: Mapping[str, Any]) -> "RestartLog":
        return RestartLog(**{**fields, "gangs": Counter(fields["gangs"])})

    def to_summary(self) -> dict[str, Any]:
        """Return the fields in a form that JSON can hold."""
        return {**vars(self), "gangs": dict(self.gangs)}


EXIT_TIMEOUT_S = 5.0
"""How long processes may take to leave in phase `exit` after a failure, when nothing more is saved (s)."""
EARLY_EXIT_TIMEOUT_S = 3.0
"""The same before all are at work: some may wait for the failed gang, and would until their own deadlines (s)."""
STACKS_TIMEOUT_S = 1.0
"""How long processes have to write their stacks before a stuck gang is killed (s)."""


class Supervisor:
    """State of one run; see the module.

    Args:
        start_timeout_s, max_start_s, evaluate_timeout_s, stop_timeout_s: see `launcher` and `evaluate` in the
            configuration.
        start_timeout_key: the setting that the first comes from.
        reference_follows: the reference's weights are earlier ones of the policy.
        external: gangs that the user starts, so the launcher cannot restart them.
    """

    def __init__(
        self,
        gangs: Iterable[GangSpec],
        *,
        restarts: RestartBudget,
        start_timeout_s: float,
        max_start_s: float,
        evaluate_timeout_s: float,
        stop_timeout_s: float,
        start_timeout_key: str = "launcher.start_timeout_s",
        reference_follows: bool = False,
        external: Collection[str] = (),
    ) -> None:
        self._gangs = {gang.name: gang for gang in gangs}
        self._restarts = restarts
        self._start_timeout_s = start_timeout_s
        self._start_timeout_key = start_timeout_key
        self._max_start_s = max_start_s
        self._start_s = min(start_timeout_s, max_start_s)  # that the start has been given
        self._evaluate_timeout_s = evaluate_timeout_s
        self._stop_timeout_s = self._stop_s = stop_timeout_s
        self._reference_follows = reference_follows
        self._external = frozenset(external)
        self._phase = Phase.RUN
        self._running = dict.fromkeys(self._gangs)
        self._attempts = dict.fromkeys(self._gangs, 0)
        self._waiting: set[str] = set()
        self._restoring: dict[str, None] = {}
        self._stuck: dict[str, RankStuck] = {}
        self._failures: list[GangExited] = []
        self._first_starts = FirstStarts()
        self._last_failure = ""
        self._all_ready = False
        self._last_step_done = False
        self._stop_requested = False
        self._lost_node = ""
        self._finished = False
        self._complaint = ""

    @property
    def pending(self) -> frozenset[str]:
        """Gangs that are about to start again."""
        return frozenset(self._waiting | self._restoring.keys())

    def start(self) -> list[Instruction]:
        """Return the first instructions; the caller starts every gang with attempt 0."""
        return [SetPhase(Phase.RUN), Arm(RunTimer.START, self._start_s)]

    def handle(self, event: Event) -> list[Instruction]:
        """Take in one event and return the instructions that follow; none after `Finish`."""
        if self._finished:
            return []
        match event:
            case AtWork():
                self._first_starts.mark_worked(event.gang)
            case AllReady():
                self._all_ready = True
            case LastStepDone():
                self._last_step_done = True
            case GangExited():
                return self._handle_exit(event)
            case RankStuck():
                return self._found_stuck(event)
            case NodeLost():
                # A lost node ends the run resumably: its devices are part of the configuration, and only a scheduler
                # gives new ones.
                self._lost_node = event.node
                return self._enter_phase(Phase.EXIT)
            case RunDirLost():
                self._finished = True
                text = f"run directory {event.path} was removed or moved, so nothing can be recorded any more"
                return [*(KillGang(name) for name in self._running), Finish(FAILED, text)]
            case StopRequested():
                return self._handle_stop(event.count)
            case Restored():
                return self._handle_restored(event)
            case RestoreFailed():
                return self._give_up(GangExited("actor", FAILED, event.error))
            case TimerExpired():
                return self._handle_deadline(event)
        return []

    def _handle_exit(self, event: GangExited) -> list[Instruction]:
        gang = self._gangs[event.gang]
        self._running.pop(event.gang, None)
        stuck = self._stuck.pop(event.gang, None)
        # Killed by us for being stuck: report why it was stuck instead of the signal.
        if stuck is not None and event.code < 0:
            event = GangExited(event.gang, event.code, stuck.why, stuck.rank, event.at)
        # Part of a restore: whatever its exit code, it starts again with the others.
        if event.gang in self._restoring:
            return self._restore_if_all_are_gone()
        if self._was_told_to_leave(gang):
            return self._handle_leave(gang, event)
        # A service has no reason to leave by itself.
        if event.code == 0 and gang.role in SERVICES:
            event = GangExited(event.gang, FAILED, "it left during the run", 0, event.at)
        return self._handle_leave(gang, event) if event.code == 0 else self._handle_failure(gang, event)

    def _was_told_to_leave(self, gang: GangSpec) -> bool:
        if gang.role in SERVICES:
            return self._phase is Phase.EXIT
        leaving = self._phase in (Phase.STOP, Phase.EXIT) or self._last_step_done
        return leaving and not (self._phase is Phase.EVALUATE and gang.role in OBSERVERS)

    def _handle_leave(self, gang: GangSpec, event: GangExited) -> list[Instruction]:
        """A gang is gone for good."""
        instructions: list[Instruction] = []
        if event.code != 0:
            self._record_complaint(event)
        # Nobody is left to save, so everything leaves at once.
        if gang.role in TRAINERS and event.code != 0 and not self._last_step_done:
            instructions += self._enter_phase(Phase.EXIT)
        elif gang.role in TRAINERS:
            instructions += self._enter_phase(
                Phase.EVALUATE if self._last_step_done and self._remaining_observers() else Phase.STOP
            )
        elif self._phase is Phase.EVALUATE and not self._remaining_observers():
            instructions += self._enter_phase(Phase.STOP)
        return instructions + self._after_leaving()

    def _after_leaving(self) -> list[Instruction]:
        """Services leave after the last work gang; the run ends after the last service."""
        instructions: list[Instruction] = []
        if not self.pending and all(self._gangs[name].role in SERVICES for name in self._running):
            instructions += self._enter_phase(Phase.EXIT)
        return instructions if self._running or self.pending else [*instructions, self._finish_run()]

    def _record_complaint(self, event: GangExited) -> None:
        gang = self._gangs[event.gang]
        # What a trainer could not save makes the run fail, unless a signal killed it.
        if self._failures or (gang.role in TRAINERS and event.code > 0 and not self._last_step_done):
            self._failures.append(event)
        elif self._phase is not Phase.EXIT:
            self._complaint = self._complaint or f"{self._rank_name(event)} failed while it left: {event.error}"

    def _handle_failure(self, gang: GangSpec, event: GangExited) -> list[Instruction]:
        """A gang that should be at work failed."""
        self._last_failure = f"{self._rank_name(event)} failed: {event.error}"
        never_worked = not self._all_ready and event.code > 0
        if self._first_starts.fails_again(gang.name, event.code, event.error):
            never_worked, event = True, replace(event, error=f"{event.error} (at both of its starts, before it worked)")
        restart = self._restarts.count_failure(gang.name)
        names = restarts_with(gang, self._gangs.values(), reference_follows=self._reference_follows)
        if restart.scope is Scope.ALL:
            names = tuple(self._gangs)
        # After a missed deadline another rank may be stuck: its stacks show where.
        dump: list[Instruction] = [DumpStacks()] if event.deadline else []
        # A gang that the user starts cannot be restarted from here.
        if event.final or never_worked or restart.scope is Scope.NONE or self._external.intersection(names):
            return [*dump, *self._give_up(event)]
        goes_back = gang.role in TRAINERS or len(names) > 1
        note = Note(f"{self._last_failure}; {_remedy(restart, goes_back=goes_back)}", failure=True)
        if goes_back:
            return [*dump, note, *self._begin_restore(names)]
        self._waiting.add(gang.name)
        return [*dump, note, Arm(RunTimer.RESTART, restart.wait_s, gang.name)]

    def _begin_restore(self, names: Iterable[str]) -> list[Instruction]:
        """End these gangs; once all are gone, the run goes back to its last checkpoint and they start again."""
        new = [name for name in names if name not in self._restoring]
        self._restoring |= dict.fromkeys(new)
        self._waiting.difference_update(new)
        kills = [KillGang(name) for name in new if name in self._running]
        return [*kills, *self._restore_if_all_are_gone()]

    def _restore_if_all_are_gone(self) -> list[Instruction]:
        # Files are cut back only when nobody writes them any more.
        if self._restoring.keys() & self._running.keys():
            return []
        if self._phase is Phase.RUN:
            return [Restore()]
        self._restoring.clear()  # a stop came meanwhile: the run ends with what was last saved
        return self._after_leaving()

    def _handle_restored(self, event: Restored) -> list[Instruction]:
        names = [name for name in self._gangs if name in self._restoring]
        self._restoring.clear()
        note = Note(f"continuing from step {event.step} (lineage {event.lineage})")
        return [note, *(start for name in names for start in self._start_again(name))]

    def _start_again(self, name: str) -> list[Instruction]:
        self._attempts[name] += 1
        self._running[name] = None
        return [StartGang(name, self._attempts[name])]

    def _found_stuck(self, event: RankStuck) -> list[Instruction]:
        """Have all processes write their stacks, and kill the gang a moment later."""
        if event.gang in self._stuck or event.gang not in self._running:
            return []
        self._stuck[event.gang] = event
        return [DumpStacks(), Arm(RunTimer.KILL, STACKS_TIMEOUT_S, event.gang)]

    def _handle_stop(self, count: int) -> list[Instruction]:
        self._stop_requested = True
        # Before all are at work there is nothing to save, and ranks may wait where nothing can interrupt them.
        if not self._all_ready or count > 1:
            return self._kill_and_finish()
        return self._enter_phase(Phase.STOP)

    def _give_up(self, event: GangExited) -> list[Instruction]:
        """Let the run fail; the trained steps are saved if the trainer is still there."""
        self._failures.append(event)
        gang = self._gangs[event.gang]
        self._running.pop(event.gang, None)
        # Saving needs the trainer and every service.
        can_save = self._all_ready and gang.role not in SERVICES | TRAINERS
        return [*self._enter_phase(Phase.STOP if can_save else Phase.EXIT), *self._after_leaving()]

    def _handle_deadline(self, event: TimerExpired) -> list[Instruction]:
        match event.timer:
            case RunTimer.RESTART if event.gang in self._waiting:
                self._waiting.discard(event.gang)
                return self._start_again(event.gang)
            case RunTimer.KILL if event.gang in self._stuck:
                return [KillGang(event.gang)]
            case RunTimer.START if not self._all_ready and self._phase is Phase.RUN:
                more_s = min(event.more_s, self._max_start_s - self._start_s)
                if more_s > 0:
                    self._start_s += more_s
                    return [Arm(RunTimer.START, more_s)]
                text = f"no progress for {self._start_timeout_s:g} s of its start ({self._start_timeout_key})"
                if event.more_s > 0:
                    text = f"still starting after {self._max_start_s:g} s (launcher.max_start_s)"
                cause = f"the last failure: {self._last_failure}" if self._last_failure else "see logs/"
                return self._kill_and_finish(f"{event.detail or 'a worker'}: {text}; {cause}")
            case RunTimer.EVALUATE if self._phase is Phase.EVALUATE:
                text = f"not ready {self._evaluate_timeout_s:g} s after the last step (evaluate.timeout_s); given up"
                self._complaint = f"{', '.join(self._remaining_observers())}: {text}"
                return self._enter_phase(Phase.STOP)
            case RunTimer.STOP if self._phase is Phase.STOP and event.more_s > 0:
                return self._extend_stop(event.more_s)
            case RunTimer.STOP if self._phase is Phase.STOP:
                text = f"still running {self._stop_s:g} s after the stop (launcher.stop_timeout_s); killed"
                late = [name for name in self._running if self._gangs[name].role not in SERVICES]
                return self._kill_and_finish(f"{', '.join(late)}: {text}")
            case RunTimer.EXIT:
                return self._kill_and_finish()
        return []

    def _extend_stop(self, more_s: float) -> list[Instruction]:
        """Wait on for a checkpoint that is being written; what is killed now would be lost."""
        first = self._stop_s == self._stop_timeout_s
        seconds = min(self._stop_timeout_s, more_s)
        self._stop_s += seconds
        note = Note("still saving the last completed step; the stop waits for it (Ctrl-C again: at once)")
        return [*([note] if first else []), Arm(RunTimer.STOP, seconds)]

    def _enter_phase(self, phase: Phase) -> list[Instruction]:
        """Move forwards to `phase`; do nothing if the run is there or beyond."""
        order = list(Phase)
        if order.index(phase) <= order.index(self._phase):
            return []
        self._phase = phase
        if phase is Phase.EVALUATE:
            return [SetPhase(phase), Arm(RunTimer.EVALUATE, self._evaluate_timeout_s)]
        # Gangs that wait for a restart stay down, except services, which still start again in `stop`.
        self._waiting = {name for name in self._waiting if phase is Phase.STOP and self._gangs[name].role in SERVICES}
        self._restoring = {name: None for name in self._restoring if name in self._running}
        if phase is Phase.STOP:
            return [SetPhase(phase), Arm(RunTimer.STOP, self._stop_timeout_s)]
        if not self._all_ready:
            timeout_s = EARLY_EXIT_TIMEOUT_S
        else:
            failed = self._failures or self._lost_node
            timeout_s = EXIT_TIMEOUT_S if failed else self._stop_timeout_s  # long enough to export the last weights
        return [SetPhase(phase), Arm(RunTimer.EXIT, min(timeout_s, self._stop_timeout_s))]

    def _remaining_observers(self) -> list[str]:
        """Return the remaining evaluators; the run waits for them only after the training is over."""
        return [name for name in self._gangs if self._gangs[name].role in OBSERVERS and self._is_left(name)]

    def _is_left(self, name: str) -> bool:
        return name in self._running or name in self._waiting

    def _kill_and_finish(self, complaint: str = "") -> list[Instruction]:
        return [*(KillGang(name) for name in self._running), self._finish_run(complaint)]

    def _finish_run(self, complaint: str = "") -> Finish:
        self._finished = True
        complaint = complaint or self._complaint
        if self._failures:
            return Finish(FAILED, self._describe_cause())
        if self._last_step_done:
            return Finish(DONE, complaint or "done")
        if self._lost_node:
            return Finish(RESUMABLE, f"{self._lost_node} is gone, and its processes with it")
        if self._stop_requested:
            return Finish(RESUMABLE, complaint or "stopped")
        return Finish(FAILED, complaint) if complaint else Finish(DONE, "done")

    def _describe_cause(self) -> str:
        """Return the first failure, and how many others followed."""
        first = min(self._failures, key=GangExited.failure_precedence)
        others = len(self._failures) - 1
        more = f" (then {others} more gang{'s' if others > 1 else ''})" if others else ""
        return f"{self._rank_name(first)} failed: {first.error}{more}"

    def _rank_name(self, event: GangExited) -> str:
        gang = self._gangs[event.gang]
        return f"{gang.role} rank {gang.rank_in_role(event.rank)}"


def _remedy(restart: Restart, *, goes_back: bool) -> str:
    if restart.scope is Scope.ALL:
        return f"that was number {restart.count}, so everything starts again from the last checkpoint"
    if goes_back:
        return "it starts again from the last checkpoint"
    return "it starts again" + (f" in {restart.wait_s:g} s" if restart.wait_s else "")
