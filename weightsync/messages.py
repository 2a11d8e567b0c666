"""Requests of trainer ranks, receivers and agents to a weight agent, and its replies."""

# trainer rank   OpenPlan, then per version: TakeSlot (parks until one is free) ... SealBuckets; AwaitRepair parks
# receiver       Watch (parks until a newer version is complete), ReleaseVersion, Serving; AskSwap, EndSwap;
#                ReportCorrupt
# other agent    WatchPeer (parks until there is more), FetchBucket (the payload is the bucket)
#
# Plans are large: messages name them by digest, and `FetchPlan` gets an unknown one, once.

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import msgspec
from torch import Tensor

from asyncflow.errors import TransportError
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection
from weightsync.plan import TransferPlan
from weightsync.slot_memory import SlotOffer
from weightsync.version import Version


class DeviceCopy(msgspec.Struct, frozen=True):
    """Memory of a trainer rank's device that holds its buckets of the version that it published last, one after the
    other (`weightsync.device_copies`). Processes of its host that take turns with it may open it."""

    rank: int
    handle: bytes  # the vendor's


class OpenPlan(msgspec.Struct, tag=True):
    """A trainer rank is about to publish under this plan (`TransferPlan.encode`)."""

    plan: bytes
    device_copy: DeviceCopy | None = None


class TakeSlot(msgspec.Struct, tag=True):
    """A trainer rank wants to write its part of a version; it gives up older ones, finished or not."""

    rank: int
    version: Version
    plan: str  # digest
    wait_s: float  # how long to wait for a free slot; then slow readers are left behind


class SealBuckets(msgspec.Struct, tag=True):
    """Buckets are written; `checksums` is by bucket index."""

    rank: int
    version: Version
    checksums: dict[int, int]


class AwaitRepair(msgspec.Struct, tag=True):
    """A trainer rank will rewrite buckets that turn out to be damaged."""

    rank: int


class NoRepair(msgspec.Struct, tag=True):
    """A trainer rank has newer weights by now and cannot rewrite this version."""

    version: Version


class Watch(msgspec.Struct, tag=True):
    """A receiver wants the newest version, if newer than this one; it holds what is offered until `ReleaseVersion`."""

    newer_than: Version | None  # what it has; None: nothing
    # When its slot is needed, the slot gets new memory at once, and the receiver keeps the old memory.
    best_effort: bool = False


class ReleaseVersion(msgspec.Struct, tag=True):
    """A receiver does not read a version any more."""

    version: Version


class Serving(msgspec.Struct, tag=True):
    """A receiver computes with this version from now on."""

    version: Version


class AskSwap(msgspec.Struct, tag=True):
    """A receiver wants to swap, and waits `wait_s` for its turn; 0: not at all."""

    wait_s: float


class EndSwap(msgspec.Struct, tag=True):
    """A receiver has swapped."""


class ReportCorrupt(msgspec.Struct, tag=True):
    version: Version
    bucket: int


class JoinBroadcast(msgspec.Struct, tag=True):
    """A receiver is ready for the next broadcast; parks."""

    broken: str  # epoch whose group broke, or ""
    least: Version | None = None  # the first version that it takes part for; None: any
    together: list[str] = []  # receivers that take part only together, this one among them; empty: it is alone


class BeginBroadcast(msgspec.Struct, tag=True):
    """The trainer's rank 0 wants to broadcast a version; parks until the receivers are ready."""

    version: Version
    plan: str  # digest
    broken: str  # epoch whose group broke, or ""
    wait_s: float  # after this, receivers that are not ready are left out


class WatchPeer(msgspec.Struct, tag=True):
    """Another agent wants to know what there is; `revision`: of the last answer, 0: none yet."""

    revision: int


class FetchPlan(msgspec.Struct, tag=True):
    """A receiver or another agent does not know the plan of this digest yet."""

    plan: str


class FetchBucket(msgspec.Struct, tag=True):
    """Another agent wants a bucket's bytes."""

    version: Version
    bucket: int
    base: Version | None  # a complete version that it has; the answer may be a delta against it


class AskStatus(msgspec.Struct, tag=True):
    """A request for `AgentStatus`."""


Request = (
    OpenPlan | TakeSlot | SealBuckets | AwaitRepair | NoRepair | Watch | ReleaseVersion | Serving | AskSwap | EndSwap
    | ReportCorrupt | JoinBroadcast | BeginBroadcast | WatchPeer | FetchPlan | FetchBucket | AskStatus
)  # fmt: skip


class Done(msgspec.Struct, tag=True):
    """The request succeeded and has no result."""


class SlotGranted(msgspec.Struct, tag=True):
    """A slot to write the version into; `live` as in `Offered`."""

    version: Version
    slot: SlotOffer
    live: list[bytes]


class Unneeded(msgspec.Struct, tag=True):
    """Nothing needs to be written: the version or a newer one is complete, or the rank's part of it has arrived."""

    version: Version


class NoRoom(msgspec.Struct, tag=True):
    """No slot became free; `reason` says who uses them. The rank may ask again."""

    reason: str


class Offered(msgspec.Struct, tag=True):
    """The newest complete version."""

    version: Version
    plan: str  # digest
    slot: SlotOffer
    live: list[bytes]  # tokens of all memories that the agent has; mappings of other memories are useless
    checksums: list[int]  # of every bucket, in order
    checksum: int  # of the whole, `version_checksum(checksums)`
    device_copies: list[DeviceCopy] = []  # of trainer ranks on this node, which may hold other versions by now


class Repair(msgspec.Struct, tag=True):
    version: Version
    buckets: list[int]


class SwapTurn(msgspec.Struct, tag=True):
    """Whether the receiver may swap now; if so, it sends `EndSwap` afterwards."""

    granted: bool


class Transfer(msgspec.Struct, tag=True):
    """A broadcast begins."""

    epoch: str  # names its groups, which stay the same as long as the epoch does
    version: Version
    members: list[str]  # receivers, in rank order
    plan: str  # digest; "": there is no broadcast
    live: list[str] = []  # epochs that may come again; members give up the groups of all others


class HeldVersion(msgspec.Struct):
    """What an agent has of a version."""

    version: Version
    plan: str  # digest
    checksums: dict[int, int]  # by bucket index, of the buckets that it has
    is_fetched: bool = False  # whether it is fetching others


class PeerHas(msgspec.Struct, tag=True):
    revision: int
    held: list[HeldVersion]


class PlanFetched(msgspec.Struct, tag=True):
    """Reply to `FetchPlan`: an encoded plan (`TransferPlan.encode`)."""

    plan: bytes


class BucketFetched(msgspec.Struct, tag=True):
    """The payload is the bucket's pieces, aligned as in any `Payload`, or a delta against `base`."""

    base: Version | None
    num_bytes: int  # of the delta, or of all pieces


class AgentStatus(msgspec.Struct, tag=True):
    """An agent's state, for people and tests."""

    newest: Version | None  # complete version
    versions: list[tuple[Version, int]]  # (version, buckets present) of every slot in use
    serving: dict[str, Version]  # by receiver: the version that it computes with
    holders: dict[str, list[Version]]  # by receiver: versions that it may be reading
    slot_bytes: int  # memory of all slots, if every page was used
    fetched_bytes: int  # from other agents, since the start


Reply = (
    Done | SlotGranted | Unneeded | NoRoom | Offered | Repair | SwapTurn | Transfer | PeerHas | PlanFetched
    | BucketFetched | AgentStatus
)  # fmt: skip


# Channels to a service that may die and come back: one after another, until the user closes.

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_PLAN_TIMEOUT_S = 60.0
_PAUSE_S = 0.2
# How often the wait for a parked answer checks its stop event (s).
_LOOK_S = 0.5


def connections(
    credentials: Credentials,
    target: str,
    name: str,
    *,
    stop: threading.Event,
    failed: Callable[[TransportError], None] | None = None,
    limits: Limits | None = None,
) -> Iterator[Connection]:
    """Yield a channel to `target`, and a new one whenever the loop's body is done with it, until `stop` is set.

    The body handles what breaks inside it. The channel is closed afterwards, which is harmless if it was closed before.

    Args:
        target: the service.
        name: of this end.
        stop: also ends the waits.
        failed: called when connecting failed; None: that is only logged.
    """
    while not stop.is_set():
        try:
            connection = Connection(
                credentials, target, name, Reply, limits=limits, timeout_s=_CONNECT_TIMEOUT_S, stop=stop
            )
        except TransportError as error:
            logger.debug("%s: %s", name, error)
            if failed is not None:
                failed(error)
        else:
            try:
                yield connection
            finally:
                connection.close()
        stop.wait(_PAUSE_S)


def parked_reply(future: "Future[tuple[Any, Tensor]]", *, stop: threading.Event) -> Any:
    """Wait for the answer to a parked request; None: `stop` was set. Raises TransportError if the channel broke."""
    while not stop.is_set():
        try:
            return future.result(timeout=_LOOK_S)[0]
        except FutureTimeout:
            continue
    return None


def fetch_plan(connection: Connection, digest: str) -> TransferPlan:
    """Ask an agent for a plan. Raises TransportError if the channel broke or the agent does not know the plan,
    either.
    """
    reply, _ = connection.call_service(FetchPlan(digest), timeout_s=_PLAN_TIMEOUT_S)
    assert isinstance(reply, PlanFetched)
    return TransferPlan.decode(reply.plan)
