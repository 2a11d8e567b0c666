"""What the project asks of a vendor, with the vendor's calls recorded."""

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from asyncflow import vendors
from asyncflow.device import (
    bind_to_device,
    copied_ahead,
    exact_dtype,
    group_backends,
    grow_segments,
    make_deterministic,
    without_growing,
)
from asyncflow.errors import DeviceMemoryError
from asyncflow.process import variables_set
from asyncflow.vendors import DeviceIpc, vendor_of


def device(kind: str) -> Any:
    """One that this build of PyTorch need not know."""
    return SimpleNamespace(type=kind, index=1)


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        ("cpu", {}),
        ("cuda", {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        ("npu", {"HCCL_DETERMINISTIC": "true"}),
    ],
)
def test_kernels_that_are_not_deterministic_are_refused(as_before: None, kind: str, variables: dict[str, str]) -> None:
    make_deterministic(device(kind))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "flash attention obeys a strict mode alone"
    assert {name: os.environ[name] for name in variables} == variables


def test_host_values_of_a_gang_travel_over_gloo() -> None:
    assert group_backends(device("cpu")) == "gloo"
    assert group_backends(device("cuda")) == "cpu:gloo,cuda:nccl"
    assert group_backends(device("npu")) == "cpu:gloo,npu:hccl"


def test_statistics_are_float32_where_kernels_have_no_float64() -> None:
    assert [exact_dtype(device(kind)) for kind in ("cpu", "cuda", "npu")] == [
        torch.float64,
        torch.float64,
        torch.float32,
    ]


@pytest.mark.parametrize(("kind", "variable"), [("cuda", "PYTORCH_ALLOC_CONF"), ("npu", "PYTORCH_NPU_ALLOC_CONF")])
def test_trainers_grow_segments_unless_the_user_says_otherwise(
    kind: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in vendor_of(kind).allocator:
        monkeypatch.delenv(name, raising=False)
    grow_segments(f"{kind}:1")
    assert os.environ[variable] == "expandable_segments:True"
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:False")
    grow_segments(f"{kind}:1")
    assert os.environ[variable] == "max_split_size_mb:64,expandable_segments:False"
    others = dict.fromkeys(vendor_of(kind).allocator[1:])
    assert without_growing(device(kind)) == {variable: "max_split_size_mb:64", **others}
    grow_segments("cpu")


def test_ascends_allocator_has_one_variable_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_NPU_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    grow_segments("npu:0")
    assert "PYTORCH_NPU_ALLOC_CONF" not in os.environ, "torch_npu aborts if both are set"
    # vllm-ascend sets its own, so the other must not be there.
    expected = {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": None}
    assert without_growing(device("npu")) == expected
    with variables_set(expected):
        assert "PYTORCH_ALLOC_CONF" not in os.environ
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"


def test_processes_get_their_vendors_variables_where_the_user_set_none(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = vendor_of("npu")
    for name in npu.environment:
        monkeypatch.setenv(name, "")  # so that it is unset again afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("CPU_AFFINITY_CONF", "2")
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    npu.load()
    assert {name: os.environ[name] for name in npu.environment} == {
        "VLLM_ASCEND_ENABLE_NZ": "0",
        "TASK_QUEUE_ENABLE": "1",
        "CPU_AFFINITY_CONF": "2",
        "HCCL_OP_EXPANSION_MODE": "AIV",
        "HCCL_EXEC_TIMEOUT": "3600",
    }
    assert vendor_of("cuda").environment == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


@pytest.mark.parametrize(
    ("node", "cores", "expected"),
    [
        ("1", "0-1,7", lambda allowed: allowed & {0, 1, 7}),
        ("1", "4000-4001", lambda allowed: allowed),  # none of them may be used
        ("-1", "0", lambda allowed: allowed),  # the machine does not say
        (None, "0", lambda allowed: allowed),
    ],
)
def test_ranks_keep_to_the_cores_near_their_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str | None, cores: str, expected: Any
) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    slot, there = tmp_path / "bus/pci/devices/0000:3b:00.0", tmp_path / "devices/system/node/node1"
    for directory in (slot, there):
        directory.mkdir(parents=True)
    if node is not None:
        (slot / "numa_node").write_text(f"{node}\n")
    (there / "cpulist").write_text(f"{cores}\n")
    before = os.sched_getaffinity(0)
    try:
        bind_to_device(device("cuda"), tmp_path)
        assert os.sched_getaffinity(0) == expected(before)
        bind_to_device(device("cpu"), tmp_path)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("error", [0, 107000])
def test_ascends_runtime_is_asked_to_page_lock_memory(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    calls: list[tuple[str, list[int]]] = []

    def register(*arguments: Any) -> int:
        calls.append(("register", [each.value for each in arguments]))
        return error

    def unregister(address: Any) -> int:
        calls.append(("unregister", [address.value]))
        return 0

    acl = SimpleNamespace(aclrtHostRegisterV2=register, aclrtHostUnregister=unregister)
    monkeypatch.setattr(vendors, "_ascendcl", lambda: acl)
    release = vendor_of("npu").pin(4096, 8192, writable=False)
    assert (release is None) == bool(error)
    if release is not None:
        release()
    assert calls == [("register", [4096, 8192, 0x10000000]), *([] if error else [("unregister", [4096])])]


def test_without_ascends_runtime_no_memory_is_page_locked() -> None:
    assert vendor_of("npu").pin(4096, 8192, writable=True) is None


def test_tensors_stay_in_order_when_they_are_copied_ahead() -> None:
    tensors = [torch.full((3,), float(k)) for k in range(5)]
    assert [float(each[0]) for each in copied_ahead(tensors, torch.device("cpu"))] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_memory_that_cannot_be_page_locked_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps the last error; the next kernel's check would report it as that kernel's."""
    calls: list[str] = []

    def register(*_: int) -> int:
        calls.append("cudaHostRegister")
        return 2

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    taken = SimpleNamespace(cudaGetLastError=lambda: calls.append("cudaGetLastError"))
    monkeypatch.setattr("ctypes.CDLL", lambda _: taken)
    assert vendor_of("cuda").pin(4096, 4096, writable=True) is None
    assert calls == ["cudaHostRegister", "cudaGetLastError"]


class Runtime:
    """A vendor's library: notes calls as (name, values), and answers `error`. It has the address 4096 for everything,
    and writes `handle` where one is asked for."""

    def __init__(self, calls: tuple[str, ...], handle: bytes, error: int = 0) -> None:
        self.called: list[tuple[Any, ...]] = []
        for name in calls:
            setattr(self, name, self._make(name, handle, error))

    def _make(self, name: str, handle: bytes, error: int) -> Any:
        def call(*arguments: Any) -> int:
            said: list[Any] = []
            for argument in arguments:
                pointed = getattr(argument, "_obj", None)
                if isinstance(pointed, ctypes.c_void_p):
                    pointed.value = 4096
                elif isinstance(pointed, ctypes.Structure):
                    ctypes.memmove(ctypes.addressof(pointed), handle, ctypes.sizeof(pointed))
                elif isinstance(argument, ctypes.Array):
                    argument.value = handle
                elif isinstance(argument, ctypes.Structure):
                    said.append(bytes(argument))
                else:
                    said.append(argument.value)
            self.called.append((name, *said))
            return error

        return call


HANDLE = bytes(range(64))  # with a zero byte, which must not end it
STREAM = 77


def ipc_of(kind: str, monkeypatch: pytest.MonkeyPatch, *, error: int = 0) -> tuple[DeviceIpc, Runtime]:
    stream = SimpleNamespace(
        cuda_stream=STREAM, npu_stream=STREAM, synchronize=lambda: runtime.called.append(("wait",))
    )
    if kind == "cuda":
        runtime = Runtime((*vendors._CudaIpc.CALLS, "cudaGetLastError"), HANDLE, error)
        monkeypatch.setattr("ctypes.CDLL", lambda _: runtime)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    else:
        runtime = Runtime(vendors._AscendIpc.CALLS, b"a key", error)
        monkeypatch.setattr(vendors, "_ascendcl", lambda: runtime)
        npu = SimpleNamespace(current_stream=lambda: stream)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: npu)
    ipc = vendor_of(kind).ipc()
    assert ipc is not None
    return ipc, runtime


def use_all(ipc: DeviceIpc) -> bytes:
    """Allocate, export, write, open, read, close and free; return the handle."""
    address = ipc.allocate(1000)
    assert address == 4096
    handle = ipc.export(address, 1000)
    ipc.copy(8192, address, 24)
    assert ipc.open(handle) == 4096
    ipc.close(handle, 4096)
    ipc.free(address)
    return handle


def test_cudas_runtime_is_asked_to_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls and their arguments are those of cuda_runtime_api.h (CUDA 13.0)."""
    ipc, runtime = ipc_of("cuda", monkeypatch)
    assert use_all(ipc) == HANDLE
    assert runtime.called == [
        ("cudaMalloc", 1000),  # void** devPtr, size_t size
        ("cudaIpcGetMemHandle", 4096),  # cudaIpcMemHandle_t* handle, void* devPtr
        ("cudaMemcpyAsync", 8192, 4096, 24, 4, STREAM),  # dst, src, count, cudaMemcpyDefault, stream
        ("cudaIpcOpenMemHandle", HANDLE, 1),  # void** devPtr, handle by value, cudaIpcMemLazyEnablePeerAccess
        ("cudaIpcCloseMemHandle", 4096),
        ("cudaFree", 4096),
    ]
    with pytest.raises(DeviceMemoryError, match="5 bytes is not CUDA's"):
        ipc.open(b"a key")


def test_ascends_runtime_is_asked_to_share_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls and their arguments are those of acl_rt.h."""
    ipc, runtime = ipc_of("npu", monkeypatch)
    assert use_all(ipc) == b"a key"
    assert runtime.called == [
        ("aclrtMalloc", 2 * 2**20, 0),  # void** devPtr, size, ACL_MEM_MALLOC_HUGE_FIRST
        ("aclrtIpcMemGetExportKey", 4096, 2 * 2**20, 65, 1),  # devPtr, size, key, its length, no check of processes
        ("wait",),  # for kernels in torch_npu's own queue
        ("aclrtMemcpyAsync", 8192, 24, 4096, 24, 3, STREAM),  # dst, destMax, src, count, device to device, stream
        ("aclrtIpcMemImportByKey", b"a key", 1),  # void** devPtr, key, peer access
        ("aclrtIpcMemClose", b"a key"),
        ("aclrtFree", 4096),
    ]


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_runtime_that_refuses_is_named_with_its_code(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    ipc, runtime = ipc_of(kind, monkeypatch, error=2)
    vendor, call = ("CUDA", "cudaMalloc") if kind == "cuda" else ("CANN", "aclrtMalloc")
    with pytest.raises(DeviceMemoryError, match=f"^{call}: {vendor} error 2$"):
        ipc.allocate(1000)
    left = [called for called, *_ in runtime.called if called == "cudaGetLastError"]
    assert left == (["cudaGetLastError"] if kind == "cuda" else []), "PyTorch would report it as the next kernel's"


@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_a_runtime_without_these_calls_shares_no_memory(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(cudaMalloc=print))
    monkeypatch.setattr(vendors, "_ascendcl", lambda: SimpleNamespace(aclrtMalloc=print))
    assert vendor_of(kind).ipc() is None
    assert vendor_of(kind).has_ipc is (kind != "cpu")
