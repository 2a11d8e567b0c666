"""Vendors of devices: one record each, and no vendor's name anywhere else."""

# Torch is imported only inside methods, because the launcher reads the records, too. All other code asks PyTorch
# (`torch.accelerator`) or `asyncflow.device`.
#
# Another vendor is a `Vendor` in its own package, named by an entry point:
#
#     [project.entry-points."asyncflow.vendors"]
#     late = "late_device.vendor:LATE"
#
# Groups of accelerators end by their deadline, and never end their process. This is based on:
#
# NCCL, torch 2.13 `ProcessGroupNCCL.cpp`. The watchdog thread stores a timeout that it sees and throws it there, which
# ends the process. With TORCH_NCCL_BLOCKING_WAIT=1, read per constructor, there is no watchdog; `wait(timeout)` waits
# in the host and throws there. `Options._timeout` bounds everything else. The monitor writes a dump key to the
# *unprefixed* store, which every first group of a process polls, unless TORCH_NCCL_DUMP_ON_TIMEOUT=0 (the default
# became 1).
#
# HCCL, Ascend/pytorch `ProcessGroupHCCL.cpp`, `Init.cpp`, and its page on TORCH_HCCL_BLOCKING_WAIT: the same switch,
# read in the constructor, formerly HCCL_BLOCKING_WAIT. With it there is also no watchdog and a wait in the host,
# bounded by the group's own timeout (`Options.op_timeout`, later `_timeout`) whatever `wait` is given. `Backend.abort`
# is empty; `abort_hccl_comm` destroys the communicators, but an operation on the device continues.
#
# Variables of Ascend's processes (`_Npu.environment`): what vllm-ascend (v0.23.0) and verl set, or demand.
# VLLM_ASCEND_ENABLE_NZ: vllm-ascend's worker refuses every update of weights unless it is 0 (`worker.py`,
# `_check_nz_disabled`). TASK_QUEUE_ENABLE: 2 would be faster for trainers, but torch_npu refuses it while a graph is
# captured (`NPUGraph.cpp`), and it takes memory. CPU_AFFINITY_CONF: each process keeps to the cores of its device,
# those of its NUMA node. HCCL_OP_EXPANSION_MODE: vector cores carry collectives out, instead of the slower AI CPUs.
# HCCL_EXEC_TIMEOUT: ranks come to a collective as late as the slowest one computes, or saves; with half an hour, the
# default, a long step is an error.
#
# Both allocator variables set is an error of torch_npu (`NPUAllocatorConfig.cpp`), and vllm-ascend sets
# PYTORCH_NPU_ALLOC_CONF by itself (`platform.py`).
#
# No group of several such devices has run: tests use a backend that behaves in the same way (`tests/device`).
#
# Memory that another process opens (`DeviceIpc`) is asked of the runtimes themselves, not of PyTorch. What PyTorch's
# allocator has may lie in growing segments or in vLLM's pool, which cannot be exported as one handle, and its own
# `_share_cuda_` and `_share_npu_` count a single reader for each handle. CUDA opens a handle also if it is of a device
# that the process does not see, as vLLM's workers see their own alone (CUDA Runtime API, `cudaIpcOpenMemHandle`); how
# CANN's keys do there was not tried. CANN exports whole pages alone (`aclrtIpcMemGetExportKey`).

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from asyncflow.errors import ConfigError, DeviceMemoryError
from asyncflow.process import variables_set

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

logger = logging.getLogger(__name__)

ENTRY_POINTS = "asyncflow.vendors"
_CUDA_HOST_REGISTER_READ_ONLY = 8
_CUDA_IPC_LAZY_PEER_ACCESS = 1
_CUDA_MEMCPY_DEFAULT = 4
_CUDA_HANDLE_BYTES = 64
_ACL_HOST_REG_PINNED = 0x10000000
_ACL_MALLOC_HUGE_FIRST = 0
_ACL_IPC_ANY_PID, _ACL_IPC_PEER_ACCESS = 1, 1
_ACL_MEMCPY_DEVICE_TO_DEVICE = 3
_ACL_KEY_BYTES = 65
_ACL_PAGE_BYTES = 2 * 2**20
# Collectives of a group that run at the same time: small ones then fill each other's gaps on their way through the
# ranks.
_GLOO_THREADS = 4


class DeviceIpc(Protocol):
    """How processes of one host share device memory. Addresses are those of the calling process; every call is for the
    thread's current device, and raises DeviceMemoryError if the runtime refuses it."""

    def allocate(self, num_bytes: int) -> int:
        """Return the address of memory that can be exported, and that no allocator of PyTorch knows."""

    def free(self, address: int) -> None:
        """Free what `allocate` returned; undefined while another process has it open."""

    def export(self, address: int, num_bytes: int) -> bytes:
        """Return the handle of what `allocate` returned; any process of the host may open it, any number of times."""

    def open(self, handle: bytes) -> int:
        """Return the address of another process's memory, on this device or one that this device can reach."""

    def close(self, handle: bytes, address: int) -> None:
        """Unmap what `open` returned; nothing reads it any more."""

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Issue a copy between device addresses in the current stream."""


@dataclass(frozen=True)
class Vendor:
    """One kind of device. The defaults suit a device that PyTorch knows through `torch.accelerator`."""

    kind: str  # device type as PyTorch names it
    backend: str  # of its process groups
    files: str = ""  # what its device files in /dev begin with, before a number
    visible: str = ""  # environment variable that limits which devices a process sees
    has_float64: bool = True  # whether its kernels compute in float64
    # Whether products of half-precision matrices can return their float32 sums (PyTorch's `out_dtype`).
    has_float32_products: bool = False
    # Environment variables that configure PyTorch's allocator for it; the first one is the one to set, alone.
    allocator: tuple[str, ...] = ()
    # Environment variables of every process that uses it, where the user set none.
    environment: Mapping[str, str] = field(default_factory=dict)
    has_ipc: bool = False  # whether processes share memory of its devices (`ipc`)
    has_request_seeds: bool = True  # whether vLLM's sampler draws as fast with a seed for each request
    has_adapters_over_ranks: bool = True  # whether vLLM instances of several ranks take adapters (`lora`)

    def obstacle(self) -> str:
        """Say why the installed software cannot drive the device; "": it can. Torch-free."""
        return ""

    def count(self, dev: Path, env: Mapping[str, str]) -> int:
        """Return how many devices a process sees, from the device files in `dev` and its environment. Torch-free."""
        names = [file.name for file in dev.iterdir()] if dev.is_dir() else []
        present = sum(1 for name in names if re.fullmatch(rf"{self.files}\d+", name))
        visible = env.get(self.visible)
        if visible is None:
            return present
        count = 0
        for entry in (part.strip() for part in visible.split(",")):
            # The vendors' runtimes stop at the first entry that names no device.
            if not entry or (re.fullmatch(r"-?\d+", entry) and not 0 <= int(entry) < present):
                break
            count += 1
        return min(count, present)

    def load(self) -> None:
        """Make PyTorch know the device; call before its first use in a process, or before a child is to use it."""
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)

    def group(self, store: "Store", rank: int, size: int, timeout: timedelta) -> "ProcessGroup":
        """Return a group whose waits raise RuntimeError once `timeout` has passed, and never end the process."""
        raise ConfigError(f"launcher.device: {self.kind} has no process groups; use {' '.join(vendors())}")

    def abort(self, group: "ProcessGroup") -> None:
        """End all waits in a group, from any thread."""
        group.abort()

    def pin(self, address: int, num_bytes: int, *, writable: bool) -> Callable[[], object] | None:
        """Page-lock host memory for the current device; return what releases it, or None if it is not locked."""
        return None

    def ipc(self) -> DeviceIpc | None:
        """Return how processes share memory of its devices; None: the installed runtime cannot."""
        return None

    def determinism(self) -> dict[str, str]:
        """Return environment variables that make its kernels and collectives reproducible to the bit."""
        return {}

    def pci_address(self, index: int) -> str:
        """Return where one of a process's devices is on the PCI bus; "": unknown, or its processes bind themselves."""
        return ""


class _Cpu(Vendor):
    def group(self, store: "Store", rank: int, size: int, timeout: timedelta) -> "ProcessGroup":
        from asyncflow.transport.channel import gloo_group

        return gloo_group(store, rank, size, timeout=timeout, num_threads=_GLOO_THREADS)

    def abort(self, group: "ProcessGroup") -> None:
        from asyncflow.transport.channel import abort_gloo

        abort_gloo(group)


class _Cuda(Vendor):
    def obstacle(self) -> str:
        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            return "torch is not installed"
        return f"the installed torch {version} is a CPU build" if version.endswith("+cpu") else ""

    def group(self, store: "Store", rank: int, size: int, timeout: timedelta) -> "ProcessGroup":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        # The constructor reads it, and then starts no watchdog that could end the process.
        with variables_set({"TORCH_NCCL_BLOCKING_WAIT": "1"}):
            return ProcessGroupNCCL(store, rank, size, options)  # type: ignore[return-value]

    def pin(self, address: int, num_bytes: int, *, writable: bool) -> Callable[[], object] | None:
        import torch

        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(address, num_bytes, 0 if writable else _CUDA_HOST_REGISTER_READ_ONLY))
        if error:
            _forget_cuda_error()
            logger.debug("cudaHostRegister of %d bytes: error %d", num_bytes, error)
            return None
        return partial(runtime.cudaHostUnregister, address)

    def ipc(self) -> DeviceIpc | None:
        # `torch.cuda.cudart()` binds none of these; the library that PyTorch has loaded does.
        library = ctypes.CDLL(None)
        return _CudaIpc(library) if all(hasattr(library, name) for name in _CudaIpc.CALLS) else None

    def determinism(self) -> dict[str, str]:
        return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    def pci_address(self, index: int) -> str:
        import torch

        found: Any = torch.cuda.get_device_properties(index)
        try:
            return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        except AttributeError:  # of an older PyTorch
            return ""


class _Npu(Vendor):
    def obstacle(self) -> str:
        return "" if importlib.util.find_spec("torch_npu") else "torch_npu is not installed"

    def load(self) -> None:
        super().load()
        importlib.import_module("torch_npu")  # registers the device and HCCL

    def group(self, store: "Store", rank: int, size: int, timeout: timedelta) -> "ProcessGroup":
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        options = ProcessGroupHCCL.Options()
        # Versions differ in the name of the option, and in that of the variable below.
        options._timeout = options.op_timeout = timeout
        with variables_set({"TORCH_HCCL_BLOCKING_WAIT": "1", "HCCL_BLOCKING_WAIT": "1"}):
            group: ProcessGroup = ProcessGroupHCCL(store, rank, size, options)
        return group

    def pin(self, address: int, num_bytes: int, *, writable: bool) -> Callable[[], object] | None:
        # As torch_npu's own allocator does it. CANN has it from 8.5 on, and its flag for read-only memory does nothing
        # yet. A kernel up to 5.10 takes no memory of ours.
        acl = _ascendcl()
        if acl is None:
            return None
        error = acl.aclrtHostRegisterV2(
            ctypes.c_void_p(address), ctypes.c_uint64(num_bytes), ctypes.c_uint32(_ACL_HOST_REG_PINNED)
        )
        if error:
            logger.debug("aclrtHostRegisterV2 of %d bytes: error %d", num_bytes, error)
            return None
        return partial(acl.aclrtHostUnregister, ctypes.c_void_p(address))

    def ipc(self) -> DeviceIpc | None:
        acl = _ascendcl()
        return _AscendIpc(acl) if acl is not None and all(hasattr(acl, name) for name in _AscendIpc.CALLS) else None

    def abort(self, group: "ProcessGroup") -> None:
        group.abort_hccl_comm("asyncflow: a member is gone")  # type: ignore[attr-defined]

    def determinism(self) -> dict[str, str]:
        return {"HCCL_DETERMINISTIC": "true"}


class _CudaHandle(ctypes.Structure):
    """`cudaIpcMemHandle_t`, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _CUDA_HANDLE_BYTES),)


class _CudaIpc:
    CALLS = (
        "cudaMalloc", "cudaFree", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle",
        "cudaMemcpyAsync",
    )  # fmt: skip

    def __init__(self, library: Any) -> None:
        self._library = library

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value or 0

    def free(self, address: int) -> None:
        self._call("cudaFree", ctypes.c_void_p(address))

    def export(self, address: int, num_bytes: int) -> bytes:
        handle = _CudaHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        if len(handle) != _CUDA_HANDLE_BYTES:
            raise DeviceMemoryError(f"a handle of {len(handle)} bytes is not CUDA's: those have {_CUDA_HANDLE_BYTES}")
        address = ctypes.c_void_p()
        self._call(
            "cudaIpcOpenMemHandle", ctypes.byref(address), _CudaHandle.from_buffer_copy(handle),
            ctypes.c_uint(_CUDA_IPC_LAZY_PEER_ACCESS),
        )  # fmt: skip
        return address.value or 0

    def close(self, handle: bytes, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        import torch

        self._call(
            "cudaMemcpyAsync", ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(num_bytes),
            ctypes.c_int(_CUDA_MEMCPY_DEFAULT), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def _call(self, name: str, *arguments: Any) -> None:
        error = int(getattr(self._library, name)(*arguments))
        if error:
            _forget_cuda_error()
            raise DeviceMemoryError(f"{name}: CUDA error {error}")


class _AscendIpc:
    CALLS = (
        "aclrtMalloc", "aclrtFree", "aclrtIpcMemGetExportKey", "aclrtIpcMemImportByKey", "aclrtIpcMemClose",
        "aclrtMemcpyAsync",
    )  # fmt: skip

    def __init__(self, library: Any) -> None:
        self._library = library

    def allocate(self, num_bytes: int) -> int:
        address, size = ctypes.c_void_p(), self._whole_pages(num_bytes)
        self._call("aclrtMalloc", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_int(_ACL_MALLOC_HUGE_FIRST))
        return address.value or 0

    def free(self, address: int) -> None:
        self._call("aclrtFree", ctypes.c_void_p(address))

    def export(self, address: int, num_bytes: int) -> bytes:
        key = ctypes.create_string_buffer(_ACL_KEY_BYTES)
        self._call(
            "aclrtIpcMemGetExportKey", ctypes.c_void_p(address), ctypes.c_size_t(self._whole_pages(num_bytes)), key,
            ctypes.c_size_t(_ACL_KEY_BYTES), ctypes.c_uint64(_ACL_IPC_ANY_PID),
        )  # fmt: skip
        return key.value

    def open(self, handle: bytes) -> int:
        address = ctypes.c_void_p()
        self._call(
            "aclrtIpcMemImportByKey", ctypes.byref(address), ctypes.c_char_p(handle),
            ctypes.c_uint64(_ACL_IPC_PEER_ACCESS),
        )  # fmt: skip
        return address.value or 0

    def close(self, handle: bytes, address: int) -> None:
        self._call("aclrtIpcMemClose", ctypes.c_char_p(handle))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        import torch

        npu: Any = torch.get_device_module("npu")
        stream = npu.current_stream()
        # torch_npu puts kernels into a queue of its own first (TASK_QUEUE_ENABLE): this call would overtake them.
        stream.synchronize()
        self._call(
            "aclrtMemcpyAsync", ctypes.c_void_p(target), ctypes.c_size_t(num_bytes), ctypes.c_void_p(source),
            ctypes.c_size_t(num_bytes), ctypes.c_int(_ACL_MEMCPY_DEVICE_TO_DEVICE), ctypes.c_void_p(stream.npu_stream),
        )  # fmt: skip

    @staticmethod
    def _whole_pages(num_bytes: int) -> int:
        return -(-num_bytes // _ACL_PAGE_BYTES) * _ACL_PAGE_BYTES

    def _call(self, name: str, *arguments: Any) -> None:
        error = int(getattr(self._library, name)(*arguments))
        if error:
            raise DeviceMemoryError(f"{name}: CANN error {error}")


CPU = _Cpu("cpu", "gloo")
# What vllm-ascend and verl set for Ascend's processes, or demand of them; see above.
_ASCEND = {
    "VLLM_ASCEND_ENABLE_NZ": "0",
    "TASK_QUEUE_ENABLE": "1",
    "CPU_AFFINITY_CONF": "1",
    "HCCL_OP_EXPANSION_MODE": "AIV",
    "HCCL_EXEC_TIMEOUT": "3600",
}
_OWN = (
    _Npu(
        "npu",
        "hccl",
        "davinci",
        "ASCEND_RT_VISIBLE_DEVICES",
        has_float64=False,
        allocator=("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        environment=_ASCEND,
        has_ipc=True,
        has_request_seeds=False,
        has_adapters_over_ranks=False,
    ),
    _Cuda(
        "cuda",
        "nccl",
        "nvidia",
        "CUDA_VISIBLE_DEVICES",
        has_float32_products=True,
        allocator=("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        # Otherwise NCCL's monitor polls the unprefixed store; see above.
        environment={"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
        has_ipc=True,
    ),
    CPU,
)


@cache
def vendors() -> dict[str, Vendor]:
    """Return all vendors by kind, installed ones first, the CPU last.

    Raises ConfigError if an installed vendor cannot be loaded.
    """
    found: list[Vendor] = []
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            record: Any = entry.load()
        except Exception as error:  # the boundary to an installed package
            raise ConfigError(f"vendor {entry.name} ({entry.value}) cannot be loaded: {error}; repair it") from error
        if not isinstance(record, Vendor):
            raise ConfigError(f"vendor {entry.name}: {entry.value} is a {type(record).__name__}; make it a Vendor")
        found.append(record)
    return {vendor.kind: vendor for vendor in (*found, *_OWN)}


def vendor_of(kind: str) -> Vendor:
    """Return the vendor of a device type or of `type:index`. Raises ConfigError if there is none."""
    kind = kind.partition(":")[0]
    if kind not in vendors():
        raise ConfigError(
            f"launcher.device: no device {kind!r} on this machine; use one of: auto, {', '.join(vendors())}"
        )
    return vendors()[kind]


@cache
def _ascendcl() -> ctypes.CDLL | None:
    """Return CANN's runtime library, if it can register memory."""
    try:
        library = ctypes.CDLL("libascendcl.so")
    except OSError:
        return None
    return library if hasattr(library, "aclrtHostRegisterV2") else None


def _forget_cuda_error() -> None:
    """Reset CUDA's last error, which PyTorch would otherwise report as the next kernel launch's."""
    # `torch.cuda.cudart()` does not bind `cudaGetLastError`, which resets the error, and `check_error` only translates
    # codes. So call it in the library that PyTorch has loaded; if that is linked statically, the symbol is missing.
    try:
        ctypes.CDLL(None).cudaGetLastError()
    except AttributeError:
        logger.warning("cudaGetLastError was not found: the next CUDA call may report a failed cudaHostRegister")
