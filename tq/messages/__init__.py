"""Everything that the queue's processes say to each other. Typed, size-limited msgpack; never pickle.

    client -> unit              PutRows PutOutputs GetColumns ClearPartition ReleaseCheckpointed HoldPuts ...
    unit -> every controller    RegisterUnit RowsCreated RowsConfirmed OutputsWritten RowsRemoved
    client -> controller        Join Heartbeat FetchRows FetchRound Release OpenPartition PublishVersion Stop ...
    controller -> unit          FenceRows FenceTask RemoveRows PutOutputs (an ack of rows that were lost)
    controller -> controller    TellLost

Fields named alike in parallel lists (`rows`, `groups`, `units`, `tokens`) belong together by position.
"""

from tq.messages.of_units import (
    UNIT_REPLIES,
    UNIT_REQUESTS,
    ClearPartition,
    ClearRows,
    Columns,
    CutSnapshot,
    FenceRows,
    FenceTask,
    GetColumns,
    GetUnitStats,
    HoldPuts,
    ListRows,
    PutOutputs,
    PutRows,
    ReleaseCheckpointed,
    RemoveRows,
    RowInfo,
    RowList,
    SnapshotWritten,
    Stored,
    UnitStats,
    WriteSnapshot,
)
from tq.messages.to_controllers import (
    FORMAT,
    NEW_ROWS,
    AckLost,
    Alive,
    CloseWriting,
    Done,
    FetchRound,
    FetchRows,
    GetQueueStats,
    Heartbeat,
    Held,
    Join,
    Joined,
    LeaseGrant,
    LostRows,
    Message,
    NoRows,
    NoRowsReason,
    OpenPartition,
    OutputsWritten,
    Published,
    PublishVersion,
    QueueStats,
    RegisterUnit,
    Release,
    RemovalReason,
    RowRecords,
    RowsAccepted,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
    Stop,
    TaskStats,
    TellLost,
    UnitAccepted,
    UnitAlive,
    UnitLoss,
    WatchLost,
)

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

__all__ = [
    "CONTROLLER_REPLIES",
    "CONTROLLER_REQUESTS",
    "FORMAT",
    "NEW_ROWS",
    "UNIT_REPLIES",
    "UNIT_REQUESTS",
    "AckLost",
    "Alive",
    "ClearPartition",
    "ClearRows",
    "CloseWriting",
    "Columns",
    "CutSnapshot",
    "Done",
    "FenceRows",
    "FenceTask",
    "FetchRound",
    "FetchRows",
    "GetColumns",
    "GetQueueStats",
    "GetUnitStats",
    "Heartbeat",
    "Held",
    "HoldPuts",
    "Join",
    "Joined",
    "LeaseGrant",
    "ListRows",
    "LostRows",
    "Message",
    "NoRows",
    "NoRowsReason",
    "OpenPartition",
    "OutputsWritten",
    "PublishVersion",
    "Published",
    "PutOutputs",
    "PutRows",
    "QueueStats",
    "RegisterUnit",
    "Release",
    "ReleaseCheckpointed",
    "RemovalReason",
    "RemoveRows",
    "RowInfo",
    "RowList",
    "RowRecords",
    "RowsAccepted",
    "RowsConfirmed",
    "RowsCreated",
    "RowsRemoved",
    "SnapshotWritten",
    "Stop",
    "Stored",
    "TaskStats",
    "TellLost",
    "UnitAccepted",
    "UnitAlive",
    "UnitLoss",
    "UnitStats",
    "WatchLost",
    "WriteSnapshot",
]
