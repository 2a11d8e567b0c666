"""What the suite must know about a generating engine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from workers.engines.base import GenerateEngine
from workers.engines.load_engine import load_generate_engine
from workers.engines.lora import WEIGHTS_FILE
from workers.settings.data import DataConfig
from workers.settings.engines import ActorConfig
from workers.settings.lora import LoraConfig
from workers.settings.rollout import RolloutConfig, SamplingConfig
from workers.settings.run import ModelConfig, RunConfig
from workers.settings.schedule import ScheduleConfig

ADAPTER = "adapter"  # in a directory of a model with an adapter merged into it: that adapter


class Adapter:
    """Opens one kind of engine and says what it promises; the defaults suit an engine with a real model."""

    engine: ClassVar[str]
    """`module:Class`, as `rollout.engine` names it; not needed where `open` is overridden."""
    options: ClassVar[Mapping[str, Any]] = {}
    """`rollout.engine_options`."""
    marks: ClassVar[Sequence[pytest.MarkDecorator]] = ()
    """Marks of the tests with the first of `families`."""
    families: ClassVar[tuple[str, ...]] = ("llama",)
    """Tiny models to run (`training.save_tiny_model`); empty: it computes nothing, and skips tests of drawn tokens."""
    model: ClassVar[Mapping[str, Any]] = {}
    """Changes to the tiny models' configurations, such as a head size that the engine's kernels support."""
    sampling: ClassVar[Mapping[str, Any]] = {}
    """Changes to the sampling settings, where the engine cannot sample as the suite would."""
    draws_ignore_batch: ClassVar[bool] = True
    """Whether the same seed gives the same draws whatever else is in the batch."""
    loads_weights: ClassVar[bool] = True
    """Whether `load_weights` replaces the weights that it computes with."""
    keeps_cache: ClassVar[bool] = False
    """Whether a running response keeps its keys and values over a swap of weights. If so, the log-probabilities of its
    later tokens are not those of the new weights alone."""
    tolerance: ClassVar[float] = 2e-5
    """Largest error of a log-probability in float32."""
    lora: ClassVar[LoraConfig | None] = None
    """If set, `load_weights` gets adapters of this kind, on one base (`EngineSetup.adapter`); the references are models
    with the adapters merged into them."""

    @property
    def name(self) -> str:
        return self.engine.rpartition(":")[2]

    @contextmanager
    def open(self, model_dir: Path, sampling: SamplingConfig) -> Iterator[GenerateEngine]:
        """Open an engine, which all tests of a family share; it is closed on leaving.

        Args:
            model_dir: a Hugging Face directory with weights (of a tiny model; a llama if `families` is empty); with
                `lora`, those of the base.
            sampling: how it draws; `batch_size` responses at a time.
        """
        own = sampling.model_copy(update={"engine": self.engine, "engine_options": dict(self.options)})
        run = run_config(model_dir, own.model_dump(), lora=self.lora)
        engine = load_generate_engine(run, run.rollout, device=torch.device("cpu"))
        yield engine
        engine.close()

    def weights(self, model_dir: Path) -> dict[str, Tensor]:
        """Return what `load_weights` gets for the model in a directory."""
        if self.lora is not None:
            return load_file(model_dir / ADAPTER / WEIGHTS_FILE)
        return load_file(model_dir / "model.safetensors")


def run_config(
    model_dir: Path, rollout: Mapping[str, Any], *, actor: ActorConfig | None = None, lora: LoraConfig | None = None
) -> RunConfig:
    return RunConfig(
        steps=1,
        roles={"rollout": 1, "actor": 1},
        model=ModelConfig(path=str(model_dir)),
        data=DataConfig(path="prompts.jsonl"),
        schedule=ScheduleConfig(rollout_batch_size=8, n_samples_per_prompt=2),
        rollout=RolloutConfig.model_validate(rollout),
        actor=actor or ActorConfig(),
        lora=lora,
    )
