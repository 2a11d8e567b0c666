"""Engines that sleep on `late`: they give the device back, and wake with the same bits."""

import pytest

from .conftest import Run

LEAST_FREED = 0.95


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("schedule", "num_ranks"), [("copies", 1), ("kernels", 1), ("copies", 2)])
def test_engines_free_the_device_and_go_on_as_if_they_had_not_slept(run: Run, schedule: str, num_ranks: int) -> None:
    for said in run("asleep", schedule, num_ranks=num_ranks, deadline_s=800):
        assert len(said) == (4 if num_ranks == 1 else 1)
        left = {name: found["asleep"] / found["awake"] for name, found in said.items()}
        assert max(left.values()) <= 1 - LEAST_FREED, left
        assert all(found["same"] for found in said.values()), said
