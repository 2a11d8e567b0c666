"""The device `late` of PyTorch, once this is imported: an accelerator made of host memory, whose asynchrony is real.

LATE_DEVICE_LIBRARY names the extension that `build.py` made; LATE_DEVICE_SCHEDULE is `copies` (default) or `kernels`.
"""

import importlib.util
import os
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch

from late_device.vendor import NUM_DEVICES


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("late_extension", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


extension = _load(os.environ["LATE_DEVICE_LIBRARY"])
extension.set_late_kernels(os.environ.get("LATE_DEVICE_SCHEDULE", "copies") == "kernels")
torch.utils.rename_privateuse1_backend("late")


def _index(device: Any = None) -> int:
    if device is None:
        return int(extension.current_device())
    return device if isinstance(device, int) else torch.device(device).index or 0


class _Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **own: Any) -> "_Stream":
        if own:
            return super().__new__(cls, **own)
        return super().__new__(cls, device=torch.device("late", _index(device)), priority=priority)


class _Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "_Event":
        return super().__new__(cls, "late", enable_timing=enable_timing)


# What PyTorch and FSDP2 ask of `torch.<device>`.
_module = ModuleType("torch.late")
for _name, _value in {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_is_in_bad_fork": lambda: False,
    "_lazy_init": lambda: None,
    "device_count": lambda: NUM_DEVICES,
    "current_device": extension.current_device,
    "set_device": lambda device: extension.set_device(_index(device)),
    "device": lambda device: torch.accelerator.device_index(_index(device)),
    "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
    "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
    "stream": lambda stream: nullcontext() if stream is None else stream,
    "Stream": _Stream,
    "Event": _Event,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: None,
    "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    "get_device_capability": lambda device=None: (9, 0),
    "memory_allocated": lambda device=None: extension.memory(_index(device))[0],
    "max_memory_allocated": lambda device=None: extension.memory(_index(device))[1],
    "reset_peak_memory_stats": lambda device=None: extension.reset_peak(_index(device)),
    "empty_cache": lambda: None,
}.items():
    setattr(_module, _name, _value)
torch._register_device_module("late", _module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

from late_device import group as _group  # noqa: E402, F401 - registers the backend, which needs the device
