"""What clients ask a controller, and, with `GetDone`, one controller another."""

import msgspec

from tq.messages.base import Message
from tq.messages.units_to_controllers import RowRecords


class Held(msgspec.Struct):
    """A lease that a consumer holds: what a restarted controller must know of it.

    Attributes:
        task, token, partition, rows, round_rows, last, total_rows: see `Granted`; rows that were settled are left out.
        round_index, rank, num_ranks: of a share of a round; no round: -1.
        step: `FetchRound.partition`.
        share_rows: rows of the share, also those that were settled.
    """

    task: str
    token: int
    partition: int
    rows: list[int]
    round_index: int = -1
    rank: int = 0
    num_ranks: int = 1
    round_rows: int = 0
    last: bool = False
    total_rows: int = 0
    step: int = 0
    share_rows: int = 0


class Join(Message):
    """First message of a client on a channel, and again when the controller has given the client up. -> `Joined`.

    Attributes:
        owner: the consumer with its incarnation; the same over all channels of one client object.
        holds: its leases of tasks that this controller serves.
    """

    owner: str
    holds: list[Held]


NEW_ROWS = ""
"""In `Heartbeat.writes`: this client puts new rows. No column is named so."""


class Heartbeat(Message):
    """Renews all leases of `owner`. -> `Alive`."""

    owner: str
    writes: list[str] = []
    """Columns that this client has put so far, or `NEW_ROWS`: whoever waits for them knows that somebody is there."""


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
        lineage: of the weights; older ones than the queue's are outdated, whatever their version.
    """

    task: str
    owner: str
    num_rows: int
    version: int
    timeout_s: float
    token_budget: int = 0
    replica: str = ""
    sequence: int = 0
    lineage: int = 0


class FetchRound(Message):
    """Lease one rank's share of round `round_index` of a partition: every rank of the gang asks for every round.

    The same (rank, round) again, by the same owner or by another reader of the replica, gets the same lease.

    Attributes:
        partition: whose; in a task with `TaskSpec.steps` a step, whose rounds may come from several partitions.
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
    """The consumer returns rows of a lease that it will not finish. -> `Done`.

    Attributes:
        filtered: nobody shall: the groups of these rows leave the queue, and admission replaces them.
        superseded: it dropped them since a unit said that the lease is void, which may be so for some of them only. A
            lease that a trainer keeps is left alone: another rank may have it by now.
    """

    task: str
    token: int
    rows: list[int]
    filtered: bool = False
    superseded: bool = False


class AckLost(Message):
    """An ack for rows whose unit is gone: the consumer had them in hand. -> `Done`, or refused as superseded."""

    task: str
    token: int
    rows: list[int]


class UnitLoss(msgspec.Struct):
    """Rows that went with one life of a unit, as another controller knows them."""

    unit: str
    incarnation: str
    records: list[RowRecords]


class TellLost(Message):
    """From another controller to the lead: rows that went with their units, as long as it counts them as lost.

    The lead has those put again of which it never heard. -> `RowsAccepted`, with who is done with which; positions
    count all rows of `losses` in order.
    """

    losses: list[UnitLoss]


class WatchLost(Message):
    """Park until rows were lost with a unit that this watcher has not seen yet. -> `LostRows` or `NoRows`.

    `after` is the last `LostRows.sequence` seen, 0 at first.
    """

    after: int
    timeout_s: float


class PublishVersion(Message):
    """From the actor: weights of `step` exist; wakes version-gated requests, admits what that allows. -> `Published`.

    Attributes:
        step: the version's.
        refills_known: how many refills the actor has been told of.
    """

    step: int
    refills_known: int = 0


class CloseWriting(Message):
    """Refuse new rows; answer fetches with `NoRows(closed)` where the task is done with all rows that are there."""


class Stop(Message):
    """Answer all parked and later fetches with `NoRows(stop)`."""


class GetQueueStats(Message):
    """Answered by `QueueStats`."""
