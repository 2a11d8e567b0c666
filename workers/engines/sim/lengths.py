"""How long simulated responses are: a pure function of (seed, row). Torch-free: the planner draws the same."""

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workers.settings.sim import SimConfig


class SimLengths:
    """How many tokens the responses of a run have."""

    def __init__(self, config: SimConfig, *, samples_per_step: int, seed: int) -> None:
        """Args:
        config: distribution.
        samples_per_step: rows of a step.
        seed: of the run.
        """
        self._config = config
        self._samples = samples_per_step
        self._seed = seed
        self._of_step = lru_cache(maxsize=8)(self._draw)

    def tokens(self, index: int) -> int:
        """Return the length of the response of row `index` (tokens, at least 1)."""
        step, place = divmod(index, self._samples)
        return max(1, round(self._config.mean_tokens * float(self._of_step(step + 1)[place])))

    def _draw(self, step: int) -> NDArray[np.float64]:
        """Return the relative lengths, float64 [samples per step], mean 1, of a step, in data order."""
        config, size = self._config, self._samples
        chance = np.random.default_rng([self._seed, step])
        drawn: NDArray[np.float64]
        match config.lengths:
            case "constant":
                drawn = np.ones(size)
            case "lognormal":
                drawn = np.minimum(chance.lognormal(0.0, config.sigma, size), config.clip * np.exp(config.sigma**2 / 2))
            case "pareto":
                mean = 1 / (1 - config.sigma)  # of shape 1 / sigma
                drawn = np.minimum(1.0 + chance.pareto(1 / config.sigma, size), config.clip * mean)
            case "file":
                numbers = _recorded(config.lengths_file)
                drawn = numbers[(np.arange(size) + (step - 1) * size) % len(numbers)]
        relative: NDArray[np.float64] = drawn / drawn.mean()
        return relative


@lru_cache(maxsize=1)
def _recorded(path: str) -> NDArray[np.float64]:
    return np.array([float(word) for word in Path(path).read_text().split()])
