"""Group-relative advantages."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.algorithms.algorithm import group_advantages

groups = st.integers(2, 8).flatmap(
    lambda size: st.lists(st.lists(st.floats(-2, 2, width=32), min_size=size, max_size=size), min_size=1, max_size=5)
)


@settings(max_examples=100, deadline=None)
@given(groups, st.booleans())
def test_advantages_follow_the_paper(rewards: list[list[float]], scale: bool) -> None:
    actual = group_advantages(torch.tensor(rewards), scale_by_std=scale, eps=1e-6)
    for row, group in zip(actual.tolist(), rewards, strict=True):
        mean, deviation = statistics.fmean(group), statistics.stdev(group)
        expected = [(reward - mean) / (deviation + 1e-6 if scale else 1.0) for reward in group]
        if len(set(group)) == 1:
            expected = [0.0] * len(group)
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_equal_rewards_yield_exact_zeros() -> None:
    assert group_advantages(torch.full((2, 3), 0.1)).tolist() == [[0.0] * 3] * 2


def test_group_of_one_has_nothing_to_compare_with() -> None:
    assert group_advantages(torch.ones(3, 1)).tolist() == [[0.0]] * 3
