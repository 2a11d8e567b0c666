"""What storage units tell every controller."""

from enum import StrEnum

import msgspec

from tq.messages.base import Message
from tq.refill import UNKNOWN, QuarantineCause


class RowRecords(msgspec.Struct):
    """Rows of an inventory that have the same partition, columns and finished tasks.

    Attributes:
        partition: of all of them.
        rows, groups, group_sizes, tokens, num_bytes: parallel.
        columns: written in all of them.
        done: tasks that committed.
        pending: not every controller has agreed to them yet: `RowsConfirmed` follows, or `RowsRemoved`.
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
    pending: bool = False

    def append(self, number: int, *, group: int, group_size: int, tokens: int, num_bytes: int) -> None:
        """Add a row; `deliveries` is the caller's."""
        self.rows.append(number)
        self.groups.append(group)
        self.group_sizes.append(group_size)
        self.tokens.append(tokens)
        self.num_bytes.append(num_bytes)


class RemovalReason(StrEnum):
    """Why rows left a unit before every task was done with them.

    dropped: a controller said that they are elsewhere; cleared: with their partition; removed: by their index.
    """

    DROPPED = "dropped"
    CLEARED = "cleared"
    REMOVED = "removed"
    REFUSED = "refused"
    QUARANTINED = "quarantined"


class RowsRemoved(Message):
    """Rows left a unit; `cause`: of a quarantine."""

    unit: str
    partition: int
    rows: list[int]
    reason: RemovalReason
    cause: QuarantineCause = UNKNOWN


class RegisterUnit(Message):
    """First message of a unit on a channel: what it holds. Everything it says later builds on this. -> `UnitAccepted`.

    Attributes:
        unit: its name.
        incarnation: another one than before means that it started empty.
        records: its live rows.
        finished: partition -> rows that all tasks are done with and that were freed or only wait for a checkpoint.
        quarantined: what it removed with groups in quarantine: this controller may not have heard of it.
    """

    unit: str
    incarnation: str
    records: list[RowRecords]
    finished: dict[int, list[int]]
    quarantined: list[RowsRemoved] = []


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
        held: there are other controllers: hand nothing out before `RowsConfirmed`.
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
    held: bool = False


class RowsConfirmed(Message):
    """Every controller agreed to these rows: they may be handed out. -> `RowsAccepted`, with what came up since.

    Attributes:
        unit, rows: as announced.
        commits: task -> positions in `rows` that it is done with, as some controller knew.
    """

    unit: str
    rows: list[int]
    commits: dict[str, list[int]] = {}


class OutputsWritten(Message):
    """A task's outputs for these rows were committed; the task is done with them.

    Attributes:
        unit: where.
        task, rows: the commit's.
        columns: written now.
        tokens: per row, by how many tokens it grew.
        num_bytes: by how many bytes all of them grew.
    """

    unit: str
    task: str
    rows: list[int]
    columns: list[str]
    tokens: list[int]
    num_bytes: int


class UnitAlive(Message):
    """Sign of life of a unit that has nothing else to say. -> `Done`."""

    unit: str
