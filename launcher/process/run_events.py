"""The data between `launcher.run.supervisor` and its shell: events go in, instructions come out. No decisions."""

from dataclasses import dataclass
from enum import StrEnum

from launcher.process.device_turn import TurnEvent

# Exit codes of the command. USAGE: refused input; 75 is EX_TEMPFAIL of sysexits.h.
DONE, FAILED, USAGE, RESUMABLE = 0, 1, 2, 75


class Phase(StrEnum):
    """The value of the store key `phase`, which every worker watches."""

    RUN = "run"
    EVALUATE = "evaluate"
    STOP = "stop"
    EXIT = "exit"


class RunTimer(StrEnum):
    START = "start"
    EVALUATE = "evaluate"
    STOP = "stop"
    EXIT = "exit"
    RESTART = "restart"
    KILL = "kill"


@dataclass(frozen=True)
class GangExited:
    """All processes of a gang are gone.

    Attributes:
        code: 0, the exit code of the rank that failed first, or minus the signal that ended it.
        error: the last error in one line; "" for code 0.
        rank: the rank that failed first.
        at: when it failed (unix time, s); tells a cause from its consequences in other gangs.
        final: another start would fail in the same way.
        deadline: the error is a deadline that passed, so another rank may be stuck.
        ordered: the launcher ended it, which nothing of its own had.
    """

    gang: str
    code: int
    error: str = ""
    rank: int = 0
    at: float = 0.0
    final: bool = False
    deadline: bool = False
    ordered: bool = False

    def failure_precedence(self) -> tuple[bool, float]:
        """Sort key that puts the cause first: a signal before the errors that peers of the lost rank then raise."""
        return self.code >= 0, self.at


@dataclass(frozen=True)
class RankStuck:
    """A rank is alive but makes no progress; `why` says on what and for how long."""

    gang: str
    rank: int
    why: str


@dataclass(frozen=True)
class NodeLost:
    """The launcher of another node is gone or silent, and with it everything that ran there."""

    node: str


@dataclass(frozen=True)
class RunDirLost:
    """The run's directory was removed or moved: nothing can be recorded or saved anymore."""

    path: str


@dataclass(frozen=True)
class AtWork:
    """Every rank of a gang reported that it is at work."""

    gang: str


@dataclass(frozen=True)
class AllReady:
    """Every rank of every gang reported that it is at work."""


@dataclass(frozen=True)
class LastStepDone:
    """The last step is trained and saved."""


@dataclass(frozen=True)
class StopRequested:
    """The user (Ctrl-C) or the scheduler asked to stop; `count` is the number of requests so far."""

    count: int


@dataclass(frozen=True)
class Restored:
    """The run's files are back at `step`; `lineage` is the new one."""

    step: int
    lineage: int


@dataclass(frozen=True)
class RestoreFailed:
    """No checkpoint can be restored; `error` says why in one line."""

    error: str


@dataclass(frozen=True)
class TimerExpired:
    """An armed timer ran out.

    Attributes:
        detail: the ranks that were awaited.
        more_s: how much longer may be waited, because what is awaited makes progress (s).
    """

    timer: RunTimer
    detail: str = ""
    gang: str = ""
    more_s: float = 0.0


Event = (
    GangExited
    | RankStuck
    | NodeLost
    | RunDirLost
    | AtWork
    | AllReady
    | LastStepDone
    | StopRequested
    | Restored
    | RestoreFailed
    | TimerExpired
    | TurnEvent
)


@dataclass(frozen=True)
class SetPhase:
    """Tell every worker the phase."""

    phase: Phase


@dataclass(frozen=True)
class Arm:
    """Send `TimerExpired(timer, gang=gang)` after `seconds`; arming a timer again restarts it."""

    timer: RunTimer
    seconds: float
    gang: str = ""


@dataclass(frozen=True)
class StartGang:
    """Start all ranks of a gang again; `attempt` counts its starts from 0."""

    gang: str
    attempt: int


@dataclass(frozen=True)
class KillGang:
    """SIGKILL every process of a gang."""

    gang: str


@dataclass(frozen=True)
class DumpStacks:
    """Have every process write its threads' stacks into its log."""


@dataclass(frozen=True)
class Restore:
    """Take the run's files back to the newest valid checkpoint, as the next lineage; answered by an event."""


@dataclass(frozen=True)
class Note:
    """A line for the user; `failure`: it reports a failure."""

    text: str
    failure: bool = False


@dataclass(frozen=True)
class Finish:
    """End the command with `code`; `message` says why in one line."""

    code: int
    message: str


Instruction = SetPhase | Arm | StartGang | KillGang | DumpStacks | Restore | Note | Finish
