"""Requests to a storage unit, and its replies."""

from collections.abc import Iterator

import msgspec

from tq.messages.to_controllers import Done, Message, RowRecords
from tq.refill import UNKNOWN, RemovalCause
from tq.wire import ColumnHeader


class PutRows(Message):
    """New rows with their first columns (a source's put; it needs no lease). -> `Stored`."""

    partition: int  # the step that the rows belong to
    # `rows`, `groups`: parallel.
    rows: list[int]
    groups: list[int]
    columns: list[ColumnHeader]  # description of the payload
    group_size: int = 0  # rows of each group, in this put and others; 0: the groups are complete in this put
    timeout_s: float = 60.0  # how long the put may wait for room (backpressure)
    # Task -> positions in `rows` that the task is already done with (a restored snapshot).
    commits: dict[str, list[int]] = {}


class PutOutputs(Message):
    """All output columns of some rows of a lease, atomically; none for a plain ack. Repeatable. -> `Stored`."""

    task: str
    token: int
    rows: list[int]
    columns: list[ColumnHeader]


class GetColumns(Message):
    """Read columns of rows. -> `Columns`, in the order of `rows`."""

    rows: list[int]
    columns: list[str]


class ListRows(Message):
    """List the rows that are here: of `rows`, of `partition`, or of both; None: all. -> `RowList`."""

    rows: list[int] | None
    partition: int | None


class ClearRows(Message):
    """Remove rows, whatever their leases; skips those that only wait for a checkpoint. -> `RowList` of the others."""

    rows: list[int]


class FenceRows(Message):
    """From a controller: leases of these rows with a token below `token` are void from now on."""

    task: str
    token: int
    rows: list[int]


class FenceTask(Message):
    """From a restarted controller: all leases of `task` with a token below `token` are void, except those `alive`."""

    task: str
    token: int
    alive: list[int]


class RemoveRows(Message):
    """From a controller: a task failed too often on the group of these rows; remove them from the queue."""

    rows: list[int]
    cause: RemovalCause = UNKNOWN


class ClearPartition(Message):
    """Remove all rows of a partition; leases on them are void.

    Controllers hear last: the rows may come anew, and a controller that was away could take finished ones for repeated.
    """

    partition: int


class ReleaseCheckpointed(Message):
    """A durable checkpoint covers partitions up to and including `step`: their trained rows may go.

    Controllers hear first, and remember which rows are finished: units forget that, too.
    """

    step: int


class HoldPuts(Message):
    """Let puts wait, so that all units can be cut at one moment; ends by itself after `timeout_s`."""

    hold: str
    timeout_s: float


class CutSnapshot(Message):
    """Under a hold: note the rows that are here now; the hold ends."""

    hold: str
    # Leave out rows of this partition and earlier ones.
    after_partition: int
    # Store the acks of these tasks as not given.
    forget_acks_of: list[str]


class WriteSnapshot(Message):
    """Write what was cut into `directory` (exists, shared by all units). -> `SnapshotWritten`."""

    hold: str
    directory: str


class GetUnitStats(Message):
    """-> `UnitStats`."""


class Stored(Message):
    """The put is in and known to every controller; `num_bytes` is what the unit holds now."""

    num_bytes: int


class Columns(Message):
    """The requested columns; values in the payload."""

    columns: list[ColumnHeader]


class RowList(Message):
    """Rows of a unit that the controllers know."""

    records: list[RowRecords]


class RowInfo(msgspec.Struct, frozen=True):
    """What `QueueClient.list_rows` says about a row.

    Attributes:
        unit: where it is.
        columns: written so far.
        done: tasks that are done with it.
        tokens: its length in tokens.
        num_bytes: of its values.
    """

    index: int
    group: int
    partition: int
    unit: str
    columns: tuple[str, ...]
    done: tuple[str, ...]
    tokens: int
    num_bytes: int

    @staticmethod
    def of(record: RowRecords, unit: str) -> "Iterator[RowInfo]":
        """Yield one for each row of a record."""
        shared = record.partition, unit, tuple(record.columns), tuple(record.done)
        for row, group, tokens, num_bytes in zip(
            record.rows, record.groups, record.tokens, record.num_bytes, strict=True
        ):
            yield RowInfo(row, group, *shared, tokens, num_bytes)


class SnapshotWritten(Message):
    files: list[str]
    num_rows: int
    num_bytes: int


class UnitStats(Message):
    """What a unit holds and did.

    Attributes:
        num_rows, num_bytes: all rows here; bytes really held, also by rows that are half gone.
        retained_rows, retained_bytes: those of them that only wait for a checkpoint.
        spilled_bytes: retained bytes that are on disk.
        puts, gets, bytes_in, bytes_out: since the start.
        shared_channels, wire_channels: clients whose payloads come through shared memory, and over the wire.
        backend: where values are kept.
    """

    num_rows: int
    num_bytes: int
    retained_rows: int = 0
    retained_bytes: int = 0
    spilled_bytes: int = 0
    puts: int = 0
    gets: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    shared_channels: int = 0
    wire_channels: int = 0
    backend: str = "memory"


UNIT_REQUESTS = (
    PutRows
    | PutOutputs
    | GetColumns
    | ListRows
    | ClearRows
    | FenceRows
    | FenceTask
    | RemoveRows
    | ClearPartition
    | ReleaseCheckpointed
    | HoldPuts
    | CutSnapshot
    | WriteSnapshot
    | GetUnitStats
)
UNIT_REPLIES = Done | Stored | Columns | RowList | SnapshotWritten | UnitStats
