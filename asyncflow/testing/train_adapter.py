"""What the suite must know about a training engine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from asyncflow.testing.adapter import run_config
from workers.engines.base import TrainEngine
from workers.engines.load_engine import load_train_engine
from workers.settings.engines import ActorConfig
from workers.settings.lora import LoraConfig


class TrainAdapter:
    """Opens one kind of engine, in a process that is a rank; the defaults suit a data-parallel engine."""

    engine: ClassVar[str]
    """`module:Class`, as `actor.engine` names it; not needed where `open` is overridden."""
    options: ClassVar[Mapping[str, Any]] = {}
    """`actor.engine_options`."""
    families: ClassVar[tuple[str, ...]] = ("llama", "qwen2", "qwen3")
    """Tiny models to run (`asyncflow.testing.training`)."""
    model: ClassVar[Mapping[str, Any]] = {}
    """Changes to the tiny models' configurations, such as a head size that the engine's kernels support."""
    layouts: ClassVar[tuple[str, ...]] = ("1", "2")
    """Ways of sharding to test, each with its own processes; names that `open` understands."""
    packages: ClassVar[Sequence[str]] = ()
    """Packages that must be importable; otherwise the tests are skipped."""
    shards_over_replicas: ClassVar[bool] = True
    """Whether a parameter is divided over the replicas; otherwise each replica holds all of it."""
    lora: ClassVar[LoraConfig | None] = None
    """Train an adapter, whose first values have seed 0, and deliver it merged (`weightsync.lora: merged`)."""
    tolerance: ClassVar[float] = 2e-5
    """Largest error of a log-probability in float32."""

    @property
    def name(self) -> str:
        return self.engine.rpartition(":")[2]

    def marks(self, layout: str) -> Sequence[pytest.MarkDecorator]:
        return ()

    def num_ranks(self, layout: str) -> int:
        return int(layout)

    def prepare(self) -> None:
        """Called first in every rank's process, before the process group exists."""

    def open(self, model_dir: Path, actor: ActorConfig, *, temperature: float, layout: str) -> TrainEngine:
        """Open the engine with the weights in a Hugging Face directory; the default process group exists."""
        own = actor.model_copy(update={"engine": self.engine, "engine_options": dict(self.options)})
        run = run_config(model_dir, {"max_response_tokens": 8, "temperature": temperature}, actor=own)
        return load_train_engine(run, device=torch.device("cpu"))

    def replica(self, layout: str) -> tuple[int, int]:
        """Return which data-parallel replica this rank belongs to, and how many there are."""
        return dist.get_rank(), dist.get_world_size()
