"""`actor.engine: fsdp`."""

from pathlib import Path

import torch

from workers.config import ActorConfig
from workers.engines.base import TrainEngine
from workers.engines.fsdp.engine import FsdpEngine

from .adapter import Adapter


class FsdpAdapter(Adapter):
    """FSDP2 over Gloo; all ranks are data-parallel."""

    name = "fsdp"

    def open(self, model_dir: Path, actor: ActorConfig, *, temperature: float, layout: str) -> TrainEngine:
        return FsdpEngine(model_dir, actor=actor, temperature=temperature, device=torch.device("cpu"), seed=0)
