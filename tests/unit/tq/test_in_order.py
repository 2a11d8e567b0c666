"""`in_order`: who gets which rows together does not depend on when they became ready."""

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tq import TaskSpec
from tq.policies import TokenBalanced

World = Callable[..., Any]
ORDERED = TaskSpec("score", frozenset({"x"}), in_order=True)
GENERATE = TaskSpec("generate", frozenset({"x"}), frozenset({"y"}))
TRAIN = TaskSpec("train", frozenset({"y"}), in_order=True, whole_groups=True, keeps_leases=True)


def test_later_rows_wait_for_the_first_ones(make_world: World) -> None:
    world = make_world(ORDERED)
    world.open(4)
    world.create([2, 3, 1])
    request = world.ask("score", 2)
    assert request not in world.answers
    world.create([0])
    assert world.granted(request).rows == [0, 1]
    assert world.granted(world.ask("score", 2)).rows == [2, 3]


def test_fewer_rows_than_asked_for_go_out_only_as_the_rest(make_world: World) -> None:
    world = make_world(ORDERED)
    world.open(3)
    world.create([0])
    request = world.ask("score", 2)
    assert request not in world.answers
    world.create([1, 2])
    assert world.granted(request).rows == [0, 1]
    assert world.granted(world.ask("score", 2)).rows == [2]


def test_rows_that_come_back_go_out_together_again(make_world: World) -> None:
    world = make_world(ORDERED)
    world.open(6)
    world.create(range(6))
    first = world.granted(world.ask("score", 2, owner="a"))
    assert world.granted(world.ask("score", 2, owner="b")).rows == [2, 3]
    world.release("score", first)
    again = world.ask("score", 2, owner="b")
    assert again not in world.answers
    world.confirm_fences()
    assert world.granted(again).rows == first.rows == [0, 1]


@given(order=st.permutations(range(8)))
def test_rounds_are_the_same_whatever_the_order_of_arrival(make_world: World, order: list[int]) -> None:
    world = make_world(GENERATE, TRAIN)
    world.open(8)
    world.create(range(8), size=2)
    leases = [world.granted(world.ask("generate")) for _ in range(8)]
    asked = [world.ask_round("train", 0, rank, num_rows=2) for rank in range(2)]
    for number in order:
        world.write("generate", leases[number], columns=["y"])
    asked += [world.ask_round("train", 1, rank, num_rows=2) for rank in range(2)]
    assert [world.granted(request).rows for request in asked] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@given(order=st.permutations(range(8)))
def test_a_policy_that_looks_further_chooses_nothing_in_order(make_world: World, order: list[int]) -> None:
    policy = TokenBalanced(window=2)
    world = make_world(TaskSpec("train", frozenset({"x"}), in_order=True, keeps_leases=True, policy=policy))
    world.open(8)
    for row in order:
        world.put([row], tokens=1 + row * 7 % 5)
    rounds = [
        [world.granted(world.ask_round("train", k, rank, num_rows=2)).rows for rank in range(2)] for k in range(2)
    ]
    assert [sorted(row for rank_slice in rank_slices for row in rank_slice) for rank_slices in rounds] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
