"""The one place that knows vendors: devices, their backends, and groups over them.

Everything else asks PyTorch (`torch.accelerator`) or this module, never `if npu`.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store, get_default_backend_for_device

from asyncflow.errors import ConfigError
from asyncflow.transport.gloo import abort_gloo, gloo_group

logger = logging.getLogger(__name__)

_CUDA_HOST_REGISTER_READ_ONLY = 8
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_GLOO_THREADS = 4
"""Collectives of a group that run at a time: on their way through the ranks, small ones then fill each other's gaps."""


def open_device(name: str) -> torch.device:
    """Make `name` (`cpu`, `cuda:1`, `npu:0`) this process's current device.

    Raises:
        ConfigError: this build of PyTorch has no such device.
    """
    if name.startswith("npu"):
        import torch_npu  # noqa: F401 - registers the device and HCCL
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.accelerator.is_available() or torch.accelerator.current_accelerator() != torch.device(device.type):
        raise ConfigError(f"launcher.device: {name} is not there for this PyTorch ({torch.__version__}); use cpu")
    torch.accelerator.set_device_index(device.index or 0)
    return device


def visible_alone(device: torch.device, *, number: int = 1, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment in which a child process sees so many devices from `device` on; nothing for the CPU."""
    variable = _VISIBLE.get(device.type)
    if variable is None:
        return {}
    listed = [name.strip() for name in env.get(variable, "").split(",") if name.strip()]
    first = device.index or 0
    indices = range(first, first + number)
    return {variable: ",".join(listed[index] if listed else str(index) for index in indices)}


def make_deterministic(device: torch.device) -> None:
    """Let this process's kernels give the same bits for the same inputs, before the first one runs.

    Kernels without such a variant are reported as warnings by PyTorch.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def connect_group(store: Store, rank: int, size: int, device: torch.device) -> ProcessGroup:
    """Connect a group of processes that share no default group, over the device's own backend.

    Args:
        store: prefixed for this group alone; its timeout bounds the meeting, and with Gloo every collective.
        rank, size: of this process in the group.
        device: whose tensors travel.
    """
    backend = get_default_backend_for_device(device)
    if backend == "gloo":
        timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # the stub lacks it
        return gloo_group(store, rank, size, timeout=timeout, num_threads=_GLOO_THREADS)
    if backend == "nccl":
        from torch.distributed import ProcessGroupNCCL

        return ProcessGroupNCCL(store, rank, size, ProcessGroupNCCL.Options())  # type: ignore[return-value]
    if backend == "hccl":
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        group: ProcessGroup = ProcessGroupHCCL(store, rank, size, ProcessGroupHCCL.Options())
        return group
    raise ConfigError(
        f"launcher.device: no group can be built over backend {backend!r} of {device}; use cpu, cuda, npu"
    )


def abort_group(group: ProcessGroup) -> None:
    """End a group of `connect_group` from any thread: waits in it, on any rank, raise RuntimeError."""
    if isinstance(group, ProcessGroupGloo):
        abort_gloo(group)
    else:
        group.abort()


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this process's random number generators: of the host and of the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def set_rng_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on with what `rng_states` returned; a generator that it lacks stays as it is."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"])


class CopyStream:
    """Copies from a device to host memory beside the computation: on a stream of its own; on the CPU, in a thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")  # starts with its first work

    def run(self, copies: Iterable[Callable[[], None]]) -> "list[CopiesDone]":
        """Begin copying, one after the other.

        Args:
            copies: each issues copies out of the device. They see what the current stream was given so far.

        Returns:
            What tells the end of each.
        """
        if self._stream is None:
            return [CopiesDone(self._thread.submit(copy).result) for copy in copies]
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        ends = []
        with self._stream:
            for copy in copies:
                copy()
                ends.append(CopiesDone(self._stream.record_event().synchronize))
        return ends

    def close(self) -> None:
        """End the thread once it is done; idempotent."""
        self._thread.shutdown()


@dataclass(frozen=True)
class CopiesDone:
    """The end of copies.

    Attributes:
        wait: blocks until they have ended; raises what went wrong.
    """

    wait: Callable[[], object]


def pin(address: int, num_bytes: int, device: torch.device, *, writable: bool) -> Callable[[], object] | None:
    """Page-lock host memory, so that copies between it and `device` need no intermediate buffer and may overlap.

    Only on CUDA; other runtimes offer no such call to Python (NPU): there, copies are staged by the driver. Where it
    fails (limits of locked memory), copies are slower, and that is all.

    Args:
        address, num_bytes: of the memory.
        device: that copies.
        writable: whether this process may write to it.

    Returns:
        What releases it, to be called before the memory is unmapped; None: it is not locked.
    """
    if device.type != "cuda" or not num_bytes:
        return None
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, num_bytes, 0 if writable else _CUDA_HOST_REGISTER_READ_ONLY))
    if error:
        logger.debug("cudaHostRegister of %d bytes: error %d", num_bytes, error)
        return None
    return partial(runtime.cudaHostUnregister, address)
