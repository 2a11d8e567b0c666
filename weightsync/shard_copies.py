"""Copies of a trainer rank's shards into a region, beside what it computes next; `weightsync.sender` owns them.

run v1 -> buckets are copied one after another -> wait -> the weights change -> run v2
                          '- repeat: buckets of v1 once more, while the shards are still v1
"""

import threading
from collections.abc import Collection, Sequence
from functools import partial

import torch

from asyncflow.device import CopiesDone, CopyStream
from asyncflow.timeline import Spans
from weightsync.shard_writer import Shard, ShardWriter, Target
from weightsync.version import Version


class ShardCopies:
    """The trainer's thread copies and waits; the sender's repeats."""

    def __init__(self, writer: ShardWriter, *, device: torch.device, timeline: Spans) -> None:
        """Args:
        writer: knows which part of which shard goes where.
        device: where the shards are.
        timeline: records every copy.
        """
        self._writer = writer
        self._timeline = timeline
        self._stream = CopyStream(device)
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
            ends = self._stream.run([partial(self._copy_bucket, target, shards, index) for index in indices])
            self._ends, self._shards = ends, (version, shards)
        return dict(zip(indices, ends, strict=True))

    def wait(self) -> None:
        """Wait until nobody reads the shards any more: they are about to change."""
        with self._reading:
            for end in self._ends:
                end.wait()
            self._ends, self._shards = (), None

    def repeat(self, version: Version, target: Target, buckets: Sequence[int]) -> bool:
        """Copy some buckets once more and wait for that; returns False if the shards are not that version any more."""
        with self._reading:
            if self._shards is None or self._shards[0] != version:
                return False
            (copied,) = self._stream.run([partial(self._writer.write, target, self._shards[1], buckets)])
            copied.wait()
        return True

    def close(self) -> None:
        """End the thread that copies; idempotent."""
        self._stream.close()

    def _copy_bucket(self, target: Target, shards: Sequence[Shard], index: int) -> None:
        with self._timeline.span("copy weights", bucket=index):
            self._writer.write(target, shards, {index})
