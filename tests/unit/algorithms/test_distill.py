"""On-policy distillation: each token is compared with the teacher."""

import pytest
import torch

from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import Distill
from workers.settings.algorithms import DistillConfig

LENGTHS = (2, 0, 3, 1)
POLICY = [-1.0, -0.5, -2.0, -30.0, -0.1, -0.2]
TEACHER = [-0.5, -0.5, -3.0, -0.01, -0.1, -40.0]


def batch(rewards: list[float]) -> PackedBatch:
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    columns = {
        "old_log_probs": Column(torch.tensor(POLICY), lengths),
        "ref_log_probs": Column(torch.tensor(TEACHER), lengths),
        "rewards": Column.of_scalars(torch.tensor(rewards)),
    }
    return PackedBatch((0, 1, 2, 3), columns, (0, 0, 1, 1))


def advantages(config: DistillConfig, rewards: list[float]) -> Column:
    algorithm = Distill(config, max_response_tokens=4, mask_truncated=False)
    return algorithm.advantages(batch(rewards), group_size=2)["advantages"]


def test_advantage_of_a_token_is_how_much_likelier_the_teacher_holds_it() -> None:
    found = advantages(DistillConfig(kl_coef=0.5), [1.0, 0.0, 0.0, 1.0])
    assert found.lengths.tolist() == list(LENGTHS)
    # A token that one of the two all but excludes counts as 20 nats.
    assert found.values.tolist() == pytest.approx([0.25, 0.0, -0.5, 10.0, 0.0, -10.0])


def test_rewards_are_added_as_grpo_compares_them() -> None:
    found = advantages(DistillConfig(kl_coef=1.0, reward_coef=2.0, advantage_eps=1e-9), [1.0, 0.0, 1.0, 1.0])
    plain = advantages(DistillConfig(kl_coef=1.0), [1.0, 0.0, 1.0, 1.0])
    added = (found.values - plain.values).tolist()
    # Of a group of two rewards, the one is (1 - 0.5) / (1 / sqrt 2) better than the mean; equal ones are not.
    assert added == pytest.approx([2 * 0.5 * 2**0.5] * 2 + [0.0] * 4, rel=1e-6)


def test_a_reward_that_failed_leaves_its_tokens_the_teachers() -> None:
    found = advantages(DistillConfig(reward_coef=1.0), [float("nan"), 0.0, 0.0, 1.0])
    assert found.values[:2].tolist() == pytest.approx([0.5, 0.0])


def test_without_a_teacher_nothing_starts() -> None:
    config = load_config(find_recipe("quickstart"), overrides=("algorithm={name: distill}",))
    with pytest.raises(ConfigError, match="ref.path: null, but algorithm.name distill learns from a teacher"):
        config.algorithm.check(config)


def test_rewards_need_something_to_be_compared_with() -> None:
    assert DistillConfig().min_group_size == 1
    assert DistillConfig(reward_coef=0.1).min_group_size == 2
    assert DistillConfig().has_reward_penalty, "log-probabilities of policy and teacher are needed before the loss"
