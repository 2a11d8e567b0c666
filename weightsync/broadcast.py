"""The collective path: trainer ranks broadcast their buckets to all receivers over the devices' own backend.

There is one group per trainer rank, {that rank} + all receivers, built once per epoch.

    trainer rank r   pack, seal b0 | pack, seal b1 |  ...        (while the bucket before travels)
    group {r, receivers}          b0 ............ b1 ...
    receiver                            check, write b0 | check, write b1 ...

Who takes part is decided per transfer by the lead agent (`weightsync.agent.turns`). A receiver that is left out, or
whose transfer breaks, takes the same version from its node's agent.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import msgspec
import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store, Work

from asyncflow.decoding import msgpack_decoder
from asyncflow.device import CopiesDone, abort_group, connect_group, side_stream, use_device
from asyncflow.errors import TransportError, WeightsLate, WeightSyncError
from asyncflow.transport.connection import Connection
from asyncflow.transport.handshake import Credentials, key_appears
from weightsync.messages import BeginBroadcast, OpenPlan, Reply, Transfer
from weightsync.plan import TransferPlan
from weightsync.region import BucketParts, Region
from weightsync.version import Version

logger = logging.getLogger(__name__)

_LEAST_WAIT_S = 0.001
"""Gloo waits without end for a timeout of 0."""
_AHEAD = 2
"""Buckets that are sent, or checked, while the next one is prepared."""
STALL_S = 30.0
"""Of a group, however long a transfer may take: for its members to meet, and for one message to arrive (s)."""
_LOOK_S = 0.2
"""How often a broadcast looks whether it is to stop (s)."""
_INSTEAD = "receivers take them from their agents"


class Broadcaster:
    """One trainer rank's side. Rank 0 asks the lead agent who takes part and tells the others through the store."""

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
        """Args:
        credentials: store and secret.
        lead: the agent that decides who takes part.
        name: of this process.
        plan: agreed on by all ranks.
        rank: this trainer rank.
        device: where the group's backend wants its tensors.
        epoch: of the trainer's gang.
        timeout_s: for the receivers to be ready, for a group to meet, and for the transfer.
        """
        self._credentials = credentials
        self._lead = lead
        self._name = name
        self._plan = plan
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._senders = senders_of(plan)
        self._buckets = plan.of_sender(rank)
        self._store = credentials.group_store(min(timeout_s, STALL_S))
        self._keys = credentials.own_store(timeout_s)
        self._connection: Connection | None = None
        self._group: ProcessGroup | None = None
        self._epoch = epoch
        self._group_epoch = self._broken = ""
        self._number = 0

    def run(
        self,
        version: Version,
        region: Region | None,
        copied: Mapping[int, CopiesDone],
        *,
        stop: threading.Event | None = None,
    ) -> dict[int, int]:
        """Broadcast this rank's buckets of a version to all receivers that are there; collective over the ranks.

        A receiver that does not come, or dies, costs its deadline; then it is left out, and the others, too, take
        the version from their agents. That is logged and no error.

        Args:
            version: which.
            region: holds it, or will; None: this rank holds nothing.
            copied: the ends of copies into the region, by bucket.
            stop: ends it early: receivers have the version from their agents.

        Returns:
            Checksums of the buckets that were packed, by index.
        """
        checksums: dict[int, int] = {}
        use_device(self._device)
        with _aborting(self._abort, when=stop), side_stream(self._device):
            self._run(version, region, copied, checksums, stop or threading.Event())
        return checksums

    def _run(
        self,
        version: Version,
        region: Region | None,
        copied: Mapping[int, CopiesDone],
        checksums: dict[int, int],
        stop: threading.Event,
    ) -> None:
        try:
            transfer = self._share(self._begin(version) if self._rank == 0 else None, stop)
            if transfer.members and region is not None:
                self._send(transfer, region, copied, checksums)
        except (RuntimeError, TransportError, WeightSyncError) as error:
            logger.warning("weights of %s: not broadcast to all (%s); %s", version, error, _INSTEAD)
            self._broken = self._group_epoch
            self._leave()

    def _abort(self) -> None:
        """End what another thread waits for."""
        connection, group = self._connection, self._group
        if connection is not None:
            connection.close()
        if group is not None:
            abort_group(group)

    def close(self) -> None:
        """Leave group and lead; idempotent."""
        self._leave()
        if self._connection is not None:
            self._connection.close()

    def _begin(self, version: Version) -> Transfer:
        """Ask which receivers take part: none if the lead agent is gone."""
        try:
            if self._connection is None or self._connection.closed:
                self._connection = Connection(
                    self._credentials, self._lead, f"{self._name}-lead", Reply, timeout_s=self._timeout_s
                )
                self._connection.call(OpenPlan(self._plan.encode()), timeout_s=self._timeout_s)
            request = BeginBroadcast(version, self._plan.digest(), self._broken, self._timeout_s)
            reply, _ = self._connection.call(request, timeout_s=2 * self._timeout_s)
        except (RuntimeError, TransportError) as error:  # the others are told that there is none
            logger.warning("weights of %s: %s; %s", version, error, _INSTEAD)
            return Transfer("", version, [], "")
        assert isinstance(reply, Transfer)
        return reply

    def _share(self, transfer: Transfer | None, stop: threading.Event) -> Transfer:
        """Return the transfer that rank 0 began, on every rank.

        Raises:
            WeightSyncError: rank 0 does not say, or `stop` was set.
        """
        self._number += 1
        key = self._key(self._number)
        if transfer is None:
            if not key_appears(self._keys, key, 2 * self._timeout_s, stop):
                raise WeightSyncError("trainer rank 0 did not say who takes part")
            return msgpack_decoder(Transfer).decode(self._keys.get(key))
        self._keys.set(key, msgspec.msgpack.encode(transfer))
        self._keys.delete_key(self._key(self._number - 2))  # all ranks have read that one: steps are collective
        return transfer

    def _key(self, number: int) -> str:
        return f"weights/transfer/{self._epoch}/{number}"

    def _send(
        self, transfer: Transfer, region: Region, copied: Mapping[int, CopiesDone], checksums: dict[int, int]
    ) -> None:
        group = self._connect(transfer)
        deadline = time.monotonic() + self._timeout_s
        in_flight: deque[list[Work]] = deque()
        for bucket in self._buckets:
            if bucket.index in copied:
                copied[bucket.index].wait()
            parts = BucketParts(region, bucket)
            works = [group.broadcast([run.to(self._device)]) for run in parts.runs]
            checksums[bucket.index] = parts.seal(transfer.version)  # while the runs travel
            works.append(group.broadcast([parts.tail.to(self._device)]))
            in_flight.append(works)
            if len(in_flight) > _AHEAD:
                _wait(in_flight.popleft(), deadline)
        for works in in_flight:
            _wait(works, deadline)

    def _connect(self, transfer: Transfer) -> ProcessGroup:
        if self._group_epoch != transfer.epoch:
            self._leave()
            self._group_epoch = transfer.epoch
            self._group = _meet(self._store, transfer, sender=self._rank, rank=0, device=self._device)
        if self._group is None:  # what its members wrote to the store is of no use to a second group
            raise WeightSyncError(f"the group of epoch {transfer.epoch} broke before")
        return self._group

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            abort_group(group)


class BroadcastMember:
    """One receiver in a broadcast."""

    def __init__(self, store: Store, name: str, device: torch.device) -> None:
        """Args:
        store: a client of its own, whose timeout bounds the meeting of a group.
        name: of this receiver.
        device: where the group's backend wants its tensors.
        """
        self._store = store
        self._name = name
        self._device = device
        self._groups: dict[int, ProcessGroup] = {}
        self.epoch = ""
        """Of the groups that it has, or had last."""
        self._aborted = False

    def receive(self, transfer: Transfer, region: Region, *, timeout_s: float) -> None:
        """Take part in a broadcast; `region` holds the version afterwards, every bucket checked.

        Args:
            transfer: the lead agent's.
            region: is written to.
            timeout_s: for all of it.

        Raises:
            WeightSyncError: the trainer or another receiver is gone, or a bucket is not what was sent; the groups are
                given up, and what is in `region` is undefined.
        """
        plan, deadline = region.layout.plan, time.monotonic() + timeout_s
        coming: deque[_Coming] = deque()
        taken: deque[Future[None]] = deque()
        use_device(self._device)
        try:
            groups = self._connect(transfer, plan)
            # The checker has a bucket while the next ones come; what is waited for holds up no computation.
            with ThreadPoolExecutor(1) as checker, side_stream(self._device):
                for bucket in plan.buckets:
                    coming.append(_Coming(groups[bucket.sender], BucketParts(region, bucket), self._device))
                    if len(coming) > len(groups):
                        taken.append(checker.submit(coming.popleft().arrived(deadline).take, transfer.version))
                    if len(taken) > _AHEAD:
                        taken.popleft().result()
                for each in coming:
                    taken.append(checker.submit(each.arrived(deadline).take, transfer.version))
                for one in taken:
                    one.result()
        except RuntimeError as error:
            self._leave()
            raise WeightSyncError(f"weights of {transfer.version}: broadcast broke ({error})") from error
        except WeightSyncError:
            self._leave()
            raise

    def abort(self) -> None:
        """Leave the groups, so that no member waits in them; nothing is received any more. Idempotent."""
        self._aborted = True
        self._leave()

    def _leave(self) -> None:
        groups, self._groups = self._groups, {}
        for group in groups.values():
            abort_group(group)

    def _connect(self, transfer: Transfer, plan: TransferPlan) -> dict[int, ProcessGroup]:
        if self.epoch != transfer.epoch:
            self._leave()
            self.epoch = transfer.epoch
            rank = 1 + transfer.members.index(self._name)
            self._groups = {
                sender: _meet(self._store, transfer, sender=sender, rank=rank, device=self._device)
                for sender in senders_of(plan)
            }
            if self._aborted:
                raise WeightSyncError(f"weights of {transfer.version}: this receiver is closing")
        if not self._groups:  # what its members wrote to the store is of no use to a second group
            raise WeightSyncError(f"the groups of epoch {transfer.epoch} broke before")
        return self._groups


def senders_of(plan: TransferPlan) -> tuple[int, ...]:
    """Return the trainer ranks that send anything, in order."""
    return tuple(sorted({bucket.sender for bucket in plan.buckets}))


def _meet(store: Store, transfer: Transfer, *, sender: int, rank: int, device: torch.device) -> ProcessGroup:
    """Return the group {sender, all receivers} of a transfer's epoch; the sender has rank 0.

    Raises:
        WeightsLate: not all came within the store's timeout.
    """
    prefix = PrefixStore(f"weights/group/{transfer.epoch}/{sender}", store)
    try:
        return connect_group(prefix, rank, 1 + len(transfer.members), device)
    except RuntimeError as error:
        who = " ".join(transfer.members)
        within = f"{store.timeout.total_seconds():g} s"  # type: ignore[attr-defined]  # the stub lacks it
        raise WeightsLate(f"weight group of sender {sender}: not all of {who} came within {within}") from error


class _Coming:
    """A bucket whose parts are on their way."""

    def __init__(self, group: ProcessGroup, parts: BucketParts, device: torch.device) -> None:
        self._parts = parts
        self._targets = [*parts.runs, parts.tail]
        self._buffers = [_buffer(target, device) for target in self._targets]
        self._works = [group.broadcast([buffer]) for buffer in self._buffers]

    def arrived(self, deadline: float) -> BucketParts:
        """Wait until all parts are here."""
        _wait(self._works, deadline)
        for target, buffer in zip(self._targets, self._buffers, strict=True):
            if buffer is not target:
                target.copy_(buffer)
        return self._parts


def _buffer(target: Tensor, device: torch.device) -> Tensor:
    return target if device.type == "cpu" else torch.empty_like(target, device=device)


@contextmanager
def _aborting(abort: Callable[[], None], *, when: threading.Event | None) -> Iterator[None]:
    """Call `abort` from another thread as soon as `when` is set, while the enclosed block runs."""
    done = threading.Event()

    def watch(stop: threading.Event) -> None:
        while not done.wait(_LOOK_S):
            if stop.is_set():
                abort()
                return

    if when is not None:
        threading.Thread(target=watch, args=(when,), name="weight-stop", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _wait(works: Iterable[Work], deadline: float) -> None:
    for work in works:
        work.wait(timedelta(seconds=max(_LEAST_WAIT_S, deadline - time.monotonic())))
