"""The dataflow graph of every algorithm. Torch-free: `--dry-run` and the queue's controllers read it."""

from collections.abc import Callable, Mapping

from workers.algorithms.config import AlgorithmConfig
from workers.dataflow import NeededWeights, Task


def algorithm_tasks(config: AlgorithmConfig, *, old_log_probs: bool = False) -> tuple[Task, ...]:
    """Return the tasks of the configured algorithm, producers before consumers.

    Args:
        config: of the algorithm.
        old_log_probs: the loss needs log-probabilities under the weights that the step found.
    """
    return GRAPHS[config.name](config, old_log_probs)


def grpo_tasks(config: AlgorithmConfig, old_log_probs: bool) -> tuple[Task, ...]:
    """GRPO: no critic; the reference is there only when the loss has a KL penalty.

    Source: Shao et al. 2024 (arXiv 2402.03300), algorithm 1.
    """
    rollout = Task(
        name="actor_rollout",
        role="rollout",
        host="rollout",
        inputs=("prompts",),
        outputs=("responses", "rollout_log_probs", "versions", "truncated"),
        weights=NeededWeights.BOUNDED,
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
    old_policy = Task(
        name="actor_log_probs",
        role="actor_fwd",
        host="actor",
        inputs=("prompts", "responses"),
        outputs=("log_probs",),
        weights=NeededWeights.NEWEST,
    )
    advantages = Task(
        name="compute_advantages_and_returns",
        role="advantages",
        host="actor",
        inputs=("rewards",),
        outputs=("advantages",),
        whole_groups=True,
    )
    optional = (*((reference,) if config.kl_coef > 0 else ()), *((old_policy,) if old_log_probs else ()))
    train = Task(
        name="actor_train",
        role="actor",
        host="actor",
        inputs=(
            *("prompts", "responses", "rollout_log_probs", "advantages"),
            *(name for task in optional for name in task.outputs),
            # Not read by the loss: masking, and what the step's metrics and ledger line report.
            *("truncated", "versions", "rewards", "correct", "epochs"),
        ),
        outputs=(),
        whole_groups=True,
    )
    return (rollout, rewards, *optional, advantages, train)


GRAPHS: Mapping[str, Callable[[AlgorithmConfig, bool], tuple[Task, ...]]] = {"grpo": grpo_tasks}
"""Algorithm name -> its graph, from the arguments of `algorithm_tasks`."""
