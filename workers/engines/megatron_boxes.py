"""Which boxes of Hugging Face tensors a run of a flattened Megatron parameter is. Pure.

The distributed optimizer cuts parameters without regard to rows: a data-parallel rank has elements `start` to `stop` of
the flattened parameter. What `megatron_shards` says of a parameter is, cut by query group, one run of it each, so:

    parameter (flat)    | q of group 0 | k | v | q of group 1 | k | v |
    this rank                  |======================|
    boxes of q_proj, k_proj, v_proj: rest of a row, whole rows, begin of a row
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from weightsync.boxes import Box
from workers.engines.base import LocalShard
from workers.engines.megatron_names import MegatronGeometry, megatron_shards


@dataclass(frozen=True)
class FlatBox:
    """A box of a Hugging Face tensor, and where it lies in this rank's run.

    Attributes:
        name, shape: of the whole tensor.
        box: which part.
        start: its first element in the run.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int

    def of(self, flat: Tensor) -> Tensor:
        """Return its view of the run's values."""
        return flat[self.start : self.start + self.box.numel].view(self.box.size)


def flat_boxes(name: str, parameter: Tensor, geometry: MegatronGeometry, *, start: int, stop: int) -> Iterator[FlatBox]:
    """Yield the boxes of elements `start` to `stop` of a flattened parameter; padding of the vocabulary is left out.

    Args:
        name: see `megatron_shards`.
        parameter: this rank's, contiguous.
        geometry: see `megatron_shards`.
        start, stop: the run.
    """
    first = int(parameter.storage_offset())
    for shard in megatron_shards(name, parameter, geometry):
        for box, values in _runs(shard):
            begin = int(values.storage_offset()) - first
            low, high = max(start, begin), min(stop, begin + box.numel)
            for part, offset in _cut(box, low - begin, high - begin):
                yield FlatBox(shard.name, shard.shape, part, begin + offset - start)


def _runs(shard: LocalShard) -> Iterator[tuple[Box, Tensor]]:
    """Split a shard of several query groups into one run of the parameter each."""
    if shard.values.is_contiguous():
        yield shard.box, shard.values
        return
    row = shard.box.offset[0]
    for values in shard.values:
        assert values.is_contiguous(), f"{shard.name}: a query group's rows are apart"
        rows = values.numel() * shard.box.size[0] // shard.box.numel
        yield Box((row, *shard.box.offset[1:]), (rows, *shard.box.size[1:])), values
        row += rows


def _cut(box: Box, low: int, high: int) -> Iterator[tuple[Box, int]]:
    """Yield (box, its first element) of elements `low` to `high` of a box with one or two dimensions."""
    width = box.size[1] if len(box.size) == 2 else 1
    while low < high:
        row, column = divmod(low, width)
        rows = max(1, (high - low) // width) if not column else 1
        count = min(rows * width, high - low) if not column else min(width - column, high - low)
        if len(box.size) == 2:
            yield Box((box.offset[0] + row, box.offset[1] + column), (rows, count // rows)), low
        else:
            yield Box((box.offset[0] + row,), (rows,)), low
        low += count
