"""What the suite has to know about a generating engine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from workers.engines.base import GenerateEngine
from workers.engines.load import load_generate_engine
from workers.settings.data import DataConfig
from workers.settings.engines import ActorConfig
from workers.settings.rollout import RolloutConfig, SamplingConfig
from workers.settings.run import ModelConfig, RunConfig
from workers.settings.schedule import ScheduleConfig


class Adapter:
    """Opens one kind of engine and says what it promises; the defaults are those of an engine with a real model."""

    engine: ClassVar[str]
    """`module:Class`, as `rollout.engine` names it; not needed where `open` is overridden."""
    options: ClassVar[Mapping[str, Any]] = {}
    """`rollout.engine_options`."""
    marks: ClassVar[Sequence[pytest.MarkDecorator]] = ()
    """Of the tests with the first of `families`."""
    families: ClassVar[tuple[str, ...]] = ("llama",)
    """Of tiny models (tiny_model.py) to run; none: it computes nothing, and is left out of tests of what is drawn."""
    model: ClassVar[Mapping[str, Any]] = {}
    """Changes of the tiny models' configurations, such as a head size that the engine's kernels have."""
    sampling: ClassVar[Mapping[str, Any]] = {}
    """Changes of how responses are drawn, where the engine cannot do it as the suite would."""
    draws_ignore_batch: ClassVar[bool] = True
    """The same seed gives the same draws whatever else is in the batch."""
    loads_weights: ClassVar[bool] = True
    """`load_weights` replaces what it computes with."""
    keeps_cache: ClassVar[bool] = False
    """A response into which weights were swapped goes on with keys and values of the old ones, so log-probabilities of
    its later tokens are not those of the new weights alone."""
    tolerance: ClassVar[float] = 2e-5
    """Largest error of a log-probability in float32."""

    @property
    def name(self) -> str:
        """Prefix of its test names."""
        return self.engine.rpartition(":")[2]

    @contextmanager
    def open(self, model_dir: Path, sampling: SamplingConfig) -> Iterator[GenerateEngine]:
        """Open an engine, which all tests of a family share; it is closed on leaving, at the end.

        Args:
            model_dir: a Hugging Face directory with weights (of a tiny model; of the first of `families`, if none).
            sampling: what it draws; `batch_size` responses at a time.
        """
        own = sampling.model_copy(update={"engine": self.engine, "engine_options": dict(self.options)})
        run = run_config(model_dir, own.model_dump())
        engine = load_generate_engine(run, run.rollout, device=torch.device("cpu"))
        yield engine
        engine.close()

    def weights(self, model_dir: Path) -> dict[str, Tensor]:
        """Return what `load_weights` gets for the model in a directory."""
        return load_file(model_dir / "model.safetensors")


def run_config(model_dir: Path, rollout: Mapping[str, Any], *, actor: ActorConfig | None = None) -> RunConfig:
    """Return the configuration of a run with a model and an engine."""
    return RunConfig(
        steps=1,
        roles={"rollout": 1, "actor": 1},
        model=ModelConfig(path=str(model_dir)),
        data=DataConfig(path="prompts.jsonl"),
        schedule=ScheduleConfig(rollout_batch_size=8, n_samples_per_prompt=2),
        rollout=RolloutConfig.model_validate(rollout),
        actor=actor or ActorConfig(),
    )
