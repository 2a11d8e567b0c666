"""Collects small values from all ranks of a gang. No pickle: msgpack over the group's own backend."""

from contextlib import nullcontext
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.decoding import msgpack_decoder
from workers.gang_peers import waiting_for_peers

_DECODER = msgpack_decoder(Any)
_HEADER_BYTES = 8
_FIRST_BYTES = 2048
"""What goes with the first exchange: longer values need a second one."""


def gather(value: Any, *, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, in rank order, on every rank. Collective.

    Args:
        value: of what JSON has, infinite numbers and NaN too.
        device: of the group's backend.
        group: None: the default one; errors of another are the caller's.

    Raises:
        DeadlineExceeded: a rank of the default group does not come, or left.
    """
    if dist.get_world_size(group) == 1:
        return [value]
    data = msgspec.msgpack.encode(value)
    first = data[: _FIRST_BYTES - _HEADER_BYTES]
    parts = _exchange(len(data).to_bytes(_HEADER_BYTES, "little") + first, _FIRST_BYTES, device, group)
    sizes = [int.from_bytes(part[:_HEADER_BYTES], "little") for part in parts]
    parts = [part[_HEADER_BYTES:] for part in parts]
    if max(sizes) > len(parts[0]):
        parts = _exchange(data, max(sizes), device, group)
    return [_DECODER.decode(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def sum_over_ranks(value: int, *, device: torch.device) -> int:
    """Return the sum of every rank's value, below 2**31. Collective over the default group."""
    return _reduced(value, device, dist.ReduceOp.SUM, "in a sum of all ranks' counts")


def max_over_ranks(value: int, *, device: torch.device) -> int:
    """Return the largest of every rank's value, below 2**31. Collective over the default group."""
    return _reduced(value, device, dist.ReduceOp.MAX, "in the largest of all ranks' counts")


def _reduced(value: int, device: torch.device, operation: dist.ReduceOp.RedOpType, where: str) -> int:
    if dist.get_world_size() == 1:
        return value
    total = torch.tensor([value], dtype=torch.int32, device=device)
    with waiting_for_peers(where):
        dist.all_reduce(total, op=operation)
        return int(total)


def _exchange(data: bytes, size: int, device: torch.device, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the bytes of every rank, each padded to `size`."""
    mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    parts: list[Tensor] = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with waiting_for_peers("in an exchange of all ranks' figures") if group is None else nullcontext():
        dist.all_gather(parts, mine, group=group)
        return [part.cpu().numpy().tobytes() for part in parts]
