"""Rows that are removed by their index, and put anew."""

from collections.abc import Callable
from typing import Any

import pytest

from tq import TaskSpec

World = Callable[..., Any]
LOOK = TaskSpec("look", frozenset({"x"}))
GROUPS = TaskSpec("groups", frozenset({"x"}), whole_groups=True)


@pytest.mark.parametrize("reason", ["removed", "cleared"])
def test_leases_on_removed_rows_are_void_also_where_the_rows_are_put_anew(make_world: World, reason: str) -> None:
    world = make_world(LOOK)
    world.put([0])
    world.granted(world.ask("look"))
    world.remove([0], reason=reason)
    assert world.fences == []
    world.put([0], "storage-1")
    (fence,) = world.fences
    assert (fence.task, fence.unit, fence.rows) == ("look", "storage-1", (0,))
    waiting = world.ask("look", owner="b")
    assert waiting not in world.answers
    world.confirm_fences()
    assert world.granted(waiting).rows == [0]


def test_row_that_nobody_had_in_hand_is_ready_as_soon_as_it_is_put_anew(make_world: World) -> None:
    world = make_world(LOOK)
    world.put([0])
    world.remove([0], reason="removed")
    world.put([0])
    assert world.fences == []
    assert world.granted(world.ask("look")).rows == [0]


def test_group_waits_for_a_done_row_that_was_removed_and_comes_as_a_whole_or_not_at_all(make_world: World) -> None:
    world = make_world(GROUPS, LOOK)
    world.put([0, 1], size=2)
    held = world.granted(world.ask("groups", 2))
    world.write("groups", held, [0])
    world.remove([0], reason="removed")
    world.put([0], size=2, group_size=2)
    waiting = world.ask("groups", 2, owner="b")
    assert waiting not in world.answers, "the other row of its group is in a lease"
    world.release("groups", held, [1])
    world.confirm_fences()
    both = world.granted(waiting)
    assert both.rows == [0, 1]
    world.write("groups", both, [1])
    world.release("groups", both, [0])
    world.confirm_fences()
    assert world.granted(world.ask("groups", 2)).rows == [0]
