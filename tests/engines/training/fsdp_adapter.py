"""`actor.engine: fsdp`."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from asyncflow.testing.train_adapter import TrainAdapter
from workers.engines.base import TrainEngine
from workers.engines.fsdp.sharding import FsdpEngine
from workers.settings.engines import ActorConfig
from workers.settings.lora import LoraConfig


class FsdpAdapter(TrainAdapter):
    """FSDP2 over Gloo; all ranks are data-parallel."""

    name = "fsdp"

    def marks(self, layout: str) -> Sequence[pytest.MarkDecorator]:
        return (pytest.mark.gate,) if layout == "2" else ()

    def open(self, model_dir: Path, actor: ActorConfig, *, temperature: float, layout: str) -> TrainEngine:
        return FsdpEngine(
            model_dir,
            actor=actor,
            temperature=temperature,
            device=torch.device("cpu"),
            seed=0,
            lora=self.lora,
            merged=self.lora is not None,
        )


class FsdpLoraAdapter(FsdpAdapter):
    """The same with an adapter beside a frozen model."""

    name = "fsdp-lora"
    lora = LoraConfig(rank=3, alpha=6)
    families = ("llama", "qwen2")

    def marks(self, layout: str) -> Sequence[pytest.MarkDecorator]:
        return ()
