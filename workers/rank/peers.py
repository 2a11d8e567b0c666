"""The ranks of a training gang as seen by one of them: how they meet, exchange small values, and whom a broken
collective is blamed on. No pickle: msgpack over Gloo, whatever the device.

A host value costs no wait for the device, and a rank that is missing is an error with a name: a backend of devices ends
the process instead.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.decoding import msgpack_decoder
from asyncflow.device import group_backends
from asyncflow.errors import DeadlineExceeded
from workers.rank.context import WorkerContext

_DECODER = msgpack_decoder(Any)
_HEADER_BYTES = 8
_FIRST_BYTES = 2048
"""What goes with the first exchange: longer values need a second one."""


def meet_peers(context: WorkerContext) -> None:
    """Make the default process group, over all ranks of this gang; every later wait in it has its deadline.

    Gloo meets here, the devices' own backend in its first collective. Without `device_id`, which would have that meet
    here, too: with it a rank takes part in a split of the communicator for each group that it is *not* in, also for
    Gloo's, whose members split nothing (torch 2.13, `_new_process_group_helper`); Megatron's groups would hang.

    Raises:
        DeadlineExceeded: not all of them came.
    """
    launcher, size = context.config.launcher, context.gang.num_ranks
    began = time.monotonic()
    try:
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
    """Say who waited for whom when a collective over the default group breaks, because its deadline passed or a rank
    left.

    Args:
        what: is waited for, e.g. `in the gradients' sums`.

    Raises:
        DeadlineExceeded: instead of whatever the backend raises.
    """
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
    """Return every rank's value, in rank order, on every rank. Collective.

    Args:
        value: of what JSON has, infinite numbers and NaN too.
        group: of Gloo; None: the default one; errors of another are the caller's.

    Raises:
        DeadlineExceeded: a rank of the default group does not come, or left.
    """
    if dist.get_world_size(group) == 1:
        return [value]
    data = msgspec.msgpack.encode(value)
    first = data[: _FIRST_BYTES - _HEADER_BYTES]
    parts = _exchange(len(data).to_bytes(_HEADER_BYTES, "little") + first, _FIRST_BYTES, group)
    sizes = [int.from_bytes(part[:_HEADER_BYTES], "little") for part in parts]
    parts = [part[_HEADER_BYTES:] for part in parts]
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
    """Return the bytes of every rank, each padded to `size`."""
    mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    parts: list[Tensor] = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with waiting_for_peers("in an exchange of all ranks' figures") if group is None else nullcontext():
        dist.all_gather(parts, mine, group=group)
        return [part.numpy().tobytes() for part in parts]
