"""GRPO as a whole: streamed micro-batches give the paper's loss."""

import math

import pytest
import torch

from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import GRPO
from workers.algorithms.parts import LossCounts, PolicyLoss, PolicyParts, PPOClip
from workers.rows.packed_rows import sample_columns, samples_of
from workers.settings.algorithms import GRPOConfig

CPU = torch.device("cpu")
LENGTHS = (3, 1, 4, 2)
REWARDS = (1.0, 0.0, 0.5, 0.5)
TRUNCATED = (False, False, True, False)


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [-2 * torch.rand(length, generator=generator) for length in LENGTHS]


NEW, OLD, REF = values(0), values(1), values(2)


def make_batch(grpo: GRPO) -> PackedBatch:
    columns = {
        **sample_columns([torch.tensor([7])] * 4, [torch.full((length,), 7) for length in LENGTHS]),
        "rollout_log_probs": Column.of_rows(OLD),
        "old_log_probs": Column.of_rows(OLD),
        "ref_log_probs": Column.of_rows(REF),
        "truncated": Column.of_scalars(torch.tensor(TRUNCATED)),
        "rewards": Column.of_scalars(torch.tensor(REWARDS)),
    }
    batch = PackedBatch((0, 1, 2, 3), columns)
    return samples_of(batch.with_columns(grpo.advantages(batch, group_size=2)))


def expected_loss(normalization: str, *, kl_coef: float, masked: bool) -> float:
    """Eq. 3 of arXiv 2402.03300 in plain Python; the second group's advantages are 0, its KL is not."""
    deviation = math.sqrt(0.5)
    advantages = (0.5 / (deviation + 1e-6), -0.5 / (deviation + 1e-6), 0.0, 0.0)
    kept = [i for i in range(4) if not (masked and TRUNCATED[i])]
    sums = []
    for i in kept:
        terms = []
        for new, old, ref in zip(NEW[i].tolist(), OLD[i].tolist(), REF[i].tolist(), strict=True):
            ratio = math.exp(new - old)
            surrogate = min(ratio * advantages[i], min(max(ratio, 0.8), 1.2) * advantages[i])
            terms.append(-surrogate + kl_coef * (math.exp(ref - new) - (ref - new) - 1))
        sums.append(sum(terms))
    if normalization == "token":
        return sum(sums) / sum(LENGTHS[i] for i in kept)
    if normalization == "sequence":
        return sum(total / LENGTHS[i] for i, total in zip(kept, sums, strict=True)) / len(kept)
    return sum(sums) / (4 * 5)


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("micro_batches", [[[0, 1, 2, 3]], [[3], [1, 0], [2]]])
def test_loss_equals_the_paper_in_any_order(
    normalization: str, kl_coef: float, masked: bool, micro_batches: list[list[int]]
) -> None:
    own = {"dual_clip": None}  # the paper has none
    config = GRPOConfig.model_validate({"loss_normalization": normalization, "kl_coef": kl_coef, **own})
    grpo = GRPO(config, max_response_tokens=5, mask_truncated=masked)
    batch = make_batch(grpo)
    total, counts = 0.0, LossCounts(0, 0, 0)
    for rows in micro_batches:
        part = batch.select(rows)
        loss = grpo.loss(part, device=CPU)
        new = torch.cat([NEW[row] for row in rows])
        total += float(loss(new, torch.zeros_like(new)))
        counts += grpo.counts(part)
    assert total * grpo.scale(counts) == pytest.approx(
        expected_loss(normalization, kl_coef=kl_coef, masked=masked), rel=1e-5, abs=1e-6
    )


def test_weights_weigh_responses_and_leave_those_of_zero_out_of_the_counts() -> None:
    grpo = GRPO(GRPOConfig(), max_response_tokens=5, mask_truncated=True)
    plain = make_batch(grpo)
    masked = plain.with_columns({"loss_weights": Column.of_scalars(torch.tensor([1.0, 0.0, 1.0, 0.25]))})
    assert grpo.counts(masked) == LossCounts(tokens=LENGTHS[0] + LENGTHS[3], sequences=2, responses=4)
    weight_A = grpo.loss(masked, device=CPU).weight_A
    assert weight_A.tolist() == [1.0] * 3 + [0.0] * 5 + [0.25] * 2
    ones = plain.with_columns({"loss_weights": Column.of_scalars(torch.ones(4))})
    assert grpo.counts(ones) == grpo.counts(plain)


def test_stats_are_sums_over_the_tokens_that_count() -> None:
    grpo = GRPO(GRPOConfig(kl_coef=0.1), max_response_tokens=5, mask_truncated=True)
    loss = grpo.loss(make_batch(grpo), device=CPU)
    new, old = torch.cat(NEW), torch.cat(OLD)
    counted = torch.tensor([True] * 4 + [False] * 4 + [True] * 2)
    total = loss(new.clone().requires_grad_(), torch.ones(10))
    assert total.requires_grad
    assert not any(value.requires_grad for value in loss.stats.values())
    assert float(loss.stats["tokens"]) == 6 and float(loss.stats["entropy"]) == 6
    assert float(loss.stats["loss"]) == pytest.approx(float(total.detach()))
    assert float(loss.stats["ratio_mean"]) == pytest.approx(float((new - old).exp()[counted].sum()), rel=1e-5)


def test_on_policy_gradient_is_minus_the_advantage() -> None:
    grpo = GRPO(GRPOConfig(), max_response_tokens=5, mask_truncated=False)
    new = torch.cat(OLD).requires_grad_()
    batch = make_batch(grpo)
    grpo.loss(batch, device=CPU)(new, torch.zeros(10)).backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, -batch["advantages"].values.repeat_interleave(torch.tensor(LENGTHS)))


def test_stats_stay_finite_when_a_masked_token_became_far_likelier() -> None:
    loss = PolicyLoss(
        PolicyParts((PPOClip(0.2, 0.2),)),
        (0.0, "k3"),
        length_N=torch.tensor([1, 1]),
        weight_A=torch.tensor([1.0, 0.0]),
        advantage_A=torch.ones(2),
        rollout_log_probs_A=torch.tensor([-1.0, -200.0]),
    )
    loss(torch.tensor([-1.0, -0.1]), torch.zeros(2))
    assert all(bool(value.isfinite()) for value in loss.stats.values()) and float(loss.stats["ratio_mean"]) == 1.0
