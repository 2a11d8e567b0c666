"""What happens to the control state besides messages (events), and what its shell must do about it (instructions)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from asyncflow.errors import AsyncFlowError
from tq.messages import (
    AckLost,
    ClearPartition,
    CloseWriting,
    FetchRound,
    FetchRows,
    Join,
    Joined,
    LeaseGrant,
    LostRows,
    NoRows,
    OpenPartition,
    OutputsWritten,
    PublishVersion,
    RegisterUnit,
    Release,
    RowRecords,
    RowsAccepted,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
    Stop,
    TellLost,
    UnitAccepted,
    WatchLost,
)
from tq.refill import RemovalCause


@dataclass(frozen=True)
class OwnerGone:
    """A consumer's channel ended, or it was silent for too long."""

    owner: str


@dataclass(frozen=True)
class OwnerWrites:
    """A connected consumer puts these columns; `tq.messages.NEW_ROWS` stands for new rows."""

    owner: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Fenced:
    """A unit confirmed that late puts under void leases will be refused; its rows may be handed out again."""

    task: str
    token: int


@dataclass(frozen=True)
class DeadlinePassed:
    """A parked request waited long enough."""

    request: int


@dataclass(frozen=True)
class UnitGone:
    """A unit's channel ended; its rows wait for its return."""

    unit: str


@dataclass(frozen=True)
class UnitLost:
    """A unit did not return in time; its rows are lost. Ignored when it is up."""

    unit: str


@dataclass(frozen=True)
class RecoveryDeadline:
    """Give up the units and consumers that have not come back by now."""


@dataclass(frozen=True)
class RecalledFinished:
    """An earlier incarnation knew that all tasks are done with these rows (`ControlState.take_finished`)."""

    partition: int
    rows: Iterable[int]


@dataclass(frozen=True)
class RecalledLosses:
    """An earlier incarnation knew that these rows were lost with their unit (`ControlState.take_losses`)."""

    records: tuple[RowRecords, ...]


@dataclass(frozen=True)
class RecalledRemoved:
    """An earlier incarnation knew that a partition will never have these rows (`ControlState.removed_rows`)."""

    partition: int
    rows: Iterable[int]


@dataclass(frozen=True)
class TasksWrite:
    """Tasks were seen to write these columns, which this controller may not have heard: task -> columns."""

    outputs: Mapping[str, Iterable[str]]


@dataclass(frozen=True)
class DoneElsewhere:
    """Another controller knows that tasks were done with rows that are lost: task -> rows."""

    commits: dict[str, list[int]]


@dataclass(frozen=True)
class Answer:
    """Reply to a request; an error is a refusal."""

    request: int
    reply: LeaseGrant | NoRows | RowsAccepted | UnitAccepted | Joined | LostRows | AsyncFlowError


@dataclass(frozen=True)
class OrderFenceRows:
    """Tell a unit that leases of `rows` older than `token` are void, then report `Fenced`."""

    task: str
    token: int
    unit: str
    rows: tuple[int, ...]


@dataclass(frozen=True)
class OrderFenceTask:
    """Tell a unit that leases of the task older than `token` are void, except `alive`, then report `Fenced`.

    A unit that is away must hear it before its rows count as here.
    """

    task: str
    token: int
    unit: str
    alive: tuple[int, ...]


@dataclass(frozen=True)
class ForwardAck:
    """An ack of rows that were lost and put again since: give it to the units that have them now (`PutOutputs`)."""

    task: str
    token: int
    rows: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class OrderRemoveRows:
    """Tell the units to remove rows of dead-letter groups; they report `RowsRemoved`."""

    rows: dict[str, tuple[int, ...]]
    cause: RemovalCause


@dataclass(frozen=True)
class PutAgain:
    """These rows must be put again: some task still needs them."""

    rows: tuple[int, ...]


@dataclass(frozen=True)
class GroupRemoved:
    """A group of `num_rows` rows left its partition for good."""

    partition: int
    group: int
    num_rows: int
    cause: RemovalCause


@dataclass(frozen=True)
class RowsOfPartitionRemoved:
    """A partition will have fewer rows than declared: remember which ones it lacks (`ControlState.removed_rows`)."""

    partition: int


@dataclass(frozen=True)
class Cleared:
    """A partition has no rows any more and may begin anew: its finished rows need not be durable any longer."""

    partition: int


Instruction = (
    Answer
    | OrderFenceRows
    | OrderFenceTask
    | ForwardAck
    | OrderRemoveRows
    | PutAgain
    | GroupRemoved
    | RowsOfPartitionRemoved
    | Cleared
)
Event = (
    RowsCreated
    | RowsConfirmed
    | OutputsWritten
    | RowsRemoved
    | RegisterUnit
    | Join
    | OpenPartition
    | FetchRows
    | FetchRound
    | Release
    | AckLost
    | WatchLost
    | PublishVersion
    | ClearPartition
    | Stop
    | CloseWriting
    | OwnerGone
    | OwnerWrites
    | Fenced
    | DeadlinePassed
    | UnitGone
    | UnitLost
    | RecoveryDeadline
    | RecalledFinished
    | RecalledLosses
    | RecalledRemoved
    | TasksWrite
    | DoneElsewhere
    | TellLost
)
