"""The trainer's side: copy this rank's shards to the node's weight agent while training continues."""

#     trainer thread    publish v1 | forward, backward ... | update | publish v2 | forward, backward ...
#     copies                       | copy v1 |                                   | copy v2 |
#     sender thread                 | check, seal | take slot ...                 | check, seal | ...
#
# The copy goes bucket by bucket straight into shared memory that was taken ahead, and may take until the weights
# change: the trainer waits only for what is not copied by then. A dead agent costs nothing either: the copy goes to
# memory of this process, and to the agent once it is back.

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncflow.device import CopiesDone, CopyStream, Staging
from asyncflow.errors import DeviceMemoryError, PeerRefused, TransportError, WeightsLate, WeightSyncError
from asyncflow.timeline import NoTimeline, Spans
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection
from weightsync.broadcast_group import Broadcaster, bucket_layouts
from weightsync.checksums import box_checksum
from weightsync.device_copies import DeviceCopyWriter
from weightsync.messages import (
    AwaitRepair,
    NoRepair,
    NoRoom,
    OpenPlan,
    Repair,
    SealBuckets,
    SlotGranted,
    TakeSlot,
    Unneeded,
    connections,
)
from weightsync.plan import Box, Piece, ShardSpec, TransferPlan
from weightsync.slot_memory import Region, RegionLayout, SlotMappings, private_memory
from weightsync.version import Version

# Copies a trainer rank's shards into a region. The trainer waits for it, so it does little else.


class Shard(Protocol):
    """One part of a tensor that this rank holds, e.g. `workers.engines.base.LocalShard`."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def box(self) -> Box: ...
    @property
    def values(self) -> Tensor: ...


def describe(shards: Iterable[Shard]) -> list[ShardSpec]:
    return [
        ShardSpec(shard.name, tuple(shard.shape), str(shard.values.dtype).removeprefix("torch."), shard.box)
        for shard in shards
    ]


@dataclass(frozen=True)
class Target:
    """A region that one rank writes its part into."""

    region: Region  # of a whole version
    views: Mapping[int, Sequence[Tensor]]  # by bucket index, the rank's pieces in the region


class ShardWriter:
    """Copies one rank's shards into its buckets of a plan."""

    def __init__(self, plan: TransferPlan, rank: int) -> None:
        self.layout = RegionLayout(plan)
        self.buckets = plan.of_sender(rank)
        self._known: list[tuple[str, Box]] = []
        self._sources: dict[int, list[tuple[int, Box]]] = {}  # by bucket, for each piece: which shard, where in it

    def target(self, memory: Tensor) -> Target:
        """Lay the plan over memory, uint8 [region_bytes]. Done ahead of time, once per memory."""
        region = Region(memory, self.layout)
        return Target(
            region, {bucket.index: [region.view_piece(piece) for piece in bucket.pieces] for bucket in self.buckets}
        )

    def match_shards(self, shards: Sequence[Shard]) -> None:
        """Find each piece's shard, unless the shards are the same as last time (they are, at every version).

        Raises WeightSyncError if no shard contains a piece.
        """
        held = [(shard.name, shard.box) for shard in shards]
        if held == self._known:
            return
        by_name: dict[str, list[tuple[int, Box]]] = {}
        for number, (name, box) in enumerate(held):
            by_name.setdefault(name, []).append((number, box))
        self._sources = {
            bucket.index: [self._find_shard(piece, by_name) for piece in bucket.pieces] for bucket in self.buckets
        }
        self._known = held

    def write(self, bucket: int, views: Sequence[Tensor], shards: Sequence[Shard]) -> None:
        """Copy a bucket's pieces, cast to the dtype of `views`; on a device it may return before the copies ended.

        Args:
            views: where the pieces go.
            shards: the shards now, in the order that `match_shards` saw.
        """
        whole: dict[int, Tensor] = {}
        sources: list[Tensor] = []
        for number, box in self._sources[bucket]:
            size = shards[number].box.size
            if number not in whole:  # a view, except for some strided shards
                whole[number] = shards[number].values.detach().reshape(size)
            sources.append(whole[number] if box.size == size else whole[number][box.slices])
        torch._foreach_copy_(list(views), sources, non_blocking=True)

    def sum_pieces(self, shards: Sequence[Shard], dtype: torch.dtype | None) -> dict[str, int]:
        """Return this rank's share of the checksum of every tensor that it sends, by name; see `box_checksum`.

        Args:
            shards: as in `write`.
            dtype: to which a receiver casts floating-point tensors; None: as they travel.
        """
        sums: dict[int, Tensor] = {}
        for bucket in self.buckets:
            for piece, (number, box) in zip(bucket.pieces, self._sources[bucket.index], strict=True):
                spec, shard = self.layout.tensor_spec(piece.tensor), shards[number]
                sent = shard.values.detach().reshape(shard.box.size)[box.slices].to(getattr(torch, spec.dtype))
                loaded = sent.to(dtype) if dtype is not None and sent.is_floating_point() else sent
                share = box_checksum(loaded, piece.box, spec.shape)
                sums[piece.tensor] = sums[piece.tensor] + share if piece.tensor in sums else share
        known = torch.stack(list(sums.values())).tolist() if sums else []  # the only wait for the device
        return dict(zip((self.layout.plan.names[number] for number in sums), known, strict=True))

    def copy_target(self, source: Target, target: Target) -> None:
        for bucket, views in target.views.items():
            torch._foreach_copy_(list(views), list(source.views[bucket]))

    def _find_shard(self, piece: Piece, held: Mapping[str, Sequence[tuple[int, Box]]]) -> tuple[int, Box]:
        name = self.layout.plan.names[piece.tensor]
        for number, box in held.get(name, ()):
            relative = piece.box.relative_to(box)
            if relative is not None:
                return number, relative
        raise WeightSyncError(f"{name}: this rank no longer holds {piece.box}")


class ShardCopies:
    """Copies shards while the trainer computes. Its own thread copies and waits; the sender's thread repeats.

    run v1 -> buckets are copied one after another -> wait -> the weights change -> run v2
                              '- repeat: buckets of v1 once more, while the shards are still v1

    `on_device` gets them, too, on an accelerator.
    """

    def __init__(
        self,
        writer: ShardWriter,
        *,
        device: torch.device,
        timeline: Spans,
        on_device: DeviceCopyWriter | None = None,
    ) -> None:
        self._writer = writer
        self._on_device = on_device
        self._timeline = timeline
        self._stream = CopyStream(device)
        self._on_host = device.type == "cpu"
        self._reading = threading.Lock()  # held while shards are read, so that `wait` covers `repeat_copies`
        self._ends: Collection[CopiesDone] = ()
        self._shards: tuple[Version, Sequence[Shard]] | None = None  # the version that the shards still hold

    def start_copies(self, version: Version, target: Target, shards: Sequence[Shard]) -> dict[int, CopiesDone]:
        """Begin to copy all buckets; returns the end of each. The shards are read until `wait` returns.

        Raises WeightSyncError if no shard contains a piece.
        """
        with self._reading:
            self._writer.match_shards(shards)
            indices = [bucket.index for bucket in self._writer.buckets]
            ends = self._begin_copies(version, target, shards, indices)
            self._ends, self._shards = ends, (version, shards)
        return dict(zip(indices, ends, strict=True))

    def wait(self) -> None:
        """Wait until nothing reads the shards any more, because they are about to change."""
        with self._reading:
            for end in self._ends:
                end.wait()
            self._ends, self._shards = (), None

    def repeat_copies(self, version: Version, target: Target, buckets: Sequence[int]) -> bool:
        """Copy some buckets once more and wait for them; False: the shards no longer hold that version."""
        with self._reading:
            if self._shards is None or self._shards[0] != version:
                return False
            for copied in self._begin_copies(version, target, self._shards[1], buckets):
                copied.wait()
        return True

    def close(self) -> None:
        self._stream.close()

    def _begin_copies(
        self, version: Version, target: Target, shards: Sequence[Shard], buckets: Sequence[int]
    ) -> list[CopiesDone]:
        if self._on_host:
            return self._stream.start_copies([partial(self._copy_bucket, target, shards, index) for index in buckets])
        return self._stream.start_staged_copies(
            [self._make_staging(version, target, shards, index) for index in buckets]
        )

    def _copy_bucket(self, target: Target, shards: Sequence[Shard], index: int) -> None:
        with self._timeline.span("copy weights", bucket=index):
            self._writer.write(index, target.views[index], shards)

    def _make_staging(self, version: Version, target: Target, shards: Sequence[Shard], index: int) -> Staging:
        """Cast and gather a bucket on the device; on the host, scatter its pieces into place (columns are strided)."""
        layout = bucket_layouts(self._writer.layout)[index]

        def pack(there: Tensor) -> None:
            words = there.view(torch.int64)
            self._writer.write(index, layout.view_pieces(words), shards)
            if self._on_device is not None:
                self._on_device.write(layout, words, version)

        def unpack(host: Tensor) -> None:
            with self._timeline.span("copy weights", bucket=index):
                torch._foreach_copy_(list(target.views[index]), layout.view_pieces(host.view(torch.int64)))

        return Staging(layout.num_bytes, pack, unpack)


# What a trainer rank knows of its versions and its agent: where the next copy goes, what is delivered. Pure.
#
#     place(v) -> ASK -> TakeSlot ... -> grant -> place(v) -> the granted slot -> stage -> [sealed] -> arrived
#              -> OWN_MEMORY while the agent is gone           (moved into a slot once it is back) -^
#              -> NEEDLESS: the agent has it already
#
# `WeightSender` holds its lock around every call, and keeps the deadlines.


class Where(Enum):
    """Where a version's copy goes, if not into a granted slot."""

    ASK = auto()  # into a slot that must be asked for now
    SOON = auto()  # into a slot that was asked for; check again later
    OWN_MEMORY = auto()  # into memory of this process; the agent gets it when it is back
    NEEDLESS = auto()  # nowhere: the agent has the version
    REFUSED = auto()  # nowhere: see `SenderState.refused`


@dataclass(frozen=True)
class Staged:
    """A version's copy, on its way to the agent."""

    version: Version
    target: Target
    slot: bytes | None  # token of the agent's memory that holds it; None: memory of this process
    # By bucket, the ends of the copies from the device; a missing one has ended.
    copied: Mapping[int, CopiesDone] = field(default_factory=dict)


class SenderState:
    """What one rank's sender knows; see above."""

    def __init__(self) -> None:
        # The newest copy.
        self.staged: Staged | None = None
        # Why the agent refused the last published version.
        self.refused: str | None = None
        # What the agent waits for before it can grant a slot.
        self.no_room = ""
        self._linked: bool | None = None  # None: never yet
        self._granted: Staged | None = None
        self._asked: Version | None = None
        self._complete: Version | None = None
        self._delivered: Version | None = None

    @property
    def undelivered(self) -> Version | None:
        """The staged version, until the agent has it."""
        if self.staged is None or self.staged.version == self._delivered:
            return None
        return self.staged.version

    def begin(self) -> None:
        """Another version is published: forget what was said of the last one."""
        self.refused = None
        self.no_room = ""

    def place(self, version: Version) -> Staged | Where:
        """Return where to copy a version; a returned slot is the caller's from now on."""
        if self._complete is not None and version <= self._complete:
            return Where.NEEDLESS
        if self._granted is not None and self._granted.version == version:
            granted, self._granted = self._granted, None
            return granted
        if self._linked is False:
            return Where.OWN_MEMORY
        if self.refused is not None:
            return Where.REFUSED
        if self._asked != version:
            self._asked = version
            return Where.ASK
        return Where.SOON

    def take_own_memory(self) -> Target | None:
        """Return this process's memory with the last copy, if nothing reads it now or later; else None."""
        staged = self.staged
        if staged is None or staged.slot is not None or self._linked is not False:
            return None
        self.staged = None
        return staged.target

    def link(self) -> Staged | Version | None:
        """The agent is reachable. Return what to begin with: a copy to deliver, or a version to ask a slot for."""
        self._linked = True
        if self.staged is not None:
            self._asked = None
            return self.staged
        return self._asked

    def unlink(self) -> None:
        self._linked = False
        self._granted = self._complete = self._delivered = None

    def grant_slot(self, granted: Staged) -> None:
        self._granted = granted
        self._asked = None

    def settle_request(self, *, complete: Version | None = None, refused: str | None = None) -> None:
        """The agent grants no slot: it already has versions up to `complete`, or refuses this one."""
        self._complete = complete or self._complete
        self.refused = refused
        self._asked = None

    def wait_on(self, reason: str) -> Version | None:
        """The agent has no room yet; return the version to ask for again."""
        self.no_room = reason
        return self._asked

    def is_due(self, staged: Staged) -> bool:
        return staged is self.staged and staged.version != self._delivered

    def move_staged(self, staged: Staged, moved: Staged) -> None:
        if self.staged is staged:
            self.staged = moved

    def note_arrived(self, version: Version) -> None:
        self._delivered = version

    def take_ahead(self, version: Version) -> bool:
        """Return whether to ask now for the slot of a future version; if so, it counts as asked."""
        if self._granted is not None and self._granted.version < version:
            self._granted = None  # that version took another path
        if self._asked is not None or self._granted is not None:
            return False
        self._asked = version
        return True


logger = logging.getLogger(__name__)

# How long slow readers may hold up a slot (s). Then they keep its memory, and the slot gets a new one.
_SLOT_WAIT_S = 10.0
_HOST = torch.device("cpu")
# How often a wait checks its stop event (s).
_LOOK_S = 0.5


@dataclass(frozen=True)
class _Take:
    version: Version


class _Lost:
    """The channel broke, or the sender is closing."""


_Event = _Take | Staged | SlotGranted | Unneeded | NoRoom | Repair | PeerRefused | _Lost


class WeightSender:
    """Publishes versions from one trainer rank. One thread of the caller publishes.

    Args:
        agent: name of this node's weight agent.
        name: of this process.
        plan: agreed on by all ranks.
        device: where the shards are.
        timeout_s: how long a slot may take to become free.
        broadcaster: also broadcasts every version, while the trainer waits; None: no broadcasts.
        on_device: also keep every version on the device, for generators that take turns with this rank there
            (`weightsync.device_copies`). Then `publish` is called only while the trainer has the turn, which is given
            away after `before_update`. Without room for it there is a warning, and shared memory.
    """

    def __init__(
        self,
        credentials: Credentials,
        agent: str,
        name: str,
        plan: TransferPlan,
        rank: int,
        *,
        device: torch.device,
        timeout_s: float = 300.0,
        broadcaster: Broadcaster | None = None,
        on_device: bool = False,
        timeline: Spans | None = None,
    ) -> None:
        self._timeline = timeline or NoTimeline()
        self._broadcaster = broadcaster
        self._credentials = credentials
        self._agent = agent
        self._name = name
        self._plan = plan
        self._digest = plan.digest()
        self._rank = rank
        self._timeout_s = timeout_s
        self._writer = ShardWriter(plan, rank)
        self._buckets = self._writer.buckets
        self._on_device = self._make_device_copy(device) if on_device and self._buckets else None
        self._copies = ShardCopies(self._writer, device=device, timeline=self._timeline, on_device=self._on_device)
        # Not page-locked: data from a device passes through the page-locked buffers of
        # `CopyStream.start_staged_copies`.
        self._slots = SlotMappings(write=True, device=_HOST)
        self._extents = tuple(self._writer.layout.bucket_extents(self._buckets))
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._state = SenderState()
        self._changed = threading.Condition()  # its lock guards the state
        self._num_bytes = 0
        self._connection: Connection | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_connected, name="weight-sender", daemon=True)
        if self._buckets:
            self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank wrote for the last version; 0: the agent had it already."""
        return self._num_bytes

    def publish(
        self, version: Version, shards: Iterable[Shard], *, timeout_s: float, stop: threading.Event | None = None
    ) -> float:
        """Begin to copy the weights; returns the seconds that the trainer was held up.

        Args:
            shards: this rank's parts, as described in the plan. They are read until `before_update` returns.
            timeout_s: for memory to become free.
            stop: ends that wait early.

        Raises:
            WeightsLate: no memory became free in time.
            WeightSyncError: the sender is closed.
        """
        began = time.monotonic()
        if self._closing.is_set():
            raise WeightSyncError(f"weights of {version}: the sender is closed")
        held = list(shards)
        place = self._memory_for(version, timeout_s, stop) if self._buckets else None
        if self._broadcaster is not None:
            self._writer.match_shards(held)
            self._broadcaster.broadcast_version(version, partial(self._writer.write, shards=held), stop=stop)
        self._num_bytes = 0
        if place is not None:
            copied = self._copies.start_copies(version, place.target, held)
            self._num_bytes = sum(bucket.num_bytes for bucket in self._buckets)
            staged = Staged(version, place.target, place.slot, copied)
            with self._changed:
                self._state.staged = staged
                self._events.put(staged)
        return time.monotonic() - began

    def sum_pieces(self, shards: Iterable[Shard], dtype: torch.dtype | None) -> dict[str, int]:
        """Return this rank's shares of the checksums of what `publish` would send of these shards now; see
        `ShardWriter.sum_pieces`."""
        held = list(shards)
        self._writer.match_shards(held)
        return self._writer.sum_pieces(held, dtype)

    def before_update(self) -> float:
        """Wait until the copies have read the weights; returns the seconds waited. Call it before every update."""
        began = time.monotonic()
        self._copies.wait()
        return time.monotonic() - began

    def wait(self, timeout_s: float) -> None:
        """Wait until the agent has this rank's part of the last version.

        Raises WeightsLate if the agent did not take it in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (version := self._state.undelivered) is not None:
                if time.monotonic() >= deadline:
                    why = self._state.refused or f"{self._agent} did not take them"
                    raise WeightsLate(f"weights of {version}: not delivered within {timeout_s:g} s: {why}")
                self._changed.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic())))

    def close(self, timeout_s: float = 10.0) -> None:
        """Deliver what was published, if the agent takes it in time, and end the thread; idempotent."""
        if not self._closing.is_set() and self._buckets:
            try:
                self.wait(timeout_s)
            except WeightSyncError as error:
                logger.warning("%s", error)
        self._closing.set()
        with self._changed:
            self._events.put(_Lost())
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            connection = self._connection
            if self._thread.is_alive() and connection is not None:
                connection.close()  # the agent does not answer
                self._thread.join(timeout_s)
        self._copies.close()
        if self._broadcaster is not None:
            self._broadcaster.close()

    def _make_device_copy(self, device: torch.device) -> DeviceCopyWriter | None:
        try:
            return DeviceCopyWriter(self._writer.layout, self._rank, device)
        except DeviceMemoryError as error:
            logger.warning(
                "%s: no copy of the weights is kept on the device (%s): generators take them from shared memory",
                self._name, error,
            )  # fmt: skip
            return None

    def _memory_for(self, version: Version, timeout_s: float, stop: threading.Event | None) -> Staged | None:
        """Return where to copy a version; None: the agent has it already."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._state.begin()
            while True:
                place = self._state.place(version)
                match place:
                    case Staged():
                        return place
                    case Where.NEEDLESS:
                        return None
                    case Where.OWN_MEMORY:
                        return Staged(version, self._own_memory(), None)
                    case Where.REFUSED:
                        raise WeightSyncError(self._state.refused or "")
                    case Where.ASK:
                        self._events.put(_Take(version))
                if stop is not None and stop.is_set():
                    raise WeightSyncError(f"weights of {version}: stopped before a slot was free")
                if time.monotonic() >= deadline:
                    reason = f"weights of {version}: {self._agent} gave no slot within {timeout_s:g} s; is it running?"
                    raise WeightsLate(self._state.no_room or reason)
                self._changed.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic())))

    def _own_memory(self) -> Target:
        return self._state.take_own_memory() or self._writer.target(private_memory(self._plan.region_bytes))

    def _keep_connected(self) -> None:
        for connection in connections(self._credentials, self._agent, self._name, stop=self._closing):
            self._connection = connection
            try:
                self._handle_events(connection)
            except Exception as error:  # noqa: BLE001 - the boundary of a thread: the agent died, or no slot was mapped
                if not self._closing.is_set():
                    logger.warning("weights: %s; generators keep what they have until the agent is back", error)
            finally:
                self._connection = None
                self._unlink_agent()

    def _unlink_agent(self) -> None:
        with self._changing_state() as state:
            state.unlink()
            self._slots.clear()

    def _handle_events(self, connection: Connection) -> None:
        device_copy = None if self._on_device is None else self._on_device.device_copy
        connection.call_service(OpenPlan(self._plan.encode(), device_copy), timeout_s=self._timeout_s)
        with self._changing_state() as state:
            events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
            self._events = events  # holds no event of an earlier channel
            first = state.link()
            if first is not None:
                events.put(first if isinstance(first, Staged) else _Take(first))
        self._submit_request(connection, AwaitRepair(self._rank))
        while not self._closing.is_set():
            event = events.get()
            match event:
                case _Take(version):
                    self._submit_request(connection, self._make_slot_request(version))
                case NoRoom(reason):
                    self._wait_on(connection, reason)
                case Staged():
                    if self._state.is_due(event):
                        self._deliver_staged(connection, event)
                case SlotGranted():
                    self._prepare_slot(event)
                case Unneeded(version):
                    self._settle_request(complete=version)
                case Repair(version, buckets):
                    self._repair_buckets(connection, version, buckets)
                    self._submit_request(connection, AwaitRepair(self._rank))
                case PeerRefused():
                    self._settle_request(refused=str(event))
                case _Lost():
                    return

    @contextlib.contextmanager
    def _changing_state(self) -> Iterator[SenderState]:
        """Hold the state's lock; then wake its waiters."""
        with self._changed:
            yield self._state
            self._changed.notify_all()

    def _submit_request(self, connection: Connection, request: TakeSlot | AwaitRepair) -> None:
        # Bound now: a late answer of this channel must not reach the next channel's queue.
        events = self._events
        future = connection.submit(request, timeout_s=self._timeout_s)
        future.add_done_callback(lambda done: events.put(_outcome(done)))

    def _note_arrived(self, version: Version) -> None:
        with self._changing_state() as state:
            state.note_arrived(version)

    def _settle_request(self, *, complete: Version | None = None, refused: str | None = None) -> None:
        with self._changing_state() as state:
            state.settle_request(complete=complete, refused=refused)

    def _prepare_slot(self, granted: SlotGranted) -> None:
        """Map a granted slot and touch its pages here, so that the trainer waits for neither."""
        target = self._make_target(granted)
        with self._changing_state() as state:
            state.grant_slot(Staged(granted.version, target, granted.slot.token))

    def _make_target(self, granted: SlotGranted) -> Target:
        self._slots.keep(granted.live)
        return self._writer.target(self._slots.get(granted.slot, self._extents))

    def _deliver_staged(self, connection: Connection, staged: Staged) -> None:
        """Seal this rank's buckets, in a slot of this agent."""
        if staged.slot not in self._slots:
            moved = self._move_staged(connection, staged)
            if moved is None:  # the agent does not need this version any more, or this sender closes
                self._note_arrived(staged.version)
                return
            staged = moved
        with self._timeline.span("seal weights", version=staged.version.step):
            # One call per bucket: other nodes fetch a bucket as soon as it is sealed.
            for bucket in self._buckets:
                if bucket.index in staged.copied:
                    staged.copied[bucket.index].wait()
                checksum = staged.target.region.bucket_checksum(bucket)
                seal = SealBuckets(self._rank, staged.version, {bucket.index: checksum})
                connection.call_service(seal, timeout_s=self._timeout_s)
        self._note_arrived(staged.version)
        # Ask for the next slot now, so that the next `publish` finds it ready.
        self._take_ahead(connection, Version(staged.version.lineage, staged.version.step + 1))

    def _move_staged(self, connection: Connection, staged: Staged) -> Staged | None:
        """Copy a version from this process's memory, or from a dead agent's, into a slot of this agent."""
        reply: object = NoRoom("")
        while isinstance(reply, NoRoom) and not self._closing.is_set():
            reply, _ = connection.call_service(
                self._make_slot_request(staged.version), timeout_s=_SLOT_WAIT_S + self._timeout_s
            )
        if not isinstance(reply, SlotGranted):
            return None
        target = self._make_target(reply)
        for copied in staged.copied.values():
            copied.wait()
        self._writer.copy_target(staged.target, target)
        moved = Staged(staged.version, target, reply.slot.token)
        with self._changed:
            self._state.move_staged(staged, moved)
        return moved

    def _take_ahead(self, connection: Connection, version: Version) -> None:
        with self._changed:
            wanted = self._state.take_ahead(version)
        if wanted:
            self._submit_request(connection, self._make_slot_request(version))

    def _make_slot_request(self, version: Version) -> TakeSlot:
        return TakeSlot(self._rank, version, self._digest, min(_SLOT_WAIT_S, self._timeout_s / 4))

    def _wait_on(self, connection: Connection, reason: str) -> None:
        logger.warning("%s", reason)
        with self._changed:
            asked = self._state.wait_on(reason)
        if asked is not None:
            self._submit_request(connection, self._make_slot_request(asked))

    def _repair_buckets(self, connection: Connection, version: Version, buckets: Sequence[int]) -> None:
        staged = self._state.staged
        able = staged is not None and staged.version == version and staged.slot in self._slots
        if staged is None or not able or not self._copies.repeat_copies(version, staged.target, buckets):
            connection.call_service(NoRepair(version), timeout_s=self._timeout_s)
            return
        logger.warning("weights of %s: wrote buckets %s again", version, list(buckets))
        wanted = [bucket for bucket in self._buckets if bucket.index in buckets]
        checksums = {bucket.index: staged.target.region.bucket_checksum(bucket) for bucket in wanted}
        connection.call_service(SealBuckets(self._rank, version, checksums), timeout_s=self._timeout_s)


def _outcome(done: "Future[tuple[Any, Tensor]]") -> _Event:
    try:
        event: _Event = done.result()[0]
    except PeerRefused as error:
        return error
    except TransportError:
        return _Lost()
    return event
