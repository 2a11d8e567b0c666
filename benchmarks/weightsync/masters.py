"""One trainer rank's weights, and a proof of them that owes nothing to the weight path.

The proof of a version is one digest per trainer rank: xxh3 over the rank's rows of every tensor in wire format, in the
order of the shapes. A rank takes it from its masters, a generator from the tensors that its engine computes with.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
import xxhash
from torch import Tensor

from benchmarks.weightsync.shapes import Shapes, rows_of
from weightsync.plan import Box, ShardSpec
from workers.engines.base import LocalShard

WIRE = torch.bfloat16
WIRE_NAME: Literal["bfloat16"] = "bfloat16"
_CHUNK = 1 << 20
_SPREAD = 0.05


def held_by(rank: int, num_ranks: int, shapes: Shapes, dtype: torch.dtype) -> list[ShardSpec]:
    """Return what a rank's masters are, by `weightsync.sender.describe`."""
    name = str(dtype).removeprefix("torch.")
    return [
        ShardSpec(key, shape, name, Box.rows(shape, *rows_of(shape, rank, num_ranks))) for key, shape in shapes.items()
    ]


class Masters:
    """Row shards of a model that change with every update."""

    def __init__(self, shapes: Shapes, rank: int, num_ranks: int, dtype: torch.dtype, seed: int) -> None:
        """Fill them at random."""
        generator = torch.Generator().manual_seed(2 * seed + rank)
        self.shards: list[LocalShard] = []
        for name, shape in shapes.items():
            start, stop = rows_of(shape, rank, num_ranks)
            values = torch.empty(stop - start, *shape[1:], dtype=dtype)
            values.uniform_(-_SPREAD, _SPREAD, generator=generator)
            self.shards.append(LocalShard(name, shape, Box.rows(shape, start, stop), values))
        self._noise = torch.empty(_CHUNK + 4096, dtype=dtype).normal_(0, _SPREAD / 10, generator=generator)

    def update(self, step: int) -> None:
        """Change nearly every element, as an optimizer step does, differently for every step."""
        for number, shard in enumerate(self.shards):
            start = (step * 97 + number * 13) % 4096
            for chunk in torch.split(shard.values.view(-1), _CHUNK):
                chunk.add_(self._noise[start : start + chunk.numel()])

    def digest(self) -> int:
        """Return this rank's part of the proof."""
        return _digest(shard.values for shard in self.shards)


def engine_digests(engine: Mapping[str, Tensor], num_ranks: int) -> list[int]:
    """Return the proof, one number per trainer rank, of the weights that an engine holds."""
    digests = []
    for rank in range(num_ranks):
        ranges = {name: rows_of(tuple(tensor.shape), rank, num_ranks) for name, tensor in engine.items()}
        digests.append(_digest(engine[name][start:stop] for name, (start, stop) in ranges.items()))
    return digests


def _digest(parts: Iterable[Tensor]) -> int:
    hasher = xxhash.xxh3_64()
    for part in parts:
        if part.numel():
            hasher.update(part.to(WIRE).contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.intdigest()
