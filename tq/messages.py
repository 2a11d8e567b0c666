"""Everything that the queue's processes say to each other. Typed, size-limited msgpack; never pickle."""

from enum import StrEnum

import msgspec

from tq.wire import ColumnHeader


class Message(msgspec.Struct, tag=True):
    """Base of all messages; the class name is the tag."""


class Done(Message):
    """Carried out."""


# Requests to a storage unit


class PutRows(Message):
    """New rows with their first columns (a source's put; it needs no lease).

    `rows`, `groups` are parallel; `partition` is the step they belong to.
    """

    partition: int
    rows: list[int]
    groups: list[int]
    columns: list[ColumnHeader]


class PutOutputs(Message):
    """All output columns of some rows of a lease, as one atom; `columns` may be empty (a plain ack).

    `owner` and `token` are the lease's. The same put twice is a no-op.
    """

    task: str
    owner: str
    token: int
    rows: list[int]
    columns: list[ColumnHeader]


class GetColumns(Message):
    """Read columns of rows; answered by `Columns` in the order of `rows`."""

    rows: list[int]
    columns: list[str]


class FenceRows(Message):
    """From the controller: leases of these rows with a token below `token` are void from now on."""

    task: str
    token: int
    rows: list[int]


class DropRows(Message):
    """From the controller: every task is done with these rows."""

    rows: list[int]


class GetUnitStats(Message):
    """Answered by `UnitStats`."""


# Replies of a storage unit


class Columns(Message):
    """The columns asked for; values in the payload."""

    columns: list[ColumnHeader]


class UnitStats(Message):
    """What a unit holds."""

    num_rows: int
    num_bytes: int


# Requests to the controller


class RowsCreated(Message):
    """From a unit: new rows exist here; `columns` are written."""

    unit: str
    partition: int
    rows: list[int]
    groups: list[int]
    columns: list[str]


class OutputsWritten(Message):
    """From a unit: a task's outputs for these rows were committed under `token`; the task is done with them."""

    task: str
    token: int
    rows: list[int]
    columns: list[str]


class OpenPartition(Message):
    """Declare how many rows a partition will have."""

    partition: int
    num_rows: int


class FetchRows(Message):
    """Lease up to `num_rows` ready rows of `task`; parks until some are ready.

    Attributes:
        owner: the consumer; one channel serves one owner.
        version: newest weights that this consumer holds; only matters to version-gated tasks.
        timeout_s: after this, answered by `NoRows(deadline)`.
    """

    task: str
    owner: str
    num_rows: int
    version: int
    timeout_s: float


class FetchRound(Message):
    """Lease one rank's share of round `round_index` of a partition: every rank of the gang asks for every round.

    Attributes:
        num_rows: rows per rank in a full round.
        rank, num_ranks: of the data-parallel gang.
    """

    task: str
    owner: str
    partition: int
    round_index: int
    num_rows: int
    rank: int
    num_ranks: int
    timeout_s: float


class PublishVersion(Message):
    """From the actor: weights of `step` exist; wakes version-gated requests and admits what that allows."""

    step: int


class Stop(Message):
    """Answer all parked and later fetches with `NoRows(stop)`."""


class GetQueueStats(Message):
    """Answered by `QueueStats`."""


# Replies of the controller


class Granted(Message):
    """A lease.

    Attributes:
        token: names it.
        partition: the step of its rows.
        rows, groups, units: parallel; `units` says where each row is.
        round_rows: most rows that any rank has in this round (rounds only), so that ranks make equally many
            micro-batches.
        last: no rows of this partition will follow (rounds only).
    """

    token: int
    partition: int
    rows: list[int]
    groups: list[int]
    units: list[str]
    round_rows: int = 0
    last: bool = False


class NoRowsReason(StrEnum):
    """Why a fetch ended without rows."""

    DEADLINE = "deadline"
    NEWER_VERSION = "newer_version"
    PARTITION_DONE = "partition_done"
    STOP = "stop"


class NoRows(Message):
    """No lease; `newest_version` is the newest that was published."""

    reason: NoRowsReason
    newest_version: int


class TaskStats(Message):
    """Counts of one task's rows."""

    task: str
    waiting: int
    ready: int
    leased: int
    done: int
    parked_requests: int


class QueueStats(Message):
    """What the controller knows."""

    tasks: list[TaskStats]
    live_rows: int
    newest_version: int
    admitted_groups: int


UNIT_REQUESTS = PutRows | PutOutputs | GetColumns | FenceRows | DropRows | GetUnitStats
UNIT_REPLIES = Done | Columns | UnitStats
CONTROLLER_REQUESTS = (
    RowsCreated | OutputsWritten | OpenPartition | FetchRows | FetchRound | PublishVersion | Stop | GetQueueStats
)
CONTROLLER_REPLIES = Done | Granted | NoRows | QueueStats
