"""Backpressure: puts wait in order while the queue is full, and hear what they waited for."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncflow.errors import PeerRefused, QueueFull
from tq import TaskSpec
from tq.control.events import DeadlinePassed, UnitGone, UnitLost
from tq.messages import RowsAccepted

World = Callable[..., Any]
LOOK = TaskSpec("look", frozenset({"x"}))
SCORE = TaskSpec("score", frozenset({"x"}), frozenset({"score"}))


def test_rows_that_wait_for_room_are_not_visible_and_come_in_order(make_world: World) -> None:
    world = make_world(LOOK, row_limit=2)
    world.put([0, 1])
    second, third = world.put([2, 3]), world.put([4])
    assert not {second, third} & world.answers.keys()
    assert world.state.stats().waiting_puts == 2
    lease = world.granted(world.ask("look", 5))
    assert lease.rows == [0, 1]
    world.write("look", lease, [0])
    assert third not in world.answers, "an earlier put is still waiting"
    world.write("look", lease, [1])
    assert isinstance(world.answers[second], RowsAccepted)
    assert world.granted(world.ask("look", 5)).rows == [2, 3]


def test_rows_that_every_task_is_done_with_make_room(make_world: World) -> None:
    world = make_world(LOOK, SCORE, row_limit=1)
    world.put([0])
    waiting = world.put([1])
    world.write("look", world.granted(world.ask("look")))
    assert waiting not in world.answers
    world.write("score", world.granted(world.ask("score")), columns=["score"])
    assert isinstance(world.answers[waiting], RowsAccepted)


def test_bytes_count_with_what_tasks_add(make_world: World) -> None:
    world = make_world(LOOK, byte_limit=100)
    world.put([0], num_bytes=60)
    assert world.state.stats().live_bytes == 60
    waiting = world.put([1], num_bytes=60)
    assert waiting not in world.answers
    world.write("look", world.granted(world.ask("look")))
    assert isinstance(world.answers[waiting], RowsAccepted)


def test_put_that_waited_too_long_hears_what_is_full_and_who_holds_it_up(make_world: World) -> None:
    world = make_world(SCORE, LOOK, row_limit=2)
    world.put([0, 1], partition=3)
    lease = world.granted(world.ask("score", 2))
    world.write("score", lease, columns=["score"])
    world.granted(world.ask("look", 2))
    waiting = world.put([2])
    world.handle(DeadlinePassed(waiting))
    error = world.error(waiting)
    assert isinstance(error, QueueFull)
    assert "live rows 2 of 2; partition 3 waits for task look: 2 rows leased" in str(error)
    assert world.state.stats().waiting_puts == 0


@pytest.mark.parametrize("limits", [{"row_limit": 2}, {"byte_limit": 100}])
def test_put_that_can_never_fit_is_refused_at_once(make_world: World, limits: dict[str, int]) -> None:
    world = make_world(LOOK, **limits)
    with pytest.raises(QueueFull, match="larger than the queue"):
        world.put([0, 1, 2], num_bytes=101)
    assert world.state.stats().live_rows == 0


def test_lost_and_restored_rows_do_not_wait(make_world: World) -> None:
    world = make_world(LOOK, SCORE, row_limit=2)
    world.put([0], "storage-0")
    world.put([1], "storage-1")
    waiting = world.put([2], "storage-1")
    world.handle(UnitGone("storage-0"))
    world.handle(UnitLost("storage-0"))
    assert isinstance(world.answers[world.put([0], "storage-1")], RowsAccepted)
    assert isinstance(world.answers[world.put([3], "storage-1", commits={"look": [0]})], RowsAccepted)
    assert waiting not in world.answers


def test_waiting_put_is_dropped_with_its_unit_or_when_it_is_taken_back(make_world: World) -> None:
    world = make_world(LOOK, row_limit=1)
    world.put([0], "storage-0")
    taken_back = world.put([1], "storage-1")
    world.put([2], "storage-2")
    world.unit_of[1] = "storage-1"
    world.remove([1])
    assert isinstance(world.answers[taken_back], PeerRefused), "else the call would be kept for ever"
    world.handle(UnitGone("storage-2"))
    assert world.state.stats().waiting_puts == 0
    world.write("look", world.granted(world.ask("look")))
    assert world.ask("look") not in world.answers


def test_put_of_a_unit_that_registers_is_in_its_inventory(make_world: World) -> None:
    world = make_world(LOOK, row_limit=1)
    world.put([0], "storage-0")
    world.put([1], "storage-1")
    world.register("storage-1", [1])
    assert world.state.stats().waiting_puts == 0
    assert world.granted(world.ask("look", 2)).rows == [0, 1]
