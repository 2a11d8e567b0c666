"""Shared memory of version slots: made by the weight agent, written by trainer ranks, read by receivers of its host.

    agent      SlotMemory: anonymous memfd, sealed size          offers (pid, descriptor, token)
    others     map_slot(offer): opened through /proc/PID/fd; read-only for receivers

Nothing has a name, so nothing needs unlinking after a kill. A mapping outlives the agent: what was offered stays
readable, and it is not written to again.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import warnings
import weakref
from collections.abc import Collection, Iterable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from asyncflow.device import pin
from asyncflow.errors import TransportError, WeightSyncError
from asyncflow.transport.frame import create_memfd, open_memfd

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_HEADER_BYTES = mmap.PAGESIZE  # the token's page
_MADV_POPULATE_READ = 22  # Linux 5.14; absent from the mmap module of Python 3.11
_MADV_POPULATE_WRITE = 23


class SlotOffer(msgspec.Struct, frozen=True):
    """Where a slot's memory is.

    Attributes:
        pid, fd: of the agent.
        num_bytes: of the region.
        token: tells this memory from any other that had the same numbers.
    """

    pid: int
    fd: int
    num_bytes: int
    token: bytes


class SlotMemory:
    """Slots of shared memory, as their agent holds them."""

    def __init__(self, num_bytes: int) -> None:
        """Reserve `num_bytes`; pages come with their first use.

        Raises:
            WeightSyncError: no descriptor or no addresses are left.
        """
        try:
            fd, token = create_memfd(_HEADER_BYTES + num_bytes)
            weakref.finalize(self, os.close, fd)
            self.memory = _map(fd, num_bytes, write=True)
        except OSError as error:
            raise WeightSyncError(
                f"weights: a slot of {num_bytes:,} bytes cannot be made ({error.strerror})"
            ) from error
        self.offer = SlotOffer(os.getpid(), fd, num_bytes, token)


def map_slot(
    offer: SlotOffer, *, write: bool, device: torch.device = _CPU, extents: Sequence[tuple[int, int]] | None = None
) -> Tensor:
    """Map an agent's slot; returns uint8 [num_bytes], which lives as long as a view of it does.

    Args:
        offer: the agent's.
        write: whether this process writes to it.
        device: that copies to or from it.
        extents: bytes (start, stop) that it copies, which are page-locked; None: all.

    Raises:
        WeightSyncError: it cannot be opened: another host, or the agent is gone.
    """
    try:
        fd = open_memfd(offer.pid, offer.fd, _HEADER_BYTES + offer.num_bytes, offer.token)
    except TransportError as error:
        raise WeightSyncError(f"weights: the agent's memory cannot be mapped ({error})") from error
    try:
        return _map(fd, offer.num_bytes, write=write, device=device, extents=extents)
    except OSError as error:
        raise WeightSyncError(f"weights: {offer.num_bytes:,} bytes cannot be mapped ({error.strerror})") from error
    finally:
        os.close(fd)


class SlotMappings:
    """Keeps the slots that one process of the agent's host has mapped. Used by one thread."""

    def __init__(self, *, write: bool, device: torch.device) -> None:
        """Args:
        write: whether this process writes.
        device: that copies to or from them.
        """
        self._write = write
        self._device = device
        self._memories: dict[bytes, tuple[tuple[tuple[int, int], ...], Tensor]] = {}

    def __contains__(self, token: bytes | None) -> bool:
        return token in self._memories

    def get(self, offer: SlotOffer, extents: tuple[tuple[int, int], ...]) -> Tensor:
        """Return a slot's memory, uint8 [num_bytes], with pages present, and page-locked, where it is touched.

        Args:
            offer: the agent's.
            extents: bytes (start, stop) that will be touched.

        Raises:
            WeightSyncError: see `map_slot`.
        """
        known, memory = self._memories.get(offer.token, (None, None))
        if memory is None or known != extents:
            memory = map_slot(offer, write=self._write, device=self._device, extents=extents)
            for start, stop in extents:
                populate(memory[start:stop], write=self._write)
            self._memories[offer.token] = extents, memory
        return memory

    def keep(self, live: Collection[bytes]) -> None:
        """Forget all others: a mapping keeps the memory of a slot that the agent has replaced.

        Args:
            live: tokens of the agent's memories.
        """
        for token in self._memories.keys() - set(live):
            del self._memories[token]

    def clear(self) -> None:
        """Forget all: the agent is gone. What is in use stays mapped."""
        self._memories.clear()


def merged(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return extents (start, stop) in order, as one where they meet."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(extents):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def private_memory(num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes] of this process alone, page-aligned, in huge pages where the kernel has them.

    Raises:
        WeightSyncError: there is not so much.
    """
    try:
        memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise WeightSyncError(f"weights: no memory of {num_bytes:,} bytes for a version ({error.strerror})") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))[:num_bytes]


def populate(memory: Tensor, *, write: bool) -> None:
    """Make the pages of a mapping present, so that its users meet no page faults. Needs no GIL while it runs."""
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = memory.data_ptr() + memory.numel() - start
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    if _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice):
        logger.debug("populate: %s", os.strerror(ctypes.get_errno()))  # an older kernel: pages come with their use


def _map(
    fd: int,
    num_bytes: int,
    *,
    write: bool,
    device: torch.device = _CPU,
    extents: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    memory = mmap.mmap(fd, _HEADER_BYTES + num_bytes, flags=mmap.MAP_SHARED, prot=protection)
    array = np.frombuffer(memory, dtype=np.uint8)[_HEADER_BYTES:]
    page = mmap.PAGESIZE  # no page may be locked twice, and what is copied must be all locked or not at all
    used = [(0, num_bytes)] if extents is None else extents
    pages = merged((start // page * page, -(-stop // page) * page) for start, stop in used)
    for start, stop in pages:
        unpin = pin(array.ctypes.data + start, min(stop, num_bytes) - start, device, writable=write)
        if unpin is not None:
            weakref.finalize(array, unpin).atexit = False  # views are gone by then, the mapping is not yet
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch knows no read-only tensors
        return torch.from_numpy(array)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
