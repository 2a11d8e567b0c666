"""The weights of a model that several ranks share and none trains: taken as boxes, read from files, written as a whole.

Each rank holds parts of Hugging Face's tensors. It asks weight sync for these boxes alone, and reads their rows alone.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weightsync.boxes import Box
from weightsync.plan import Need
from workers.engines.base import LocalShard
from workers.engines.hf.weights import HfWeights, write_weights
from workers.trainer.gang_peers import gather, waiting_for_peers


class SharedWeights:
    """This rank's parts; the ranks of the default group hold the model together."""

    def __init__(
        self, shards: Callable[[], Iterable[LocalShard]], aliases: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        """Args:
        shards: the parts as they are now, always in the same order.
        aliases: other names of tied weights.
        """
        self._all = shards
        self._aliases = aliases or {}

    def needs(self) -> dict[str, Need]:
        """Return what `load` needs: a name for each box, since a rank may hold several of one tensor."""
        return {
            f"{shard.name}[{number}]": Need(shard.shape, (shard.name, *self._aliases.get(shard.name, ())), shard.box)
            for number, shard in enumerate(self._shards())
        }

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the boxes, by the names of `needs`."""
        for number, shard in enumerate(self._shards()):
            shard.values.copy_(weights[f"{shard.name}[{number}]"].reshape(shard.values.shape))

    @torch.no_grad()
    def read(self, files: HfWeights) -> None:
        """Copy the boxes from safetensors.

        Raises:
            ConfigError: they are not all there.
        """
        for shard in self._shards():
            rows = files.read_shard(shard, self._aliases.get(shard.name, ()))
            box = rows[(slice(None), *shard.box.slices[1:])] if shard.shape else rows
            shard.values.copy_(box.reshape(shard.values.shape))

    def save(self, target: Path) -> None:
        """Write whole weights as safetensors into `target`, which is made; collective, the first rank writes.

        Raises:
            OSError: they cannot be written; on the first rank.
            DeadlineExceeded: a rank is gone.
        """
        own = self._shards()
        held = gather([[shard.name, shard.shape, shard.box.offset, shard.box.size] for shard in own])
        shapes: dict[str, tuple[int, ...]] = {}
        holders: dict[str, dict[Box, tuple[int, int]]] = {}  # where several ranks have a box, the first one gives it
        for rank, parts in enumerate(held):
            for number, (name, shape, offset, size) in enumerate(parts):
                shapes[name] = tuple(shape)
                holders.setdefault(name, {}).setdefault(Box(tuple(offset), tuple(size)), (rank, number))

        me = dist.get_rank()

        def whole(name: str) -> Tensor:
            out = torch.empty(shapes[name] if me == 0 else 0, dtype=own[0].values.dtype)
            for box, (rank, number) in holders[name].items():
                if me not in (0, rank):
                    continue
                part = torch.empty(box.size, dtype=out.dtype)
                if rank == me:
                    part.copy_(own[number].values.reshape(box.size))
                elif me == 0:
                    dist.recv(part, src=rank)
                if me == 0:
                    out[box.slices] = part
                else:
                    dist.send(part, dst=0)
            return out

        names = iter(shapes)
        with waiting_for_peers("for a part of the weights that are written"):
            try:
                if me == 0:
                    target.mkdir(parents=True, exist_ok=True)
                    write_weights(target, shapes, lambda _: whole(next(names)))
            finally:
                for name in names:  # the other ranks; and the first, if it cannot write: the others send anyway
                    whole(name)

    def _shards(self) -> list[LocalShard]:
        return [shard for shard in self._all() if shard.box.numel]
