"""The trainer's side: copy the shards to the host, go on; a thread broadcasts the buckets.

    trainer thread    | copy v1 | train ...              | copy v2 | train ...
    sending thread              | bucket 0 | bucket 1 |             | bucket 0 | ...

The only time the trainer waits is the copy, and the rest of the previous transfer when a step is shorter than one.
"""

import logging
import queue
import threading
import time
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from asyncflow.device import abort_group
from asyncflow.errors import WeightSyncError
from weightsync.bucket import TrailerKind, bucket_buffer, seal, values_of
from weightsync.plan import ShardSpec, TransferPlan
from weightsync.version import Version

logger = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 5.0
_LOOK_S = 0.5
"""How often a wait looks at its stop event (s)."""


class Shard(Protocol):
    """One piece of a parameter that this rank holds; `workers.engines.base.LocalShard` is one."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> int: ...
    @property
    def values(self) -> Tensor: ...


def describe(shards: Iterable[Shard]) -> list[ShardSpec]:
    """Return what this rank holds, for the plan."""
    return [ShardSpec(shard.name, tuple(shard.shape), shard.start, shard.values.numel()) for shard in shards]


class WeightSender:
    """Sends versions from one trainer rank. One thread of the caller publishes."""

    def __init__(self, group: ProcessGroup, plan: TransferPlan, rank: int, device: torch.device) -> None:
        """Allocate this rank's bucket buffers once.

        Args:
            group: this rank and all receivers; see `connect_sender`.
            plan: agreed on by all ranks.
            rank: this trainer rank.
            device: where the group's backend wants its tensors.
        """
        self._group = group
        self._device = device
        self._dtype = getattr(torch, plan.dtype)
        self._buckets = plan.of_sender(rank)
        self._buffers = [bucket_buffer(bucket, self._dtype) for bucket in self._buckets]
        self._jobs: queue.SimpleQueue[Version | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="weight-sender", daemon=True)
        self._thread.start()

    @property
    def bytes_per_version(self) -> int:
        """Bytes that this rank sends for one version, to each receiver."""
        return sum(buffer.numel() for buffer in self._buffers)

    def publish(
        self, version: Version, shards: Iterable[Shard], *, timeout_s: float, stop: threading.Event | None = None
    ) -> float:
        """Copy the weights and start sending them; returns the seconds that the trainer was held up.

        Args:
            version: of these weights.
            shards: this rank's pieces, as described in the plan.
            timeout_s: deadline for the previous transfer to end.
            stop: ends that wait early.

        Raises:
            WeightSyncError: the previous transfer failed or did not end in time, or the sender is closed.
        """
        began = time.monotonic()
        if self._closed:
            raise WeightSyncError(f"weights of step {version.step}: the sender is closed")
        self.wait(timeout_s, stop=stop)
        flat = {(shard.name, shard.start): shard.values for shard in shards}
        for bucket, buffer in zip(self._buckets, self._buffers, strict=True):
            values = values_of(buffer, self._dtype)
            offset = 0
            for piece in bucket.pieces:
                values[offset : offset + piece.numel].copy_(_find(flat, piece.name, piece.start, piece.numel))
                offset += piece.numel
        self._idle.clear()
        self._jobs.put(version)
        return time.monotonic() - began

    def wait(self, timeout_s: float, *, stop: threading.Event | None = None) -> None:
        """Wait until the last version has left.

        Raises:
            WeightSyncError: it failed, did not end in time, or had not ended when `stop` was set.
        """
        deadline = time.monotonic() + timeout_s
        while not self._idle.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
            if stop is not None and stop.is_set():
                raise WeightSyncError("weights: the last version had not reached all receivers when the stop came")
            if time.monotonic() >= deadline:
                raise WeightSyncError(f"weights: the last version did not reach all receivers within {timeout_s:g} s")
        if self._error is not None:
            raise WeightSyncError(f"weights: broadcast failed, a receiver is gone ({self._error})") from self._error

    def close(self, timeout_s: float = 10.0) -> None:
        """Tell the receivers that nothing follows and end the thread; idempotent.

        A version in progress is sent to its end; receivers that do not take it within `timeout_s` are cut off.
        """
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            abort_group(self._group)
            self._thread.join(_ABORT_TIMEOUT_S)

    def _run(self) -> None:
        while self._error is None:
            version = self._jobs.get()
            try:
                if version is None:
                    self._end()
                    return
                for bucket, buffer in zip(self._buckets, self._buffers, strict=True):
                    seal(buffer, bucket, version)
                    self._broadcast(buffer)
            except Exception as error:  # noqa: BLE001 - the boundary of a thread: `wait` raises it
                logger.warning("weights: broadcast failed: %s", error)
                self._error = error
                abort_group(self._group)  # the other receivers would wait for the rest
            finally:
                self._idle.set()

    def _end(self) -> None:
        if not self._buckets:
            return
        bucket, buffer = self._buckets[0], self._buffers[0]
        seal(buffer, bucket, Version(0, 0), TrailerKind.END)
        self._broadcast(buffer)

    def _broadcast(self, buffer: Tensor) -> None:
        self._group.broadcast([buffer.to(self._device)]).wait()


def _find(flat: dict[tuple[str, int], Tensor], name: str, start: int, numel: int) -> Tensor:
    values = flat.get((name, start))
    if values is not None and values.numel() >= numel:
        return values[:numel]
    for (other, first), candidate in flat.items():
        if other == name and first <= start and start + numel <= first + candidate.numel():
            return candidate[start - first : start - first + numel]
    raise WeightSyncError(f"{name}: this rank no longer holds elements {start} to {start + numel}")
