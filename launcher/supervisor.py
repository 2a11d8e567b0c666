"""Decides how a run goes on when something happens to it: events in, instructions out. Pure: no clock, no sockets.

`launcher.job` feeds it and carries out what it says. A run moves through phases, only forwards:

    run ----------> stop ----> exit ----> Finish(0 done | 75 stopped, resumable | 1 failed)
     | '-> evaluate -^  |       ^  services leave
     |                  '- the actor saves
     '--------------------------'  the actor or a service failed: nobody can save, all leave at once

In `evaluate` the last step is saved, and held-out prompts are still answered: only a run that trained to its end is
there, and every other work gang leaves meanwhile. Work gangs leave in `stop`, services only in `exit`, when no work
gang is left.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from asyncflow.job import GangSpec
from workers.dataflow import OBSERVERS, SERVICES

TRAINERS = frozenset({"actor", "critic"})
EXIT_TIMEOUT_S = 5.0
"""How long processes may take to leave in phase `exit` after a failure, when nothing is saved any more (s)."""
EARLY_EXIT_TIMEOUT_S = 3.0
"""The same before all are at work: some may wait for the gang that failed, and would until their deadlines (s)."""

DONE, FAILED, RESUMABLE = 0, 1, 75
"""Exit codes of the command; 75 is EX_TEMPFAIL of sysexits.h, which Slurm's `RequeueExit` can name."""


class Phase(StrEnum):
    """Value of the store key `phase`, which every worker watches."""

    RUN = "run"
    EVALUATE = "evaluate"
    STOP = "stop"
    EXIT = "exit"


class Timer(StrEnum):
    """Deadlines that the supervisor asks for."""

    START = "start"
    EVALUATE = "evaluate"
    STOP = "stop"
    EXIT = "exit"


@dataclass(frozen=True)
class GangExited:
    """All processes of a gang are gone.

    Attributes:
        gang: its name.
        code: 0, the exit code of the rank that failed first, or minus the signal that ended it.
        error: the last error in one line, "" for code 0.
        rank: the rank that failed first.
        at: when it failed (unix time, s); tells a cause from its consequences in other gangs.
    """

    gang: str
    code: int
    error: str = ""
    rank: int = 0
    at: float = 0.0


@dataclass(frozen=True)
class AllReady:
    """Every rank of every gang reported that it is at work."""


@dataclass(frozen=True)
class LastStepDone:
    """The last step is trained and saved."""


@dataclass(frozen=True)
class StopRequested:
    """The user (Ctrl-C) or the scheduler asked to stop; `count` is how often so far."""

    count: int


@dataclass(frozen=True)
class DeadlinePassed:
    """A timer that was armed ran out; `detail` names who was waited for."""

    timer: Timer
    detail: str = ""


Event = GangExited | AllReady | LastStepDone | StopRequested | DeadlinePassed


@dataclass(frozen=True)
class SetPhase:
    """Tell every worker the phase."""

    phase: Phase


@dataclass(frozen=True)
class Arm:
    """Send `DeadlinePassed(timer)` after `seconds`."""

    timer: Timer
    seconds: float


@dataclass(frozen=True)
class KillGang:
    """SIGKILL every process of a gang."""

    gang: str


@dataclass(frozen=True)
class Finish:
    """End the command with `code`; `message` says why in one line."""

    code: int
    message: str


Instruction = SetPhase | Arm | KillGang | Finish


class Supervisor:
    """State of one run; see the module."""

    def __init__(
        self, gangs: Iterable[GangSpec], *, start_timeout_s: float, evaluate_timeout_s: float, stop_timeout_s: float
    ) -> None:
        self._gangs = {gang.name: gang for gang in gangs}
        self._left = dict.fromkeys(self._gangs)
        self._start_timeout_s = start_timeout_s
        self._evaluate_timeout_s = evaluate_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._phase = Phase.RUN
        self._failures: list[GangExited] = []
        self._all_ready = False
        self._last_step_done = False
        self._stop_requested = False
        self._finished = False
        self._complaint = ""

    def start(self) -> list[Instruction]:
        """Return the first instructions."""
        return [SetPhase(Phase.RUN), Arm(Timer.START, self._start_timeout_s)]

    def handle(self, event: Event) -> list[Instruction]:
        """Take in one event; after `Finish` nothing follows."""
        if self._finished:
            return []
        match event:
            case AllReady():
                self._all_ready = True
            case LastStepDone():
                self._last_step_done = True
            case GangExited():
                return self._exited(event)
            case StopRequested():
                return self._stop(event.count)
            case DeadlinePassed():
                return self._deadline(event)
        return []

    def _exited(self, event: GangExited) -> list[Instruction]:
        gang = self._gangs[event.gang]
        self._left.pop(event.gang, None)
        is_service = gang.role in SERVICES
        instructions: list[Instruction] = []
        if event.code != 0:
            self._failures.append(event)
            nobody_can_save = not self._all_ready or is_service or gang.role in TRAINERS
            instructions += self._enter(Phase.EXIT if nobody_can_save else Phase.STOP)
        elif is_service and self._phase is not Phase.EXIT:
            self._failures.append(GangExited(event.gang, 1, "it left while the run was going on", 0, event.at))
            instructions += self._enter(Phase.EXIT)
        elif gang.role in TRAINERS:
            instructions += self._enter(Phase.EVALUATE if self._last_step_done and self._observers() else Phase.STOP)
        elif self._phase is Phase.EVALUATE and not self._observers():
            instructions += self._enter(Phase.STOP)
        if all(self._gangs[name].role in SERVICES for name in self._left):
            instructions += self._enter(Phase.EXIT)
        return instructions if self._left else [*instructions, self._finish()]

    def _stop(self, count: int) -> list[Instruction]:
        self._stop_requested = True
        if not self._all_ready or count > 1:  # before all are at work there is nothing to save
            return self._kill_and_finish()
        return self._enter(Phase.STOP)

    def _deadline(self, event: DeadlinePassed) -> list[Instruction]:
        match event.timer:
            case Timer.START if not self._all_ready and self._phase is Phase.RUN:
                text = f"not at work {self._start_timeout_s:g} s after the start (launcher.start_timeout_s)"
                return self._kill_and_finish(f"{event.detail or 'a worker'}: {text}; see logs/")
            case Timer.EVALUATE if self._phase is Phase.EVALUATE:
                text = f"not ready {self._evaluate_timeout_s:g} s after the last step (evaluate.timeout_s); given up"
                self._complaint = f"{', '.join(self._observers())}: {text}"
                return self._enter(Phase.STOP)
            case Timer.STOP if self._phase is Phase.STOP:
                text = f"still running {self._stop_timeout_s:g} s after the stop (launcher.stop_timeout_s); killed"
                late = [name for name in self._left if self._gangs[name].role not in SERVICES]
                return self._kill_and_finish(f"{', '.join(late)}: {text}")
            case Timer.EXIT:
                return self._kill_and_finish()
        return []

    def _enter(self, phase: Phase) -> list[Instruction]:
        """Move forwards to `phase`; nothing when the run is there or beyond."""
        order = list(Phase)
        if order.index(phase) <= order.index(self._phase):
            return []
        self._phase = phase
        if phase is Phase.EVALUATE:
            return [SetPhase(phase), Arm(Timer.EVALUATE, self._evaluate_timeout_s)]
        if phase is Phase.STOP:
            return [SetPhase(phase), Arm(Timer.STOP, self._stop_timeout_s)]
        if not self._all_ready:
            timeout_s = EARLY_EXIT_TIMEOUT_S
        else:
            timeout_s = EXIT_TIMEOUT_S if self._failures else self._stop_timeout_s  # the last weights are exported
        return [SetPhase(phase), Arm(Timer.EXIT, min(timeout_s, self._stop_timeout_s))]

    def _observers(self) -> list[str]:
        """Return what is left of the gangs that nobody waits for until the training is over."""
        return [name for name in self._left if self._gangs[name].role in OBSERVERS]

    def _kill_and_finish(self, complaint: str = "") -> list[Instruction]:
        return [*(KillGang(name) for name in self._left), self._finish(complaint)]

    def _finish(self, complaint: str = "") -> Finish:
        self._finished = True
        complaint = complaint or self._complaint
        if self._failures:
            return Finish(FAILED, self._cause())
        if self._last_step_done:
            return Finish(DONE, complaint or "done")
        if self._stop_requested:
            return Finish(RESUMABLE, complaint or "stopped")
        return Finish(FAILED, complaint) if complaint else Finish(DONE, "done")

    def _cause(self) -> str:
        """Name the first failure. A signal comes before exceptions: those are often what its peers then raised."""
        first = min(self._failures, key=lambda failure: (failure.code >= 0, failure.at))
        gang = self._gangs[first.gang]
        others = len(self._failures) - 1
        more = f" (then {others} more gang{'s' if others > 1 else ''})" if others else ""
        return f"{gang.role} rank {gang.index * gang.num_ranks + first.rank} failed: {first.error}{more}"
