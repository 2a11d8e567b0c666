"""Each algorithm's loss and gradient against float64 references, written in plain Python from its paper."""

import math
import random
import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import Moments
from workers.algorithms.load_algorithm import load_algorithm
from workers.algorithms.parts import LossCounts
from workers.rows.packed_rows import sample_columns, samples_of
from workers.settings.algorithms import AlgorithmConfig
from workers.settings.rollout import RolloutConfig

GROUP, LENGTHS, MOST = 3, (3, 1, 4, 2, 6, 5), 6
REWARDS = (1.0, 0.0, 0.25, 0.5, 0.0, 0.0)
CPU = torch.device("cpu")
Tokens = list[list[float]]
"""A number per token of each response."""


def draw(seed: int, *, spread: float) -> Tokens:
    """Log-probabilities: the same for every seed but for the spread, so that ratios lie around 1."""
    common, chance = random.Random(0), random.Random(seed)
    return [[-1 - common.random() + spread * chance.uniform(-1, 1) for _ in range(length)] for length in LENGTHS]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def groups(numbers: tuple[float, ...] | list[float]) -> list[list[float]]:
    return [list(numbers[start : start + GROUP]) for start in range(0, len(numbers), GROUP)]


def in_deviations(rewards: list[float]) -> list[float]:
    return [(reward - mean(group)) / (statistics.stdev(group) + 1e-6) for group in groups(rewards) for reward in group]


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def per_token(new: Tokens, old: Tokens, advantage: Callable[[int, int], float], low: float, high: float) -> Tokens:
    return [
        [clipped(math.exp(new[i][t] - old[i][t]), advantage(i, t), low, high) for t in range(LENGTHS[i])]
        for i in range(len(LENGTHS))
    ]


def k3(new: float, ref: float) -> float:
    return math.exp(ref - new) - (ref - new) - 1


def grpo(new: Tokens, old: Tokens, ref: Tokens) -> float:
    """arXiv 2402.03300, eq. 3: the mean over responses of the mean over tokens, minus beta x KL."""
    advantages = in_deviations(list(REWARDS))
    terms = per_token(new, old, lambda i, _: advantages[i], 0.2, 0.2)
    return -mean(
        [mean([terms[i][t] - 0.1 * k3(new[i][t], ref[i][t]) for t in range(n)]) for i, n in enumerate(LENGTHS)]
    )


def dr_grpo(new: Tokens, old: Tokens, ref: Tokens) -> float:
    """arXiv 2503.20783, section 3.2: no deviation, the sum over tokens over a constant."""
    advantages = [reward - mean(group) for group in groups(REWARDS) for reward in group]
    return -sum(map(sum, per_token(new, old, lambda i, _: advantages[i], 0.2, 0.2))) / (len(LENGTHS) * MOST)


def dapo(new: Tokens, old: Tokens, ref: Tokens) -> float:
    """arXiv 2503.14476, eq. 8, 10, 13: the mean over all tokens, a higher upper clip, overlong responses cost."""
    longest, cache = MOST, 3
    penalties = [
        0.0 if n <= longest - cache else -1.0 if n > longest else ((longest - cache) - n) / cache for n in LENGTHS
    ]
    advantages = in_deviations([reward + penalty for reward, penalty in zip(REWARDS, penalties, strict=True)])
    terms = per_token(new, old, lambda i, _: advantages[i], 0.2, 0.28)
    return -sum(map(sum, terms)) / sum(LENGTHS)


def gspo(new: Tokens, old: Tokens, ref: Tokens) -> float:
    """arXiv 2507.18071, eq. 5 and 7: one ratio per response, the geometric mean of its tokens' ratios."""
    advantages = in_deviations(list(REWARDS))
    ratios = [math.exp(mean([a - b for a, b in zip(new[i], old[i], strict=True)])) for i in range(len(LENGTHS))]
    return -mean([clipped(ratio, advantages[i], 0.05, 0.06) for i, ratio in enumerate(ratios)])


def rloo(new: Tokens, old: Tokens, ref: Tokens) -> float:
    """arXiv 2402.14740, section 2.2: R = r - beta log(policy / reference) of the response, minus the others' mean."""
    penalized = [
        reward - 0.1 * sum(a - b for a, b in zip(old[i], ref[i], strict=True)) for i, reward in enumerate(REWARDS)
    ]
    advantages = [reward - (sum(group) - reward) / (GROUP - 1) for group in groups(penalized) for reward in group]
    return -sum(map(sum, per_token(new, old, lambda i, _: advantages[i], 0.2, 0.2))) / (len(LENGTHS) * MOST)


def normalized_over_tokens(advantages: Tokens) -> Tokens:
    every = [value for response in advantages for value in response]
    middle, deviation = mean(every), statistics.pstdev(every)
    return [[(value - middle) / deviation for value in response] for response in advantages]


def reinforce_plus_plus(new: Tokens, old: Tokens, ref: Tokens) -> float:
    """arXiv 2501.03262, eq. 8 to 10: the reward minus beta x the KL to come, normalised over the batch."""
    to_come = [
        [REWARDS[i] - 0.1 * sum(old[i][k] - ref[i][k] for k in range(t, n)) for t in range(n)]
        for i, n in enumerate(LENGTHS)
    ]
    advantages = normalized_over_tokens(to_come)
    return -sum(map(sum, per_token(new, old, lambda i, t: advantages[i][t], 0.2, 0.2))) / sum(LENGTHS)


def reinforce_plus_plus_baseline(new: Tokens, old: Tokens, ref: Tokens) -> float:
    """arXiv 2501.03262, section 3.2: the group's mean is the baseline; k2 in the loss."""
    centred = [reward - mean(group) for group in groups(REWARDS) for reward in group]
    advantages = normalized_over_tokens([[centred[i]] * n for i, n in enumerate(LENGTHS)])
    terms = per_token(new, old, lambda i, t: advantages[i][t], 0.2, 0.2)
    penalty = sum(0.1 * 0.5 * (new[i][t] - ref[i][t]) ** 2 for i, n in enumerate(LENGTHS) for t in range(n))
    return (penalty - sum(map(sum, terms))) / sum(LENGTHS)


def ppo(new: Tokens, old: Tokens, ref: Tokens) -> float:
    """arXiv 1707.06347, eq. 7, advantages of 1506.02438, eq. 16: gamma 1, lambda 0.95; `ref` has the values."""
    advantages = []
    for i, n in enumerate(LENGTHS):
        behind = [*ref[i][1:], 0.0]
        errors = [(REWARDS[i] if t == n - 1 else 0.0) + behind[t] - ref[i][t] for t in range(n)]
        advantages.append([sum(0.95**k * error for k, error in enumerate(errors[t:])) for t in range(n)])
    return -sum(map(sum, per_token(new, old, lambda i, t: advantages[i][t], 0.2, 0.2))) / sum(LENGTHS)


def cispo(new: Tokens, old: Tokens, ref: Tokens) -> float:
    """arXiv 2506.13585, eq. 4 and 5: sg(clip(r)) A log policy, the mean over all tokens; no lower bound, no KL."""
    advantages, found = in_deviations(list(REWARDS)), draw(1, spread=0.3)  # behind the stop-gradient
    terms = [
        min(math.exp(found[i][t] - old[i][t]), 1.28) * advantages[i] * new[i][t]
        for i, n in enumerate(LENGTHS)
        for t in range(n)
    ]
    return -sum(terms) / sum(LENGTHS)


def dppo(new: Tokens, rollout: Tokens, kind: str, bound: float) -> float:
    """arXiv 2602.04879, eq. 11 to 14: M r A, ratio and divergence both from the policy that drew the token."""
    advantages, terms = in_deviations(list(REWARDS)), []
    for i, n in enumerate(LENGTHS):
        for t in range(n):
            pi, mu = math.exp(new[i][t]), math.exp(rollout[i][t])
            apart = abs(pi - mu) if kind == "tv" else mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
            ratio, advantage = pi / mu, advantages[i]
            dropped = apart > bound and (ratio > 1 if advantage > 0 else ratio < 1)
            terms.append(0.0 if dropped else ratio * advantage)
    return -sum(terms) / sum(LENGTHS)


def icepop(new: Tokens, old: Tokens, rollout: Tokens, ref: Tokens) -> float:
    """arXiv 2510.18855: M(old / rollout) times GRPO's term, minus gamma x KL; M(k) is k in [alpha, beta], else 0."""
    advantages = in_deviations(list(REWARDS))
    terms = per_token(new, old, lambda i, _: advantages[i], 0.2, 0.2)

    def kept(i: int, t: int) -> float:
        k = math.exp(old[i][t] - rollout[i][t])
        return k if 0.8 <= k <= 1.25 else 0.0

    return -mean(
        [
            mean([kept(i, t) * terms[i][t] - 0.1 * k3(new[i][t], ref[i][t]) for t in range(n)])
            for i, n in enumerate(LENGTHS)
        ]
    )


CASES: list[tuple[Callable[[Tokens, Tokens, Tokens], float], Mapping[str, Any]]] = [
    (grpo, {"name": "grpo", "kl_coef": 0.1, "loss_normalization": "sequence"}),
    (dr_grpo, {"name": "grpo", "scale_advantages_by_std": False, "loss_normalization": "constant"}),
    (dapo, {"name": "dapo", "overlong_buffer_tokens": 3}),
    (gspo, {"name": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.06}),
    (rloo, {"name": "rloo", "kl_coef": 0.1}),
    (reinforce_plus_plus, {"name": "reinforce_plus_plus", "kl_coef": 0.1}),
    (reinforce_plus_plus_baseline, {"name": "reinforce_plus_plus", "baseline": "group", "kl_coef": 0.1}),
    (ppo, {"name": "ppo", "whiten_advantages": False, "dual_clip": None}),
    (cispo, {"name": "cispo", "eps_clip_high": 0.28}),
]


def column(tokens: Tokens, dtype: torch.dtype) -> Column:
    return Column.of_rows([torch.tensor(response, dtype=dtype) for response in tokens])


def streamed_loss(
    settings: Mapping[str, Any],
    new: Tokens,
    old: Tokens,
    ref: Tokens,
    micro_batches: list[list[int]],
    *,
    gap: float = 0.0,
    rollout: Tokens | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[float, torch.Tensor]:
    """What a trainer computes: the loss, and its gradient for every token's log-probability.

    Args:
        old: under the policy that the step found, as the trainer computes it.
        gap: what the generating engine recorded is this much lower.
        rollout: what it recorded; None: `old`, less the gap.
        dtype: of the log-probabilities.
    """
    config: AlgorithmConfig = TypeAdapter(AlgorithmConfig).validate_python(settings)
    algorithm = load_algorithm(config, RolloutConfig(max_response_tokens=MOST))
    columns = {
        **sample_columns([torch.tensor([0])] * len(LENGTHS), [torch.zeros(length).long() for length in LENGTHS]),
        "rollout_log_probs": column(rollout or [[value - gap for value in response] for response in old], dtype),
        "old_log_probs": column(old, dtype),
        "ref_log_probs": column(ref, dtype),
        "values": column(ref, dtype),
        "rewards": Column.of_scalars(torch.tensor(REWARDS)),
        "truncated": Column.of_scalars(torch.zeros(len(LENGTHS), dtype=torch.bool)),
    }
    batch = PackedBatch(tuple(range(len(LENGTHS))), columns)
    batch = samples_of(batch.with_columns(algorithm.advantages(batch, group_size=GROUP)))
    parts = [batch.select(rows) for rows in micro_batches]
    if algorithm.whole_step:
        moments = Moments.merged(algorithm.moments(part) for part in parts)
        parts = [algorithm.normalized(part, moments) for part in parts]
    total, counts, gradients = 0.0, LossCounts(0, 0, 0), {}
    for rows, part in zip(micro_batches, parts, strict=True):
        log_probs = torch.cat([torch.tensor(new[row], dtype=dtype) for row in rows]).requires_grad_()
        value = algorithm.loss(part, device=CPU)(log_probs, torch.zeros_like(log_probs).detach())
        value.backward()
        total += float(value.detach())
        counts += algorithm.counts(part)
        assert log_probs.grad is not None
        gradients |= dict(zip(rows, log_probs.grad.split([LENGTHS[row] for row in rows]), strict=True))
    scale = algorithm.scale(counts)
    return total * scale, scale * torch.cat([gradients[row] for row in range(len(LENGTHS))])


@pytest.mark.parametrize("micro_batches", [[[0, 1, 2, 3, 4, 5]], [[5], [2, 0], [4, 1, 3]]])
@pytest.mark.parametrize(("paper", "settings"), CASES, ids=[case[0].__name__ for case in CASES])
def test_loss_and_gradient_are_the_papers_in_any_order(
    paper: Callable[[Tokens, Tokens, Tokens], float], settings: Mapping[str, Any], micro_batches: list[list[int]]
) -> None:
    new, old, ref = draw(1, spread=0.3), draw(2, spread=0.3), draw(3, spread=0.3)
    loss, gradient = streamed_loss(settings, new, old, ref, micro_batches)
    assert loss == pytest.approx(paper(new, old, ref), rel=1e-6, abs=1e-7)
    assert gradient.tolist() == pytest.approx(numeric_gradient(paper, new, old, ref), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("paper", "settings"), CASES[2:6], ids=[case[0].__name__ for case in CASES[2:6]])
def test_a_gap_between_the_engines_weighs_tokens_and_changes_nothing_else(
    paper: Callable[[Tokens, Tokens, Tokens], float], settings: Mapping[str, Any]
) -> None:
    """Neither the ratio, its clip, nor a KL penalty in the reward; of algorithms without a KL term in the loss."""
    new, old, ref = draw(1, spread=0.3), draw(2, spread=0.3), draw(3, spread=0.3)
    loss, _ = streamed_loss(settings, new, old, ref, [[0, 1, 2, 3, 4, 5]], gap=math.log(1.5))
    assert loss == pytest.approx(1.5 * paper(new, old, ref), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("micro_batches", [[[0, 1, 2, 3, 4, 5]], [[5], [2, 0], [4, 1, 3]]])
@pytest.mark.parametrize(("kind", "bound"), [("tv", 0.03), ("kl", 0.003)])
@pytest.mark.parametrize("method", ["none", "truncated_is"])
def test_gradient_of_dppo_is_the_papers(kind: str, bound: float, method: str, micro_batches: list[list[int]]) -> None:
    """With weights, too: old / rollout, below the cap, times policy / old is the paper's ratio."""
    new, old, rollout = draw(1, spread=0.3), draw(2, spread=0.3), draw(3, spread=0.3)
    settings = {"name": "dppo", "divergence": kind, "max_divergence": bound, "off_policy": {"method": method}}
    _, gradient = streamed_loss(settings, new, old, old, micro_batches, rollout=rollout)
    expected = numeric_gradient(lambda moved, drew, _: dppo(moved, drew, kind, bound), new, rollout, old)
    assert gradient.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert 0 < expected.count(0.0) < sum(LENGTHS)


def test_dppos_ratio_is_truncated_and_keeps_its_gradient() -> None:
    new = [[0.0 * number for number in response] for response in draw(1, spread=0.3)]
    rollout = [[-5.0 for _ in response] for response in new]
    settings = {"name": "dppo", "max_divergence": 1.0, "off_policy": {"method": "none"}}
    _, gradient = streamed_loss(settings, new, rollout, rollout, [[0, 1, 2, 3, 4, 5]])
    advantages = in_deviations(list(REWARDS))
    expected = [-20 * advantages[i] / sum(LENGTHS) for i, n in enumerate(LENGTHS) for _ in range(n)]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("micro_batches", [[[0, 1, 2, 3, 4, 5]], [[5], [2, 0], [4, 1, 3]]])
def test_icepop_is_the_papers(micro_batches: list[list[int]]) -> None:
    new, old, rollout, ref = (draw(seed, spread=0.3) for seed in range(1, 5))
    settings = {
        "name": "grpo", "loss_normalization": "sequence", "kl_coef": 0.1,
        "off_policy": {"method": "icepop", "band_low": 0.8, "band_high": 1.25},
    }  # fmt: skip
    loss, gradient = streamed_loss(settings, new, old, ref, micro_batches, rollout=rollout)
    assert loss == pytest.approx(icepop(new, old, rollout, ref), rel=1e-6, abs=1e-7)
    expected = numeric_gradient(lambda moved, a, b: icepop(moved, a, rollout, b), new, old, ref)
    assert gradient.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    weights = [math.exp(a - b) for x, y in zip(old, rollout, strict=True) for a, b in zip(x, y, strict=True)]
    assert min(weights) < 0.8 and max(weights) > 1.25


def test_errors_in_float32_are_those_of_the_page() -> None:
    """Of the gradient, relative to its largest component; a trainer's log-probabilities are float32."""
    new, old, ref, rollout = (draw(seed, spread=0.3) for seed in range(1, 5))
    band = {"method": "icepop", "band_low": 0.8, "band_high": 1.25}
    papers: dict[str, tuple[Callable[[Tokens, Tokens, Tokens], float], Mapping[str, Any], Tokens]] = {
        **{paper.__name__: (paper, given, old) for paper, given in CASES},
        "dppo_tv": (lambda a, b, _: dppo(a, b, "tv", 0.15), {"name": "dppo"}, old),
        "dppo_kl": (lambda a, b, _: dppo(a, b, "kl", 0.05), {"name": "dppo", "divergence": "kl"}, old),
        "icepop": (
            lambda a, b, c: icepop(a, b, rollout, c),
            {"name": "grpo", "loss_normalization": "sequence", "kl_coef": 0.1, "off_policy": band},
            rollout,
        ),
    }
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    stated = {name: float(error) for name, error in re.findall(r"^\| `(\w+)` .*?\| (\de-\d+) \|", page, re.MULTILINE)}
    assert stated.keys() == papers.keys()
    for name, (paper, given, drew) in papers.items():
        parts = [[5], [2, 0], [4, 1, 3]]
        _, gradient = streamed_loss(given, new, old, ref, parts, rollout=drew, dtype=torch.float32)
        exact = numeric_gradient(paper, new, old, ref)
        error = max(abs(a - b) for a, b in zip(gradient.tolist(), exact, strict=True)) / max(map(abs, exact))
        assert error <= stated[name], f"{name}: {error:.1e}"


def numeric_gradient(
    paper: Callable[[Tokens, Tokens, Tokens], float], new: Tokens, old: Tokens, ref: Tokens
) -> list[float]:
    """Central differences."""
    step, found = 1e-5, []
    for i, length in enumerate(LENGTHS):
        for t in range(length):
            sides = []
            for sign in (1, -1):
                moved = [list(response) for response in new]
                moved[i][t] += sign * step
                sides.append(paper(moved, old, ref))
            found.append((sides[0] - sides[1]) / (2 * step))
    return found


def test_clips_are_reached_by_the_cases() -> None:
    """Else the test above would say nothing of them."""
    new, old = draw(1, spread=0.3), draw(2, spread=0.3)
    ratios = [math.exp(a - b) for x, y in zip(new, old, strict=True) for a, b in zip(x, y, strict=True)]
    assert min(ratios) < 0.8 and max(ratios) > 1.28


def test_moments_of_parts_are_those_of_the_whole() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1e6
    parts = [Moments.of(part) for part in values.split([1, 0, 400, 599])]
    whole = Moments.merged(parts)
    assert (whole.count, whole.mean) == (1000, pytest.approx(float(values.mean())))
    assert whole.deviation == pytest.approx(float(values.std(correction=0)), rel=1e-9)
    assert Moments.merged([]).deviation == 0.0
