"""Copies a trainer rank's shards to where they lie in a region. The trainer waits for it, so it does little else."""

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from asyncflow.device import CopiesDone, CopyStream, Staging
from asyncflow.errors import WeightSyncError
from asyncflow.timeline import Spans
from weightsync.boxes import Box
from weightsync.bucket_buffer import bucket_layouts
from weightsync.plan import Piece, ShardSpec, TransferPlan
from weightsync.region import Region, RegionLayout
from weightsync.version import Version


class Shard(Protocol):
    """One part of a tensor that this rank holds; `workers.engines.base.LocalShard` is one."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def box(self) -> Box: ...
    @property
    def values(self) -> Tensor: ...


def describe(shards: Iterable[Shard]) -> list[ShardSpec]:
    """Return what this rank holds, for the plan."""
    return [
        ShardSpec(shard.name, tuple(shard.shape), str(shard.values.dtype).removeprefix("torch."), shard.box)
        for shard in shards
    ]


@dataclass(frozen=True)
class Target:
    """A region that one rank writes its part into.

    Attributes:
        region: of a whole version.
        views: by bucket, of the rank's pieces in it.
    """

    region: Region
    views: Mapping[int, Sequence[Tensor]]


class ShardWriter:
    """One rank's part of a plan."""

    def __init__(self, plan: TransferPlan, rank: int) -> None:
        """Args:
        plan: agreed on by all ranks.
        rank: whose buckets are written.
        """
        self.layout = RegionLayout(plan)
        self.buckets = plan.of_sender(rank)
        self._known: list[tuple[str, Box]] = []
        self._sources: dict[int, list[tuple[int, Box]]] = {}  # by bucket, of each piece: which shard, where in it

    def target(self, memory: Tensor) -> Target:
        """Lay the plan over memory, uint8 [region_bytes]; once, ahead of time."""
        region = Region(memory, self.layout)
        return Target(
            region, {bucket.index: [region.piece(piece) for piece in bucket.pieces] for bucket in self.buckets}
        )

    def match(self, shards: Sequence[Shard]) -> None:
        """Find each piece's shard; they are the same ones at every version.

        Raises:
            WeightSyncError: a piece is not in them.
        """
        held = [(shard.name, shard.box) for shard in shards]
        if held == self._known:
            return
        by_name: dict[str, list[tuple[int, Box]]] = {}
        for number, (name, box) in enumerate(held):
            by_name.setdefault(name, []).append((number, box))
        self._sources = {
            bucket.index: [self._find(piece, by_name) for piece in bucket.pieces] for bucket in self.buckets
        }
        self._known = held

    def write(self, bucket: int, views: Sequence[Tensor], shards: Sequence[Shard]) -> None:
        """Copy a bucket's pieces, with the cast to the type of `views`; may return before a device has.

        Args:
            bucket: its index.
            views: where its pieces go.
            shards: what this rank holds now, as `match` was told.
        """
        whole: dict[int, Tensor] = {}
        sources: list[Tensor] = []
        for number, box in self._sources[bucket]:
            size = shards[number].box.size
            if number not in whole:  # a view, but for some strided ones
                whole[number] = shards[number].values.detach().reshape(size)
            sources.append(whole[number] if box.size == size else whole[number][box.slices])
        torch._foreach_copy_(list(views), sources, non_blocking=True)

    def copy(self, source: Target, target: Target) -> None:
        """Copy all pieces from one region to another."""
        for bucket, views in target.views.items():
            torch._foreach_copy_(list(views), list(source.views[bucket]))

    def _find(self, piece: Piece, held: Mapping[str, Sequence[tuple[int, Box]]]) -> tuple[int, Box]:
        name = self.layout.plan.names[piece.tensor]
        for number, box in held.get(name, ()):
            relative = piece.box.within(box)
            if relative is not None:
                return number, relative
        raise WeightSyncError(f"{name}: this rank no longer holds {piece.box}")


class ShardCopies:
    """Copies shards beside what the trainer computes next. Its thread copies and waits; the sender's repeats.

    run v1 -> buckets are copied one after another -> wait -> the weights change -> run v2
                              '- repeat: buckets of v1 once more, while the shards are still v1
    """

    def __init__(self, writer: ShardWriter, *, device: torch.device, timeline: Spans) -> None:
        """Args:
        writer: knows which part of which shard goes where.
        device: where the shards are.
        timeline: records every copy.
        """
        self._writer = writer
        self._timeline = timeline
        self._stream = CopyStream(device)
        self._on_host = device.type == "cpu"
        self._reading = threading.Lock()  # held while shards are read, so that `wait` waits for that
        self._ends: Collection[CopiesDone] = ()
        self._shards: tuple[Version, Sequence[Shard]] | None = None  # whose weights they still are

    def run(self, version: Version, target: Target, shards: Sequence[Shard]) -> dict[int, CopiesDone]:
        """Begin to copy all buckets; returns the end of each. The shards are read until `wait` returns.

        Raises:
            WeightSyncError: a piece is not in the shards.
        """
        with self._reading:
            self._writer.match(shards)
            indices = [bucket.index for bucket in self._writer.buckets]
            ends = self._begin(target, shards, indices)
            self._ends, self._shards = ends, (version, shards)
        return dict(zip(indices, ends, strict=True))

    def wait(self) -> None:
        """Wait until the shards are not read any more: they are about to change."""
        with self._reading:
            for end in self._ends:
                end.wait()
            self._ends, self._shards = (), None

    def repeat(self, version: Version, target: Target, buckets: Sequence[int]) -> bool:
        """Copy some buckets once more and wait for that; returns False if the shards are not that version any more."""
        with self._reading:
            if self._shards is None or self._shards[0] != version:
                return False
            for copied in self._begin(target, self._shards[1], buckets):
                copied.wait()
        return True

    def close(self) -> None:
        """End the thread that copies; idempotent."""
        self._stream.close()

    def _begin(self, target: Target, shards: Sequence[Shard], buckets: Sequence[int]) -> list[CopiesDone]:
        if self._on_host:
            return self._stream.run([partial(self._copy_bucket, target, shards, index) for index in buckets])
        return self._stream.stage([self._staging(target, shards, index) for index in buckets])

    def _copy_bucket(self, target: Target, shards: Sequence[Shard], index: int) -> None:
        with self._timeline.span("copy weights", bucket=index):
            self._writer.write(index, target.views[index], shards)

    def _staging(self, target: Target, shards: Sequence[Shard], index: int) -> Staging:
        """Cast and gather a bucket on the device; on the host its pieces go to where they lie, columns too."""
        layout = bucket_layouts(self._writer.layout)[index]

        def pack(there: Tensor) -> None:
            self._writer.write(index, layout.pieces(there.view(torch.int64)), shards)

        def unpack(host: Tensor) -> None:
            with self._timeline.span("copy weights", bucket=index):
                torch._foreach_copy_(list(target.views[index]), layout.pieces(host.view(torch.int64)))

        return Staging(8 * layout.num_words, pack, unpack)
