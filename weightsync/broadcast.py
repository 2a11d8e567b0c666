"""The collective path: trainer ranks broadcast their buckets to all receivers, from device to device.

    trainer rank r   cast b0 | cast b1 | ...                     (while the bucket before travels)
    all members           b0 ............ b1 ...                 over the devices' own backend
    receiver                        sum, write b0 | ...          compare all sums at the end: one copy to the host

Who takes part is decided per transfer by the lead agent (`weightsync.agent.turns`). A receiver that is left out, or
whose transfer breaks, takes the same version from its node's agent.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import torch
from torch import Tensor
from torch.distributed import Store

from asyncflow.decoding import msgpack_decoder
from asyncflow.device import use_device
from asyncflow.errors import TransportError, WeightSyncError
from asyncflow.transport.meeting import Credentials, key_appears
from asyncflow.transport.server import Connection
from weightsync.broadcast_group import STALL_S, BroadcastGroup, aborting, sender_name
from weightsync.bucket_buffer import BucketLayout, bucket_layouts
from weightsync.messages import BeginBroadcast, OpenPlan, Reply, Transfer
from weightsync.plan import Piece, TransferPlan
from weightsync.region import RegionLayout
from weightsync.version import Version

logger = logging.getLogger(__name__)

_INSTEAD = "receivers take them from their agents"

Cast = Callable[[int, Sequence[Tensor]], None]
"""(bucket's index, views): copies the pieces of a bucket, with the cast; see `ShardWriter.write`."""


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
        device: that the shards are on.
        epoch: of the trainer's gang.
        timeout_s: each, for the receivers to come, to be ready, for a group to connect, and for the transfer.
        """
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

    def run(self, version: Version, cast: Cast, *, stop: threading.Event | None = None) -> None:
        """Broadcast a version to all receivers that are there; collective over the ranks.

        A receiver that does not come, or dies, costs its deadline; then it is left out, and the others, too, take
        the version from their agents. That is logged and no error.

        Args:
            version: which.
            cast: has this rank's buckets copied into buffers on the device.
            stop: ends it early: receivers have the version from their agents.
        """
        stop = stop or threading.Event()
        with aborting(self._abort, when=stop):
            try:
                transfer = self._share(self._begin(version, stop) if self._rank == 0 else None, stop)
                if transfer.members and self._sends:
                    self._send(transfer, cast, stop)
            except (RuntimeError, TransportError, WeightSyncError) as error:
                logger.warning("weights of %s: not broadcast to all (%s); %s", version, error, _INSTEAD)
                self._broken = self._group.epoch
                self._group.leave()

    def close(self) -> None:
        """Leave group and lead; idempotent."""
        self._abort()

    def _abort(self) -> None:
        """End what another thread waits for."""
        connection = self._connection
        if connection is not None:
            connection.close()
        self._group.leave()

    def _begin(self, version: Version, stop: threading.Event) -> Transfer:
        """Ask which receivers take part: none if the lead agent is gone."""
        try:
            if self._connection is None or self._connection.closed:
                self._connection = Connection(
                    self._credentials, self._lead, f"{self._name}-lead", Reply, timeout_s=self._timeout_s, stop=stop
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

    def _send(self, transfer: Transfer, cast: Cast, stop: threading.Event) -> None:
        def fill(bucket: BucketLayout, words: Tensor) -> None:
            cast(bucket.bucket.index, bucket.pieces(words))
            bucket.stamp(words, transfer.version)

        self._group.connect(transfer, self._plan, timeout_s=self._timeout_s, stop=stop)
        self._group.ready(transfer, self._plan, deadline=time.monotonic() + self._timeout_s, stop=stop)
        self._group.travel(self._buckets, fill=fill, take=None, deadline=time.monotonic() + self._timeout_s)


class BroadcastMember:
    """One receiver in a broadcast."""

    def __init__(self, store: Store, name: str, device: torch.device) -> None:
        """Args:
        store: a client of its own, whose timeout bounds the meeting of a group.
        name: of this receiver.
        device: that buckets arrive on.
        """
        self._group = BroadcastGroup(store, name, device)
        self._device = device
        self._closing = threading.Event()

    def receive(
        self, transfer: Transfer, layout: RegionLayout, target: Callable[[Piece], Tensor], *, timeout_s: float
    ) -> None:
        """Take part in a broadcast; the targets hold the version afterwards, every bucket checked.

        Args:
            transfer: the lead agent's.
            layout: of its plan.
            target: where a piece is written to, a tensor of its shape on any device, with a cast where types differ;
                nowhere on device `meta`.
            timeout_s: each, for the group to connect, for all members to be ready, and for the transfer.

        Raises:
            WeightSyncError: the trainer or another receiver is gone, or a bucket is not what was sent; the group is
                given up, and what is in the targets is undefined.
        """
        use_device(self._device)
        buckets = bucket_layouts(layout)
        summaries: Tensor

        def take(bucket: BucketLayout, words: Tensor) -> None:
            summaries[bucket.bucket.index].copy_(bucket.summary(words))
            targets = [target(piece) for piece in bucket.bucket.pieces]
            wanted = [k for k, each in enumerate(targets) if not each.is_meta]
            if wanted:
                pieces = bucket.pieces(words)
                torch._foreach_copy_([targets[k] for k in wanted], [pieces[k] for k in wanted], non_blocking=True)

        try:
            summaries = torch.empty((len(buckets), 5), dtype=torch.int64, device=self._device)
            self._group.connect(transfer, layout.plan, timeout_s=timeout_s, stop=self._closing)
            self._group.ready(transfer, layout.plan, deadline=time.monotonic() + timeout_s, stop=self._closing)
            self._group.travel(buckets, fill=None, take=take, deadline=time.monotonic() + timeout_s)
            for bucket, summary in zip(buckets, summaries.tolist(), strict=True):
                bucket.check(summary, transfer.version)
        except RuntimeError as error:
            self._group.leave()
            raise WeightSyncError(f"weights of {transfer.version}: broadcast broke ({error})") from error
        except WeightSyncError:
            self._group.leave()
            raise

    def decline(self, transfer: Transfer) -> None:
        """Have the other members not wait for this one, which cannot take a transfer in, or no further."""
        with suppress(RuntimeError):  # the store is gone: they have their deadlines
            self._group.call_off(transfer)

    def abort(self) -> None:
        """Leave the group, so that no member waits in it; nothing is received any more. Idempotent."""
        self._closing.set()
        self._group.abort()
