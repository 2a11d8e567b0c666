"""Moves an engine's state from its device to page-locked host memory and back, while the other side has the device.

    move_out   copy storages to host blocks, free them          device 100 % -> 0
    move_in    allocate them again, copy back                   the same bits, the same tensors and views

Used by the engines that are `Sleeper`s (`workers.engines.base`); knows nothing of turns. Nothing here is collective.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncflow.device import free_cached_memory, use_device, wait_for_device
from asyncflow.errors import ConfigError

# PyTorch's allocator of page-locked memory rounds sizes up to a power of two, so one block for everything could take
# twice what it holds.
_BLOCK_BYTES = 2**28
_ALIGNED = 64  # of a storage's place in a block (bytes)
# How long memory of the other side may still be there after its process was killed (s): an engine's own processes
# (vLLM's) end a moment after it, and the driver frees what they had later still. How often that is looked at (s).
_FREED_S = 20.0
_LOOK_S = 0.1


class StateOffload:
    """The host memory for one engine's state. Used by one thread.

    Page-locking a gigabyte takes about as long as copying it several times, so blocks are kept and only the first
    `move_out` pays for them. On the CPU, where nothing is page-locked, they are given back.
    """

    # The memory behind tensors is resized to nothing and back, so that every view keeps working: the flat shards behind
    # FSDP2's parameters, Megatron's contiguous buffers and the optimizer's ranges of them, tied weights.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[Tensor] = []
        self._out: list[tuple[torch.UntypedStorage, int]] = []  # with their sizes in bytes
        self._copied: list[tuple[Tensor, Tensor]] = []  # parts of these, and their places in host memory; uint8

    @property
    def is_out(self) -> bool:
        return bool(self._out)

    @torch.no_grad()
    def move_out(self, kept: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> None:
        """Free the device memory behind tensors, after copying that of `kept`; `scratch` comes back uninitialized.

        Tensors of other devices are left alone. No copy out of them may be under way in another thread or stream.
        Raises ConfigError if the host has no memory to page-lock; nothing was freed.
        """
        assert not self._out, "move_out() twice"
        use_device(self._device)
        kept_storages, scratch_storages = _storages(kept, self._device), _storages(scratch, self._device)
        copied = list(self._place_storages(kept_storages.values()))
        for part, host in copied:
            host.copy_(part, non_blocking=True)
        wait_for_device(self._device)  # until here the device still reads what is freed next
        self._out = [(each, each.nbytes()) for each in (scratch_storages | kept_storages).values()]
        self._copied = copied
        for storage, _ in self._out:
            storage.resize_(0)
        free_cached_memory(self._device)

    @torch.no_grad()
    def move_in(self) -> None:
        """Allocate the memory again, waiting a while for it if it is not free, and bring back what was kept."""
        use_device(self._device)
        deadline = time.monotonic() + _FREED_S
        for storage, num_bytes in self._out:
            while not _allocate(storage, num_bytes, may_fail=time.monotonic() < deadline):
                time.sleep(_LOOK_S)
        for part, host in self._copied:
            part.copy_(host, non_blocking=True)
        wait_for_device(self._device)  # other threads and streams may use the tensors as soon as this returns
        self._out, self._copied = [], []  # they would keep gradients alive
        if self._device.type == "cpu":
            self._blocks = []

    def _place_storages(self, storages: Iterable[torch.UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of storages with their places in the blocks. The parts follow a storage that is resized."""
        position = 0
        for storage in storages:
            whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            done, num_bytes = 0, storage.nbytes()
            while done < num_bytes:
                number, begin = divmod(position, _BLOCK_BYTES)
                size = min(num_bytes - done, _BLOCK_BYTES - begin)
                part = whole if size == num_bytes else whole[done : done + size]
                yield part, self._block(number)[begin : begin + size]
                done += size
                position += size
            position = -(-position // _ALIGNED) * _ALIGNED

    def _block(self, number: int) -> Tensor:
        if number == len(self._blocks):
            pinned = self._device.type != "cpu"
            try:
                self._blocks.append(torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned))
            except RuntimeError as error:
                raise ConfigError(
                    f"roles: no host memory for the state of a model that sleeps: {len(self._blocks)} blocks of "
                    f"{_BLOCK_BYTES // 2**20} MB are page-locked, and one more is refused ({error}); use hosts with "
                    f"more memory, or give the roles devices of their own"
                ) from error
        return self._blocks[number]


class OffloadedState(ABC):
    """Implements `Sleeper` for an engine that can list its tensors."""

    _device: torch.device
    _offload: StateOffload | None = None

    def sleep(self) -> None:
        if self._offload is None:
            self._offload = StateOffload(self._device)
        if not self._offload.is_out:
            self._prepare_sleep()
            self._offload.move_out(self._state_tensors(), self._scratch_tensors())

    def wake(self) -> None:
        if self._offload is not None and self._offload.is_out:
            self._offload.move_in()
            self._scratch_lost()

    @property
    def resident_bytes(self) -> int:
        tensors = [*self._state_tensors(), *self._scratch_tensors()]
        return sum(storage.nbytes() for storage in _storages(tensors, self._device).values())

    @abstractmethod
    def _state_tensors(self) -> Iterable[Tensor]:
        """Return all tensors whose values matter; several may share memory."""

    def _scratch_tensors(self) -> Iterable[Tensor]:
        """Return tensors whose memory is kept for later, but not its contents."""
        return ()

    def _prepare_sleep(self) -> None:
        """Give up buffers that a pass left behind."""
        return

    def _scratch_lost(self) -> None:
        """Note that the contents of `_scratch_tensors` are gone."""
        return


def _allocate(storage: torch.UntypedStorage, num_bytes: int, *, may_fail: bool) -> bool:
    """Return whether the device had the memory; raises OutOfMemoryError if not, unless it `may_fail`."""
    try:
        storage.resize_(num_bytes)
    except torch.OutOfMemoryError:
        if not may_fail:
            raise
        return False
    return True


def _storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """Return the distinct memory behind tensors on a device; on the CPU without memory that others own."""
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        # Weights that a model adopted are views of the agent's memory.
        if local.device.type == device.type and storage.resizable():
            found[storage._cdata] = storage
    return found
