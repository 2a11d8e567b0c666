"""Builds the run's algorithm from its configuration."""

from workers.algorithms.base import Algorithm
from workers.algorithms.load import load_algorithm
from workers.config import RunConfig


def algorithm_of(config: RunConfig) -> Algorithm:
    """Return the algorithm that `config.algorithm` names."""
    return load_algorithm(
        config.algorithm,
        max_response_tokens=config.rollout.max_response_tokens,
        mask_truncated=config.rollout.truncated == "mask",
    )
