"""A run's dataflow graph under its configuration. Torch-free: launcher, queue and workers read it."""

from workers.algorithms.graph import algorithm_tasks
from workers.config import RunConfig
from workers.dataflow import Task


def graph_of(config: RunConfig) -> tuple[Task, ...]:
    """Return the run's tasks, producers before consumers."""
    correction = config.algorithm.off_policy.settled(config.schedule.staleness_bound)
    old_log_probs = config.actor.num_updates > 1 and correction.has_proximal_policy
    return algorithm_tasks(config.algorithm, old_log_probs=old_log_probs)
