"""Everything that the queue's processes say to each other. Typed, size-limited msgpack; never pickle.

    client -> unit          PutRows PutOutputs GetColumns ClearPartition CommitPartitions HoldPuts ...
    unit -> controllers     RegisterUnit RowsCreated OutputsWritten RowsRemoved (every unit tells every controller)
    client -> controller    Join Heartbeat FetchRows FetchRound GiveBack OpenPartition PublishVersion Stop ...
    controller -> unit      FenceRows FenceTask QuarantineRows PutOutputs (an ack of rows that were lost)

Fields named alike in parallel lists (`rows`, `groups`, `units`, `tokens`) belong together by position.
"""

from enum import StrEnum

import msgspec

from tq.wire import ColumnHeader


class Message(msgspec.Struct, tag=True):
    """Base of all messages; the class name is the tag."""


class Done(Message):
    """Carried out."""


# Requests to a storage unit


class PutRows(Message):
    """New rows with their first columns (a source's put; it needs no lease). Answered by `Stored`.

    Attributes:
        partition: the step that the rows belong to.
        rows, groups: parallel.
        group_size: rows of each group, in this put and others; 0: the groups are complete in this put.
        columns: description of the payload.
        timeout_s: how long the put may wait for room (backpressure).
        commits: task -> positions in `rows` that it is done with already (a restored snapshot).
    """

    partition: int
    rows: list[int]
    groups: list[int]
    columns: list[ColumnHeader]
    group_size: int = 0
    timeout_s: float = 60.0
    commits: dict[str, list[int]] = {}


class PutOutputs(Message):
    """All output columns of some rows of a lease, as one atom; `columns` may be empty (a plain ack). -> `Stored`.

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
    """From a controller: leases of these rows with a token below `token` are void from now on."""

    task: str
    token: int
    rows: list[int]


class FenceTask(Message):
    """From a restarted controller: all leases of `task` with a token below `token` are void, except those `alive`."""

    task: str
    token: int
    alive: list[int]


class QuarantineRows(Message):
    """From a controller: `task` failed too often on this group; take its rows out of the queue."""

    task: str
    group: int
    rows: list[int]


class ClearPartition(Message):
    """Remove all rows of a partition, whoever works on them."""

    partition: int


class CommitPartitions(Message):
    """A durable checkpoint covers partitions up to and including `newest`: their trained rows may go."""

    newest: int


class HoldPuts(Message):
    """Let puts wait, so that all units can be cut at one moment; ends by itself after `timeout_s`."""

    hold: str
    timeout_s: float


class CutSnapshot(Message):
    """Under a hold: note what is here now; the hold ends.

    Attributes:
        hold: of `HoldPuts`.
        after_partition: rows of this partition and earlier ones are left out.
        forget_acks_of: tasks whose acks are stored as not given.
    """

    hold: str
    after_partition: int
    forget_acks_of: list[str]


class WriteSnapshot(Message):
    """Write what was cut into `directory` (exists, shared by all units); answered by `SnapshotWritten`."""

    hold: str
    directory: str


class GetUnitStats(Message):
    """Answered by `UnitStats`."""


# Replies of a storage unit


class Stored(Message):
    """The put is in and known to every controller; `num_bytes` is what the unit holds now."""

    num_bytes: int


class Columns(Message):
    """The columns asked for; values in the payload."""

    columns: list[ColumnHeader]


class SnapshotWritten(Message):
    """Files of one unit, relative to the snapshot's directory."""

    files: list[str]
    num_rows: int
    num_bytes: int


class UnitStats(Message):
    """What a unit holds and did.

    Attributes:
        num_rows, num_bytes: all rows here; bytes really held, also by rows that are half gone.
        retained_rows, retained_bytes: of those, rows that only wait for a checkpoint.
        spilled_bytes: of the retained ones, on disk.
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


# Requests to a controller, from units


class RowRecords(msgspec.Struct):
    """Rows of an inventory that have the same partition, columns and finished tasks.

    Attributes:
        partition: of all of them.
        rows, groups, group_sizes, tokens, num_bytes: parallel.
        columns: written in all of them.
        done: tasks that committed.
        deliveries: task -> how often each row was given back, parallel to `rows`; absent: never.
    """

    partition: int
    rows: list[int]
    groups: list[int]
    group_sizes: list[int]
    tokens: list[int]
    num_bytes: list[int]
    columns: list[str]
    done: list[str]
    deliveries: dict[str, list[int]] = {}


class RegisterUnit(Message):
    """First message of a unit on a channel: what it holds. Everything it says later builds on this. -> `UnitAccepted`.

    Attributes:
        unit: its name.
        incarnation: another one than before means that it started empty.
        records: its live rows.
        finished: partition -> rows that all tasks are done with and that were freed or only wait for a checkpoint.
    """

    unit: str
    incarnation: str
    records: list[RowRecords]
    finished: dict[int, list[int]]


class RowsCreated(Message):
    """New rows exist at a unit; `columns` are written. Parks while the queue is full. -> `RowsAccepted`.

    Attributes:
        unit: where.
        partition, rows, groups, group_size: see `PutRows`.
        columns: written.
        tokens: per row, its length in tokens so far.
        num_bytes: of all of them together.
        timeout_s: how long this may park.
        commits: see `PutRows`.
    """

    unit: str
    partition: int
    rows: list[int]
    groups: list[int]
    columns: list[str]
    tokens: list[int]
    num_bytes: int
    group_size: int = 0
    timeout_s: float = 60.0
    commits: dict[str, list[int]] = {}


class OutputsWritten(Message):
    """A task's outputs for these rows were committed under `token`; the task is done with them.

    Attributes:
        unit: where.
        task, token, rows: the commit's.
        columns: written now.
        tokens: per row, by how many tokens it grew.
        num_bytes: by how many bytes all of them grew.
    """

    unit: str
    task: str
    token: int
    rows: list[int]
    columns: list[str]
    tokens: list[int]
    num_bytes: int


class RemovalReason(StrEnum):
    """Why rows left the queue before every task was done with them."""

    CLEARED = "cleared"
    REFUSED = "refused"
    QUARANTINED = "quarantined"


class RowsRemoved(Message):
    """Rows left a unit; `task` is the one that failed on them (quarantine)."""

    unit: str
    partition: int
    rows: list[int]
    reason: RemovalReason
    task: str = ""
    group: int = -1


# Requests to a controller, from clients


class Held(msgspec.Struct):
    """A lease that a consumer holds: what a restarted controller must know of it."""

    task: str
    token: int
    partition: int
    rows: list[int]
    round_index: int = -1
    rank: int = 0
    num_ranks: int = 1
    round_rows: int = 0
    last: bool = False


class Join(Message):
    """First message of a client on a channel. -> `Joined`.

    Attributes:
        owner: the consumer with its incarnation; the same over all channels of one client object.
        holds: its leases of tasks that this controller serves.
    """

    owner: str
    holds: list[Held]


class Heartbeat(Message):
    """Renews all leases of `owner`. -> `Alive`."""

    owner: str
    writes: list[str] = []
    """Columns that this client has put so far: whoever waits for them knows that somebody is there."""


class OpenPartition(Message):
    """Declare how many rows a partition will have."""

    partition: int
    num_rows: int


class FetchRows(Message):
    """Lease ready rows of `task`; parks until some are ready.

    Attributes:
        task: whose inputs must be complete.
        owner: the consumer.
        num_rows: at most (but at least one parcel).
        version: newest weights that this consumer holds; only matters to version-gated tasks.
        timeout_s: after this, answered by `NoRows(deadline)`.
        token_budget: at most so many tokens (but at least one parcel); 0: no budget.
        replica, sequence: ranks of one data-parallel replica that fetch for themselves name the replica and count
            their fetches: the same (replica, sequence) gets the same lease. "": this consumer alone.
    """

    task: str
    owner: str
    num_rows: int
    version: int
    timeout_s: float
    token_budget: int = 0
    replica: str = ""
    sequence: int = 0


class FetchRound(Message):
    """Lease one rank's share of round `round_index` of a partition: every rank of the gang asks for every round.

    The same (rank, round) again, by the same owner or by another reader of the replica, gets the same lease.

    Attributes:
        num_rows: rows per rank in a full round.
        rank, num_ranks: of the data-parallel gang.
        token_budget: tokens per rank in a full round; 0: no budget.
    """

    task: str
    owner: str
    partition: int
    round_index: int
    num_rows: int
    rank: int
    num_ranks: int
    timeout_s: float
    token_budget: int = 0


class GiveBack(Message):
    """The consumer returns rows of a lease that it will not finish. -> `Done`."""

    task: str
    owner: str
    token: int
    rows: list[int]


class AckLost(Message):
    """An ack for rows whose unit is gone: the consumer had them in hand. -> `Done`, or refused as superseded."""

    task: str
    owner: str
    token: int
    rows: list[int]


class WatchLost(Message):
    """Park until rows were lost with a unit that this watcher has not seen yet. -> `LostRows` or `NoRows`.

    `after` is the last `LostRows.sequence` seen, 0 at first.
    """

    after: int
    timeout_s: float


class PublishVersion(Message):
    """From the actor: weights of `step` exist; wakes version-gated requests and admits what that allows."""

    step: int


class Stop(Message):
    """Answer all parked and later fetches with `NoRows(stop)`."""


class GetQueueStats(Message):
    """Answered by `QueueStats`."""


# Replies of a controller


class UnitAccepted(Message):
    """The inventory is in. `tasks` are all tasks of the queue; `drop` lives elsewhere now, forget it.

    `commits` says which of the inventory's rows some task is known to be done with (task -> rows).
    """

    tasks: list[str]
    drop: list[int]
    commits: dict[str, list[int]] = {}


class RowsAccepted(Message):
    """The rows are known; `commits` (task -> positions) says which tasks were done with them before they were lost."""

    commits: dict[str, list[int]] = {}


class Joined(Message):
    """Welcome. `void` are tokens among those held that are not this owner's any more."""

    void: list[int]


class Alive(Message):
    """Answer to a heartbeat.

    Attributes:
        known: False when this controller has given the owner up (its leases are void) or never met it: join again.
        units: name -> bytes held, of the units that are up: where to put.
        newest_version: newest published weights.
    """

    known: bool
    units: dict[str, int]
    newest_version: int


class Granted(Message):
    """A lease.

    Attributes:
        token: names it.
        partition: the step of its rows.
        rows, groups, units: parallel; `units` says where each row is.
        tokens: per row, its length in tokens.
        round_rows: most rows that any rank has in this round (rounds only), so that ranks make equally many
            micro-batches.
        last: no rows of this partition will follow (rounds only).
    """

    token: int
    partition: int
    rows: list[int]
    groups: list[int]
    units: list[str]
    tokens: list[int] = []
    round_rows: int = 0
    last: bool = False


class NoRowsReason(StrEnum):
    """Why a fetch ended without rows."""

    DEADLINE = "deadline"
    NEWER_VERSION = "newer_version"
    PARTITION_DONE = "partition_done"
    STOP = "stop"


class NoRows(Message):
    """No lease.

    Attributes:
        reason: why.
        newest_version: newest that was published.
        waiting_for: for a deadline, what is missing, in words for a person.
        producers_alive: for a deadline, whether somebody who writes what is missing is connected.
    """

    reason: NoRowsReason
    newest_version: int
    waiting_for: str = ""
    producers_alive: bool = True


class LostRows(Message):
    """Rows that went with their unit and that some task still needs: put them again (`put_rows`, same indices)."""

    sequence: int
    partitions: list[int]
    rows: list[int]
    groups: list[int]


class TaskStats(Message):
    """Counts of one task's rows.

    Attributes:
        task: name.
        controller: which serves it.
        waiting, ready, leased, done: rows by state (done: of partitions still held).
        parked_requests: fetches that wait.
        oldest_request_s: how long the oldest of them waits (0: none).
        rows_per_s: done per second, over the last ten seconds or so.
        acked: rows done since the controller's start.
        deliveries: leases given so far.
        given_back: rows that came back from consumers that died or gave up.
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
    given_back: int = 0


class QueueStats(Message):
    """What one controller knows.

    Attributes:
        tasks: those that it serves.
        live_rows, live_bytes: rows that some task is not done with.
        row_limit, byte_limit: where puts start to wait; 0: none.
        waiting_puts: puts that wait for room.
        newest_version: published.
        admitted_groups: high-water mark of admission (0 without admission).
        lost_rows: went with a unit, not put again yet.
        quarantined_groups: taken out after too many deliveries.
        units: name -> bytes held; only those that are up.
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
    quarantined_groups: int = 0
    units: dict[str, int] = {}
    owners: list[str] = []


UNIT_REQUESTS = (
    PutRows
    | PutOutputs
    | GetColumns
    | FenceRows
    | FenceTask
    | QuarantineRows
    | ClearPartition
    | CommitPartitions
    | HoldPuts
    | CutSnapshot
    | WriteSnapshot
    | GetUnitStats
)
UNIT_REPLIES = Done | Stored | Columns | SnapshotWritten | UnitStats
CONTROLLER_REQUESTS = (
    RegisterUnit
    | RowsCreated
    | OutputsWritten
    | RowsRemoved
    | Join
    | Heartbeat
    | OpenPartition
    | FetchRows
    | FetchRound
    | GiveBack
    | AckLost
    | WatchLost
    | PublishVersion
    | Stop
    | GetQueueStats
)
CONTROLLER_REPLIES = Done | UnitAccepted | RowsAccepted | Joined | Alive | Granted | NoRows | LostRows | QueueStats
