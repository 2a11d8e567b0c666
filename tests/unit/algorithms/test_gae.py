"""Advantages, returns and value losses of PPO against plain-Python float64 references written from the papers."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import PPO, Moments, generalized_advantages, token_rewards
from workers.algorithms.parts import ValueLoss, clipped_value_loss, loss_scale
from workers.rows.packed_rows import sample_columns, samples_of
from workers.settings.algorithms import PPOConfig

CPU = torch.device("cpu")
number = st.floats(-3, 3)
responses = st.lists(st.lists(st.tuples(number, number), max_size=6), min_size=1, max_size=4)


def sums_of_errors(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Schulman et al. 2016, eq. 16, as it is written: A_t = sum over l of (gamma lambda)^l delta_(t+l)."""
    behind = [*values[1:], 0.0]
    errors = [rewards[t] + gamma * behind[t] - values[t] for t in range(len(values))]
    return [sum((gamma * lam) ** k * error for k, error in enumerate(errors[t:])) for t in range(len(values))]


def packed(rows: Sequence[Sequence[tuple[float, float]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards [A], values [A], lengths [N] in float64."""
    flat = torch.tensor([pair for row in rows for pair in row], dtype=torch.float64).reshape(-1, 2)
    return flat[:, 0], flat[:, 1], torch.tensor([len(row) for row in rows])


@settings(max_examples=200, deadline=None)
@given(responses, st.floats(0.5, 1), st.floats(0, 1))
def test_advantages_are_equation_16_and_returns_add_the_value(
    rows: list[list[tuple[float, float]]], gamma: float, lam: float
) -> None:
    advantage, target = generalized_advantages(*packed(rows), gamma=gamma, lam=lam)
    expected = [
        one for row in rows for one in sums_of_errors([pair[0] for pair in row], [pair[1] for pair in row], gamma, lam)
    ]
    values = [pair[1] for row in rows for pair in row]
    assert advantage.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert target.tolist() == pytest.approx([a + v for a, v in zip(expected, values, strict=True)], rel=1e-5, abs=1e-5)


def test_the_ends_of_lambda() -> None:
    """0 is the one-step error (eq. 17), 1 the discounted rest of the rewards minus the value (eq. 18)."""
    rewards, values, lengths = packed([[(0.0, 0.3), (0.5, -0.2), (1.0, 0.7)], [(2.0, 0.5)]])
    one_step, _ = generalized_advantages(rewards, values, lengths, gamma=0.9, lam=0.0)
    assert one_step.tolist() == pytest.approx([0.9 * -0.2 - 0.3, 0.5 + 0.9 * 0.7 + 0.2, 1.0 - 0.7, 1.5], abs=1e-6)
    whole, target = generalized_advantages(rewards, values, lengths, gamma=0.9, lam=1.0)
    rest = [0.9 * 0.5 + 0.81, 0.5 + 0.9, 1.0, 2.0]
    assert target.tolist() == pytest.approx(rest, abs=1e-6)
    assert whole.tolist() == pytest.approx([a - b for a, b in zip(rest, values.tolist(), strict=True)], abs=1e-6)


def test_reward_is_at_the_last_token_and_each_token_pays_for_itself() -> None:
    lengths = torch.tensor([2, 0, 1])
    assert token_rewards(torch.tensor([1.0, 5.0, -2.0]), lengths).tolist() == [0.0, 1.0, -2.0]
    penalty = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)
    paid = token_rewards(torch.tensor([1.0, 5.0, -2.0]), lengths, penalty)
    assert paid.tolist() == pytest.approx([-0.1, 1.2, -2.3])


@settings(max_examples=200, deadline=None)
@given(number, number, number, st.floats(0.05, 1))
def test_value_loss_is_the_larger_error_of_the_value_and_the_one_near_the_old_value(
    value: float, old: float, target: float, clip: float
) -> None:
    near = old + min(max(value - old, -clip), clip)
    expected = max((value - target) ** 2, (near - target) ** 2) / 2
    loss, clipped = clipped_value_loss(
        *(torch.tensor([x], dtype=torch.float64) for x in (value, old, target)), clip=clip
    )
    assert float(loss) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert bool(clipped) == ((near - target) ** 2 > (value - target) ** 2)
    plain, _ = clipped_value_loss(*(torch.tensor([x], dtype=torch.float64) for x in (value, old, target)), clip=None)
    assert float(plain) == pytest.approx((value - target) ** 2 / 2, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("value", "gradient"), [(0.1, -0.9), (0.5, 0.0), (-0.5, -1.5)])
def test_value_that_went_far_enough_towards_its_target_is_left_alone(value: float, gradient: float) -> None:
    moved = torch.tensor([value], requires_grad=True)
    loss, _ = clipped_value_loss(moved, torch.tensor([0.0]), torch.tensor([1.0]), clip=0.2)
    (got,) = torch.autograd.grad(loss.sum(), moved)
    assert float(got) == pytest.approx(gradient)


def make_batch() -> PackedBatch:
    chance = torch.Generator().manual_seed(2)
    lengths = torch.tensor([3, 2, 4], dtype=torch.int32)

    def column() -> Column:
        return Column(torch.randn(9, generator=chance), lengths)

    batch = PackedBatch(
        (0, 1, 2),
        {
            **sample_columns([torch.tensor([0])] * 3, torch.arange(9).split([3, 2, 4])),
            "rewards": Column.of_scalars(torch.tensor([1.0, 0.0, 0.5])),
            "truncated": Column.of_scalars(torch.tensor([False, True, False])),
            "values": column(),
            "old_log_probs": column(),
            "ref_log_probs": column(),
        },
    )
    return samples_of(batch)


def make_ppo(**settings: object) -> PPO:
    config = PPOConfig.model_validate({"name": "ppo"} | settings)
    return PPO(config, max_response_tokens=8, mask_truncated=True)


def test_kl_penalty_in_the_reward_is_charged_at_each_token() -> None:
    batch, settings = make_batch(), {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.1, "kl_placement": "reward"}
    found = make_ppo(**settings).advantages(batch, group_size=1)
    expected, start = [], 0
    penalty = 0.1 * (batch["old_log_probs"].values.double() - batch["ref_log_probs"].values.double())
    for reward, length in zip([1.0, 0.0, 0.5], [3, 2, 4], strict=True):
        rewards = [-float(p) for p in penalty[start : start + length]]
        rewards[-1] += reward
        expected += sums_of_errors(rewards, batch["values"].values[start : start + length].tolist(), 0.9, 0.8)
        start += length
    assert found["advantages"].values.tolist() == pytest.approx(expected, rel=1e-5)
    in_loss = make_ppo(**settings | {"kl_placement": "loss"}).advantages(batch, group_size=1)
    free = make_ppo(**settings | {"kl_coef": 0.0}).advantages(batch, group_size=1)
    assert in_loss["advantages"].values.equal(free["advantages"].values)
    assert not in_loss["advantages"].values.equal(found["advantages"].values)


def test_whitened_advantages_have_mean_0_and_variance_1_over_tokens_that_count() -> None:
    ppo, batch = make_ppo(), make_batch()
    batch = batch.with_columns(ppo.advantages(batch, group_size=1))
    parts = [batch.select([0]), batch.select([1]), batch.select([2])]
    moments = Moments.merged(ppo.moments(part) for part in parts)
    white = torch.cat([ppo.normalized(parts[k], moments)["advantages"].values for k in (0, 2)]).double()
    assert float(white.mean()) == pytest.approx(0, abs=1e-6)
    assert float(white.var(unbiased=False)) == pytest.approx(1, abs=1e-5)
    assert make_ppo().whole_step and not make_ppo(whiten_advantages=False).whole_step


def test_policy_loss_is_equation_7_with_an_advantage_per_token() -> None:
    ppo, batch = make_ppo(eps_clip=0.2), make_batch()
    batch = batch.with_columns({**ppo.advantages(batch, group_size=1), "rollout_log_probs": batch["old_log_probs"]})
    new = batch["old_log_probs"].values.double() + torch.linspace(-0.5, 0.5, 9).double()
    loss = ppo.loss(batch, device=CPU)(new, torch.zeros(9))
    expected = 0.0
    for t in (0, 1, 2, 5, 6, 7, 8):  # the second response was cut, and cut ones are masked
        ratio = math.exp(float(new[t]) - float(batch["old_log_probs"].values[t]))
        advantage = float(batch["advantages"].values[t])
        expected -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert ppo.scale(ppo.counts(batch)) == 1 / 7


def test_critics_loss_leaves_masked_responses_out_and_says_how_well_it_knew() -> None:
    ppo, batch = make_ppo(value_clip=0.3, value_loss_coef=0.5), make_batch()
    batch = batch.with_columns(ppo.advantages(batch, group_size=1))
    loss: ValueLoss = ppo.value_loss(batch, device=CPU)
    value = batch["values"].values.double() + torch.linspace(-1, 1, 9).double()
    total = float(loss(value))
    expected = 0.0
    for t in (0, 1, 2, 5, 6, 7, 8):
        old, target = float(batch["values"].values[t]), float(batch["returns"].values[t])
        near = old + min(max(float(value[t]) - old, -0.3), 0.3)
        expected += 0.5 * max((float(value[t]) - target) ** 2, (near - target) ** 2) / 2
    assert total == pytest.approx(expected, rel=1e-6)
    assert float(loss.stats["tokens"]) == 7 and float(loss.stats["loss"]) == pytest.approx(total)
    error = (batch["values"].values - batch["returns"].values)[[0, 1, 2, 5, 6, 7, 8]]
    assert float(loss.stats["error_squared"]) == pytest.approx(float(error.square().sum()), rel=1e-5)
    counts = ppo.counts(batch)
    assert loss_scale("token", counts, max_response_tokens=8) == ppo.scale(counts)
