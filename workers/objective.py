"""Builds the run's algorithm from its configuration."""

from workers.algorithms.grpo import GRPO
from workers.config import RunConfig


def algorithm_of(config: RunConfig) -> GRPO:
    """Return the algorithm that `config.algorithm` names, with the correction that the schedule needs."""
    algorithm = config.algorithm
    correction = algorithm.off_policy.settled(config.schedule.staleness_bound)
    return GRPO(
        algorithm.model_copy(update={"off_policy": correction}),
        max_response_tokens=config.rollout.max_response_tokens,
        mask_truncated=config.rollout.truncated == "mask",
    )
