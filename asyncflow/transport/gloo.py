"""Gloo between two processes, or more: groups, frames whose receives are posted ahead, and memory for what arrives.

A group is built directly on a store, so it needs no global group, and when one end dies only this group fails. A Gloo
timeout kills the pair, so idle receives have none.
"""

import contextlib
import mmap
import os
import threading
from collections import deque
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from asyncflow.network import GLOO_INTERFACE, LOOPBACK
from asyncflow.transport.arena import Extents, tracked_view

NO_TIMEOUT = timedelta(days=365)
_TIMEOUTS_OF_A_MEETING = 5  # so many Gloo waits for an end that came and died before the two were connected
_LEAST_MEETING = timedelta(seconds=4.0)  # a busy process may need it for its half of the work
_SHORTEST_S = 0.001  # Gloo takes 0 for none
_FRAME_TAG, _ABORT_TAG, _BULK_TAG = 0, 1, 2
_POSTED, _POSTED_LEAST = 8, 4
_POOL_BYTES = 2**33  # of addresses; pages come with their first use
_MAP_NORESERVE = 0x4000  # mmap.MAP_NORESERVE appeared in Python 3.13


@cache
def gloo_device() -> Any:
    """Return this process's one Gloo device: one thread and one descriptor however many channels share it."""
    interfaces = os.environ.get(GLOO_INTERFACE)
    if interfaces:  # PyTorch takes several, with commas; a pair needs one
        return ProcessGroupGloo.create_device(interface=interfaces.split(",")[0])
    return ProcessGroupGloo.create_device(hostname=LOOPBACK)


def gloo_group(
    store: dist.Store, rank: int, size: int, *, timeout: timedelta, num_threads: int = 1
) -> dist.ProcessGroup:
    """Connect a private Gloo group under `store`'s prefix; blocks until all ranks came, or the time is up.

    Args:
        store: of this group alone.
        rank, size: of this process in it.
        timeout: of operations, and of the meeting: ranks must come within a fifth of it (some seconds at least), since
            Gloo waits five times for one that came and died before it was connected.
        num_threads: so many operations run at a time; the others wait for their turn.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [gloo_device()]
    options._threads = num_threads
    options._timeout = max(_LEAST_MEETING, timeout / _TIMEOUTS_OF_A_MEETING)
    group = ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(timeout)
    return group  # type: ignore[return-value]


def abort_gloo(group: dist.ProcessGroup) -> None:
    """Close this rank's pairs from any thread: every wait in `group`, here or at a peer, ends with an error.

    Gloo has no call for this. What it has: a timeout kills the pair; so this waits a moment for what never comes.
    """
    for rank in range(group.size()):
        if rank != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], rank, _ABORT_TAG).wait(timedelta(milliseconds=1))


class GlooPair:
    """One end of a two-rank group. Frames and bulk messages have a tag each, so neither waits behind the other.

    In Gloo a send to an end that has not posted the receive waits for it: a further round trip, and for ever when the
    process is stopped. So receives of frames are posted ahead: the bytes leave at once, and the kernel keeps them for a
    stopped process. Any thread may post and send; one receives.

    All methods raise RuntimeError when the pair is broken, or is now because a timeout passed.
    """

    def __init__(self, store: dist.Store, rank: int, *, frame_bytes: int, timeout: timedelta) -> None:
        """Connect; see `gloo_group`.

        Args:
            store: of this pair alone.
            rank: 0 or 1.
            frame_bytes: of every frame.
            timeout: for the other end to come.
        """
        self._group = gloo_group(store, rank, 2, timeout=timeout)
        self._other = 1 - rank
        self._frame_bytes = frame_bytes
        self._lock = threading.Lock()
        self._posted: deque[tuple[Tensor, dist.Work]] = deque()
        self._spare: list[Tensor] = []
        self.expect(_POSTED)

    def expect(self, frames: int) -> None:
        """Have at least so many receives of frames posted."""
        if len(self._posted) >= frames:
            return
        with self._lock:
            while len(self._posted) < frames:
                buffer = self._spare.pop() if self._spare else torch.empty(self._frame_bytes, dtype=torch.uint8)
                self._posted.append((buffer, self._group.recv([buffer], self._other, _FRAME_TAG)))

    def send_frame(self, frame: Tensor, timeout_s: float | None) -> None:
        """Send one frame, and wait until it left."""
        self._group.send([frame], self._other, _FRAME_TAG).wait(as_timeout(timeout_s))

    def next_frame(self, timeout: timedelta = NO_TIMEOUT) -> Tensor:
        """Wait for the next frame; give its buffer back with `reuse`."""
        if len(self._posted) <= _POSTED_LEAST:  # several at once: each wakes the peer's Gloo thread
            self.expect(_POSTED)
        buffer, work = self._posted[0]
        work.wait(timeout)
        self._posted.popleft()
        return buffer

    def reuse(self, buffer: Tensor) -> None:
        """Post this buffer again one day."""
        self._spare.append(buffer)

    def begin_send(self, part: Tensor) -> dist.Work:
        """Begin to send a bulk message; the other end must have asked for it or be about to."""
        return self._group.send([part], self._other, _BULK_TAG)

    def receive_into(self, buffers: list[Tensor]) -> None:
        """Receive bulk messages of exactly these sizes, in order; without a timeout."""
        for work in [self._group.recv([buffer], self._other, _BULK_TAG) for buffer in buffers]:
            work.wait(NO_TIMEOUT)

    def abort(self) -> None:
        """End every wait at both ends; see `abort_gloo`."""
        abort_gloo(self._group)


def as_timeout(timeout_s: float | None) -> timedelta:
    """Return seconds as Gloo wants them; None: no timeout."""
    return NO_TIMEOUT if timeout_s is None else timedelta(seconds=max(_SHORTEST_S, timeout_s))


class BufferPool:
    """Lends buffers of one anonymous mapping, for bulk messages; what does not fit is allocated as usual. Thread-safe.

    A fresh buffer of 288 MB costs 70,000 page faults, more than its transfer. So channels borrow receive and staging
    buffers here, which come back when their last view is gone. Never shared with other processes (see `arena`).
    """

    def __init__(self, num_bytes: int = _POOL_BYTES) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            memory = mmap.mmap(-1, num_bytes, flags=flags)
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a limit on addresses, or a kernel without huge pages
            memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self._extents = Extents(len(memory))
        self._released: deque[int] = deque()
        self._lock = threading.Lock()

    def borrow(self, num_bytes: int) -> Tensor:
        """Return uint8 [num_bytes], undefined content; it comes back when the last view of it is gone."""
        with self._lock:
            while self._released:
                self._extents.free(self._released.popleft())
            start = self._extents.allocate(num_bytes)
        if start is None or not num_bytes:
            return torch.empty(num_bytes, dtype=torch.uint8)
        return tracked_view(self._memory, start, num_bytes, self._released)

    @property
    def highest(self) -> int:
        """How far the memory was ever used (bytes)."""
        return self._extents.highest


@cache
def buffer_pool() -> BufferPool:
    """Return this process's pool."""
    return BufferPool()
