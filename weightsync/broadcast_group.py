"""The group of all senders and receivers of a broadcast, as one of its members sees it."""

#     connect   once per epoch: the members meet over the job store and build one group
#     ready     each transfer: all of them say over the store that they are ready, before the first byte
#     travel    bucket by bucket in the plan's order, which is the same everywhere; the root is the bucket's sender
#
#     cast b0 | cast b1 | ............. | cast b2 |        two buffers, on a stream beside the computation
#               b0 ....................... b1 .......      (b2 takes b0's buffer once that has arrived)
#                         sum, write b0 |
#
# A member is only in groups whose senders have something that it needs. On the CPU each sender has its own group:
# Gloo's do not block each other. On an accelerator senders that the same members need share one, and the groups, one
# per pipeline stage of the trainer if somebody needs only some stages, transfer one after another:
#
#     generator              stage 0 | stage 1 |       of all senders
#     rank of a sharded copy         | stage 1 |       if it holds parts of that stage's tensors

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroup, Store, Work

from asyncflow.decoding import msgpack_decoder
from asyncflow.device import abort_group, connect_group, side_stream, use_device
from asyncflow.errors import TransportError, WeightsLate, WeightSyncError
from asyncflow.transport.meeting import Credentials, key_appears
from asyncflow.transport.server import Connection
from weightsync.checksums import checksum
from weightsync.messages import BeginBroadcast, OpenPlan, Reply, Transfer
from weightsync.plan import DTYPE_BYTES, Bucket, Piece, TransferPlan, buckets_of
from weightsync.slot_memory import RegionLayout
from weightsync.version import Version

# How a bucket travels from device to device: its pieces, cast to the wire's dtype, and a trailer that identifies it.
#
#     int64 words   | piece ..... | piece . | ... | bucket, lineage, step, checksum |
#                     each begins with a word       the trailer
#
# The checksum (`checksums.py`) is computed by the device: only the trailers are copied to the host, once per version.

_WORD_BYTES = 8
_TRAILER_WORDS = 4
TRAILER_BYTES = _TRAILER_WORDS * _WORD_BYTES


class BucketLayout:
    """Where the parts of one bucket lie in a buffer; both ends derive it from the same plan."""

    def __init__(self, bucket: Bucket, layout: RegionLayout) -> None:
        self.bucket = bucket
        self._places: list[tuple[Piece, torch.dtype, int, int]] = []  # piece, its dtype, first and last byte
        start = 0
        for piece in bucket.pieces:
            dtype = layout.tensor_spec(piece.tensor).dtype
            num_bytes = piece.box.numel * DTYPE_BYTES[dtype]
            self._places.append((piece, getattr(torch, dtype), start, start + num_bytes))
            start += -(-num_bytes // _WORD_BYTES) * _WORD_BYTES
        self._content_words = start // _WORD_BYTES
        # Length of a buffer that holds the bucket.
        self.num_words = self._content_words + _TRAILER_WORDS

    @property
    def num_bytes(self) -> int:
        return _WORD_BYTES * self.num_words

    def view_pieces(self, words: Tensor) -> list[Tensor]:
        """Return the pieces in a buffer, int64 [num_words]: views in the shapes of their boxes."""
        content = words.view(torch.uint8)
        return [content[start:end].view(dtype).view(piece.box.size) for piece, dtype, start, end in self._places]

    def stamp_trailer(self, words: Tensor, version: Version) -> None:
        trailer = words[self._content_words :]
        for place, value in enumerate((self.bucket.index, *version)):
            trailer[place].fill_(value)
        trailer[3].copy_(checksum(words[: self._content_words]))

    def make_summary(self, words: Tensor) -> Tensor:
        """Return int64 [5] on the buffer's device: the trailer, and the checksum of what arrived."""
        content = words[: self._content_words]
        return torch.cat((words[self._content_words :], checksum(content).view(1)))

    def check(self, summary: list[int], version: Version) -> None:
        """Raise WeightSyncError if another bucket or version came than expected, or if its bytes changed."""
        index, lineage, step, sent, arrived = summary
        if sent != arrived:
            raise WeightSyncError(f"bucket {self.bucket.index} of {version}: checksum does not match")
        if (index, Version(lineage, step)) != (self.bucket.index, version):
            raise WeightSyncError(
                f"bucket {self.bucket.index} of {version}: bucket {index} of {Version(lineage, step)} came instead"
            )


@lru_cache(maxsize=8)
def bucket_layouts(layout: RegionLayout) -> tuple[BucketLayout, ...]:
    return tuple(BucketLayout(bucket, layout) for bucket in layout.plan.buckets)


# Bounds what one member waits for the others, however long a transfer may take: for a group to meet, and for one bucket
# to arrive (s). For the backend to connect, the limit is that of a transfer, since HCCL needs tens of seconds.
STALL_S = 30.0
# Gloo would wait forever with a timeout of 0.
_LEAST_WAIT_S = 0.001
# Per group: one buffer travels while the other is cast or summed.
_BUFFERS = 2
# The word of a member that calls the transfer off.
_OFF = "off"
# What goes with a word that has no value.
_NOTHING = "-"
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.1
# How often an abortable wait checks its stop (s).
_LOOK_S = 0.2

# (bucket, int64 [num_words] on the device): casts a bucket into its buffer, or takes it out.
Handle = Callable[[BucketLayout, Tensor], None]


# Where a piece goes: the part of it that is kept (slices of the piece), and a tensor of that part's shape, on any
# device and of any floating-point dtype; None: nowhere.
Target = Callable[[Piece], tuple[tuple[slice, ...], Tensor] | None]


class _Seat(NamedTuple):
    group: ProcessGroup
    root: int


class Circle(NamedTuple):
    """Processes that have one group: trainer ranks, and the receivers that need what they send."""

    senders: tuple[int, ...]
    members: tuple[str, ...]


def list_circles(
    senders: Sequence[int], needed: Mapping[str, Collection[int]], *, one_per_sender: bool
) -> list[Circle]:
    """Return the groups of a transfer, in the order in which they transfer; senders that nobody needs have none.

    Args:
        needed: the senders that each receiver needs, in rank order.
        one_per_sender: otherwise senders that the same receivers need share a group.
    """
    circles: dict[object, tuple[list[int], tuple[str, ...]]] = {}
    for sender in senders:
        members = tuple(name for name, wanted in needed.items() if sender in wanted)
        if members:
            circles.setdefault(sender if one_per_sender else members, ([], members))[0].append(sender)
    return [Circle(tuple(own), members) for own, members in circles.values()]


def needed_senders(plan: TransferPlan, pieces: Sequence[Piece], *, exact: bool) -> tuple[int, ...]:
    """Return the trainer ranks that a receiver of `pieces` needs: those that send a part of them or, unless `exact`, a
    part of the same tensors, which is the same for all ranks of a pipeline stage."""
    if exact:
        buckets = buckets_of(plan, pieces)
        return tuple(sorted({bucket.sender for bucket in plan.buckets if bucket.index in buckets}))
    tensors = {piece.tensor for piece in pieces}
    return tuple(sorted({b.sender for b in plan.buckets if any(part.tensor in tensors for part in b.pieces)}))


class BroadcastGroup:
    """One member's part. One thread uses it; any thread may `abort`.

    Args:
        store: a client of its own; its timeout bounds the meeting of a group and each bucket.
        me: of `sender_name`, or a receiver's name.
        device: that buckets travel from and to.
    """

    def __init__(self, store: Store, me: str, device: torch.device) -> None:
        # Of the current groups, or of the last ones.
        self.epoch = ""
        self._store = store
        self._me = me
        self._device = device
        # By epoch; None: its groups were left.
        self._seats: dict[str, dict[int, _Seat] | None] = {}
        self._transfer: Transfer | None = None
        self._said: list[str] = []  # keys, in that transfer
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._buffers: list[Tensor] = []
        self._aborted = threading.Event()

    def connect_members(
        self,
        transfer: Transfer,
        plan: TransferPlan,
        *,
        pieces: Sequence[Piece] | None = None,
        timeout_s: float,
        stop: threading.Event,
    ) -> None:
        """Make sure that the groups of a transfer's epoch exist.

        Args:
            plan: says who sends; the same for all transfers of an epoch.
            pieces: that this receiver needs; None: all.
            timeout_s: for the backend to connect, once all have met (the store's timeout bounds the meeting).
            stop: ends it early.

        Raises:
            WeightsLate: not all members came in time.
            WeightSyncError: the groups broke earlier, or this member has left.
        """
        self.epoch = transfer.epoch
        for epoch in self._seats.keys() - {transfer.epoch, *transfer.live}:
            _abort_seats(self._seats.pop(epoch, None))
        if transfer.epoch not in self._seats:
            seats = self._seats[transfer.epoch] = {}
            on_cpu, senders = self._device.type == "cpu", senders_of(plan)
            own = senders if pieces is None else needed_senders(plan, pieces, exact=on_cpu)
            deadline = time.monotonic() + self._store.timeout.total_seconds()  # type: ignore[attr-defined]  # the stub lacks it
            said = self._all_say(
                "here", transfer, _everyone(transfer, plan), deadline=deadline, stop=stop, value=" ".join(map(str, own))
            )
            needed = {name: tuple(map(int, said[name].split())) for name in transfer.members}
            for circle in list_circles(senders, needed, one_per_sender=on_cpu):
                everyone = [*map(sender_name, circle.senders), *circle.members]
                if self._me in everyone:
                    group = self._meet_members(f"{transfer.epoch}/{circle.senders[0]}", everyone, timeout_s, stop)
                    seats |= {sender: _Seat(group, root) for root, sender in enumerate(circle.senders)}
            if self._aborted.is_set():
                _abort_seats(seats)
                raise WeightSyncError(f"weights of {transfer.version}: {self._me} is closing")
        if self._seats.get(transfer.epoch) is None:  # its keys in the store cannot serve a second group
            self.call_off(transfer)
            raise WeightSyncError(f"the group of epoch {transfer.epoch} is broken already")

    def ready(self, transfer: Transfer, plan: TransferPlan, *, deadline: float, stop: threading.Event) -> None:
        """Say that this member is ready, and wait until all are; raises WeightsLate after `deadline`. Nothing is sent
        before.
        """
        self._all_say("ready", transfer, _everyone(transfer, plan), deadline=deadline, stop=stop)

    def agree_on_most(
        self, transfer: Transfer, names: Sequence[str], value: int, *, deadline: float, stop: threading.Event
    ) -> int:
        """Return the largest value of these members of a transfer, each of which calls this once. Raises WeightsLate
        like `ready`."""
        said = self._all_say("value", transfer, names, deadline=deadline, stop=stop, value=str(value))
        return max(int(said[name]) for name in names)

    def call_off(self, transfer: Transfer) -> None:
        """Announce that this member takes no part in a transfer, so that the others need not wait in vain."""
        self._store.set(_key(_OFF, transfer), "1")

    def transfer_buckets(
        self,
        buckets: Sequence[BucketLayout],
        *,
        fill: Handle | None,
        take: Handle | None,
        deadline: float,
    ) -> None:
        """Transfer the buckets of all senders that this member needs, or its own; of the last transfer that
        `connect_members` was called for.

        Args:
            buckets: of the plan, in its order.
            fill: casts what this member sends; None: it sends nothing.
            take: gets what arrives; None: this member receives nothing.
            deadline: for the last bucket; then the group is aborted (s, monotonic).

        Raises:
            RuntimeError: a member is gone.
        """
        use_device(self._device)
        seats = self._seats.get(self.epoch)  # `leave_group`, in another thread, replaces the dict
        with aborting(self.leave_group, when=self._aborted, deadline=deadline), side_stream(self._device, self._stream):
            if seats is None:
                raise RuntimeError("the group was left")
            groups = list(dict.fromkeys(id(seat.group) for seat in seats.values()))
            # One communicator of an accelerator at a time: each transfer ends before the next one begins.
            for each in [groups] if self._device.type == "cpu" and groups else [[group] for group in groups]:
                mine = [b for b in buckets if b.bucket.sender in seats and id(seats[b.bucket.sender].group) in each]
                self._transfer_in(seats, mine, len(each), fill=fill, take=take, deadline=deadline)

    def _transfer_in(
        self,
        seats: Mapping[int, _Seat],
        buckets: Sequence[BucketLayout],
        num_groups: int,
        *,
        fill: Handle | None,
        take: Handle | None,
        deadline: float,
    ) -> None:
        under_way: deque[tuple[Work, BucketLayout, Tensor]] = deque()

        def arrive() -> None:
            work, bucket, words = under_way.popleft()
            # NCCL waits for the time given here, whatever the group's own timeout is.
            work.wait(timedelta(seconds=max(_LEAST_WAIT_S, min(STALL_S, deadline - time.monotonic()))))
            if take is not None:
                take(bucket, words)

        buffers = self._buffers_for(buckets, num_groups)
        for number, bucket in enumerate(buckets):
            if len(under_way) == len(buffers):
                arrive()
            # Buckets arrive in order, so the last one in this buffer has arrived.
            words, seat = buffers[number % len(buffers)][: bucket.num_words], seats[bucket.bucket.sender]
            if fill is not None and seat.group.rank() == seat.root:
                fill(bucket, words)
            options = BroadcastOptions()
            options.rootRank = seat.root
            under_way.append((seat.group.broadcast([words], options), bucket, words))
        while under_way:
            arrive()
        if self._stream is not None:
            self._stream.synchronize()  # sources may change and targets are complete from now on

    def abort(self) -> None:
        """Leave for good; waits in the group raise. Any thread; idempotent."""
        self._aborted.set()
        self.leave_group()

    def leave_group(self) -> None:
        """Give all groups up; their epochs are over for this member."""
        former, self._seats = self._seats, dict.fromkeys(self._seats)
        self._buffers = []  # an aborted operation may still write to the old ones
        for seats in former.values():
            _abort_seats(seats)

    def _all_say(
        self,
        word: str,
        transfer: Transfer,
        everyone: Sequence[str],
        *,
        deadline: float,
        stop: threading.Event,
        value: str | None = None,
    ) -> dict[str, str]:
        """Say a word over the store and wait until everyone has said it; return what all said with it if they give a
        `value`. On failure call the transfer off for all.

        Raises WeightsLate if a member has not said it by `deadline`, or has called the transfer off.
        """
        if self._transfer != transfer:
            for key in self._said:
                self._store.delete_key(key)  # transfers are collective, so all members have read it
            self._transfer, self._said = transfer, []
        self._said.append(_key(word, transfer, self._me))
        self._store.set(self._said[-1], value or _NOTHING)
        off, pause_s = _key(_OFF, transfer), _FIRST_LOOK_S
        missing, values = deque(everyone), dict[str, str]()
        # Ask for one member at a time; the order does not matter, since all must have said it.
        while missing:
            if self._store.check([key := _key(word, transfer, missing[0])]):
                if value is not None:
                    values[missing[0]] = self._store.get(key).decode().removeprefix(_NOTHING)
                missing.popleft()
                pause_s = _FIRST_LOOK_S
                continue
            if self._store.check([off]) or time.monotonic() > deadline or stop.wait(pause_s):
                self.call_off(transfer)
                raise WeightsLate(f"weights of {transfer.version}: {missing[0]} was not {word} in time")
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        return values

    def _meet_members(
        self, name: str, everyone: Sequence[str], timeout_s: float, stop: threading.Event
    ) -> ProcessGroup:
        prefix, rank = PrefixStore(f"weights/group/{name}", self._store), everyone.index(self._me)
        try:
            return connect_group(prefix, rank, len(everyone), self._device, connect_s=timeout_s, stop=stop)
        except RuntimeError as error:
            raise WeightsLate(f"weight group: not all of {' '.join(everyone)} connected ({error})") from error

    def _buffers_for(self, buckets: Sequence[BucketLayout], num_groups: int) -> list[Tensor]:
        """Return one buffer per bucket in flight. They are reused, so the allocator need not know of the streams."""
        number, size = _BUFFERS * num_groups, max(bucket.num_words for bucket in buckets)
        if len(self._buffers) < number or self._buffers[0].numel() < size:
            self._buffers = [torch.empty(size, dtype=torch.int64, device=self._device) for _ in range(number)]
        return self._buffers[:number]


def _key(word: str, transfer: Transfer, member: str = "") -> str:
    lineage, step = transfer.version
    return f"weights/{word}/{transfer.epoch}/{lineage}.{step}/{member}"


def _everyone(transfer: Transfer, plan: TransferPlan) -> list[str]:
    return [*map(sender_name, senders_of(plan)), *transfer.members]


def _abort_seats(seats: Mapping[int, _Seat] | None) -> None:
    for group in {id(seat.group): seat.group for seat in (seats or {}).values()}.values():
        abort_group(group)


def sender_name(rank: int) -> str:
    return f"sender {rank}"


def senders_of(plan: TransferPlan) -> tuple[int, ...]:
    """Return the trainer ranks that send anything, in order."""
    return tuple(sorted({bucket.sender for bucket in plan.buckets}))


@contextmanager
def aborting(
    abort: Callable[[], None], *, when: threading.Event | None, deadline: float | None = None
) -> Iterator[None]:
    """Call `abort` from another thread while the block runs, once `when` is set or `deadline` has passed.

    For backends whose waits have no timeout. `abort` is repeated, since the block may begin another wait after it.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_S):
            if (when is not None and when.is_set()) or (deadline is not None and time.monotonic() > deadline):
                abort()

    threading.Thread(target=watch, name="weight-stop", daemon=True).start()
    try:
        yield
    finally:
        done.set()


# The collective path: trainer ranks broadcast their buckets to all receivers, from device to device.
#
#     trainer rank r   cast b0 | cast b1 | ...                     (while the bucket before travels)
#     all members           b0 ............ b1 ...                 over the devices' own backend
#     receiver                        sum, write b0 | ...          compare all sums at the end: one copy to the host
#
# The lead agent (`agent_service`) decides per transfer who takes part. A receiver that is left out, or whose
# transfer breaks, takes the same version from its node's agent.

logger = logging.getLogger(__name__)

_INSTEAD = "receivers take them from their agents"

# (bucket's index, views): copies the pieces of a bucket, with the cast; see `ShardWriter.write`.
Cast = Callable[[int, Sequence[Tensor]], None]


class Broadcaster:
    """One trainer rank's side. Rank 0 asks the lead agent who takes part and tells the others through the store.

    Args:
        lead: name of the agent that decides who takes part.
        name: of this process.
        plan: agreed on by all ranks.
        device: that the shards are on.
        epoch: of the trainer's gang.
        timeout_s: applies separately to four waits: receivers come, all are ready, a group connects, a transfer ends.
    """

    def __init__(
        self,
        credentials: Credentials,
        lead: str,
        name: str,
        plan: TransferPlan,
        rank: int,
        *,
        device: torch.device,
        epoch: str,
        timeout_s: float,
    ) -> None:
        self._credentials = credentials
        self._lead = lead
        self._name = name
        self._plan = plan
        self._rank = rank
        self._timeout_s = timeout_s
        self._buckets = bucket_layouts(RegionLayout(plan))
        self._sends = bool(plan.of_sender(rank))
        self._keys = credentials.own_store(timeout_s)
        self._group = BroadcastGroup(credentials.group_store(min(timeout_s, STALL_S)), sender_name(rank), device)
        self._connection: Connection | None = None
        self._epoch = epoch
        self._broken = ""
        self._number = 0

    def broadcast_version(self, version: Version, cast: Cast, *, stop: threading.Event | None = None) -> None:
        """Broadcast a version to all available receivers; collective over the ranks.

        A receiver that does not come, or dies, costs its deadline. It is then left out, and the others also take this
        version from their agents. That is logged, and is no error.

        Args:
            cast: copies this rank's buckets into buffers on the device.
            stop: ends it early; receivers then take the version from their agents.
        """
        stop = stop or threading.Event()
        with aborting(self._abort_group, when=stop):
            try:
                transfer = self._share_transfer(self._begin_transfer(version, stop) if self._rank == 0 else None, stop)
                if transfer.members and self._sends:
                    self._send_version(transfer, cast, stop)
            except (RuntimeError, TransportError, WeightSyncError) as error:
                logger.warning("weights of %s: not broadcast to all (%s); %s", version, error, _INSTEAD)
                self._broken = self._group.epoch
                self._group.leave_group()

    def close(self) -> None:
        self._abort_group()

    def _abort_group(self) -> None:
        """End whatever another thread is waiting for."""
        connection = self._connection
        if connection is not None:
            connection.close()
        self._group.leave_group()

    def _begin_transfer(self, version: Version, stop: threading.Event) -> Transfer:
        """Ask which receivers take part: none if the lead agent is gone."""
        try:
            if self._connection is None or self._connection.closed:
                self._connection = Connection(
                    self._credentials, self._lead, f"{self._name}-lead", Reply, timeout_s=self._timeout_s, stop=stop
                )
                self._connection.call_service(OpenPlan(self._plan.encode()), timeout_s=self._timeout_s)
            request = BeginBroadcast(version, self._plan.digest(), self._broken, self._timeout_s)
            reply, _ = self._connection.call_service(request, timeout_s=2 * self._timeout_s)
        except (RuntimeError, TransportError) as error:  # the other ranks are told that nothing is broadcast
            logger.warning("weights of %s: %s; %s", version, error, _INSTEAD)
            return Transfer("", version, [], "")
        assert isinstance(reply, Transfer)
        return reply

    def _share_transfer(self, transfer: Transfer | None, stop: threading.Event) -> Transfer:
        """Return rank 0's transfer on every rank; raises WeightSyncError if rank 0 is silent or `stop` was set."""
        self._number += 1
        key = self._transfer_key(self._number)
        if transfer is None:
            if not key_appears(self._keys, key, 2 * self._timeout_s, stop):
                raise WeightSyncError("trainer rank 0 did not say who takes part")
            return msgpack_decoder(Transfer).decode(self._keys.get(key))
        self._keys.set(key, msgspec.msgpack.encode(transfer))
        # Steps are collective, so all ranks have read that one.
        self._keys.delete_key(self._transfer_key(self._number - 2))
        return transfer

    def _transfer_key(self, number: int) -> str:
        return f"weights/transfer/{self._epoch}/{number}"

    def _send_version(self, transfer: Transfer, cast: Cast, stop: threading.Event) -> None:
        def fill(bucket: BucketLayout, words: Tensor) -> None:
            cast(bucket.bucket.index, bucket.view_pieces(words))
            bucket.stamp_trailer(words, transfer.version)

        self._group.connect_members(transfer, self._plan, timeout_s=self._timeout_s, stop=stop)
        self._group.ready(transfer, self._plan, deadline=time.monotonic() + self._timeout_s, stop=stop)
        self._group.transfer_buckets(self._buckets, fill=fill, take=None, deadline=time.monotonic() + self._timeout_s)


class BroadcastMember:
    """One receiver in a broadcast.

    Args:
        store: a client of its own; its timeout bounds the meeting of a group.
        name: of this receiver.
        device: that buckets arrive on.
    """

    def __init__(self, store: Store, name: str, device: torch.device) -> None:
        self._group = BroadcastGroup(store, name, device)
        self._device = device
        self._closing = threading.Event()

    def receive_version(
        self,
        transfer: Transfer,
        layout: RegionLayout,
        target: Target,
        *,
        pieces: Sequence[Piece] | None = None,
        timeout_s: float,
    ) -> None:
        """Take part in a broadcast; afterwards the targets hold the version, with every bucket checked.

        Args:
            layout: of the transfer's plan.
            target: returns where a piece goes.
            pieces: that this receiver needs; None: all.
            timeout_s: applies separately to the group's connecting, to all members being ready, and to the transfer.

        Raises:
            WeightSyncError: the trainer or another receiver is gone, or a bucket is damaged. The group is given up, and
                the targets are undefined.
        """
        use_device(self._device)
        buckets, arrived = bucket_layouts(layout), set[int]()
        summaries: Tensor

        def take(bucket: BucketLayout, words: Tensor) -> None:
            summaries[bucket.bucket.index].copy_(bucket.make_summary(words))
            arrived.add(bucket.bucket.index)
            found = [target(piece) for piece in bucket.bucket.pieces]
            parts = [
                (where, part[where[0]]) for where, part in zip(found, bucket.view_pieces(words), strict=True) if where
            ]
            if parts:
                torch._foreach_copy_([where[1] for where, _ in parts], [part for _, part in parts], non_blocking=True)

        try:
            summaries = torch.empty((len(buckets), 5), dtype=torch.int64, device=self._device)
            self._group.connect_members(transfer, layout.plan, pieces=pieces, timeout_s=timeout_s, stop=self._closing)
            self._group.ready(transfer, layout.plan, deadline=time.monotonic() + timeout_s, stop=self._closing)
            self._group.transfer_buckets(buckets, fill=None, take=take, deadline=time.monotonic() + timeout_s)
            for bucket, summary in zip(buckets, summaries.tolist(), strict=True):
                if bucket.bucket.index in arrived:  # others are none of this receiver's
                    bucket.check(summary, transfer.version)
        except RuntimeError as error:
            self._group.leave_group()
            raise WeightSyncError(f"weights of {transfer.version}: broadcast broke ({error})") from error
        except WeightSyncError:
            self._group.leave_group()
            raise

    def agree_on_most(self, transfer: Transfer, names: Sequence[str], value: int, *, timeout_s: float) -> int:
        """Return the largest value of these members, each of which calls this once per transfer, before
        `receive_version`. Raises WeightsLate if one does not in time, or declines."""
        deadline = time.monotonic() + timeout_s
        return self._group.agree_on_most(transfer, names, value, deadline=deadline, stop=self._closing)

    def decline_transfer(self, transfer: Transfer) -> None:
        """Tell the other members not to wait for this one, which cannot receive (the rest of) a transfer."""
        with suppress(RuntimeError):  # without a store, their deadlines end the wait
            self._group.call_off(transfer)

    def abort(self) -> None:
        """Leave the group, so that no member waits in it, and receive no more. Idempotent."""
        self._closing.set()
        self._group.abort()
