"""Who broadcasts to whom: one group per trainer rank, {that rank} + all receivers, built once per epoch.

Rank 0 of each group is its sender. A trainer rank is in one group, a receiver in as many as there are senders.
"""

from dataclasses import dataclass

import torch
from torch.distributed import PrefixStore, ProcessGroup, Store

from asyncflow.device import connect_group
from asyncflow.errors import WeightsLate


@dataclass(frozen=True)
class Membership:
    """One epoch's members.

    Attributes:
        epoch: changes whenever a member comes, leaves or breaks its group; keeps store keys of different groups apart.
        senders: trainer ranks that hold anything, in order.
        receivers: names, in rank order.
    """

    epoch: str
    senders: tuple[int, ...]
    receivers: tuple[str, ...]


def connect_sender(store: Store, members: Membership, rank: int, device: torch.device) -> ProcessGroup:
    """Meet all receivers; returns this trainer rank's group, in which it has rank 0.

    Raises:
        WeightsLate: not all came within the store's timeout.
    """
    return _connect(store, members, sender=rank, rank=0, device=device)


def connect_receiver(store: Store, members: Membership, name: str, device: torch.device) -> dict[int, ProcessGroup]:
    """Meet all senders; returns one group per sender, by trainer rank.

    Raises:
        WeightsLate: not all came within the store's timeout.
    """
    rank = 1 + members.receivers.index(name)
    return {sender: _connect(store, members, sender=sender, rank=rank, device=device) for sender in members.senders}


def _connect(store: Store, members: Membership, *, sender: int, rank: int, device: torch.device) -> ProcessGroup:
    prefix = PrefixStore(f"weights/group/{members.epoch}/{sender}", store)
    try:
        return connect_group(prefix, rank, 1 + len(members.receivers), device)
    except RuntimeError as error:
        who = " ".join(members.receivers)
        within = f"{store.timeout.total_seconds():g} s"  # type: ignore[attr-defined]  # the stub lacks it
        raise WeightsLate(f"weight group of sender {sender}: not all of {who} came within {within}") from error
