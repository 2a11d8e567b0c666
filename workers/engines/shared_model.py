"""A model that several ranks share and none trains: its weights come as boxes, from files or from the policy, and are
written whole.

Each rank holds parts of Hugging Face's tensors; it requests only these boxes from weight sync, and reads only their
rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weightsync.plan import Box, Need
from workers.engines.base import LocalShard, TrainEngine
from workers.engines.hf.weights import NO_ALIASES, HfWeights, write_weights
from workers.engines.lora import AdapterSwitch
from workers.rank.peers import gather, waiting_for_peers
from workers.rows.packed_rows import Sequences


class SharedModel(ABC):
    """One rank of the model; implements `FrozenEngine` and `PolicyCopy` except `log_probs`. Its ranks are those of the
    default group; `policy` is the engine whose weights `take` copies, divided alike."""

    adopts_weights = False
    _aliases: Mapping[str, Iterable[str]] = NO_ALIASES  # other names of tied weights

    def __init__(self, policy: TrainEngine | None) -> None:
        self._policy = policy

    @abstractmethod
    def shards(self) -> Iterable[LocalShard]:
        """Return this rank's pieces of all parameters, in a fixed order; views."""

    def take(self) -> None:
        """Copy the policy's current weights; each rank copies its own."""
        assert self._policy is not None, "a frozen model follows no policy"
        for own, source in zip(self.shards(), self._policy.shards(), strict=True):
            own.values.copy_(source.values)

    def weight_needs(self) -> Mapping[str, Need]:
        """Return what `load_weights` needs: one name per box, since a rank may hold several boxes of a tensor."""
        return {
            f"{shard.name}[{number}]": Need(shard.shape, (shard.name, *self._aliases.get(shard.name, ())), shard.box)
            for number, shard in enumerate(self._held_shards())
        }

    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        for number, shard in enumerate(self._held_shards()):
            shard.values.copy_(weights[f"{shard.name}[{number}]"].reshape(shard.values.shape))

    def read_weights(self, weights_dir: Path) -> None:
        """Read this rank's rows from files. Raises ConfigError if they lack weights, or hold others."""
        files = HfWeights(weights_dir)
        self._check_stored(files)
        files.fill(self._held_shards(), self._aliases)

    def save_weights(self, target: Path) -> None:
        """Write whole weights as safetensors into `target`, which is created; collective, the first rank writes.

        Raises:
            OSError: they cannot be written; on the first rank.
            DeadlineExceeded: a rank is gone.
        """
        own = self._held_shards()
        held = gather([[shard.name, shard.shape, shard.box.offset, shard.box.size] for shard in own])
        shapes: dict[str, tuple[int, ...]] = {}
        holders: dict[str, dict[Box, tuple[int, int]]] = {}  # the first rank with a box sends it
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

        # All ranks walk the names in the same order, so sends and receives match.
        names = iter(shapes)
        with waiting_for_peers("for a part of the weights that are written"):
            try:
                if me == 0:
                    target.mkdir(parents=True, exist_ok=True)
                    write_weights(target, shapes, lambda _: whole(next(names)))
            finally:
                for name in names:  # the other ranks; and the first one if it cannot write, since the others still send
                    whole(name)

    @abstractmethod
    def _check_stored(self, weights: HfWeights) -> None:
        """Refuse files with tensors that the model would not use."""

    def _held_shards(self) -> list[LocalShard]:
        return [shard for shard in self.shards() if shard.box.numel]


class BaseOfPolicy:
    """The model that a policy with an adapter began as: the policy with its adapter off; implements `PolicyCopy`.

    Args:
        policy: the engine; its copy needs no memory and no weights.
        switch: of the policy's adapter.
    """

    def __init__(self, policy: TrainEngine, switch: AdapterSwitch) -> None:
        self._policy, self._switch = policy, switch

    def take(self) -> None:
        """Never called: it is the initial model."""
        raise AssertionError("the base is frozen")

    def log_probs(self, batch: Sequences | None) -> Tensor:
        with self._switch.off():
            return self._policy.log_probs(batch)
