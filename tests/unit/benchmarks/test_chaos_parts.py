"""What the chaos benchmark counts and draws, apart from the runs that it hurts."""

from collections import Counter

import pytest

from benchmarks.chaos.kill_plan import KillPlan
from benchmarks.chaos.part_rollout import longest_gap
from benchmarks.chaos.run_audit import audit
from benchmarks.chaos.throughput import Throughput


def trained(step: int, *groups: int) -> list[dict[str, int]]:
    return [{"step": step, "group": group} for group in groups]


def updated(*steps: int) -> list[dict[str, int]]:
    return [{"step": step, "update": 1} for step in steps]


def test_run_that_trained_every_group_once_is_exact() -> None:
    found = audit([*trained(1, 0, 1), *trained(2, 3, 2)], updated(1, 2))
    assert (found.skipped, found.twice, found.updates_missing, found.updates_twice) == (0, 0, 0, 0)


def test_group_below_the_newest_one_that_nobody_trained_is_skipped_unless_it_is_among_dead_letters() -> None:
    ledger = [*trained(1, 0, 3), *trained(2, 4)]
    assert audit(ledger, updated(1, 2)).skipped == 2
    assert audit([*ledger, {"step": 1, "group": 2, "dead_letter": True}], updated(1, 2)).skipped == 1


def test_group_or_update_that_is_there_twice_is_counted() -> None:
    found = audit([*trained(1, 0, 1), *trained(2, 1, 2)], updated(1, 1))
    assert (found.twice, found.updates_twice, found.updates_missing) == (1, 1, 1)


def test_everybody_dies_once_before_anybody_dies_twice() -> None:
    plan, names = KillPlan(seed=3), ["actor-0", "launcher", "rollout-0", "rollout-1", "storage-0"]
    drawn = [plan.victim(names) for _ in range(15)]
    assert all(Counter(drawn[k : k + 5]) == Counter(names) for k in (0, 5, 10))


def test_who_is_not_there_keeps_its_turn() -> None:
    plan = KillPlan(seed=0)
    assert [plan.victim(["a"]) for _ in range(3)] == ["a"] * 3
    assert plan.victim(["a", "b"]) == "b"
    assert plan.victim(["a"]) == "a"
    assert plan.victim(["a", "b"]) == "b"


def test_moments_are_the_same_for_a_seed() -> None:
    plans = [KillPlan(seed) for seed in (1, 1, 2)]
    one, same, other = ([plan.moment() for _ in range(20)] for plan in plans)
    assert one == same != other
    assert {moment.hurried for moment in one} == {True, False}


def test_throughput_is_back_at_the_end_of_the_first_window_that_has_it() -> None:
    responses = Throughput()
    for second in range(30):
        responses.add(second, 10 * min(second, 10) + 8 * max(0, second - 15))
    assert responses.rate(0, 10) == pytest.approx(10)
    assert responses.back_at(10, rate=7, window_s=2) == 17
    assert responses.back_at(10, rate=9, window_s=2) is None


def test_longest_gap_counts_both_ends_and_no_overlap() -> None:
    spans = [(3.0, 5.0), (1.0, 4.0), (7.0, 20.0)]
    assert longest_gap(spans, 0.5, 9.0) == 2.0
    assert longest_gap(spans, 0.0, 1.5) == 1.0
    assert longest_gap([], 2.0, 5.0) == 3.0
    assert longest_gap([(1.0, 2.0)], 1.0, 6.0) == 4.0
