"""Schedules of the learning rate, against values worked out by hand and against torch's own."""

import pytest
import torch

from workers.engines.base import learning_rate
from workers.settings.engines import TrainingConfig


def rates(steps: int, **settings: object) -> list[float]:
    config = TrainingConfig.model_validate({"lr": 1.0} | settings).for_run(steps)
    return [learning_rate(config, step) for step in range(1, steps + 1)]


def test_constant_with_and_without_warm_up() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]
    assert rates(6, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_from_the_end_of_the_warm_up_to_the_last_step() -> None:
    assert rates(6, lr_schedule="linear", lr_warmup_steps=2) == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(5, lr_schedule="linear", lr_min_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_decay_ends_with_the_run_also_where_its_first_steps_are_the_critics_alone() -> None:
    def policy_rates(**settings: object) -> list[float]:
        config = TrainingConfig.model_validate({"lr": 1.0, "lr_schedule": "linear"} | settings)
        return [learning_rate(config.for_run(7, begins_after=2), trained) for trained in range(1, 6)]

    assert policy_rates() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert policy_rates(lr_decay_steps=5) == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert policy_rates(lr_decay_steps=1) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_cosine_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9, eta_min=0.1)
    expected = []
    for _ in range(10):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates(10, lr_schedule="cosine", lr_min_ratio=0.1) == pytest.approx(expected)


def test_decay_may_end_before_the_run_does_or_not_fit_at_all() -> None:
    assert rates(5, lr_schedule="linear", lr_decay_steps=3) == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert rates(2, lr_schedule="cosine", lr_warmup_steps=4) == [0.25, 0.5]
    assert rates(1, lr_schedule="linear") == [1.0]
