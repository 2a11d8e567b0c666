"""A policy loss that is a sum over samples, evaluated in parts: the same gradient, and only where it is declared."""

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from workers.algorithms.algorithm import GRPO, Moments
from workers.algorithms.load_algorithm import load_algorithm
from workers.algorithms.parts import PolicyLoss
from workers.engines.base import DivisibleLoss
from workers.records.log_prob_gap import Comparison
from workers.rows.packed_rows import samples_of
from workers.settings.algorithms import AlgorithmConfig
from workers.settings.rollout import RolloutConfig
from workers.trainer.tri_model import LossOfMicroStep, MicroStep

from .test_failed_rewards import CPU, LENGTHS, batch_of

ALGORITHMS: list[dict[str, Any]] = [
    {"name": "grpo", "kl_coef": 0.1, "entropy_coef": 0.01},
    {"name": "grpo", "loss_normalization": "sequence", "off_policy": {"mask": "geometric", "geometric_log_ratio": 0.7}},
    {"name": "cispo"},
    {"name": "dapo"},
    {"name": "dppo"},
    {"name": "gspo"},
    {"name": "rloo"},
    {"name": "reinforce_plus_plus"},
    {"name": "ppo"},
]
ROWS = [0, 1, 2, 3]
SIZES = [(1, LENGTHS[0]), (2, LENGTHS[1] + LENGTHS[2]), (1, LENGTHS[3])]


def make_loss(section: dict[str, Any]) -> tuple[PolicyLoss, Tensor]:
    """Return the loss of four samples, and log-probabilities."""
    config: Any = TypeAdapter(AlgorithmConfig).validate_python(section)
    algorithm = load_algorithm(config, RolloutConfig(max_response_tokens=5))
    batch = batch_of(ROWS)
    batch = samples_of(batch.with_columns(algorithm.advantages(batch, group_size=4)))
    if algorithm.whole_step:
        batch = algorithm.normalized(batch, Moments.merged([algorithm.moments(batch)]))
    return algorithm.loss(batch, device=CPU), batch["new_log_probs"].values


def gradients(losses: Any, log_probs_A: Tensor, sizes: list[int]) -> Tensor:
    """Return the gradients of log-probabilities and entropies, [2, A], of losses of neighbouring samples."""
    values = torch.stack([log_probs_A, log_probs_A.abs()]).requires_grad_()
    parts = torch.split(values, sizes, dim=1)
    sum(loss(*part) for loss, part in zip(losses, parts, strict=True)).backward()
    assert values.grad is not None
    return values.grad


@pytest.mark.parametrize("section", ALGORITHMS, ids=lambda section: section["name"])
def test_parts_of_a_loss_have_its_gradient(section: dict[str, Any]) -> None:
    loss, log_probs_A = make_loss(section)
    parts = loss.cut_loss(SIZES)
    assert parts is not None and isinstance(loss, DivisibleLoss)
    expected = gradients([loss], log_probs_A, [sum(LENGTHS)])
    assert bool(expected.any())
    torch.testing.assert_close(gradients(parts, log_probs_A, [drawn for _, drawn in SIZES]), expected)
    assert all(part.stats["tokens"] <= drawn for part, (_, drawn) in zip(parts, SIZES, strict=True))


class OfWholeBatches(GRPO):
    """Might look at all samples of a micro-batch."""


class OfSamples(GRPO):
    per_sample = True


@pytest.mark.parametrize(("kind", "declared"), [(OfWholeBatches, False), (OfSamples, True)])
def test_a_subclass_must_declare_it_for_itself(kind: type[GRPO], declared: bool) -> None:
    config: Any = TypeAdapter(AlgorithmConfig).validate_python({"name": "grpo"})
    algorithm = kind(config, max_response_tokens=5, mask_truncated=False)
    batch = batch_of(ROWS)
    batch = samples_of(batch.with_columns(algorithm.advantages(batch, group_size=4)))
    assert (algorithm.loss(batch, device=CPU).cut_loss(SIZES) is not None) == declared


def test_the_comparison_with_the_generating_engine_is_made_of_the_whole_alone() -> None:
    loss, log_probs_A = make_loss({"name": "grpo"})
    comparison = Comparison(loss.rollout_log_probs_A, torch.zeros(sum(LENGTHS), dtype=torch.int32))
    compared = comparison.wrap_loss(loss)
    parts = compared.cut_loss(SIZES)
    assert parts is not None
    gradients(parts, log_probs_A, [drawn for _, drawn in SIZES])
    assert comparison.log_probs_A is None
    compared(log_probs_A, log_probs_A)
    assert comparison.log_probs_A is not None and comparison.log_probs_A.equal(log_probs_A)
    assert comparison.wrap_loss(lambda log_probs, _: log_probs.sum()).cut_loss(SIZES) is None


@pytest.mark.parametrize("own", [None, torch.arange(sum(LENGTHS)) % 3 > 0])
def test_the_loss_of_a_micro_step_is_cut_with_the_tokens_that_the_policy_drew(own: Tensor | None) -> None:
    config: Any = TypeAdapter(AlgorithmConfig).validate_python({"name": "grpo", "off_policy": {"method": "none"}})
    algorithm = load_algorithm(config, RolloutConfig(max_response_tokens=5))
    batch = batch_of(ROWS)
    batch = samples_of(batch.with_columns(algorithm.advantages(batch, group_size=4)))
    log_probs_A = batch["new_log_probs"].values
    step: Any = MicroStep(batch, None, own)  # type: ignore[arg-type]
    loss = LossOfMicroStep(step, lambda whole: algorithm.loss(whole, device=CPU))
    parts = loss.cut_loss(SIZES)
    assert parts is not None
    expected = gradients([loss], log_probs_A, [sum(LENGTHS)])
    torch.testing.assert_close(gradients(parts, log_probs_A, [drawn for _, drawn in SIZES]), expected)
