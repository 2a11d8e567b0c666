"""Losses and advantages of rollouts with several samples, against loops in plain Python."""

import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import PPO, Algorithm
from workers.algorithms.load_algorithm import load_algorithm
from workers.algorithms.parts import LossCounts
from workers.rows.packed_rows import samples_of
from workers.settings.algorithms import AlgorithmConfig, DAPOConfig
from workers.settings.rollout import RolloutConfig

CPU = torch.device("cpu")
MASKS = ([[0, 1, 1, 0, 0, 1]], [[0, 0, 1, 0], [0, 1, 0, 1, 1]], [[0, 1], [0, 0], [0, 1, 1]], [[0, 1, 1, 1, 1]])
"""Rollout -> sample -> its mask."""
REWARDS, TRUNCATED = (1.0, 0.0, 0.25, 0.75), (False, False, False, True)
DRAWN = [[sum(mask) for mask in samples] for samples in MASKS]
SAMPLES = [count for rollout in DRAWN for count in rollout]


def values(seed: int) -> torch.Tensor:
    return -2 * torch.rand(sum(SAMPLES), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


NEW, OLD, REF = values(0), values(1), values(2)


def make_rows() -> PackedBatch:
    masks = [torch.tensor([one for mask in rollout for one in mask], dtype=torch.uint8) for rollout in MASKS]
    drawn = torch.tensor([sum(rollout) for rollout in DRAWN], dtype=torch.int32)
    columns = {
        "tokens": Column.of_rows([mask.long() + 5 for mask in masks]),
        "sample_lengths": Column.of_rows([torch.tensor([*map(len, one)], dtype=torch.int32) for one in MASKS]),
        "response_mask": Column.of_rows(masks),
        "rollout_log_probs": Column(OLD, drawn),
        "old_log_probs": Column(OLD, drawn),
        "ref_log_probs": Column(REF, drawn),
        "values": Column(values(3), drawn),
        "truncated": Column.of_scalars(torch.tensor(TRUNCATED)),
        "rewards": Column.of_scalars(torch.tensor(REWARDS)),
    }
    return PackedBatch((0, 1, 2, 3), columns)


def make(masked: bool = False, **settings: Any) -> Algorithm[Any]:
    config: Any = TypeAdapter(AlgorithmConfig).validate_python({"dual_clip": None, **settings})
    truncated = "mask" if masked else "train"
    return load_algorithm(config, RolloutConfig(max_response_tokens=5, truncated=truncated))


def trained(algorithm: Algorithm[Any], micro_batches: list[list[int]]) -> float:
    """The update's loss, from micro-batches of samples."""
    rows = make_rows()
    samples = samples_of(rows.with_columns(algorithm.advantages(rows, group_size=2)))
    new = NEW.split(SAMPLES)
    total, counts = 0.0, LossCounts(0, 0, 0)
    for positions in micro_batches:
        part, log_probs = samples.select(positions), torch.cat([new[k] for k in positions])
        total += float(algorithm.loss(part, device=CPU)(log_probs, torch.zeros_like(log_probs)))
        counts += algorithm.counts(part)
    return total * algorithm.scale(counts)


def surrogate(log_ratio: float, advantage: float) -> float:
    ratio = math.exp(log_ratio)
    return -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)


def by_hand(normalization: str, *, masked: bool, sample_ratio: bool) -> float:
    """Rollout after rollout, sample after sample, token after token; its reward is the rollout's."""
    advantages = [
        (1.0 if reward == max(pair) else -1.0) * math.sqrt(0.5)
        for pair in ((1.0, 0.0), (0.25, 0.75))
        for reward in pair
    ]
    place, sums = 0, []
    for drawn, advantage in zip(DRAWN, advantages, strict=True):
        terms = []
        for count in drawn:
            gaps = (NEW - OLD)[place : place + count].tolist()
            mean = sum(gaps) / max(1, count)
            terms += [surrogate(mean if sample_ratio else gap, advantage) for gap in gaps]
            place += count
        sums.append(sum(terms))
    kept = [k for k in range(4) if not (masked and TRUNCATED[k])]
    if normalization == "token":
        return sum(sums[k] for k in kept) / sum(sum(DRAWN[k]) for k in kept)
    if normalization == "sequence":
        return sum(sums[k] / sum(DRAWN[k]) for k in kept) / len(kept)
    return sum(sums[k] for k in kept) / (4 * 5)


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize("micro_batches", [[[0, 1, 2, 3, 4, 5, 6]], [[6, 2], [4], [0, 5], [3, 1]]])
def test_a_rollout_counts_once_however_its_samples_are_cut(
    normalization: str, masked: bool, name: str, micro_batches: list[list[int]]
) -> None:
    settings = {"name": name, "loss_normalization": normalization, "eps_clip": 0.2, "eps_clip_high": None}
    algorithm = make(masked, **settings, off_policy={"method": "none"})
    expected = by_hand(normalization, masked=masked, sample_ratio=name == "gspo")
    assert trained(algorithm, micro_batches) == pytest.approx(expected, rel=1e-5)


def test_a_mask_of_samples_leaves_out_single_ones() -> None:
    limit = 0.3
    algorithm = make(name="grpo", off_policy={"mask": "geometric", "geometric_log_ratio": limit})
    rows = make_rows()
    shifted = torch.cat([torch.full((count,), -1.0 if k == 2 else 0.0) for k, count in enumerate(SAMPLES)])
    recorded = Column(OLD + shifted, rows["old_log_probs"].lengths)
    rows = rows.with_columns({"rollout_log_probs": recorded, **algorithm.advantages(rows, group_size=2)})
    loss = algorithm.loss(samples_of(rows), device=CPU)
    new = OLD.clone().requires_grad_()
    loss(new, torch.zeros_like(new)).backward()
    assert new.grad is not None
    moved = [bool((part != 0).any()) for part in new.grad.split(SAMPLES)]
    assert moved == [True, True, False, True, False, True, True]  # the third is far off, the fifth has no token


def test_gae_steps_from_drawn_token_to_drawn_token_of_all_samples_and_pays_once() -> None:
    ppo = make(name="ppo", gamma=0.9, lam=0.8, kl_coef=0.1, kl_placement="reward")
    assert isinstance(ppo, PPO)
    rows = make_rows()
    found = ppo.advantages(rows, group_size=1)
    expected: list[float] = []
    value, penalty, place = rows["values"].values.tolist(), (0.1 * (OLD - REF)).tolist(), 0
    for reward, rollout in zip(REWARDS, DRAWN, strict=True):
        count, advantage, later = sum(rollout), 0.0, 0.0
        ours: list[float] = []
        for t in reversed(range(place, place + count)):
            gain = (reward if t == place + count - 1 else 0.0) - penalty[t]
            advantage = gain + 0.9 * later - value[t] + 0.9 * 0.8 * advantage
            later = value[t]
            ours.insert(0, advantage)
        expected += ours
        place += count
    assert found["advantages"].values.tolist() == pytest.approx(expected, rel=1e-5)
    assert found["returns"].lengths.equal(rows["values"].lengths)


def test_a_penalty_to_come_ends_with_its_rollout() -> None:
    algorithm = make(name="reinforce_plus_plus", kl_coef=0.1)
    drawn = [sum(rollout) for rollout in DRAWN]
    found = algorithm.advantages(make_rows(), group_size=1)["advantages"].values.split(drawn)
    for ours, penalty, reward in zip(found, (OLD - REF).split(drawn), REWARDS, strict=True):
        to_come = penalty.flip(0).cumsum(0).flip(0)
        assert ours.tolist() == pytest.approx((reward - 0.1 * to_come).tolist(), rel=1e-5, abs=1e-6)


def test_the_price_of_length_is_that_of_all_replies_of_a_rollout() -> None:
    config = DAPOConfig(overlong_buffer_tokens=4, group_filter=None)
    drawn = RolloutConfig(max_response_tokens=2, function="tools", max_drawn_tokens=7)
    one = make_rows().with_columns({"rewards": Column.of_scalars(torch.zeros(4))})
    priced = load_algorithm(config, drawn).advantages(one, group_size=4)["advantages"].values
    fallen = torch.tensor([max(-1.0, min(0.0, (7 - 4 - sum(samples)) / 4)) for samples in DRAWN])
    expected = (fallen - fallen.mean()) / fallen.std()
    assert fallen.min() < fallen.max()
    torch.testing.assert_close(priced.float(), expected, rtol=1e-4, atol=1e-4)
