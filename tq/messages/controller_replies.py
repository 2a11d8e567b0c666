"""Replies of a controller to units, clients and other controllers."""

from enum import StrEnum

from tq.messages.to_controllers import Message
from tq.refill import Refill


class UnitAccepted(Message):
    """The inventory is in. `tasks` are all tasks of the queue; rows of `drop` are elsewhere now: forget them.

    `commits` says which of the inventory's rows some task is known to be done with (task -> rows).
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
    """The client is known. `void` are tokens among those held that are not this owner's any more."""

    void: list[int]


class Alive(Message):
    """Answer to a heartbeat.

    Attributes:
        known: False when this controller has given the owner up (its leases are void) or never met it: join again.
        units: name -> bytes held, of the units that are up: where to put.
        away: units that are not up but may come back with their rows.
        newest_version: newest published weights.
    """

    known: bool
    units: dict[str, int]
    away: list[str]
    newest_version: int


class LeaseGrant(Message):
    """A lease.

    Attributes:
        task: that holds it.
        token: names it.
        partition: the step that its rows were admitted for.
        rows, groups, units: parallel; `units` says where each row is.
        tokens: per row, its length in tokens.
        round_rows: most rows that any rank has in this round (rounds only), so that ranks make equally many
            micro-batches.
        last: no rows of this partition, or of the step that was asked for, will follow (rounds only).
        total_rows: rows of all ranks in this round (rounds only).
        values: columns of the rows, enclosed (`tq.wire`), if the fetch waited for a small put of exactly these rows.
    """

    task: str
    token: int
    partition: int
    rows: list[int]
    groups: list[int]
    units: list[str]
    tokens: list[int] = []
    round_rows: int = 0
    last: bool = False
    total_rows: int = 0
    values: bytes = b""


class NoRowsReason(StrEnum):
    """Why a fetch ended without rows; closed: for writing, and the task is done with all rows; held back: see
    `FetchRows.tell_held_back`."""

    DEADLINE = "deadline"
    NEWER_VERSION = "newer_version"
    HELD_BACK = "held_back"
    PARTITION_DONE = "partition_done"
    STOP = "stop"
    CLOSED = "closed"


class NoRows(Message):
    """No lease.

    Attributes:
        reason: why.
        newest_version: newest that was published, and that the task's consumers can use (`TaskSpec.version_interval`).
        waiting_for: for a deadline, what is missing, in words for a person.
        producers_alive: for a deadline, whether a client that writes what is missing is connected.
        lineage: of the newest version.
    """

    reason: NoRowsReason
    newest_version: int
    waiting_for: str = ""
    producers_alive: bool = True
    lineage: int = 0


class LostRows(Message):
    """Rows that went with their unit and that some task still needs: put them again (`put_rows`, same indices)."""

    sequence: int
    partitions: list[int]
    rows: list[int]
    groups: list[int]


class Published(Message):
    """The version is known. `refills`: of admission, beyond those that the asker knew; only the lead has some."""

    refills: list[Refill] = []


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
        row_limit, byte_limit: where puts start to wait; 0: none.
        waiting_puts: puts that wait for room.
        newest_version: published.
        admitted_groups: high-water mark of admission (0 without admission).
        lost_rows: went with a unit, not put again yet.
        dead_letter_groups: taken out after too many deliveries.
        filtered_groups: taken out since they would teach nothing.
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
    dead_letter_groups: int = 0
    filtered_groups: int = 0
    units: dict[str, int] = {}
    owners: list[str] = []
