"""`late` as a vendor of asyncflow: all that the project needs to be told of a further kind of device. Torch-free."""

import ctypes
import importlib
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncflow.errors import DeviceMemoryError
from asyncflow.vendors import DeviceIpc, Vendor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

NUM_DEVICES = 8


HANDLE = struct.Struct("<qqq")
"""Process, descriptor of its memory, bytes."""


class LateIpc:
    """Memory of `late` that other processes can open, if LATE_DEVICE_IPC is set: host memory like all of it."""

    def __init__(self) -> None:
        self._mapped: dict[int, tuple[mmap.mmap, int]] = {}  # by address: memory, and its descriptor or -1

    def allocate(self, num_bytes: int) -> int:
        fd = os.memfd_create("late")
        os.ftruncate(fd, num_bytes)
        return self._map(fd, num_bytes, kept=fd)

    def free(self, address: int) -> None:
        os.close(self._mapped.pop(address)[1])

    def export(self, address: int, num_bytes: int) -> bytes:
        memory, fd = self._mapped[address]
        assert len(memory) == num_bytes
        return HANDLE.pack(os.getpid(), fd, num_bytes)

    def open(self, handle: bytes) -> int:
        pid, fd, num_bytes = HANDLE.unpack(handle)
        try:
            file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError as error:
            raise DeviceMemoryError(f"open: {error.strerror}") from error
        try:
            return self._map(file, num_bytes, kept=-1)
        finally:
            os.close(file)

    def close(self, handle: bytes, address: int) -> None:
        del self._mapped[address]  # unmapped with its last view

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        import torch

        torch.accelerator.current_stream().synchronize()
        ctypes.memmove(target, source, num_bytes)

    def _map(self, fd: int, num_bytes: int, *, kept: int) -> int:
        memory = mmap.mmap(fd, num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._mapped[address] = memory, kept
        return address


IPC = LateIpc()


class _Late(Vendor):
    def count(self, dev: Path, env: Mapping[str, str]) -> int:
        return NUM_DEVICES

    def load(self) -> None:
        importlib.import_module("late_device")

    def group(self, store: "Store", rank: int, size: int, timeout: timedelta) -> "ProcessGroup":
        from late_device.group import LateGroup

        return LateGroup(store, rank, size, timeout)

    def pin(self, address: int, num_bytes: int, *, writable: bool) -> Callable[[], object]:
        from late_device import extension

        extension.pin(address, num_bytes)
        return partial(extension.unpin, address)

    def ipc(self) -> DeviceIpc | None:
        return IPC if self.has_ipc else None


LATE = _Late("late", "lccl", has_ipc="LATE_DEVICE_IPC" in os.environ)
