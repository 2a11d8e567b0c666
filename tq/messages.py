"""Everything that the queue's processes say to each other. Typed, size-limited msgpack; never pickle.

    client -> unit              PutRows PutOutputs GetColumns ClearPartition ReleaseCheckpointed HoldPuts ...
    unit -> every controller    RegisterUnit RowsCreated RowsConfirmed OutputsWritten RowsRemoved
    client -> controller        Join Heartbeat FetchRows FetchRound Release OpenPartition PublishVersion Stop ...
    controller -> unit          FenceRows FenceTask RemoveRows PutOutputs (an ack of rows that were lost)
    controller -> controller    TellLost

Fields named alike in parallel lists (`rows`, `groups`, `units`, `tokens`) belong together by position.
"""

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from asyncflow.errors import PeerRefused
from tq.refill import UNKNOWN, Refill, RemovalCause
from tq.wire import ColumnHeader


class Message(msgspec.Struct, tag=True):
    """Base of all messages; the class name is the tag."""


# Version of the messages between the queue's processes; raised by every change that an older process would misread.
FORMAT = 3


class Introduction(Message, kw_only=True):
    """First message of a process on a channel to a controller; says its message format."""

    format: int = FORMAT

    def check_format(self, sender: str) -> None:
        """Raise PeerRefused if the process speaks another format."""
        if self.format != FORMAT:
            raise PeerRefused(
                f"{sender} speaks format {self.format} of the queue's messages, this controller format {FORMAT}; "
                f"install the same version of AsyncFlow for both"
            )


class Done(Message):
    """The request succeeded and has no result."""


# What storage units tell every controller, what clients ask one controller, and what controllers tell each other.


class RowRecords(msgspec.Struct):
    """Rows of an inventory that have the same partition, columns and finished tasks."""

    partition: int
    # `rows`, `groups`, `group_sizes`, `tokens`, `num_bytes`: parallel.
    rows: list[int]
    groups: list[int]
    group_sizes: list[int]
    tokens: list[int]
    num_bytes: list[int]
    columns: list[str]  # written in all of the rows
    done: list[str]  # tasks that committed
    deliveries: dict[str, list[int]] = {}  # task -> how often each row was released, parallel to `rows`; absent: never
    announced: bool = False  # not every controller has agreed to the rows yet; `RowsConfirmed` or `RowsRemoved` follows

    def append(self, number: int, *, group: int, group_size: int, tokens: int, num_bytes: int) -> None:
        """Add a row; the caller updates `deliveries`."""
        self.rows.append(number)
        self.groups.append(group)
        self.group_sizes.append(group_size)
        self.tokens.append(tokens)
        self.num_bytes.append(num_bytes)


class RemovalReason(StrEnum):
    """Why rows left a unit before every task was done with them."""

    # A controller said that they are elsewhere.
    DROPPED = "dropped"
    # With their partition.
    CLEARED = "cleared"
    # By their index.
    REMOVED = "removed"
    REFUSED = "refused"
    GROUP_LEFT = "group_left"


class RowsRemoved(Message):
    """Rows left a unit; `cause` is that of a dead letter."""

    unit: str
    partition: int
    rows: list[int]
    reason: RemovalReason
    cause: RemovalCause = UNKNOWN


class RegisterUnit(Introduction):
    """First message of a unit on a channel: what it holds. Everything later builds on this. -> `UnitAccepted`."""

    unit: str
    incarnation: str  # a new one means that the unit started empty
    records: list[RowRecords]  # its live rows
    # Partition -> rows that all tasks are done with, whether freed or waiting for a checkpoint.
    finished: dict[int, list[int]]
    # What the unit removed with groups that left; this controller may not have heard of it.
    removed_groups: list[RowsRemoved] = []
    # What former lives of the unit held at their end, the oldest first, until all controllers know it: no controller
    # may have survived them.
    earlier: list["RegisterUnit"] = []


class RowsCreated(Message):
    """New rows exist at a unit; `columns` are written. Parks while the queue is full. -> `RowsAccepted`."""

    unit: str
    # `partition`, `rows`, `groups`, `group_size`, `commits`: see `PutRows`.
    partition: int
    rows: list[int]
    groups: list[int]
    columns: list[str]
    tokens: list[int]  # length of each row in tokens so far
    num_bytes: int  # of all rows together
    group_size: int = 0
    timeout_s: float = 60.0
    commits: dict[str, list[int]] = {}
    announced: bool = False  # there are other controllers: hand nothing out before `RowsConfirmed`
    # Enclosed values of a small put (`tq.wire`), passed on to a lease of exactly these rows that a fetch waits for.
    values: bytes = b""


class RowsConfirmed(Message):
    """Every controller agreed to these rows: they may be handed out. -> `RowsAccepted`, with what came up since."""

    unit: str
    rows: list[int]
    # Task -> positions in `rows`, as some controller knew to be done.
    commits: dict[str, list[int]] = {}
    # See `RowsCreated`.
    values: bytes = b""


class OutputsWritten(Message):
    """A task's outputs for these rows were committed; the task is done with them."""

    unit: str
    task: str
    rows: list[int]
    columns: list[str]
    # `tokens`, `num_bytes`: by how much each row, and all of them together, grew.
    tokens: list[int]
    num_bytes: int


class UnitAlive(Message):
    """Heartbeat of a unit that has nothing else to say. -> `Done`."""

    unit: str


class Held(msgspec.Struct):
    """A lease that a consumer holds: what a restarted controller must know of it. Fields are those of `LeaseGrant`."""

    task: str
    token: int
    partition: int
    rows: list[int]  # without those that are done
    # `round_index`, `rank`, `num_ranks`: of a slice of a round; -1: no round.
    round_index: int = -1
    rank: int = 0
    num_ranks: int = 1
    largest_slice: int = 0
    last: bool = False
    total_rows: int = 0
    step: int = 0  # `FetchRound.partition`
    slice_rows: int = 0  # rows of the slice, including those that are done


class Join(Introduction):
    """First message of a client on a channel, and again when the controller has given the client up. -> `Joined`."""

    # The consumer with its incarnation, the same on all channels of one client object.
    owner: str
    # Its leases of tasks that this controller serves.
    holds: list[Held]


# In `Heartbeat.writes`: this client puts new rows. No column has this name.
NEW_ROWS = ""


class Heartbeat(Message):
    """Renews all leases of `owner`. -> `Alive`."""

    owner: str
    # Columns that this client has put so far, or `NEW_ROWS`: consumers then know that their producer is there.
    writes: list[str] = []


class OpenPartition(Message):
    """Declare how many rows a partition will have."""

    partition: int
    num_rows: int


class FetchRows(Message):
    """Lease ready rows of `task`; parks until some are ready."""

    task: str
    owner: str
    num_rows: int  # at most, but at least one item
    version: int  # newest weights that this consumer holds; matters only to version-gated tasks
    timeout_s: float  # afterwards, the answer is `NoRows(deadline)`
    token_budget: int = 0  # at most this many tokens, but at least one item; 0: no budget
    # `replica`, `sequence`: ranks of one data-parallel replica that fetch for themselves name the replica and count
    # their fetches: the same (replica, sequence) gets the same lease. "": this consumer alone.
    replica: str = ""
    sequence: int = 0
    lineage: int = 0  # of the weights; those of older lineages than the queue's are outdated, whatever their version
    # Answer `NoRows(held_back)` when ready rows need newer weights than exist, so that the consumer can say what it
    # waits for. It then asks again without this flag, and parks.
    tell_held_back: bool = False


class FetchRound(Message):
    """Lease one rank's slice of round `round_index` of a partition: every rank of the gang asks for every round.

    The same (rank, round) again, by the same owner or by another reader of the replica, gets the same lease.
    """

    task: str
    owner: str
    partition: int  # in a task with `TaskSpec.steps` a step, whose rounds may come from several partitions
    round_index: int
    num_rows: int  # rows per rank in a full round
    rank: int
    num_ranks: int
    timeout_s: float
    token_budget: int = 0  # tokens per rank in a full round; 0: no budget


class Release(Message):
    """The consumer returns rows of a lease that it will not finish. -> `Done`."""

    task: str
    token: int
    rows: list[int]
    filtered: bool = False  # the groups of these rows leave the queue, and admission replaces them
    failures: int = 0  # likewise, as dead letters: how often the consumer itself failed on these rows; 0: it did not
    # The consumer dropped the rows because a unit called the lease void, perhaps for some of them only. A lease that a
    # trainer keeps is left alone: another rank may have it by now.
    fenced: bool = False


class AckLost(Message):
    """An ack for rows whose unit is gone while the consumer has them in hand. -> `Done`, or refused as fenced."""

    task: str
    token: int
    rows: list[int]


class UnitLoss(msgspec.Struct):
    """Rows lost with one life of a unit, as another controller knows them."""

    unit: str
    incarnation: str
    records: list[RowRecords]


class TellLost(Message):
    """From another controller to the lead: the rows that it counts as lost with their units.

    The lead has the rows put again that it never heard of. -> `RowsAccepted`, with the tasks that are done with them;
    positions count all rows of `losses` in order.
    """

    losses: list[UnitLoss]


class WatchLost(Message):
    """Park until rows were lost that this watcher has not seen yet. -> `LostRows` or `NoRows`.

    `after` is the last `LostRows.sequence` seen, 0 at first.
    """

    after: int
    timeout_s: float


class PublishVersion(Message):
    """From the actor: weights of `step` exist; wakes version-gated requests, admits what that allows. -> `Published`.

    `refills_known`: how many refills the actor has been told of.
    """

    step: int
    refills_known: int = 0


class CloseWriting(Message):
    """Refuse new rows; answer fetches with `NoRows(closed)` once the task is done with all rows that are there."""


class Stop(Message):
    """Answer all parked and later fetches with `NoRows(stop)`."""


class GetQueueStats(Message):
    """Answered by `QueueStats`."""


# Replies of a controller to units, clients and other controllers.


class UnitAccepted(Message):
    """The inventory is in. `tasks` are all tasks of the queue; rows of `drop` are elsewhere now: forget them.

    `commits` (task -> rows): which of the inventory's rows a task is known to be done with.
    """

    tasks: list[str]
    drop: list[int]
    commits: dict[str, list[int]] = {}


class RowsAccepted(Message):
    """The rows are known; `commits` (task -> positions) says which tasks were done with them before they were lost.

    Also the answer to `TellLost`.
    """

    commits: dict[str, list[int]] = {}


class Joined(Message):
    """The client is known. `void` are those of its tokens that are no longer this owner's."""

    void: list[int]


class Alive(Message):
    """Answer to a heartbeat."""

    known: bool  # False when this controller has given the owner up (its leases are void) or never met it: join again
    units: dict[str, int]  # name -> bytes held, of the units that are up: where to put
    away: list[str]  # units that are down but may come back with their rows
    newest_version: int


class LeaseGrant(Message):
    """A lease, named by its token."""

    task: str
    token: int
    partition: int  # the step that its rows were admitted for
    # `rows`, `groups`, `units`: parallel; `units` says where each row is.
    rows: list[int]
    groups: list[int]
    units: list[str]
    tokens: list[int] = []  # length of each row in tokens
    # Most rows of any rank in this round (rounds only), so that ranks make equally many micro-batches.
    largest_slice: int = 0
    last: bool = False  # no rows of this partition, or of the requested step, will follow (rounds only)
    total_rows: int = 0  # rows of all ranks in this round (rounds only)
    # Enclosed columns of the rows (`tq.wire`), if the fetch waited for a small put of exactly these rows.
    values: bytes = b""


class NoRowsReason(StrEnum):
    """Why a fetch ended without rows."""

    DEADLINE = "deadline"
    NEWER_VERSION = "newer_version"
    # See `FetchRows.tell_held_back`.
    HELD_BACK = "held_back"
    PARTITION_DONE = "partition_done"
    STOP = "stop"
    # Closed for writing, and the task is done with all rows.
    CLOSED = "closed"


class NoRows(Message):
    """No lease.

    Attributes:
        newest_version: newest one that was published and that the task's consumers can use
            (`TaskSpec.version_interval`).
        waiting_for: for a deadline, what is missing, as text for people.
        producers_alive: for a deadline, whether a client that writes what is missing is connected.
        lineage: of the newest version.
    """

    reason: NoRowsReason
    newest_version: int
    waiting_for: str = ""
    producers_alive: bool = True
    lineage: int = 0


class LostRows(Message):
    """Rows lost with their unit that some task still needs: put them again (`put_rows`, same indices)."""

    sequence: int
    partitions: list[int]
    rows: list[int]
    groups: list[int]


class Published(Message):
    """The version is known. `refills`: admission's, beyond those that the asker knew; only the lead has some."""

    refills: list[Refill] = []


class TaskStats(Message):
    """Counts of one task's rows.

    Attributes:
        waiting, ready, leased, done: rows by state (done: of partitions still held).
        parked_requests: fetches that wait.
        oldest_request_s: how long the oldest of these has waited (0: none).
        rows_per_s: done per second, over roughly the last ten seconds.
        acked: rows done since the controller's start.
        deliveries: leases given so far.
        released: rows that came back from consumers that died or gave up.
    """

    task: str
    waiting: int
    ready: int
    leased: int
    done: int
    parked_requests: int
    controller: str = ""
    oldest_request_s: float = 0.0
    rows_per_s: float = 0.0
    acked: int = 0
    deliveries: int = 0
    released: int = 0


class QueueStats(Message):
    """What one controller knows.

    Attributes:
        tasks: those that it serves.
        live_rows, live_bytes: rows that some task is not done with.
        admitted_groups: high-water mark of admission (0 without admission).
        row_limit, byte_limit: where puts start to wait; 0: no limit.
        lost_rows: lost with a unit, not put again yet.
        dead_letter_groups: taken out after too many deliveries.
        filtered_groups: taken out because they would teach nothing.
        units: name -> bytes held, of the units that are up.
        owners: consumers with a fresh heartbeat.
    """

    tasks: list[TaskStats]
    live_rows: int
    newest_version: int
    admitted_groups: int
    live_bytes: int = 0
    row_limit: int = 0
    byte_limit: int = 0
    waiting_puts: int = 0
    lost_rows: int = 0
    dead_letter_groups: int = 0
    filtered_groups: int = 0
    units: dict[str, int] = {}
    owners: list[str] = []


# Requests to a storage unit, and its replies.


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
    def from_record(record: RowRecords, unit: str) -> "Iterator[RowInfo]":
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

CONTROLLER_REQUESTS = (
    RegisterUnit
    | RowsCreated
    | RowsConfirmed
    | OutputsWritten
    | RowsRemoved
    | UnitAlive
    | Join
    | Heartbeat
    | OpenPartition
    | FetchRows
    | FetchRound
    | Release
    | AckLost
    | WatchLost
    | PublishVersion
    | ClearPartition
    | ReleaseCheckpointed
    | Stop
    | CloseWriting
    | TellLost
    | GetQueueStats
)
CONTROLLER_REPLIES = (
    Done | UnitAccepted | RowsAccepted | Joined | Alive | LeaseGrant | NoRows | LostRows | Published | QueueStats
)
