"""What the training engines count and clip alike."""

import math

import pytest

from workers.engines.base import Updates
from workers.settings.engines import ActorConfig


def make_updates(**settings: object) -> Updates:
    given = {"lr": 0.8, "lr_warmup_steps": 4, "grad_clip": 2.0}
    return Updates(ActorConfig.model_validate(given | settings))


def test_all_updates_of_a_step_have_its_learning_rate() -> None:
    updates = make_updates(num_mini_batches=2)
    rates = [updates.next(1.0, 1.0)[1].lr for _ in range(5)]
    assert rates == pytest.approx([0.2, 0.2, 0.4, 0.4, 0.6])
    assert (updates.number, updates.num_steps) == (5, 2)


def test_the_scaled_gradient_is_clipped() -> None:
    updates = make_updates()
    assert updates.next(3.0, 0.5)[0] == 0.5
    factor, stats = updates.next(16.0, -0.5)
    assert stats.grad_norm == 8.0
    assert factor == pytest.approx(-0.125, rel=1e-6)  # norm 16 becomes 2


def test_updates_whose_gradient_was_clipped_say_so() -> None:
    updates = make_updates()
    assert [updates.next(norm, 1.0)[1].clipped for norm in (1.9, 2.1, 0.0, 50.0)] == [False, True, False, True]
    free = make_updates(grad_clip=None)
    factor, stats = free.next(1e6, 0.5)
    assert (factor, stats.grad_norm, stats.clipped) == (0.5, 5e5, False)
    assert free.next(math.inf, 1.0)[0] is None


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_reported_and_counted(norm: float) -> None:
    updates = make_updates()
    factor, stats = updates.next(norm, 1.0)
    assert factor is None and not math.isfinite(stats.grad_norm) and updates.number == 1


def test_steps_count_on_after_a_resume_with_another_number_of_updates() -> None:
    before, after = make_updates(num_mini_batches=3), make_updates(ppo_epochs=2)
    for _ in range(6):
        before.next(1.0, 1.0)
    after.load_state_dict(before.state_dict())
    assert (after.number, after.num_steps) == (6, 2)
    assert [after.next(1.0, 1.0)[1].lr for _ in range(3)] == pytest.approx([0.6, 0.6, 0.8])
