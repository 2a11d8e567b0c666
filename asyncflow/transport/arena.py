"""Shared memory of one direction of a channel: the sender writes payloads into it, the receiver reads them in place.

    sender                                       receiver
      Arena: anonymous memfd, sparse               PeerArena: maps /proc/PID/fd/N of the sender (then it is closed)
      allocate -> write -> handle in a frame ----> borrow: a tensor over the region
      region may be used again <------ release --- last view gone; rides on the next frame that goes back

Nothing has a name, so nothing needs unlinking after a kill. A region is used again only after its release, and an arena
dies as a whole with its channel while mappings live on, so a peer that is slow, stopped or dead sees no other bytes
than those sent to it, and its death costs other processes nothing.
"""

import contextlib
import fcntl
import os
import secrets
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncflow.errors import TransportError

ALIGN_BYTES = 64
_NAME = "asyncflow"
_TOKEN_BYTES = 16
_DATA_START = 4096  # the token's page


class ArenaOffer(msgspec.Struct):
    """Where an arena is.

    Attributes:
        fd: the sender's descriptor.
        num_bytes: of the whole file.
        generation: repeated in every handle.
        token: the file's first bytes.
    """

    fd: int
    num_bytes: int
    generation: int
    token: bytes


class Arena:
    """Shared memory that the sender writes payloads into. Thread-safe."""

    def __init__(self, num_bytes: int) -> None:
        """Reserve `num_bytes` of addresses; pages come with their first use.

        Raises:
            OSError: no descriptor or no addresses are left.
        """
        fd, token = create_memfd(num_bytes)
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._memory = _mapped(fd, num_bytes)
        self._extents = Extents(num_bytes - _DATA_START)
        self._lock = threading.Lock()
        self.offer = ArenaOffer(fd, num_bytes, secrets.randbits(32), token)

    def allocate(self, num_bytes: int) -> int | None:
        """Return the offset of a region, or None when there is no room."""
        with self._lock:
            start = self._extents.allocate(num_bytes)
        return None if start is None else start + _DATA_START

    def region(self, offset: int, num_bytes: int) -> Tensor:
        """Return uint8 [num_bytes] to write into."""
        return self._memory[offset : offset + num_bytes]

    def release(self, offsets: Iterable[int]) -> None:
        """The receiver has no views of these regions any more.

        Raises:
            TransportError: no such region is in use.
        """
        with self._lock:
            for offset in offsets:
                try:
                    self._extents.free(offset - _DATA_START)
                except KeyError as error:
                    raise TransportError(f"arena: the peer released {offset}, where no region is in use") from error

    def close(self) -> None:
        """Close the descriptor: the receiver has the mapping, or never will. The memory lives as long as a mapping."""
        self._close_fd()

    @property
    def highest(self) -> int:
        """How far the memory was ever used (bytes)."""
        return self._extents.highest

    @property
    def idle(self) -> bool:
        """Whether no region is in use."""
        return not self._extents.in_use


class PeerArena:
    """The receiver's end. One thread borrows; the last view of a region may go in any thread."""

    def __init__(self, pid: int, offer: ArenaOffer) -> None:
        """Map the sender's memory.

        Raises:
            TransportError: it cannot be opened, or is not what was offered.
        """
        self._offer = offer
        fd = open_memfd(pid, offer.fd, offer.num_bytes, offer.token)
        try:
            self._memory = _mapped(fd, offer.num_bytes).numpy()
        except RuntimeError as error:
            raise TransportError(f"arena: {offer.num_bytes} bytes cannot be mapped") from error
        finally:
            os.close(fd)
        self.released: deque[int] = deque()
        """Offsets of regions that the sender may use again and was not told of."""

    def borrow(self, offset: int, num_bytes: int, generation: int) -> Tensor:
        """Return a region as uint8 [num_bytes]; the caller owns it until its last view is gone.

        Raises:
            TransportError: the handle is not one of this arena.
        """
        inside = _DATA_START <= offset <= self._offer.num_bytes - num_bytes and offset % ALIGN_BYTES == 0
        if generation != self._offer.generation or num_bytes <= 0 or not inside:
            raise TransportError(
                f"arena: handle {offset}+{num_bytes} of generation {generation:08x} does not belong to "
                f"{self._offer.num_bytes} bytes of generation {self._offer.generation:08x}"
            )
        return tracked_view(self._memory, offset, num_bytes, self.released)


class Extents:
    """Allocator of aligned parts of [0, num_bytes): first fit, neighbours merged. Not thread-safe.

    The lowest address wins so that memory that was used before, and is therefore in RAM, is used again first.
    """

    def __init__(self, num_bytes: int) -> None:
        """Manage `num_bytes`, rounded down to `ALIGN_BYTES`."""
        self.num_bytes = num_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._starts = [0] if self.num_bytes else []  # of the free extents, sorted
        self._sizes = [self.num_bytes] if self.num_bytes else []
        self._used: dict[int, int] = {}
        self.highest = 0
        """End of the highest part that was ever handed out."""

    @property
    def in_use(self) -> int:
        """How many parts are handed out."""
        return len(self._used)

    def allocate(self, num_bytes: int) -> int | None:
        """Return the start of a part of at least `num_bytes`, or None when no free part is long enough."""
        size = max(1, -(-num_bytes // ALIGN_BYTES)) * ALIGN_BYTES
        for k, free in enumerate(self._sizes):
            if free < size:
                continue
            start = self._starts[k]
            if free == size:
                del self._starts[k], self._sizes[k]
            else:
                self._starts[k] += size
                self._sizes[k] -= size
            self._used[start] = size
            self.highest = max(self.highest, start + size)
            return start
        return None

    def free(self, start: int) -> None:
        """Take a part back.

        Raises:
            KeyError: no part that is in use starts there.
        """
        size = self._used.pop(start)
        k = bisect_left(self._starts, start)
        if k < len(self._starts) and start + size == self._starts[k]:
            size += self._sizes[k]
            del self._starts[k], self._sizes[k]
        if k > 0 and self._starts[k - 1] + self._sizes[k - 1] == start:
            self._sizes[k - 1] += size
        else:
            self._starts.insert(k, start)
            self._sizes.insert(k, size)


def tracked_view(memory: NDArray[np.uint8], start: int, num_bytes: int, released: deque[int]) -> Tensor:
    """Return a view of `memory`; `start` is appended to `released` when the last tensor or array over it is gone.

    That happens in the thread that drops the last one, perhaps in the middle of anything: an append needs no lock.
    The memory as a whole lives as long as any such view.

    Args:
        memory: uint8, 1-D.
        start, num_bytes: which part; not empty.
        released: read by the memory's manager.
    """
    view = memory[start : start + num_bytes]
    weakref.finalize(view, released.append, start).atexit = False
    return torch.from_numpy(view)


def take_released(released: deque[int], most: int) -> list[int]:
    """Remove up to `most` offsets and return them."""
    taken: list[int] = []
    with contextlib.suppress(IndexError):
        while len(taken) < most:
            taken.append(released.popleft())
    return taken


def create_memfd(num_bytes: int) -> tuple[int, bytes]:
    """Return (descriptor, token) of new shared memory that can neither shrink nor grow."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        os.ftruncate(fd, num_bytes)
        os.pwrite(fd, token, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd, token


def open_memfd(pid: int, fd: int, num_bytes: int, token: bytes) -> int:
    """Open memory that another process made with `create_memfd`; returns a descriptor of our own.

    The number may mean something else by now, or in another namespace: nothing but a memfd is opened, and the token
    decides. Its size must be sealed, since touching a page that is gone would kill this process.

    Raises:
        TransportError: it is not that memory, or this process may not open it.
    """
    path = f"/proc/{int(pid)}/fd/{int(fd)}"
    try:
        if not str(Path(path).readlink()).startswith(f"/memfd:{_NAME}"):
            raise TransportError(f"arena: {path} is no shared memory of this program")
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"arena: {path} cannot be opened ({error.strerror})") from error
    sealed = fcntl.fcntl(own, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    if not sealed or os.fstat(own).st_size != num_bytes or os.pread(own, _TOKEN_BYTES, 0) != token:
        os.close(own)
        raise TransportError(f"arena: {path} is not what the peer offered")
    return own


def _mapped(fd: int, num_bytes: int) -> Tensor:
    # Not mmap.mmap: it would keep a descriptor per mapping.
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)
