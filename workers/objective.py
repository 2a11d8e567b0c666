"""Builds the run's algorithm from its configuration."""

from workers.algorithms.grpo import GRPO
from workers.config import RunConfig


def algorithm_of(config: RunConfig) -> GRPO:
    """Return the algorithm that `config.algorithm` names, with the correction that the schedule needs."""
    algorithm = config.algorithm
    if algorithm.off_policy.method is None:
        method = "truncated_is" if config.schedule.staleness_bound else "none"
        settled = algorithm.off_policy.model_copy(update={"method": method})
        algorithm = algorithm.model_copy(update={"off_policy": settled})
    return GRPO(
        algorithm,
        max_response_tokens=config.rollout.max_response_tokens,
        mask_truncated=config.rollout.truncated == "mask",
    )
