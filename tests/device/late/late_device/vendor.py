"""`late` as a vendor of asyncflow: all that the project needs to be told of a further kind of device. Torch-free."""

import importlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncflow.vendors import Vendor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

NUM_DEVICES = 8


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


LATE = _Late("late", "lccl")
