"""The dataflow graph of every algorithm. Torch-free: `--dry-run` and the queue's controllers read it."""

from collections.abc import Callable, Mapping

from workers.algorithms.config import AlgorithmConfig
from workers.dataflow import Task


def algorithm_tasks(config: AlgorithmConfig) -> tuple[Task, ...]:
    """Return the tasks of the configured algorithm, producers before consumers."""
    return GRAPHS[config.name](config)


def grpo_tasks(config: AlgorithmConfig) -> tuple[Task, ...]:
    """GRPO: no critic; the reference is there only when the loss has a KL penalty.

    Source: Shao et al. 2024 (arXiv 2402.03300), algorithm 1.
    """
    rollout = Task(
        name="actor_rollout",
        role="rollout",
        host="rollout",
        inputs=("prompts",),
        outputs=("responses", "rollout_log_probs", "versions", "truncated"),
    )
    rewards = Task(
        name="rewards",
        role="reward",
        host="rollout",
        inputs=("prompts", "responses", "answers"),
        outputs=("rewards", "correct"),
    )
    reference = Task(
        name="ref_log_probs",
        role="ref",
        host="actor",
        inputs=("prompts", "responses"),
        outputs=("ref_log_probs",),
    )
    advantages = Task(
        name="compute_advantages_and_returns",
        role="advantages",
        host="actor",
        inputs=("rewards",),
        outputs=("advantages",),
        whole_groups=True,
    )
    has_reference = config.kl_coef > 0
    train = Task(
        name="actor_train",
        role="actor",
        host="actor",
        inputs=(
            *("prompts", "responses", "rollout_log_probs", "advantages"),
            *(("ref_log_probs",) if has_reference else ()),
            # Not read by the loss: masking, and what the step's metrics and ledger line report.
            *("truncated", "versions", "rewards", "correct", "epochs"),
        ),
        outputs=(),
        whole_groups=True,
    )
    return (rollout, rewards, *((reference,) if has_reference else ()), advantages, train)


GRAPHS: Mapping[str, Callable[[AlgorithmConfig], tuple[Task, ...]]] = {"grpo": grpo_tasks}
"""Algorithm name -> its graph."""
