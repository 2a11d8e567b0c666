"""Derives which boxes of whole tensors this rank holds from DTensor placements, for the `fsdp` engine's `shards()`.

Looks at shapes, meshes and placements, and takes views of local tensors; never communicates.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from asyncflow.errors import PlanError
from weightsync.plan import Box
from workers.engines.base import LocalShard

#     mesh (dp 2, tp 2), placements [Shard(1), Shard(0)] of [4, 6], rank (0, 1):    box [2:4, 0:3]
#
# FSDP2 over tensor parallelism on the same dimension cuts by tensor parallelism first, and expresses that as
# `[_StridedShard(0, split_factor=tp), Shard(0)]`: a rank's rows are one run. Read from left to right, as by torch's
# `compute_local_shape_and_global_offset` and the split of `_StridedShard`, the same placements give the same rows only
# if sizes divide evenly: 7 rows over (dp 3, tp 2) leave row 6 with rank (2, 1), but those functions say (2, 0) (torch
# 2.13). So the order of the cuts is first read from the split factors. A `_StridedShard` alone on its dimension, as for
# a fused projection, gives a rank several runs: one shard each. With FSDP2 over it, torch writes placements that its
# own `full_tensor` misreads (2.13), so those are refused.
#
# Legend of a run: (first index, number of indices) along one dimension.

Run = tuple[int, int]


@dataclass(frozen=True)
class MeshCut:
    """How one mesh dimension cuts a tensor dimension."""

    parts: int  # ranks along the mesh dimension
    index: int  # this rank's
    split_factor: int = 1  # of `_StridedShard`; 1 for `Shard`


def local_shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[LocalShard]:
    """Yield what this rank holds of each tensor, in order, as views without gradient.

    `tensors` are DTensors, or plain tensors, which every rank holds whole. A rank outside a tensor's mesh gets nothing
    for it; one inside that has no rows gets one empty shard. Raises PlanError if a tensor is a partial sum, or its
    local shape does not follow from its placements.
    """
    for name, tensor in tensors:
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            yield LocalShard(name, shape, Box.from_shape(shape), tensor.detach())
            continue
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is not None:
            yield from _shards_of(name, tensor, coordinate)


def local_runs(length: int, cuts: Sequence[MeshCut]) -> list[Run] | None:
    """Return which indices of a dimension a rank holds, in local order; at least one run, which may be empty.

    `cuts` are those of this dimension, in the order of mesh dimensions. None: the split factors do not determine the
    order in which the cuts were made.
    """
    order = _in_order_of_cutting([cut for cut in cuts if cut.parts > 1])
    if len(order) > 1 and any(cut.split_factor > 1 for cut in order):
        return None
    runs = [(0, length)]
    for cut in order:
        pieces: list[Run] = []
        for part in range(cut.split_factor):
            piece = _chunk(runs, cut.split_factor, part)
            pieces.extend(_chunk(piece, cut.parts, cut.index))
        runs = _joined(pieces)
    return runs


def _shards_of(name: str, tensor: DTensor, coordinate: Sequence[int]) -> Iterator[LocalShard]:
    shape, mesh, local = tuple(tensor.shape), tensor.device_mesh, tensor.to_local().detach()
    cuts: list[list[MeshCut]] = [[] for _ in shape]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial):
            raise PlanError(f"{name}: a partial sum over mesh dimension {axis} cannot be sent; reduce it first")
        if isinstance(placement, (Shard, _StridedShard)):
            factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            cuts[placement.dim].append(MeshCut(mesh.size(axis), coordinate[axis], factor))
    runs = [local_runs(length, cuts_of_axis) or [] for length, cuts_of_axis in zip(shape, cuts, strict=True)]
    if tuple(sum(size for _, size in runs_of_axis) for runs_of_axis in runs) != tuple(local.shape) or [] in runs:
        raise PlanError(
            f"{name}: which part of {shape} is {tuple(local.shape)} at {tuple(coordinate)} of a mesh "
            f"{tuple(mesh.shape)} does not follow from {tensor.placements}; shard it with distribute_tensor or "
            "fully_shard, and a fused dimension only once"
        )
    # Several runs along a dimension give one box per combination.
    for parts in itertools.product(*map(_with_local_starts, runs)):
        values = local
        for axis, (local_start, (_, size)) in enumerate(parts):
            values = values.narrow(axis, local_start, size)
        box = Box(tuple(start for _, (start, _) in parts), tuple(size for _, (_, size) in parts))
        yield LocalShard(name, shape, box, values)


def _in_order_of_cutting(cuts: Sequence[MeshCut]) -> list[MeshCut]:
    """Return the cuts in the order in which they were made."""
    # A split factor is the number of parts into which later mesh dimensions had already cut: such a cut is a plain one
    # after theirs. Factors that do not fit are left in place.
    order: list[MeshCut] = []
    for cut in reversed(cuts):
        made = [math.prod(other.parts for other in order[:place]) for place in range(len(order) + 1)]
        if cut.split_factor in made:
            order.insert(made.index(cut.split_factor), MeshCut(cut.parts, cut.index))
        else:
            order.insert(0, cut)
    return order


def _chunk(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """Return one of the parts into which `torch.chunk` divides the indices, with empty ones at the end."""
    size = -(-sum(size for _, size in runs) // parts)
    first, last = index * size, (index + 1) * size
    taken, position = [], 0
    for start, length in runs:
        low, high = max(first, position), min(last, position + length)
        if low < high:
            taken.append((start + low - position, high - low))
        position += length
    return taken


def _joined(runs: Sequence[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, size in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined or [(0, 0)]


def _with_local_starts(runs: Sequence[Run]) -> list[tuple[int, Run]]:
    sizes = (size for _, size in runs[:-1])
    return list(zip(itertools.accumulate(sizes, initial=0), runs, strict=True))
