"""What the suite has to know about a training engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from workers.config import ActorConfig
from workers.engines.base import TrainEngine


class Adapter:
    """Opens one kind of engine, in a process that is a rank; the defaults are those of a data-parallel engine."""

    name: ClassVar[str]
    families: ClassVar[tuple[str, ...]] = ("llama", "qwen2", "qwen3")
    """Of tiny models (`asyncflow.testing.tiny_model`)."""
    model: ClassVar[dict[str, Any]] = {}
    """Changes of the tiny models' configurations, such as a head size that the engine's kernels have."""
    layouts: ClassVar[tuple[str, ...]] = ("1", "2")
    """Ways of sharding to test, each a set of processes; a name that `open` understands."""
    packages: ClassVar[Sequence[str]] = ()
    """That must be importable; else the tests are skipped."""
    shards_over_replicas: ClassVar[bool] = True
    """Whether a parameter is divided over the replicas; else each has all of it."""
    tolerance: ClassVar[float] = 2e-5
    """Largest error of a log-probability in float32."""

    def num_ranks(self, layout: str) -> int:
        """Return the processes of a layout."""
        return int(layout)

    def prepare(self) -> None:
        """Run first in every rank's process, before the process group is made."""

    def open(self, model_dir: Path, actor: ActorConfig, *, temperature: float, layout: str) -> TrainEngine:
        """Open the engine with the weights in a Hugging Face directory; the default process group exists."""
        raise NotImplementedError

    def replica(self, layout: str) -> tuple[int, int]:
        """Return which data-parallel replica this rank belongs to, and how many there are."""
        return dist.get_rank(), dist.get_world_size()
