"""The dataflow graph of every algorithm. Torch-free: `--dry-run` and the queue's controllers read it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from workers.algorithms.config import AlgorithmConfig, PolicyConfig, PPOConfig
from workers.dataflow import CRITIC_TRAIN, NeededWeights, Task


def algorithm_tasks(config: AlgorithmConfig, *, old_log_probs: bool = False) -> tuple[Task, ...]:
    """Return the tasks of the configured algorithm, producers before consumers.

    Args:
        config: of the algorithm.
        old_log_probs: loss or reward need log-probabilities under the weights that the step found.
    """
    return GRAPHS.get(config.name, critic_free_tasks)(config, old_log_probs)


def critic_free_tasks(config: PolicyConfig, old_log_probs: bool) -> tuple[Task, ...]:
    """Algorithms without a critic; the reference is there only when there is a KL penalty.

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
        whole_groups=config.filters_groups,
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
        inputs=config.advantage_inputs,
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


def ppo_tasks(config: PPOConfig, old_log_probs: bool) -> tuple[Task, ...]:
    """PPO: a critic computes values, advantages and returns, passes the advantages on, and trains on the returns.

    Source: Schulman et al. 2017 (arXiv 1707.06347), algorithm 1.
    """
    *others, advantages, train = critic_free_tasks(config, old_log_probs)
    values = Task(
        name="values",
        role="critic",
        host="actor",
        inputs=("prompts", "responses"),
        outputs=("values",),
    )
    advantages = replace(advantages, role="critic", outputs=("advantages", "returns"), whole_groups=False)
    critic = Task(
        name=CRITIC_TRAIN,
        role="critic",
        host="actor",
        inputs=("prompts", "responses", "values", "returns", "truncated", "rewards"),
        outputs=(),
        whole_groups=True,
        passes_on=True,
    )
    return (*others, values, advantages, critic, train)


GRAPHS: Mapping[str, Callable[[Any, bool], tuple[Task, ...]]] = MappingProxyType({"ppo": ppo_tasks})
"""Algorithm name -> its graph, from the arguments of `algorithm_tasks`, where that is another than the critic-free one.
The configuration is the algorithm's own class."""
