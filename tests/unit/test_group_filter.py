"""Which groups are not trained."""

from math import nan
from pathlib import Path

import pytest
from pydantic import ValidationError

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.rewards.group_filter import GroupFilter, load_group_filter
from workers.settings.algorithms import DAPOConfig, GRPOConfig

OWN = """
def between(rewards):
    return 0.1 < sum(rewards) / len(rewards) < 0.9

def talks(rewards):
    return "yes"

def breaks(rewards):
    raise ValueError(f"what are {rewards}?")
"""


@pytest.fixture
def own_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_filters.py").write_text(OWN)
    monkeypatch.setenv("ASYNCFLOW_CODE_DIRECTORY", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))


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
    judge = GroupFilter("zero_variance", group_size=4)
    assert judge.refused([0] * len(rewards), rewards) == (frozenset({0}) if uniform else frozenset())


def test_sums_that_differ_in_their_last_digit_are_the_same_reward() -> None:
    """Training has them as float32."""
    judge = GroupFilter("zero_variance", group_size=2)
    assert 33.3 + 66.6 != 99.9
    assert judge.refused([5, 5, 6, 6], [33.3 + 66.6, 99.9, 99.9, 99.8]) == {5}


def test_turns_that_are_credited_by_themselves_are_compared_by_themselves() -> None:
    """Equal sums of other turns have advantages; the same turns have none."""
    judge = GroupFilter("zero_variance", group_size=2)
    turns = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.1 + 0.2], [0.3], [1.0], [nan]]
    rewards = [sum(own) for own in turns]
    assert judge.refused([5, 5, 6, 6, 7, 7, 8, 8], rewards, turns) == {6, 7}
    assert judge.refused([5, 5, 6, 6, 7, 7, 8, 8], rewards) == {5, 6, 7}


@pytest.mark.usefixtures("own_filters")
def test_function_of_ones_own_judges_the_rewards_that_are_known() -> None:
    judge = GroupFilter("own_filters:between", group_size=2)
    try:
        assert judge.refused([5, 5, 6, 6, 7, 7, 8, 8, 9], [1, 1, 1, 0, 0, nan, nan, nan, 0]) == {5, 7}
    finally:
        judge.close()


@pytest.mark.usefixtures("own_filters")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "talks",
            r"^algorithm.group_filter: own_filters:talks returned 'yes' on rewards \[1, 0\]; return True to train",
        ),
        ("breaks", r"^algorithm.group_filter: own_filters:breaks raised ValueError: what are \[1, 0\]\? on rewards"),
    ],
)
def test_function_that_cannot_judge_is_named(name: str, message: str) -> None:
    judge = GroupFilter(f"own_filters:{name}", group_size=2)
    try:
        with pytest.raises(UserCodeFailed, match=message):
            judge.refused([0, 0], [1, 0])
    finally:
        judge.close()


def test_filter_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValidationError, match="it is not a filter; give zero_variance, module:function, or null"):
        GRPOConfig(group_filter="zero_varianze")
    with pytest.raises(ConfigError, match="^algorithm.group_filter: no module 'no_such_filters'"):
        GroupFilter("no_such_filters:keep", group_size=2)


def test_dapo_filters_by_default_and_others_do_not() -> None:
    assert load_group_filter(DAPOConfig(), group_size=4) is not None
    assert load_group_filter(GRPOConfig(), group_size=4) is None
