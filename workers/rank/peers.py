"""The ranks of a training gang as seen by one of them: how they connect, exchange small values, and whom a broken
collective is blamed on. No pickle: msgpack over Gloo, whatever the device.

With Gloo, host values do not wait for the device, and a missing rank is an error with a name; a device backend would
end the process instead.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from asyncflow.decoding import msgpack_decoder
from asyncflow.device import connect_group, group_backends
from asyncflow.errors import DeadlineExceeded
from tq.client.dataloader import DeviceRoute, Replica
from tq.columns import Column
from tq.config import ReplicaBroadcast, ReplicaFetch
from tq.wire import ColumnHeader, describe, unpack
from workers.rank.context import WorkerContext
from workers.settings.engines import ActorConfig, RefConfig

_DECODER = msgpack_decoder(Any)
_HEADER_BYTES = 8
# Size of the first exchange; longer values need a second one.
_FIRST_BYTES = 2048


def meet_peers(context: WorkerContext) -> None:
    """Make the default process group over all ranks of this gang; every later wait in it has a deadline. Raises
    DeadlineExceeded if not all ranks came."""
    launcher, size = context.config.launcher, context.gang.num_ranks
    began = time.monotonic()
    try:
        # Gloo connects here, the device's own backend in its first collective. `device_id` would connect that here,
        # too, but with it a rank takes part in a split of the communicator for each group that it is *not* in, also
        # for Gloo's, whose members split nothing (torch 2.13, `_new_process_group_helper`): Megatron's groups would
        # hang.
        dist.init_process_group(
            group_backends(context.device),
            store=context.group_store(),
            rank=context.rank,
            world_size=size,
            timeout=timedelta(seconds=launcher.operation_timeout_s),
        )
    except RuntimeError as error:
        raise _blame(
            f"{context.gang.name} rank {context.rank}", _others(context.rank, size), began, "to meet", error
        ) from error


@contextmanager
def waiting_for_peers(what: str) -> Iterator[None]:
    """Raise DeadlineExceeded, saying who waited for whom `what` (e.g. `in the gradients' sums`), if a collective over
    the default group fails because its deadline passed or a rank left."""
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        rank = dist.get_rank()
        raise _blame(f"rank {rank}", _others(rank, dist.get_world_size()), began, what, error) from error


def _others(rank: int, size: int) -> str:
    ranks = [str(other) for other in range(size) if other != rank]
    return f"rank{'s' if len(ranks) > 1 else ''} {' '.join(ranks)}"


def _blame(who: str, whom: str, began: float, what: str, error: Exception) -> DeadlineExceeded:
    waited_s = time.monotonic() - began
    reason = " ".join(str(error).split())[-200:]
    return DeadlineExceeded(f"{who} waited {waited_s:.0f} s {what} for {whom}, in vain: {reason}")


def gather(value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value (JSON types, bytes, infinities and NaN), in rank order, on every rank. Collective.

    Over the default group it raises DeadlineExceeded if a rank does not come or left; errors of another, a Gloo group,
    are the caller's.
    """
    if dist.get_world_size(group) == 1:
        return [value]
    data = msgspec.msgpack.encode(value)
    first = data[: _FIRST_BYTES - _HEADER_BYTES]
    parts = _exchange(len(data).to_bytes(_HEADER_BYTES, "little") + first, _FIRST_BYTES, group)
    sizes = [int.from_bytes(part[:_HEADER_BYTES], "little") for part in parts]
    parts = [part[_HEADER_BYTES:] for part in parts]
    # All ranks see the same sizes, so all make the second exchange, or none.
    if max(sizes) > len(parts[0]):
        parts = _exchange(data, max(sizes), group)
    return [_DECODER.decode(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def sum_over_ranks(value: int) -> int:
    """Return the sum of every rank's value, below 2**31. Collective over the default group."""
    return _reduced(value, dist.ReduceOp.SUM, "in a sum of all ranks' counts")


def max_over_ranks(value: int) -> int:
    """Return the largest of every rank's value, below 2**31. Collective over the default group."""
    return _reduced(value, dist.ReduceOp.MAX, "in the largest of all ranks' counts")


def all_ranks(value: bool) -> bool:
    """Return whether the value is true on every rank. Collective over the default group."""
    return not sum_over_ranks(int(not value))


def _reduced(value: int, operation: dist.ReduceOp.RedOpType, where: str) -> int:
    if dist.get_world_size() == 1:
        return value
    total = torch.tensor([value], dtype=torch.int32)
    with waiting_for_peers(where):
        dist.all_reduce(total, op=operation)
        return int(total)


def _exchange(data: bytes, size: int, group: dist.ProcessGroup | None) -> list[bytes]:
    mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    parts: list[Tensor] = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with waiting_for_peers("in an exchange of all ranks' figures") if group is None else nullcontext():
        dist.all_gather(parts, mine, group=group)
        return [part.numpy().tobytes() for part in parts]


# Which ranks of the actor train on the same rows, and how results of one of them reach the others.
#
# With FSDP every rank is a replica by itself. With `megatron` a replica is all ranks that hold parts of one copy of
# the model: its lead (the first stage's first rank) fetches rows, computes the hosted tasks, and counts; all ranks
# train.
#
#     lead      queue -> rows -> columns -> forward_backward, ledger, statistics
#                         |         |
#     others              '-> rows  '-> columns -> forward_backward        (`dataloader`, `ReplicaPeers.share_columns`)
#
# Rows get from the lead to the others as `tq.replica_fetch` and `tq.replica_broadcast` say; so they do among the ranks
# of a model that is not trained, which are one replica (`workers.tasks.task_worker`).

_CPU = torch.device("cpu")

# Whether inside of a pipeline stage -> the groups of a `DeviceRoute`.
DeviceGroups = Callable[[bool], tuple[dist.ProcessGroup, ...]]


@dataclass(frozen=True)
class ReplicaPlace:
    """Which rows a rank gets."""

    # Its replica's number, and how many there are
    index: int
    count: int
    members: tuple[tuple[int, ...], ...]  # Ranks of every replica, stage by stage; the first one is its lead
    rank: int  # This rank
    num_stages: int = 1  # Pipeline stages of a replica

    @staticmethod
    def of_rank(actor: ActorConfig, rank: int, num_ranks: int) -> "ReplicaPlace":
        """Return the place of `rank`; raises ConfigError if the ranks make no whole replicas."""
        if actor.engine != "megatron":
            return ReplicaPlace(rank, num_ranks, tuple((one,) for one in range(num_ranks)), rank)
        layout = actor.megatron.layout(num_ranks)
        members = tuple(layout.replica_ranks(replica) for replica in range(layout.replicas))
        return ReplicaPlace(layout.place(rank).replica, layout.replicas, members, rank, layout.stages)

    @staticmethod
    def of_copy(ref: RefConfig, rank: int, num_ranks: int) -> "ReplicaPlace":
        """Return the place of `rank` in a copy of a model that is not trained."""
        stages = ref.megatron.pipeline_parallel if ref.engine == "megatron" else 1
        return ReplicaPlace(0, 1, (tuple(range(num_ranks)),), rank, stages)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.members[self.index]

    def reads_several_times(self, fetch: ReplicaFetch) -> bool:
        """Whether several ranks of a replica read its rows from the queue."""
        several = self.num_stages if fetch is ReplicaFetch.STAGE else len(self.ranks)
        return fetch is not ReplicaFetch.BROADCAST and several > 1

    @property
    def leads(self) -> bool:
        """Whether this rank fetches, counts and acknowledges for its replica."""
        return self.ranks[0] == self.rank

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.ranks.index(self.rank) * self.num_stages // len(self.ranks)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Ranks of this replica in this rank's pipeline stage."""
        size = len(self.ranks) // self.num_stages
        return self.ranks[self.stage * size : (self.stage + 1) * size]


def open_replica(
    context: WorkerContext,
    place: ReplicaPlace,
    fetch: ReplicaFetch,
    device_groups: DeviceGroups,
    *,
    computing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Replica | None:
    """Return what distributes the queue's rows to the ranks of this replica, over their own group; None: one rank.

    Args:
        fetch: with `STAGE` every pipeline stage distributes by itself.
        device_groups: see `row_groups` of `workers.engines.load_engine`; used with `tq.replica_broadcast: device`.
        computing: entered while rows are broadcast so.
    """
    if len(place.ranks) == 1:
        return None
    by_stage = fetch is ReplicaFetch.STAGE
    ranks, part = (place.stage_ranks, f"-stage-{place.stage}") if by_stage else (place.ranks, "")
    # A long timeout: ranks wait here for rows; every `tq.request_timeout_s` the lead tells them that none came.
    store = context.new_store(context.config.launcher.operation_timeout_s)
    keys = f"replica/{context.gang.name}/{context.job.lineage}/{context.attempt}/{place.index}{part}"
    group = connect_group(PrefixStore(keys, store), ranks.index(place.rank), len(ranks), _CPU)
    route = None
    if context.config.tq.replica_broadcast is ReplicaBroadcast.DEVICE:
        route = DeviceRoute(device_groups(by_stage), context.device, computing)
    name = f"replica {place.index} of {context.gang.name}"
    if by_stage:
        name = f"stage {place.stage} of {name}"
    return Replica(group, name, fetch=fetch, acks=place.ranks[0] in ranks, route=route)


class ReplicaPeers:
    """Distributes columns to the ranks of each replica; all ranks of the gang construct it together."""

    def __init__(self, place: ReplicaPlace) -> None:
        self._lead = place.ranks[0]
        self.leads = place.leads
        # `new_group` is collective over all ranks, so each rank makes every replica's group.
        groups = [dist.new_group(list(ranks)) for ranks in place.members]
        self._group = groups[place.index]

    def share_columns(self, columns: Mapping[str, Column] | None) -> Mapping[str, Column]:
        """Return the lead's columns on every rank of the replica; the others pass None. Raises DeadlineExceeded if a
        rank does not come, or left."""
        meta, body = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
        if columns is not None:
            headers, payload = describe(columns, narrow=False)
            meta = torch.frombuffer(bytearray(msgspec.msgpack.encode(headers)), dtype=torch.uint8)
            body = torch.empty(payload.num_bytes, dtype=torch.uint8)
            payload.write(body)
        with waiting_for_peers("for the columns of its replica"):
            sizes = self._broadcast_tensor(torch.tensor([meta.numel(), body.numel()]))
            num_meta, num_body = sizes.tolist()
            meta = self._broadcast_tensor(meta if columns is not None else torch.empty(num_meta, dtype=torch.uint8))
            body = self._broadcast_tensor(body if columns is not None else torch.empty(num_body, dtype=torch.uint8))
        if columns is not None:
            return columns
        return unpack(msgpack_decoder(list[ColumnHeader]).decode(meta.numpy().tobytes()), body)

    def have_equal(self, value: str) -> bool:
        """Return whether all ranks of the replica have the same value. Raises DeadlineExceeded like `share_columns`."""
        with waiting_for_peers("for the rows of its replica"):
            return len(set(gather(value, group=self._group))) == 1

    def _broadcast_tensor(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=self._lead, group=self._group)  # Gloo, since these are host values
        return tensor
