"""Loss terms against plain-Python float64 references written from the papers."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import ConfigError
from workers.algorithms.parts import (
    DualClip,
    LossCounts,
    PolicyLoss,
    PolicyParts,
    PPOClip,
    Tokens,
    bounded_ratio,
    kl_divergence,
    loss_scale,
    policy_parts,
    token_weights,
)
from workers.settings.algorithms import OffPolicyConfig

log_prob = st.floats(-8, 0)


def clipped_policy_loss(
    log_ratio: torch.Tensor, advantage: torch.Tensor, *, eps_clip: float, eps_clip_high: float, dual_clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clip and the dual one, one after the other."""
    clips = (PPOClip(eps_clip, eps_clip_high), *(() if dual_clip is None else (DualClip(dual_clip),)))
    zeros = torch.zeros_like(log_ratio)
    surrogate, clipped = PolicyParts(clips).surrogate(Tokens(log_ratio, zeros, zeros, advantage, torch.tensor([1])))
    return -surrogate, clipped


@settings(max_examples=200, deadline=None)
@given(log_prob, log_prob, st.floats(-3, 3), st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_clipped_loss_is_ppo_equation_7(new: float, old: float, advantage: float, low: float, high: float) -> None:
    ratio = math.exp(new - old)
    surrogate = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    log_ratio = torch.tensor([new - old], dtype=torch.float64)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    loss, clipped = clipped_policy_loss(log_ratio, advantages, eps_clip=low, eps_clip_high=high, dual_clip=None)
    assert float(loss) == pytest.approx(-surrogate, rel=1e-9, abs=1e-12)
    assert bool(clipped) == (surrogate < ratio * advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        *((1.0, 2.0, -2.0), (1.5, 1.0, 0.0), (1.5, -1.0, 1.5), (0.5, 1.0, -0.5), (0.5, -1.0, 0.0)),
        *((2.9, -1.0, 2.9), (3.1, -1.0, 0.0), (math.exp(10), -1.0, 0.0)),
    ],
)
def test_gradient_vanishes_only_where_the_clip_binds(ratio: float, advantage: float, gradient: float) -> None:
    log_ratio = torch.tensor([ratio]).log().requires_grad_()
    loss, _ = clipped_policy_loss(log_ratio, torch.tensor([advantage]), eps_clip=0.2, eps_clip_high=0.2, dual_clip=3.0)
    loss.sum().backward()
    assert log_ratio.grad is not None and float(log_ratio.grad) == pytest.approx(gradient)


def test_upper_clip_may_be_wider() -> None:
    log_ratio, advantage = torch.tensor([1.25]).log(), torch.tensor([1.0])
    symmetric, _ = clipped_policy_loss(log_ratio, advantage, eps_clip=0.2, eps_clip_high=0.2, dual_clip=3.0)
    wide, clipped = clipped_policy_loss(log_ratio, advantage, eps_clip=0.2, eps_clip_high=0.28, dual_clip=3.0)
    assert float(symmetric) == pytest.approx(-1.2) and float(wide) == pytest.approx(-1.25) and not clipped


@settings(max_examples=200, deadline=None)
@given(st.floats(-12, 12), st.floats(-3, 3))
def test_dual_clip_is_equation_5_of_1912_09729(log_ratio: float, advantage: float) -> None:
    ratio = math.exp(log_ratio)
    surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    expected = max(surrogate, 3 * advantage) if advantage < 0 else surrogate
    loss, clipped = clipped_policy_loss(
        torch.tensor([log_ratio], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        eps_clip=0.2, eps_clip_high=0.2, dual_clip=3.0,
    )  # fmt: skip
    assert float(loss) == pytest.approx(-expected, rel=1e-9, abs=1e-12)
    assert bool(clipped) == (expected != ratio * advantage)


@settings(max_examples=200, deadline=None)
@given(log_prob, log_prob)
def test_kl_estimators_are_schulmans(new: float, ref: float) -> None:
    ratio = math.exp(ref - new)
    expected = {"k1": new - ref, "k2": (new - ref) ** 2 / 2, "k3": ratio - 1 - (ref - new)}
    left, right = (torch.tensor([value], dtype=torch.float64) for value in (new, ref))
    assert float(kl_divergence(left, right, "k1")) == pytest.approx(expected["k1"], abs=1e-12)
    assert float(kl_divergence(left, right, "k2")) == pytest.approx(expected["k2"], abs=1e-12)
    assert float(kl_divergence(left, right, "k3")) == pytest.approx(min(10.0, expected["k3"]), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_kl(estimator: str) -> None:
    policy = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    estimate = (policy * kl_divergence(policy.log(), reference.log(), estimator)).sum()  # type: ignore[arg-type]
    torch.testing.assert_close(estimate, (policy * (policy / reference).log()).sum())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_of_each_estimator_averages_to_what_its_docstring_says(estimator: str) -> None:
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    policy, reference = logits.log_softmax(0), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    divergences = {
        "k1": torch.zeros((), dtype=torch.float64) * logits.sum(),
        "k2": (policy.exp() * (policy - reference)).sum(),
        "k3": (reference.exp() * (reference - policy)).sum(),
    }
    estimate = (policy.detach().exp() * kl_divergence(policy, reference, estimator)).sum()  # type: ignore[arg-type]
    (actual,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(divergences[estimator], logits)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("difference", "value", "gradient"),
    [
        (-2.0, math.exp(2.0) - 3.0, 1 - math.exp(2.0)),
        (-2.6, math.exp(2.6) - 3.6, 1 - math.exp(2.6)),  # 9.86
        (-2.62, 10.0, 0.0),
        (-3.0, 10.0, 0.0),
        (-500.0, 10.0, 0.0),
        (10.5, math.exp(-10.5) + 9.5, 1 - math.exp(-10.5)),
        (12.0, 10.0, 0.0),
    ],
)
def test_k3_counts_up_to_10_and_has_no_gradient_beyond(difference: float, value: float, gradient: float) -> None:
    policy = torch.tensor([difference - 1.0], dtype=torch.float64, requires_grad=True)
    found = kl_divergence(policy, torch.tensor([-1.0], dtype=torch.float64), "k3")
    assert found.item() == pytest.approx(value)
    assert torch.autograd.grad(found.sum(), policy)[0].item() == pytest.approx(gradient)


@pytest.mark.parametrize(("estimator", "clamped"), [("k3", 2.0), ("k2", 0.0), ("k1", 0.0)])
def test_tokens_whose_k3_is_cut_are_counted_and_train_by_the_rest_of_the_loss(estimator: Any, clamped: float) -> None:
    policy = torch.tensor([-5.0, -1.0, -30.0], dtype=torch.float64, requires_grad=True)
    weights, advantages = torch.ones(3, dtype=torch.float64), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    parts = policy_parts((), OffPolicyConfig(), "token")
    loss = PolicyLoss(parts, (0.1, estimator), torch.tensor([3]), weights, advantages, policy.detach())
    loss.ref_log_probs_A = torch.tensor([-1.0, -1.5, -1.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(loss(policy, torch.zeros(3)), policy)
    assert float(loss.stats["kl_clamped_fraction"]) == clamped
    kl = {"k3": [0.0, 1 - math.exp(-0.5), 0.0], "k2": [-4.0, 0.5, -29.0], "k1": [1.0] * 3}[estimator]
    assert gradient.tolist() == pytest.approx([-a + 0.1 * k for a, k in zip(advantages.tolist(), kl, strict=True)])


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_entropy_is_maximised_with_the_weight_of_each_token(aggregate: Any) -> None:
    """Tokens of a policy over three, and the gradient of their logits, against the formula in float64."""
    logits = torch.tensor([[0.3, -1.0, 0.8], [2.0, 0.1, -0.5]], dtype=torch.float64, requires_grad=True)
    distribution = logits.log_softmax(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    weights, advantages = torch.tensor([1.0, 0.25], dtype=torch.float64), torch.tensor([1.5, -0.5], dtype=torch.float64)
    drawn = distribution[:, 0]
    loss = PolicyLoss(
        policy_parts((), OffPolicyConfig(), aggregate), (0.0, "k3"), torch.tensor([2]), weights, advantages,
        drawn.detach(), entropy_coef=0.3,
    )  # fmt: skip
    total = loss(drawn, entropy)
    (gradient,) = torch.autograd.grad(total, logits)
    assert total.item() == pytest.approx(float(-(weights * (advantages + 0.3 * entropy)).sum().detach()))
    for row in range(2):
        probs = distribution[row].exp().tolist()
        h = -sum(p * math.log(p) for p in probs)
        for j, p in enumerate(probs):
            of_drawn, of_entropy = (j == 0) - p, -p * (math.log(p) + h)
            expected = -float(weights[row]) * (float(advantages[row]) * of_drawn + 0.3 * of_entropy)
            assert float(gradient[row, j]) == pytest.approx(expected)


def test_an_engine_whose_entropies_have_no_gradient_is_refused() -> None:
    ones = torch.ones(2)
    loss = PolicyLoss(policy_parts((), OffPolicyConfig(), "token"), (0.0, "k3"), torch.tensor([2]), ones, ones, -ones)
    loss((-ones).requires_grad_(), ones)
    loss.entropy_coef = 0.1
    with pytest.raises(
        ConfigError, match=r"^algorithm.entropy_coef: 0.1 cannot be used with this training engine, whose ent"
    ):
        loss((-ones).requires_grad_(), ones)


def test_importance_weights_keep_their_own_bound() -> None:
    assert float(bounded_ratio(torch.tensor(19.0, dtype=torch.float64))) == pytest.approx(math.exp(19))
    assert float(bounded_ratio(torch.tensor(21.0, dtype=torch.float64))) == pytest.approx(math.exp(20))


def test_extreme_differences_stay_finite() -> None:
    log_ratio = torch.tensor([500.0, -500.0])
    loss, _ = clipped_policy_loss(log_ratio, torch.tensor([0.0, -1.0]), eps_clip=0.2, eps_clip_high=0.2, dual_clip=3.0)
    assert bool(loss.isfinite().all())
    assert bool(kl_divergence(torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0]), "k3").isfinite().all())


def test_scales_and_weights_of_each_normalisation() -> None:
    lengths, keep = torch.tensor([3, 2, 0, 1]), torch.tensor([True, True, True, False])
    counts = LossCounts(tokens=5, sequences=3, responses=4)
    rows = torch.tensor([5, 5, 0, 1])  # the first two are samples of one rollout
    assert token_weights("token", lengths, keep, rows).tolist() == [1, 1, 1, 1, 1, 0]
    assert token_weights("sequence", lengths, keep, rows).tolist() == pytest.approx([1 / 5] * 5 + [0])
    assert loss_scale("token", counts, max_response_tokens=8) == 1 / 5
    assert loss_scale("sequence", counts, max_response_tokens=8) == 1 / 3
    assert loss_scale("constant", counts, max_response_tokens=8) == 1 / 32
    assert loss_scale("token", LossCounts(0, 0, 4), max_response_tokens=8) == 0.0
    assert counts + LossCounts(1, 1, 1) == LossCounts(6, 4, 5)
