"""The parts of a policy's loss: together they are, to the bit, the one function that they were cut from."""

import itertools
import math

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from workers.algorithms.load_algorithm import load_algorithm
from workers.algorithms.parts import (
    BinaryDivergence,
    DualClip,
    PolicyLoss,
    PPOClip,
    Tokens,
    TopDivergence,
    TopOutcomes,
    WeightClip,
    bounded_ratio,
    kl_divergence,
    policy_parts,
    response_means,
)
from workers.settings.algorithms import AlgorithmConfig, OffPolicyConfig
from workers.settings.rollout import RolloutConfig

LENGTHS = torch.tensor([5, 0, 17, 1, 9])
CLIPPED = [("grpo", {}), ("dapo", {}), ("gspo", {}), ("gspo", {"eps_clip": 0.1, "eps_clip_high": None}), ("rloo", {}),
           ("reinforce_plus_plus", {}), ("ppo", {"dual_clip": None})]  # fmt: skip
METHODS = {
    "none": ("none", None), "truncated_is": ("truncated_is", None), "decoupled": ("decoupled", None),
    "sequence_mask": ("truncated_is", "geometric"),
}  # fmt: skip
"""The methods as they were called -> method, mask."""


def drawn(seed: int, spread: float = 0.5) -> Tensor:
    common = torch.rand(int(LENGTHS.sum()), generator=torch.Generator().manual_seed(99))
    moved = torch.randn(len(common), generator=torch.Generator().manual_seed(seed))
    return (-4 * common + spread * moved).clamp(max=-1e-3)


def in_one_piece(
    new: Tensor, old: Tensor | None, rollout: Tensor, advantage: Tensor, *,
    method: str, clip: tuple[float, float, float | None], whole_samples: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss of each token, where it was clipped, and where its weight was changed, as one function computed them."""
    eps_clip, eps_clip_high, dual_clip = clip
    old = new.detach() if old is None else old
    if method == "none":
        base, weight, changed = rollout, torch.ones_like(old), torch.zeros_like(old, dtype=torch.bool)
    else:
        plain = bounded_ratio(old - rollout)
        base, weight = old, plain.clamp(max=2.0)
        if method == "decoupled":
            weight = torch.where(plain > 2.0, 0.0, plain)
        if method == "sequence_mask":
            mean = response_means(old - rollout, LENGTHS)
            weight = weight * ((mean >= -0.5) & (mean <= 0.5)).repeat_interleave(LENGTHS)
        changed = weight != plain
    log_ratio = new - base
    if whole_samples:
        log_ratio = response_means(log_ratio, LENGTHS).repeat_interleave(LENGTHS)
    ratio = bounded_ratio(log_ratio)
    surrogate = ratio * advantage
    least = torch.minimum(surrogate, ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantage)
    if dual_clip is not None:
        least = torch.where(advantage < 0, torch.maximum(least, dual_clip * advantage), least)
    return -least * weight, least != surrogate, changed


@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "settings"), CLIPPED)
def test_an_algorithm_of_parts_is_the_same_to_the_bit(
    name: str, settings: dict[str, float | None], method: str, has_old: bool
) -> None:
    way, mask = METHODS[method]
    bound = {} if mask is None else {"geometric_log_ratio": 0.5}
    given = {"name": name, "off_policy": {"method": way, "mask": mask, **bound}, **settings}
    config: AlgorithmConfig = TypeAdapter(AlgorithmConfig).validate_python(given)
    algorithm = load_algorithm(config, RolloutConfig(max_response_tokens=9))
    rollout, old, ref, advantage = drawn(1), drawn(2), drawn(3), drawn(4) + 2
    weight = (torch.arange(len(rollout)) % 7 > 0).float()
    new, expected_new = drawn(5).requires_grad_(), drawn(5).requires_grad_()
    loss = PolicyLoss(
        algorithm.parts(), (0.1, "k3"), LENGTHS, weight, advantage, rollout, ref, old if has_old else None
    )
    total = loss(new, torch.zeros_like(rollout))
    total.backward()  # type: ignore[no-untyped-call]
    clip = (config.eps_clip, config.upper_clip, config.dual_clip)  # type: ignore[union-attr]
    each, clipped, changed = in_one_piece(
        expected_new, old if has_old else None, rollout, advantage,
        method=method, clip=clip, whole_samples=name == "gspo",
    )  # fmt: skip
    expected = ((each + 0.1 * kl_divergence(expected_new, ref, "k3")) * weight).sum()
    expected.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None and expected_new.grad is not None
    assert torch.equal(total, expected) and torch.equal(new.grad, expected_new.grad)
    assert float(loss.stats["clip_fraction"]) == float((clipped * weight).sum())
    assert float(loss.stats["corrected_fraction"]) == float((changed * weight).sum())


def test_the_cases_above_reach_every_clip_and_mask() -> None:
    tokens = Tokens(drawn(5), drawn(2), drawn(1), drawn(4) + 2, LENGTHS)
    ratio = bounded_ratio(tokens.log_probs_A - tokens.old_log_probs_A)
    surrogate = ratio * tokens.advantage_A
    for clip, (low, high) in itertools.product((PPOClip,), ((0.2, 0.28), (3e-4, 4e-4))):
        assert bool(clip(low, high)(tokens, ratio, surrogate)[1].any())
    far = Tokens(drawn(5), drawn(2), drawn(1), -tokens.advantage_A.abs(), LENGTHS)
    assert bool(DualClip(3.0)(far, ratio, ratio * far.advantage_A)[1].any())
    for settings in ({}, {"method": "decoupled"}, {"mask": "geometric"}):
        _, changed = policy_parts((), OffPolicyConfig.model_validate(settings), "token").weights(tokens)
        assert bool(changed.any()) and not bool(changed.all())


def test_a_clipped_weight_keeps_every_gradient() -> None:
    new = drawn(5).requires_grad_()
    tokens = Tokens(new, drawn(2), drawn(1), drawn(4) + 2, LENGTHS)
    ratio = bounded_ratio(new - tokens.old_log_probs_A)
    surrogate, clipped = WeightClip(0.9, 1.1)(tokens, ratio, ratio)
    surrogate.sum().backward()
    assert new.grad is not None and torch.equal(new.grad, ratio.detach().clamp(0.9, 1.1) * tokens.advantage_A)
    assert torch.equal(clipped, (ratio < 0.9) | (ratio > 1.1))


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_divergence_of_certain_tokens_is_finite(kind: str) -> None:
    log_probs = torch.tensor([0.0, 0.0, -200.0, -1e-9, -1.0])
    rollout = torch.tensor([0.0, -200.0, 0.0, -1.0, -1.0])
    tokens = Tokens(log_probs, log_probs, rollout, torch.zeros(5), torch.tensor([5]))
    apart = BinaryDivergence(kind, 0.1).divergence(tokens)  # type: ignore[arg-type]
    assert bool(apart.isfinite().all()) and bool((apart >= -1e-6).all())
    assert float(apart[0]) == float(apart[4]) == 0.0 and bool((apart[1:4] > 0.1).all())


def distributions(seed: int, places: int = 60, vocabulary: int = 9) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(places, vocabulary, generator=generator, dtype=torch.float64)
    return logits.softmax(-1).tolist()  # type: ignore[no-any-return]


def whole_vocabulary_divergence(kind: str, mu: list[float], pi: list[float], drawn: int, k: int) -> float:
    """arXiv 2602.04879, the top-K approximation, by sets: the k likeliest under mu, the drawn token, all others."""
    likeliest = sorted(range(len(mu)), key=lambda token: -mu[token])[:k]
    compared = {*likeliest, drawn}
    outcomes = [(mu[token], pi[token]) for token in compared]
    if len(compared) < len(mu):
        outcomes.append((1 - sum(mu[token] for token in compared), 1 - sum(pi[token] for token in compared)))
    if kind == "tv":
        return sum(abs(m - p) for m, p in outcomes) / 2
    return sum(m * math.log(m / p) for m, p in outcomes)


@pytest.mark.parametrize("kind", ["tv", "kl"])
@pytest.mark.parametrize("k", [1, 3, 8, 9])
def test_divergence_of_the_likeliest_tokens_is_that_of_the_whole_vocabularys_sets(kind: str, k: int) -> None:
    """Also where the drawn token is none of them; between the divergence of two outcomes and that of all."""
    mu, pi = distributions(0), distributions(1)
    places, vocabulary = len(mu), len(mu[0])
    drawn = [place % vocabulary for place in range(places)]
    rollout, policy = (torch.tensor(each, dtype=torch.float64).log() for each in (mu, pi))
    mu, pi = rollout.exp().tolist(), policy.exp().tolist()
    ids = rollout.topk(k).indices
    column = torch.tensor(drawn).unsqueeze(1)
    has_drawn = (ids == column).any(1)
    assert k == vocabulary or 0 < int(has_drawn.sum()) < places
    top = TopOutcomes(rollout.gather(1, ids), has_drawn, policy.gather(1, ids))
    lone = [each.gather(1, column).squeeze(1) for each in (policy, policy, rollout)]
    tokens = Tokens(*lone, torch.ones(places), torch.tensor([places]), top)
    found = TopDivergence(kind, 0.1).divergence(tokens)  # type: ignore[arg-type]
    rows = zip(mu, pi, drawn, strict=True)
    expected = torch.tensor([whole_vocabulary_divergence(kind, *row, k) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    binary = BinaryDivergence(kind, 0.1).divergence(tokens)  # type: ignore[arg-type]
    rows = zip(mu, pi, drawn, strict=True)
    whole = [whole_vocabulary_divergence(kind, *row, vocabulary) for row in rows]
    assert bool((binary <= found + 1e-12).all()) and bool(
        (found <= torch.tensor(whole, dtype=torch.float64) + 1e-9).all()
    )


def test_tokens_that_the_likeliest_ones_show_to_be_far_away_are_dropped() -> None:
    """The drawn token's own probability is the same, so the divergence of two outcomes is 0."""
    log_probs = torch.tensor([0.3, 0.3]).log()
    rollout = torch.tensor([[0.6, 0.3], [0.6, 0.3]]).log()
    moved = torch.tensor([[0.2, 0.3], [0.6, 0.3]]).log()
    tokens = Tokens(
        log_probs, log_probs, log_probs - 1e-3, torch.ones(2), torch.tensor([2]),
        TopOutcomes(rollout, torch.tensor([True, True]), moved),
    )  # fmt: skip
    _, dropped = TopDivergence("tv", 0.15)(tokens, torch.ones(2), torch.ones(2))
    assert dropped.tolist() == [True, False]
    assert not bool(BinaryDivergence("tv", 0.15)(tokens, torch.ones(2), torch.ones(2))[1].any())
