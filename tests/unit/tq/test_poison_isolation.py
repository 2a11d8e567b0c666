"""The last try of a row before its group becomes a dead letter is made with nothing else in hand."""

from collections.abc import Callable
from typing import Any

import pytest

from tq import TaskSpec
from tq.control.events import DeadlinePassed, OwnerGone

World = Callable[..., Any]


def spec(**changes: Any) -> TaskSpec:
    return TaskSpec(
        "ref", **{"inputs": frozenset({"x"}), "outputs": frozenset({"ref"}), "max_deliveries": 3, **changes}
    )


def fails(world: Any, *, num_rows: int = 9, owner: str = "a") -> list[int]:
    """A consumer takes rows and releases all of them."""
    granted = world.granted(world.ask("ref", num_rows, owner=owner))
    world.release("ref", granted)
    world.confirm_fences()
    rows: list[int] = granted.rows
    return rows


def test_only_the_poisonous_group_goes_among_the_dead_letters(make_world: World) -> None:
    world = make_world(spec(whole_groups=True))
    world.create(range(8), size=2)
    assert fails(world) == fails(world) == list(range(8))
    for group in range(4):
        granted = world.granted(world.ask("ref", 9))
        assert granted.rows == [2 * group, 2 * group + 1], "alone"
        if group == 1:
            world.release("ref", granted)
            world.confirm_fences()
        else:
            world.write("ref", granted)
    assert [removal.rows for removal in world.removals] == [{"storage-1": (2, 3)}]


def test_whoever_holds_a_last_try_gets_nothing_more_until_it_is_done(make_world: World) -> None:
    world = make_world(spec())
    world.create(range(3))
    assert fails(world, num_rows=2) == fails(world, num_rows=2) == [0, 1]
    first = world.granted(world.ask("ref", 9, owner="a"))
    waits = world.ask("ref", 9, owner="a")
    assert first.rows == [0]
    assert waits not in world.answers
    assert world.granted(world.ask("ref", 9, owner="b")).rows == [1], "another may try another one"
    assert world.granted(world.ask("ref", 9, owner="c")).rows == [2]
    world.create([3])
    assert waits not in world.answers
    world.write("ref", first)
    assert world.granted(waits).rows == [3]


def test_rows_before_a_last_try_go_out_without_it(make_world: World) -> None:
    world = make_world(spec())
    world.create([5])
    assert fails(world) == fails(world) == [5]
    world.create(range(5))
    world.create([6])
    assert world.granted(world.ask("ref", 9)).rows == [0, 1, 2, 3, 4]
    assert world.granted(world.ask("ref", 9)).rows == [5]
    assert world.granted(world.ask("ref", 9, owner="b")).rows == [6]


def test_a_parked_fetch_of_another_consumer_is_not_held_up(make_world: World) -> None:
    world = make_world(spec())
    world.create([0])
    assert fails(world) == fails(world) == [0]
    assert world.granted(world.ask("ref", owner="a")).rows == [0]
    held_up, other = world.ask("ref", owner="a"), world.ask("ref", owner="b")
    world.create([1])
    assert held_up not in world.answers
    assert world.granted(other).rows == [1]


def test_death_of_the_reader_of_a_last_try_blames_that_row_alone(make_world: World) -> None:
    world = make_world(spec(), TaskSpec("look", frozenset({"x"})))
    world.create(range(2))
    for _ in range(3):
        world.join("a")
        world.granted(world.ask("ref", 9))
        world.handle(OwnerGone("a"))
        world.confirm_fences()
    assert [removal.rows for removal in world.removals] == [{"storage-0": (0,)}]


@pytest.mark.parametrize("most", [0, 1])
def test_without_a_second_try_nothing_is_handed_out_alone(make_world: World, most: int) -> None:
    world = make_world(spec(max_deliveries=most))
    world.create(range(3))
    fails(world, num_rows=1)
    assert world.granted(world.ask("ref", 9)).rows == ([0, 1, 2] if most == 0 else [1, 2])


def test_whoever_waits_in_vain_is_told_why(make_world: World) -> None:
    world = make_world(spec())
    world.create(range(2))
    assert fails(world) == fails(world) == [0, 1]
    world.granted(world.ask("ref"))
    waits = world.ask("ref")
    world.handle(DeadlinePassed(waits))
    assert "failed too often to be handed out with others" in world.answers[waits].waiting_for
