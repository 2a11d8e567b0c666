"""The generator's side: a thread stages incoming versions while the engine goes on with the old one.

    receiving thread   | v1 ......... | v2 ......... |
    engine thread      generate v0 ......| load v1 | generate v1 ... | load v2 |

Only a version whose buckets all carry it and match their checksums is ever offered; the newest complete one wins.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from asyncflow.device import abort_group
from asyncflow.errors import WeightSyncError
from weightsync.bucket import bucket_buffer, unseal, values_of
from weightsync.plan import Bucket, TransferPlan
from weightsync.version import Version

logger = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 5.0


class WeightReceiver:
    """Receives every version that the trainer sends and keeps the newest complete one on the host."""

    def __init__(self, groups: Sequence[ProcessGroup], plan: TransferPlan, device: torch.device) -> None:
        """Start receiving.

        Args:
            groups: one per sender; see `connect_receiver`.
            plan: the trainer's.
            device: where the groups' backend wants its tensors.
        """
        self._groups = groups
        self._plan = plan
        self._device = device
        self._dtype = getattr(torch, plan.dtype)
        self._offsets = plan.offsets()
        self._buffers = [bucket_buffer(bucket, self._dtype) for bucket in plan.buckets]
        self._incoming = torch.empty(plan.numel, dtype=self._dtype)
        self._complete = torch.empty(plan.numel, dtype=self._dtype)
        self._version: Version | None = None
        self._ended: str | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="weight-receiver", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> Version | None:
        """The newest complete version on this host."""
        return self._version

    def load(self, apply: Callable[[Mapping[str, Tensor]], None], *, newer_than: Version | None) -> Version | None:
        """Give the newest complete version to `apply` if it is newer than the one held; returns its version.

        Args:
            apply: copies the weights (HF names, views that are valid during the call).
            newer_than: version that the engine holds; None: none.
        """
        with self._changed:
            if self._version is None or (newer_than is not None and self._version <= newer_than):
                return None
            offsets = self._offsets
            apply(
                {
                    name: self._complete[offsets[name] : offsets[name] + shape.numel()].view(shape)
                    for name, shape in ((name, torch.Size(shape)) for name, shape in self._plan.shapes.items())
                }
            )
            return self._version

    def wait_for(self, step: int, *, timeout_s: float, stop: threading.Event | None = None) -> bool:
        """Wait until a version of `step` or later is complete; False when `stop` was set first.

        Raises:
            WeightSyncError: not within `timeout_s`, or the trainer is gone.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._version is None or self._version.step < step:
                if stop is not None and stop.is_set():
                    return False
                if self._ended is not None:
                    raise WeightSyncError(f"weights of step {step} will not come: {self._ended}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WeightSyncError(f"weights of step {step} did not come within {timeout_s:g} s")
                self._changed.wait(min(left, 0.5))
        return True

    def join(self, timeout_s: float) -> None:
        """Wait for the trainer's end of transmission; when it does not come in time, leave the groups."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._abort()
            self._thread.join(_ABORT_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while (version := self._receive_version()) is not None:
                with self._changed:
                    if self._version is not None and version <= self._version:
                        continue
                    self._incoming, self._complete = self._complete, self._incoming
                    self._version = version
                    self._changed.notify_all()
            self._end("the trainer ended")
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: `wait_for` raises it
            logger.warning("weights: %s", error)
            self._end(str(error))
            self._abort()

    def _receive_version(self) -> Version | None:
        version: Version | None = None
        for bucket, buffer in zip(self._plan.buckets, self._buffers, strict=True):
            arrived = self._receive(bucket, buffer)
            if arrived is None:
                self._drain_ends(bucket.sender)
                return None
            if version is not None and arrived != version:
                raise WeightSyncError(f"bucket {bucket.index} carries {arrived}, the ones before it {version}")
            version = arrived
            self._scatter(bucket, values_of(buffer, self._dtype))
        return version

    def _receive(self, bucket: Bucket, buffer: Tensor) -> Version | None:
        on_device = buffer.to(self._device)
        self._groups[bucket.sender].broadcast([on_device]).wait()
        if on_device is not buffer:
            buffer.copy_(on_device)
        return unseal(buffer, bucket)

    def _drain_ends(self, ended: int) -> None:
        firsts = {bucket.sender: bucket for bucket in reversed(self._plan.buckets)}
        for sender, bucket in sorted(firsts.items()):
            if sender != ended:
                self._receive(bucket, self._buffers[bucket.index])

    def _scatter(self, bucket: Bucket, values: Tensor) -> None:
        offset = 0
        for piece in bucket.pieces:
            start = self._offsets[piece.name] + piece.start
            self._incoming[start : start + piece.numel] = values[offset : offset + piece.numel]
            offset += piece.numel

    def _abort(self) -> None:
        """Cut the groups: a sender, or a receiver behind this one in a broadcast, would wait for this rank."""
        for group in self._groups:
            abort_group(group)

    def _end(self, reason: str) -> None:
        with self._changed:
            self._ended = reason
            self._changed.notify_all()
