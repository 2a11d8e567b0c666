"""Which ranks of the actor train on the same rows, and how what one of them computed gets to the others.

With FSDP every rank is a replica by itself. With `megatron` a replica is all ranks that hold parts of one copy of the
model: its lead (the first stage's first rank) fetches rows, computes the hosted tasks, and counts; all ranks train.

    lead      queue -> rows -> columns -> forward_backward, ledger, statistics
                        |         |
    others              '-> rows  '-> columns -> forward_backward        (`tq.client.dataloader`, `ReplicaPeers.share`)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from asyncflow.decoding import msgpack_decoder
from asyncflow.device import connect_group
from tq.client.dataloader import Replica
from tq.columns import Column
from tq.wire import ColumnHeader, describe, unpack
from workers.rank.context import WorkerContext
from workers.rank.peers import waiting_for_peers
from workers.settings.engines import ActorConfig

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ReplicaPlace:
    """Which rows a rank gets.

    Attributes:
        index, count: of its replica.
        members: ranks of every replica, each with its lead first.
        rank: this one.
    """

    index: int
    count: int
    members: tuple[tuple[int, ...], ...]
    rank: int

    @staticmethod
    def of(actor: ActorConfig, rank: int, num_ranks: int) -> "ReplicaPlace":
        """Return where `rank` is.

        Raises:
            ConfigError: the ranks make no whole replicas.
        """
        if actor.engine != "megatron":
            return ReplicaPlace(rank, num_ranks, tuple((one,) for one in range(num_ranks)), rank)
        layout = actor.megatron.layout(num_ranks)
        members = tuple(layout.replica_ranks(replica) for replica in range(layout.replicas))
        return ReplicaPlace(layout.place(rank).replica, layout.replicas, members, rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's replica."""
        return self.members[self.index]

    @property
    def leads(self) -> bool:
        """Whether this rank fetches, counts and acknowledges for its replica."""
        return self.ranks[0] == self.rank


def open_replica(context: WorkerContext, place: ReplicaPlace) -> Replica | None:
    """Return what shares the queue's rows among the ranks of this replica, over a group of theirs; None: one rank."""
    if len(place.ranks) == 1:
        return None
    # Patient: a rank waits here for rows; the lead says each `tq.request_timeout_s` that there are none yet.
    store = context.new_store(context.config.launcher.operation_timeout_s)
    keys = f"replica/{context.gang.name}/{context.job.lineage}/{context.attempt}/{place.index}"
    number, size = place.ranks.index(place.rank), len(place.ranks)
    group = connect_group(PrefixStore(keys, store), number, size, _CPU)
    return Replica(group, f"replica {place.index} of {context.gang.name}")


class ReplicaPeers:
    """Shares columns among the ranks of each replica; constructed by all ranks of the gang together."""

    def __init__(self, place: ReplicaPlace) -> None:
        self._lead = place.ranks[0]
        self.leads = place.leads
        """Whether this rank computes."""
        groups = [dist.new_group(list(ranks)) for ranks in place.members]
        self._group = groups[place.index]

    def share(self, columns: Mapping[str, Column] | None) -> Mapping[str, Column]:
        """Return the lead's columns on every rank of the replica.

        Args:
            columns: on the lead; None elsewhere.

        Raises:
            DeadlineExceeded: a rank does not come, or left.
        """
        meta, body = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
        if columns is not None:
            headers, payload = describe(columns, narrow=False)
            meta = torch.frombuffer(bytearray(msgspec.msgpack.encode(headers)), dtype=torch.uint8)
            body = torch.empty(payload.num_bytes, dtype=torch.uint8)
            payload.write(body)
        with waiting_for_peers("for the columns of its replica"):
            sizes = self._broadcast(torch.tensor([meta.numel(), body.numel()]))
            num_meta, num_body = sizes.tolist()
            meta = self._broadcast(meta if columns is not None else torch.empty(num_meta, dtype=torch.uint8))
            body = self._broadcast(body if columns is not None else torch.empty(num_body, dtype=torch.uint8))
        if columns is not None:
            return columns
        return unpack(msgpack_decoder(list[ColumnHeader]).decode(meta.numpy().tobytes()), body)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=self._lead, group=self._group)  # host values: Gloo
        return tensor
