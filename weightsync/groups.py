"""Who broadcasts to whom: one group per trainer rank, {that rank} + all receivers, built once per membership.

Rank 0 of each group is its sender. A trainer rank is in one group, a receiver in as many as there are senders.
The plan travels through the job store: the ranks publish what they hold, rank 0 plans, receivers read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch.distributed import PrefixStore, ProcessGroup, Store

from asyncflow.decoding import msgpack_decoder
from asyncflow.device import connect_group
from asyncflow.errors import PlanError, WeightSyncError
from weightsync.plan import ShardSpec, TransferPlan, plan_transfer


@dataclass(frozen=True)
class Membership:
    """One transfer's members.

    Attributes:
        epoch: changes whenever a member starts anew; keeps store keys of different groups apart.
        num_senders: trainer ranks.
        receivers: names, in rank order.
    """

    epoch: str
    num_senders: int
    receivers: tuple[str, ...]


class _Published(msgspec.Struct):
    plan: TransferPlan | None
    error: str


def agree_on_plan(
    store: Store, members: Membership, rank: int, held: Sequence[ShardSpec], *, bucket_bytes: int, dtype: str
) -> TransferPlan:
    """Sender's side: publish what this rank holds; every rank returns the same plan.

    Raises:
        WeightSyncError: a rank did not publish within the store's timeout.
        PlanError: see `plan_transfer`.
    """
    keys = _prefixed(store, members)
    keys.set(f"held/{rank}", msgspec.msgpack.encode(list(held)))  # type: ignore[arg-type]  # the stub lacks bytes
    if rank == 0:
        everybody = [
            msgpack_decoder(list[ShardSpec]).decode(_wait(keys, f"held/{k}", f"trainer rank {k}"))
            for k in range(members.num_senders)
        ]
        try:
            published = _Published(plan_transfer(everybody, bucket_bytes=bucket_bytes, dtype=dtype), "")
        except PlanError as error:
            published = _Published(None, str(error))
        keys.set("plan", msgspec.msgpack.encode(published))  # type: ignore[arg-type]  # the stub lacks bytes
    return read_plan(store, members)


def read_plan(store: Store, members: Membership) -> TransferPlan:
    """Receiver's side: wait for the plan.

    Raises:
        WeightSyncError: the trainer published none within the store's timeout.
        PlanError: the trainer could make none; see `plan_transfer`.
    """
    data = _wait(_prefixed(store, members), "plan", "the trainer")
    published = msgpack_decoder(_Published).decode(data)
    if published.plan is None:
        raise PlanError(published.error)
    return published.plan


def connect_sender(store: Store, members: Membership, rank: int, device: torch.device) -> ProcessGroup:
    """Meet all receivers; returns this rank's group, in which it has rank 0."""
    return _connect(store, members, sender=rank, rank=0, device=device)


def connect_receiver(store: Store, members: Membership, name: str, device: torch.device) -> list[ProcessGroup]:
    """Meet all senders; returns one group per sender, in order."""
    rank = 1 + members.receivers.index(name)
    return [_connect(store, members, sender=sender, rank=rank, device=device) for sender in range(members.num_senders)]


def _connect(store: Store, members: Membership, *, sender: int, rank: int, device: torch.device) -> ProcessGroup:
    prefix = PrefixStore(f"group/{sender}", _prefixed(store, members))
    try:
        return connect_group(prefix, rank, 1 + len(members.receivers), device)
    except RuntimeError as error:
        who = " ".join(members.receivers)
        raise WeightSyncError(f"weight group of sender {sender}: not all of {who} came within the deadline") from error


def _prefixed(store: Store, members: Membership) -> PrefixStore:
    return PrefixStore(f"weights/{members.epoch}", store)


def _wait(store: Store, key: str, who: str) -> bytes:
    try:
        return store.get(key)
    except RuntimeError as error:
        raise WeightSyncError(f"weights: {who} published no {key.split('/')[0]!r} within the deadline") from error
