"""Memory of this process that messages use again and again, for what goes over the wire.

A fresh 288 MB buffer costs 70,000 page faults, more than its transfer. Channels borrow receive and staging buffers
here; a buffer comes back when its last view is gone. Never shared with other processes (see `arena`).
"""

import mmap
import threading
from collections import deque
from functools import cache

import numpy as np
import torch
from torch import Tensor

from asyncflow.transport.extents import Extents
from asyncflow.transport.loan import lend

_POOL_BYTES = 2**33  # of addresses; pages come with their first use
_MAP_NORESERVE = 0x4000  # mmap.MAP_NORESERVE appeared in Python 3.13


class WarmPool:
    """Lends buffers of one anonymous mapping; what does not fit is allocated as usual. Thread-safe."""

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

    def lend(self, num_bytes: int) -> Tensor:
        """Return uint8 [num_bytes], undefined content; it comes back when the last view of it is gone."""
        with self._lock:
            while self._released:
                self._extents.free(self._released.popleft())
            start = self._extents.allocate(num_bytes)
        if start is None or not num_bytes:
            return torch.empty(num_bytes, dtype=torch.uint8)
        return lend(self._memory, start, num_bytes, self._released)

    @property
    def highest(self) -> int:
        """How far the memory was ever used (bytes)."""
        return self._extents.highest


@cache
def warm_pool() -> WarmPool:
    """Return this process's pool."""
    return WarmPool()
