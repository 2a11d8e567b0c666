"""A response whose reward failed (NaN) has no weight: training goes on as if it were not there."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import PPO, Moments, group_advantages, leave_one_out
from workers.algorithms.load_algorithm import load_algorithm
from workers.rows.packed_rows import sample_columns, samples_of
from workers.settings.algorithms import AlgorithmConfig, OffPolicyConfig
from workers.settings.rollout import RolloutConfig

CPU = torch.device("cpu")
LENGTHS = (3, 1, 4, 2)
REWARDS = (1.0, 0.0, math.nan, 0.25)
SCORED = [0, 1, 3]
ALGORITHMS: list[dict[str, Any]] = [
    {"name": "grpo", "kl_coef": 0.1},
    {"name": "grpo", "loss_normalization": "sequence"},
    {"name": "grpo", "loss_normalization": "constant", "scale_advantages_by_std": False},
    {"name": "dapo", "overlong_buffer_tokens": 2},
    {"name": "rloo", "kl_coef": 0.1},
    {"name": "reinforce_plus_plus", "kl_coef": 0.1},
    {"name": "reinforce_plus_plus"},
    {"name": "reinforce_plus_plus", "baseline": "group"},
    {"name": "gspo"},
    {"name": "ppo", "whiten_advantages": False},
    {"name": "ppo", "kl_placement": "reward", "kl_coef": 0.1},
]


def tokens(seed: int) -> Column:
    generator = torch.Generator().manual_seed(seed)
    return Column.of_rows([-2 * torch.rand(length, generator=generator) for length in LENGTHS])


def batch_of(rows: list[int]) -> PackedBatch:
    columns = {
        **sample_columns([torch.tensor([7])] * 4, [torch.full((length,), 7) for length in LENGTHS]),
        "rollout_log_probs": tokens(1),
        "ref_log_probs": tokens(2),
        "values": tokens(3),
        "old_log_probs": tokens(4),
        "new_values": tokens(5),
        "new_log_probs": tokens(6),
        "truncated": Column.of_scalars(torch.tensor([False] * 4)),
        "rewards": Column.of_scalars(torch.tensor(REWARDS)),
    }
    return PackedBatch((0, 1, 2, 3), columns).select(rows)


def train(section: dict[str, Any], rows: list[int]) -> dict[str, object]:
    """Return loss, statistics and the gradient of the rows that have a reward."""
    config: Any = TypeAdapter(AlgorithmConfig).validate_python(section)
    config = config.model_copy(update={"off_policy": OffPolicyConfig(method="none")})
    algorithm = load_algorithm(config, RolloutConfig(max_response_tokens=5))
    batch = batch_of(rows)
    new = batch["new_log_probs"].values.clone().requires_grad_()
    batch = samples_of(batch.with_columns(algorithm.advantages(batch, group_size=len(rows))))
    if algorithm.whole_step:
        moments = Moments.merged([algorithm.moments(batch)])
        batch = algorithm.normalized(batch, moments)
    scale = algorithm.scale(algorithm.counts(batch))
    loss = algorithm.loss(batch, device=CPU)
    (scale * loss(new, torch.ones_like(new))).backward()
    result: dict[str, object] = {name: float(value) for name, value in loss.stats.items()}
    result["gradient"] = new.grad[_scored_tokens(rows)].tolist()  # type: ignore[index]
    if isinstance(algorithm, PPO):
        critic = algorithm.value_loss(batch, device=CPU)
        values = batch["new_values"].values.clone().requires_grad_()
        (scale * critic(values)).backward()
        result |= {f"critic_{name}": float(value) for name, value in critic.stats.items()}
        result["critic_gradient"] = values.grad[_scored_tokens(rows)].tolist()  # type: ignore[index]
    return result


def _scored_tokens(rows: list[int]) -> torch.Tensor:
    return torch.tensor([row in SCORED for row in rows for _ in range(LENGTHS[row])])


@pytest.mark.parametrize("section", ALGORITHMS, ids=lambda section: "-".join(map(str, section.values())))
def test_loss_and_gradient_are_those_without_the_response(section: dict[str, Any]) -> None:
    whole, without = train(section, [0, 1, 2, 3]), train(section, SCORED)
    assert whole.keys() == without.keys()
    for name, value in whole.items():
        assert value == pytest.approx(without[name], rel=1e-5, abs=1e-7), name


some_failed = st.lists(st.one_of(st.just(math.nan), st.floats(-2, 2, width=32)), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(some_failed)
def test_a_group_is_compared_among_those_that_have_a_reward(rewards: list[float]) -> None:
    known = [reward for reward in rewards if not math.isnan(reward)]
    for compare in (group_advantages, leave_one_out):
        expected = iter(compare(torch.tensor([known]))[0].tolist() if known else [])
        wanted = [0.0 if math.isnan(reward) else next(expected) for reward in rewards]
        assert compare(torch.tensor([rewards]))[0].tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
