"""`rollout.engine: hf`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from asyncflow.testing.adapter import Adapter
from workers.engines.hf.engine import HfEngine
from workers.settings.lora import LoraConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig


class HfAdapter(Adapter):
    """Runs in this process, on the CPU."""

    name = "hf"
    marks = (pytest.mark.gate,)
    families = ("llama", "qwen2", "qwen3")
    on_swap = "recompute"

    @contextmanager
    def open(self, model_dir: Path, sampling: SamplingConfig) -> Iterator[HfEngine]:
        sampling = sampling.model_copy(update={"on_swap": self.on_swap})
        engine = HfEngine(
            model_dir, ModelConfig(path=str(model_dir)),
            sampling=sampling, device=torch.device("cpu"), lora=self.lora,
        )  # fmt: skip
        yield engine
        engine.close()


class HfKeepAdapter(HfAdapter):
    """`rollout.on_swap: keep`."""

    name = "hf-keep"
    marks = ()
    families = ("llama",)
    on_swap = "keep"
    keeps_cache = True


class HfFinishAdapter(HfAdapter):
    """`rollout.on_swap: finish`."""

    name = "hf-finish"
    marks = ()
    families = ("llama",)
    on_swap = "finish"


class HfLoraAdapter(HfAdapter):
    """Versions are adapters."""

    name = "hf-lora"
    marks = ()
    families = ("llama", "qwen2", "qwen3")
    lora = LoraConfig(rank=4, alpha=6)


class HfLoraFewTargetsAdapter(HfLoraAdapter):
    """Only some layers are adapted, and running responses keep their keys and values."""

    name = "hf-lora-few"
    marks = ()
    families = ("llama",)
    lora = LoraConfig(rank=3, targets=("q_proj", "down_proj"), use_rslora=True)
    on_swap = "keep"
    keeps_cache = True
