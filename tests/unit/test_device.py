"""What the project asks of a vendor, with the vendor's calls recorded."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncflow.device import exact_dtype, group_backends, grow_segments, make_deterministic, without_growing
from asyncflow.vendors import vendor_of


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
    assert without_growing(device(kind)) == {variable: "max_split_size_mb:64"}
    grow_segments("cpu")


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
