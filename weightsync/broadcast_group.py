"""The group of all senders and receivers of a broadcast, as one of its members has it.

    connect   once per epoch: the members meet over the job store, and build one group
    ready     each transfer: all of them say over the store that they are ready, before the first byte
    travel    bucket by bucket in the plan's order, which is the same everywhere; the root is the bucket's sender

    cast b0 | cast b1 | ............. | cast b2 |        two buffers, on a stream beside the computation
              b0 ....................... b1 .......      (b2 takes b0's buffer once that has arrived)
                        sum, write b0 |

On the CPU each sender has a group of its own with the receivers: Gloo's groups do not get in each other's way, and the
other senders need not take in what they do not want.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroup, Store, Work

from asyncflow.device import abort_group, connect_group, side_stream, use_device
from asyncflow.errors import WeightsLate, WeightSyncError
from weightsync.bucket_buffer import BucketLayout
from weightsync.messages import Transfer
from weightsync.plan import TransferPlan

STALL_S = 30.0
"""Of a group, however long a transfer may take: for its members to meet, and for one bucket to arrive (s). To connect,
its backend has as long as a transfer: HCCL needs tens of seconds."""
_LEAST_WAIT_S = 0.001
"""Gloo waits without end for a timeout of 0."""
_BUFFERS = 2
"""Of each group: one that travels, and one that is cast or summed."""
_OFF = "off"
"""Said by one member: the transfer is called off."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.1
_LOOK_S = 0.2
"""How often what may be stopped looks whether it is (s)."""

Handle = Callable[[BucketLayout, Tensor], None]
"""(bucket, int64 [num_words] on the device): casts a bucket into its buffer, or takes it out."""


class _Seat(NamedTuple):
    """This member's group with a sender, and that one's rank in it."""

    group: ProcessGroup
    root: int


class BroadcastGroup:
    """One member's part. One thread uses it; any may `abort`."""

    def __init__(self, store: Store, me: str, device: torch.device) -> None:
        """Args:
        store: a client of its own, whose timeout bounds the meeting of a group and each bucket.
        me: of `sender_name`, or a receiver's name.
        device: between which of all members the buckets travel.
        """
        self.epoch = ""
        """Of the group that it has, or had last."""
        self._store = store
        self._me = me
        self._device = device
        self._seats: dict[int, _Seat] = {}
        self._transfer: Transfer | None = None
        self._said: list[str] = []  # keys, in that transfer
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._buffers: list[Tensor] = []
        self._aborted = threading.Event()

    def connect(self, transfer: Transfer, plan: TransferPlan, *, timeout_s: float, stop: threading.Event) -> None:
        """Have the group of a transfer's epoch.

        Args:
            transfer: whose members are its own.
            plan: says who sends.
            timeout_s: for the backend to connect, once all have met, for which the store's timeout counts.
            stop: ends it early.

        Raises:
            WeightsLate: not all members came in time.
            WeightSyncError: the group broke before, or this member has left.
        """
        if self.epoch != transfer.epoch:
            self.leave()
            self.epoch = transfer.epoch
            wait_s = self._store.timeout.total_seconds()  # type: ignore[attr-defined]  # the stub lacks it
            self._all_say("here", transfer, plan, deadline=time.monotonic() + wait_s, stop=stop)
            for senders in self._circles(plan):
                everyone = [*map(sender_name, senders), *transfer.members]
                if self._me in everyone:
                    group = self._meet(f"{transfer.epoch}/{senders[0]}", everyone, timeout_s, stop)
                    self._seats |= {sender: _Seat(group, root) for root, sender in enumerate(senders)}
            if self._aborted.is_set():
                raise WeightSyncError(f"weights of {transfer.version}: {self._me} is closing")
        if not self._seats:  # what its members wrote to the store is of no use to a second group
            self.call_off(transfer)
            raise WeightSyncError(f"the group of epoch {transfer.epoch} broke before")

    def ready(self, transfer: Transfer, plan: TransferPlan, *, deadline: float, stop: threading.Event) -> None:
        """Say that this member is ready, and wait until all are: nothing has been sent then.

        Raises:
            WeightsLate: not all were by `deadline`.
        """
        self._all_say("ready", transfer, plan, deadline=deadline, stop=stop)

    def call_off(self, transfer: Transfer) -> None:
        """Say that this member takes no part in a transfer, so that the others need not wait for their deadlines."""
        self._store.set(_key(_OFF, transfer), "1")

    def travel(
        self,
        buckets: Sequence[BucketLayout],
        *,
        fill: Handle | None,
        take: Handle | None,
        deadline: float,
    ) -> None:
        """Have all buckets of a plan travel.

        Args:
            buckets: of the plan, in its order.
            fill: casts what this member sends; None: it sends nothing.
            take: is given what arrives; None: that is for others.
            deadline: for the last one; then the group is aborted (s, monotonic).

        Raises:
            RuntimeError: a member is gone.
        """
        use_device(self._device)
        seats = self._seats  # `leave`, in another thread, puts others in their place
        under_way: deque[tuple[Work, BucketLayout, Tensor]] = deque()

        def arrive() -> None:
            work, bucket, words = under_way.popleft()
            # NCCL waits as long as it is told here, whatever the group's own timeout is.
            work.wait(timedelta(seconds=max(_LEAST_WAIT_S, min(STALL_S, deadline - time.monotonic()))))
            if take is not None:
                take(bucket, words)

        with aborting(self.leave, when=self._aborted, deadline=deadline), side_stream(self._device, self._stream):
            mine = [bucket for bucket in buckets if bucket.bucket.sender in seats]
            if not mine:
                raise RuntimeError("the group was left")
            buffers = self._buffers_for(mine, len({id(seat.group) for seat in seats.values()}))
            for number, bucket in enumerate(mine):
                if len(under_way) == len(buffers):
                    arrive()
                words, seat = buffers[number % len(buffers)][: bucket.num_words], seats[bucket.bucket.sender]
                if fill is not None and seat.group.rank() == seat.root:
                    fill(bucket, words)
                options = BroadcastOptions()
                options.rootRank = seat.root
                under_way.append((seat.group.broadcast([words], options), bucket, words))
            while under_way:
                arrive()
            if self._stream is not None:
                self._stream.synchronize()  # what was read may change from now on, what was written is there

    def abort(self) -> None:
        """Leave for good; what waits in the group raises. From any thread; idempotent."""
        self._aborted.set()
        self.leave()

    def leave(self) -> None:
        """Give the group up; its epoch is over for this member."""
        seats, self._seats = self._seats, {}
        self._buffers = []  # an operation that was aborted may still write to them
        for group in {id(seat.group): seat.group for seat in seats.values()}.values():
            abort_group(group)

    def _all_say(
        self, word: str, transfer: Transfer, plan: TransferPlan, *, deadline: float, stop: threading.Event
    ) -> None:
        """Say a word over the store, and wait until all members have. One that gives up calls the transfer off for all.

        Raises:
            WeightsLate: not all have by `deadline`, or one has called it off.
        """
        if self._transfer != transfer:
            for key in self._said:
                self._store.delete_key(key)  # all members have read it: transfers are collective
            self._transfer, self._said = transfer, []
        self._said.append(_key(word, transfer, self._me))
        self._store.set(self._said[-1], "1")
        off, pause_s = _key(_OFF, transfer), _FIRST_LOOK_S
        missing = deque([*map(sender_name, senders_of(plan)), *transfer.members])
        while missing:
            if self._store.check([_key(word, transfer, missing[0])]):
                missing.popleft()
                pause_s = _FIRST_LOOK_S
                continue
            if self._store.check([off]) or time.monotonic() > deadline or stop.wait(pause_s):
                self.call_off(transfer)
                raise WeightsLate(f"weights of {transfer.version}: {missing[0]} was not {word} in time")
            pause_s = min(2 * pause_s, _LAST_LOOK_S)

    def _circles(self, plan: TransferPlan) -> list[tuple[int, ...]]:
        senders = senders_of(plan)
        return [(sender,) for sender in senders] if self._device.type == "cpu" else [senders]

    def _meet(self, name: str, everyone: Sequence[str], timeout_s: float, stop: threading.Event) -> ProcessGroup:
        prefix, rank = PrefixStore(f"weights/group/{name}", self._store), everyone.index(self._me)
        try:
            return connect_group(prefix, rank, len(everyone), self._device, connect_s=timeout_s, stop=stop)
        except RuntimeError as error:
            raise WeightsLate(f"weight group: not all of {' '.join(everyone)} connected ({error})") from error

    def _buffers_for(self, buckets: Sequence[BucketLayout], num_groups: int) -> list[Tensor]:
        """Return as many buffers as may be under way; the same ones each time, so that no allocator has to know."""
        number, size = _BUFFERS * num_groups, max(bucket.num_words for bucket in buckets)
        if len(self._buffers) < number or self._buffers[0].numel() < size:
            self._buffers = [torch.empty(size, dtype=torch.int64, device=self._device) for _ in range(number)]
        return self._buffers[:number]


def _key(word: str, transfer: Transfer, member: str = "") -> str:
    lineage, step = transfer.version
    return f"weights/{word}/{transfer.epoch}/{lineage}.{step}/{member}"


def sender_name(rank: int) -> str:
    """Return what a trainer rank is called among the members."""
    return f"sender {rank}"


def senders_of(plan: TransferPlan) -> tuple[int, ...]:
    """Return the trainer ranks that send anything, in order."""
    return tuple(sorted({bucket.sender for bucket in plan.buckets}))


@contextmanager
def aborting(
    abort: Callable[[], None], *, when: threading.Event | None, deadline: float | None = None
) -> Iterator[None]:
    """Call `abort` from another thread while the enclosed block runs, once `when` is set or `deadline` has passed, and
    from then on again and again: the block may begin a wait after it.

    Some backends' waits have no timeout of their own.
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
