"""What the suite has to know about an engine."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file
from torch import Tensor

from workers.engines.base import GenerateEngine
from workers.rollout.config import SamplingConfig


class Adapter:
    """Opens one kind of engine and says what it promises; the defaults are those of an engine with a real model."""

    name: ClassVar[str]
    families: ClassVar[tuple[str, ...]] = ("llama",)
    """Of tiny models (tiny_model.py) to run; none: it computes nothing, and is left out of tests of what is drawn."""
    model: ClassVar[dict[str, Any]] = {}
    """Changes of the tiny models' configurations, such as a head size that the engine's kernels have."""
    sampling: ClassVar[dict[str, Any]] = {}
    """Changes of how answers are drawn, where the engine cannot do it as the suite would."""
    draws_ignore_batch: ClassVar[bool] = True
    """The same seed gives the same draws whatever else is in the batch."""
    loads_weights: ClassVar[bool] = True
    """`load_weights` replaces what it computes with."""
    keeps_cache: ClassVar[bool] = False
    """An answer into which weights were swapped goes on with keys and values of the old ones, so log-probabilities of
    its later tokens are not those of the new weights alone."""
    tolerance: ClassVar[float] = 2e-5
    """Largest error of a log-probability in float32."""

    def open(self, model_dir: Path, sampling: SamplingConfig) -> AbstractContextManager[GenerateEngine]:
        """Open an engine, which all tests of a family share; it is closed on leaving, at the end.

        Args:
            model_dir: a Hugging Face directory with weights (of a tiny model; of the first of `families`, if none).
            sampling: what it draws; `batch_size` answers at a time.
        """
        raise NotImplementedError

    def weights(self, model_dir: Path) -> dict[str, Tensor]:
        """Return what `load_weights` gets for the model in a directory."""
        return load_file(model_dir / "model.safetensors")
