"""Which groups teach nothing."""

from math import nan

import pytest

from workers.algorithms.dapo import uniform_groups


@pytest.mark.parametrize(
    ("rewards", "uniform"),
    [
        ([1, 1, 1, 1], True),
        ([1, 1, nan, nan], True),
        ([1, 0, nan, nan], False),
        ([1, nan, nan, nan], False),
        ([nan, nan, nan, nan], False),
        ([1, 1, 1], False),
    ],
)
def test_only_whole_groups_with_two_rewards_or_more_are_judged(rewards: list[float], uniform: bool) -> None:
    assert uniform_groups([0] * len(rewards), rewards, group_size=4) == (frozenset({0}) if uniform else frozenset())
