"""Builds the run's algorithm from its configuration."""

from workers.algorithms.grpo import GRPO
from workers.config import RunConfig


def algorithm_of(config: RunConfig) -> GRPO:
    """Return the algorithm that `config.algorithm` names."""
    return GRPO(
        config.algorithm,
        max_response_tokens=config.rollout.max_response_tokens,
        mask_truncated=config.rollout.truncated == "mask",
    )
