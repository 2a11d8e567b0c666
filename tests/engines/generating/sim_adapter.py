"""`rollout.engine: sim`: it computes nothing, but must run, stop and swap as the others do."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncflow.testing.adapter import Adapter
from workers.engines.sim.decode_times import SimLengths
from workers.engines.sim.engine import SimGenerateEngine, sim_shapes
from workers.settings.rollout import SamplingConfig
from workers.settings.sim import SimConfig

_CONFIG = SimConfig(mean_tokens=12, sigma=0.8, decode_s_per_token=0.0005, parameters=64)


def _ticks() -> Callable[[], float]:
    """Return a clock that goes on by a token's time whenever it is looked at, and not while the machine is busy."""
    numbers = itertools.count()
    return lambda: next(numbers) * _CONFIG.decode_s_per_token


class SimAdapter(Adapter):
    """Runs in this process; its responses take milliseconds."""

    name = "sim"
    marks = (pytest.mark.gate,)
    families = ()

    @contextmanager
    def open(self, model_dir: Path, sampling: SamplingConfig) -> Iterator[SimGenerateEngine]:
        engine = SimGenerateEngine(
            _CONFIG,
            SimLengths(_CONFIG, samples_per_step=64, seed=0),
            num_slots=sampling.batch_size,
            max_response_tokens=sampling.max_response_tokens,
            clock=_ticks(),
        )
        yield engine
        engine.close()

    def weights(self, model_dir: Path) -> dict[str, Tensor]:
        return {name: torch.zeros(shape) for name, shape in sim_shapes(_CONFIG).items()}
