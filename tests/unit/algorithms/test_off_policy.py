"""Corrections for tokens of older weights, against their formulas in float64."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config, read_yaml
from launcher.config.paths import find_recipe
from tests.support.two_engines import RIGHT, drawn
from tq.columns import Column, PackedBatch
from workers.algorithms.load_algorithm import load_algorithm
from workers.algorithms.parts import DualClip, PolicyLoss, PPOClip, Tokens, policy_parts, response_means
from workers.rows.packed_rows import sample_columns, samples_of
from workers.settings.algorithms import OffPolicyConfig
from workers.settings.run import RunConfig

LENGTHS = torch.tensor([2, 0, 3])
NEW = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5], dtype=torch.float64)
OLD = torch.tensor([-1.5, -1.9, -2.5, -3.5, -2.5], dtype=torch.float64)
"""Mean log ratios of the responses: 0.2 and 1.167."""
RATIOS = [math.exp(new - old) for new, old in zip(NEW.tolist(), OLD.tolist(), strict=True)]


def policy_loss(method: str | None, new: torch.Tensor = NEW, old: torch.Tensor = OLD, **settings: Any) -> PolicyLoss:
    off_policy = OffPolicyConfig.model_validate({"method": method, **settings})
    parts = policy_parts((PPOClip(0.2, 0.2), DualClip(3.0)), off_policy, "token")
    advantages = torch.tensor([1.0, -1.0, 2.0, 0.5, 1.0], dtype=torch.float64)
    return PolicyLoss(parts, (0.0, "k3"), LENGTHS, torch.ones(5, dtype=torch.float64), advantages, old)


TRUNCATED = [min(ratio, 2.0) for ratio in RATIOS]


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"method": "decoupled"}, [ratio if ratio <= 2 else 0.0 for ratio in RATIOS]),
        ({"method": "truncated_is"}, TRUNCATED),
        ({"method": "icepop", "band_low": 0.95}, [ratio if 0.95 <= ratio <= 5 else 0.0 for ratio in RATIOS]),
        ({"method": "icepop", "band_high": 1.7}, [ratio if 0.5 <= ratio <= 1.7 else 0.0 for ratio in RATIOS]),
        # The samples' weights have the logarithms 0.5 - 0.1 = 0.4 and 3.5; their means are 0.2 and 1.167.
        # By default the sums may be 3 x 0.06 x sqrt(tokens) + 0.0018 x tokens: 0.258 and 0.317.
        ({"method": "truncated_is", "mask": "geometric"}, [0.0] * 5),
        ({"method": "truncated_is", "mask": "sequence"}, [0.0] * 5),
        ({"method": "truncated_is", "mask": "geometric", "geometric_log_ratio": 0.19}, [0.0] * 5),
        ({"method": "truncated_is", "mask": "geometric", "geometric_log_ratio": 1.2}, TRUNCATED),
        ({"method": "truncated_is", "mask": "sequence", "sequence_log_ratio": 0.41}, [*TRUNCATED[:2], 0.0, 0.0, 0.0]),
        ({"method": "truncated_is", "mask": "sequence", "sequence_log_ratio": 0.39}, [0.0] * 5),
        ({"method": "truncated_is", "mask": "sequence", "sequence_log_ratio": 3.51}, TRUNCATED),
    ],
)
def test_gradient_is_the_policy_gradient_times_the_weights(settings: dict[str, Any], weights: list[float]) -> None:
    new, loss = NEW.clone().requires_grad_(), policy_loss(**settings)
    loss(new, torch.zeros(5, dtype=torch.float64)).backward()  # type: ignore[no-untyped-call]
    expected = [-weight * advantage for weight, advantage in zip(weights, loss.advantage_A.tolist(), strict=True)]
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor(expected, dtype=torch.float64))
    changed = sum(weight != ratio for weight, ratio in zip(weights, RATIOS, strict=True))
    assert float(loss.stats["corrected_fraction"]) == changed
    assert float(loss.stats["ratio_squared"]) == pytest.approx(sum(ratio**2 for ratio in RATIOS))


@pytest.mark.parametrize("method", [None, "none", "decoupled", "truncated_is", "icepop"])
def test_on_policy_all_corrections_are_the_same(method: str | None) -> None:
    new, loss = NEW.clone().requires_grad_(), policy_loss(method, old=NEW)
    loss(new, torch.zeros(5, dtype=torch.float64)).backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    torch.testing.assert_close(new.grad, -loss.advantage_A)
    assert float(loss.stats["corrected_fraction"]) == 0


@pytest.mark.parametrize("method", ["none", "decoupled", "truncated_is", "icepop"])
@pytest.mark.parametrize("far", [-1e4, 1e4])
def test_weights_stay_finite_however_far_the_policies_are_apart(method: str, far: float) -> None:
    new = (OLD.float() + far).requires_grad_()
    loss = policy_loss(method, old=OLD.float())
    total = loss(new, torch.zeros(5))
    total.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    assert bool(total.isfinite()) and bool(new.grad.isfinite().all())
    assert all(bool(value.isfinite()) for value in loss.stats.values())


FOUND = torch.tensor([-1.1, -1.9, -1.0, -3.2, -1.6], dtype=torch.float64)
"""Under the policy that the step found."""


@pytest.mark.parametrize("method", ["decoupled", "truncated_is"])
def test_after_the_first_update_ratio_and_clip_are_relative_to_the_policy_that_the_step_found(method: str) -> None:
    new, loss = NEW.clone().requires_grad_(), policy_loss(method)
    loss.old_log_probs_A = FOUND
    total = loss(new, torch.zeros(5, dtype=torch.float64))
    expected, clipped = 0.0, 0
    for now, found, drew, advantage in zip(
        NEW.tolist(), FOUND.tolist(), OLD.tolist(), loss.advantage_A.tolist(), strict=True
    ):
        ratio, weight = math.exp(now - found), math.exp(found - drew)
        weight = min(weight, 2.0) if method == "truncated_is" else weight * (weight <= 2.0)
        plain, bounded = ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage
        expected -= weight * min(plain, bounded)
        clipped += bounded < plain
    assert float(total.detach()) == pytest.approx(expected)
    assert float(loss.stats["clip_fraction"]) == clipped > 0
    log_ratios = (FOUND - OLD).tolist()
    assert float(loss.stats["old_policy_kl"]) == pytest.approx(sum(math.exp(d) - 1 - d for d in log_ratios))


def test_with_one_update_the_policy_that_the_step_found_is_the_one_that_is_trained() -> None:
    implicit, explicit = policy_loss("truncated_is"), policy_loss("truncated_is")
    explicit.old_log_probs_A = NEW
    zeros = torch.zeros(5, dtype=torch.float64)
    assert float(implicit(NEW, zeros)) == float(explicit(NEW, zeros))
    assert implicit.stats == explicit.stats


def test_without_a_correction_the_policy_that_drew_the_tokens_is_ppos_old_one() -> None:
    loss = policy_loss("none")
    loss(NEW, torch.zeros(5, dtype=torch.float64))
    assert float(loss.stats["old_policy_kl"]) == 0.0 and float(loss.stats["clip_fraction"]) > 0


def test_means_of_responses_skip_none() -> None:
    assert response_means(NEW, LENGTHS).tolist() == pytest.approx([-1.5, 0.0, -5 / 3])


def share_left_out(wrong: str, mask: str, length: int, *, deviation: float | None = None, **bound: float) -> float:
    """Return the share of responses that a mask leaves out, of tokens that one of two engines in bfloat16 drew.

    Args:
        deviation: to which the differences of right engines are scaled: SmolLM2's is 0.06; None: as they are.
    """
    tokens = drawn(wrong, torch.bfloat16)
    error = (tokens.trained - tokens.rollout).double()
    if deviation is not None:
        error = error * deviation / error.std()
        error = error - error.exp().mean().log()  # weights average to 1
    responses, chance = 400, torch.Generator().manual_seed(0)
    log_weight_A = error[torch.randint(len(error), (responses * length,), generator=chance)]
    settings: dict[str, Any] = {"mask": mask} | bound
    parts = policy_parts((), OffPolicyConfig.model_validate(settings), "token")
    zeros_A = torch.zeros_like(log_weight_A)
    lengths_N = torch.full((responses,), length)
    kept_A = parts.masks[0](Tokens(zeros_A, log_weight_A, zeros_A, zeros_A, lengths_N))
    return 1 - float(kept_A.double().mean())


@pytest.mark.parametrize("deviation", [None, 0.06])
@pytest.mark.parametrize("length", [10, 100, 1000, 8000])
@pytest.mark.parametrize("mask", ["sequence", "geometric"])
def test_a_mask_leaves_out_at_most_one_in_a_hundred_responses_that_are_on_policy(
    mask: str, length: int, deviation: float | None
) -> None:
    assert share_left_out(RIGHT, mask, length, deviation=deviation) <= 0.01


@pytest.mark.parametrize("mask", ["sequence", "geometric"])
@pytest.mark.parametrize("wrong", ["temperature 0.7 for 1", "a zeroed layer", "top-p on one side"])
def test_a_mask_leaves_out_all_responses_of_an_engine_with_something_wrong(wrong: str, mask: str) -> None:
    assert share_left_out(wrong, mask, 1000) == share_left_out(wrong, mask, 8000) == 1.0


def test_no_constant_bound_of_the_sum_is_right_for_short_and_for_long_responses() -> None:
    """The field's largest, a factor of 10; of the mean its largest, 0.001."""
    assert share_left_out(RIGHT, "sequence", 8000, deviation=0.06, sequence_log_ratio=math.log(10)) > 0.9
    assert share_left_out(RIGHT, "geometric", 100, deviation=0.06, geometric_log_ratio=0.001) > 0.7


def test_weights_carry_no_gradient() -> None:
    new = NEW.clone().requires_grad_()
    parts = policy_parts((), OffPolicyConfig(method="decoupled", mask="sequence"), "token")
    weight_A, _ = parts.weights(Tokens(new, new.detach(), OLD, torch.ones(5), LENGTHS))
    assert not weight_A.requires_grad


@pytest.mark.parametrize("mask", ["sequence", "geometric"])
def test_without_a_correction_samples_are_masked_by_the_policy_in_training(mask: str) -> None:
    loss = policy_loss("none", mask=mask, **{f"{mask}_log_ratio": 0.5})
    loss(NEW, torch.zeros(5, dtype=torch.float64))
    assert float(loss.stats["corrected_fraction"]) == 3.0 and float(loss.stats["old_policy_kl"]) == 0.0


def gradient_of(*settings: str) -> tuple[torch.Tensor, float]:
    """Return each token's gradient, and how many ratios were clipped, for gaps between the engines of GAPS nats."""
    config = load_config(find_recipe("quickstart"), overrides=["algorithm.kl_coef=0", *settings])
    algorithm = load_algorithm(config.algorithm, config.rollout)
    lengths = torch.ones(len(GAPS), dtype=torch.int32)
    new = torch.full_like(GAPS, -2.0).requires_grad_()
    columns = {
        **sample_columns([torch.tensor([0])] * len(GAPS), [torch.tensor([0])] * len(GAPS)),
        "rollout_log_probs": Column(new.detach() - GAPS, lengths),
        "advantages": Column.of_scalars(torch.tensor([-1.0] * 6 + [1.0] * 2)),
        "truncated": Column.of_scalars(torch.zeros(len(GAPS), dtype=torch.bool)),
        "rewards": Column.of_scalars(torch.zeros(len(GAPS))),
    }
    loss = algorithm.loss(samples_of(PackedBatch(tuple(range(len(GAPS))), columns)), device=torch.device("cpu"))
    loss(new, torch.zeros_like(GAPS)).backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    return new.grad, float(loss.stats["clip_fraction"])


GAPS = torch.tensor([-10.0, -1.0, -0.01, 0.01, 1.0, 10.0, 10.0, 100.0])


@pytest.mark.parametrize("mode", ["sync", "periodic", "async"])
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_by_default_the_ratio_is_the_trainers_and_the_generating_engine_gives_weights(mode: str, name: str) -> None:
    gradient, clipped = gradient_of(f"schedule.mode={mode}", f"algorithm.name={name}")
    assert gradient.tolist() == pytest.approx([*GAPS[:4].exp().tolist(), 2.0, 2.0, -2.0, -2.0])
    assert clipped == 0


@pytest.mark.parametrize("method", ["none", "decoupled", "truncated_is", "icepop"])
def test_no_token_moves_the_policy_by_more_than_a_small_multiple_of_its_advantage(method: str) -> None:
    gradient, _ = gradient_of("schedule.mode=sync", f"algorithm.off_policy.method={method}")
    assert float(gradient.abs().max()) <= 3.0


def test_the_mask_by_its_old_name_is_refused_by_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"'sequence_mask' cannot be used .*; give algorithm\.off_policy\.mask: geom"):
        load_config(find_recipe("quickstart"), overrides=["algorithm.off_policy.method=sequence_mask"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("off_policy.method=icepop", "off_policy.cap=3"),
            "cap: 3.0 .*cap=3.; it is for method truncated_is or decoupled",
        ),
        (("off_policy.band_low=0.4",), "band_low: 0.4 .*; it is for method icepop"),
        (("off_policy.band_high=4",), "band_high: 4.0 .*; it is for method icepop"),
        (
            ("off_policy.sequence_log_ratio=0.3",),
            "it is for mask sequence; set that, or leave sequence_lo",
        ),
        (
            ("off_policy.mask=sequence", "off_policy.geometric_log_ratio=0.3"),
            "it is for mask geometric; set that, or leave",
        ),
        (
            ("off_policy.mask_log_ratio=0.3",),
            "mask_log_ratio: 0.3 .*; it was one bound of a sum and of a mean; give sequence_log_r",
        ),
        (
            ("off_policy.mask=sequence", "off_policy.mask_log_ratio=0.5"),
            "mask_log_ratio: 0.5 .*; it was one bound of a sum and of a mean; give sequence_log_r",
        ),
        (
            ("off_policy.method=icepop", "off_policy.band_low=1", "off_policy.band_high=1"),
            "icepop leaves out all tokens but those of weight 1",
        ),
        (("dual_clip=1.2",), r"dual_clip: 1\.2 .*; it must be greater than 1 \+ eps_clip_high = 1\.2"),
        (("name=dppo", "max_divergence=1.5"), r"max_divergence: 1\.5 .*; total variation is 1 at most"),
    ],
)
def test_setting_that_nothing_reads_or_that_bounds_nothing_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(find_recipe("quickstart"), overrides=[f"algorithm.{setting}" for setting in settings])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [("off_policy.method=icepop",), ("eps_clip_high=5",), ("name=dppo", "divergence=kl", "max_divergence=2")],
)
def test_default_that_a_run_wrote_down_is_not_refused(settings: tuple[str, ...], tmp_path: Path) -> None:
    config = load_config(find_recipe("quickstart"), overrides=[f"algorithm.{setting}" for setting in settings])
    config.save(tmp_path)
    assert load_config(tmp_path / "config.yaml") == config


def test_a_bound_that_an_earlier_run_wrote_down_and_nothing_read_is_passed_over(tmp_path: Path) -> None:
    config = load_config(find_recipe("quickstart"))
    config.save(tmp_path)
    file = tmp_path / "config.yaml"
    values = yaml.safe_load(file.read_text())
    section = values["algorithm"]["off_policy"]
    for name in ("sequence_log_ratio", "geometric_log_ratio"):
        del section[name]
    section["mask_log_ratio"] = 0.5
    file.write_text(yaml.safe_dump(values))
    assert section["mask"] is None
    assert load_config(file) == config, "--resume"
    assert RunConfig.model_validate(read_yaml(file).values) == config, "verify"
