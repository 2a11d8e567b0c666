"""Announced rows whose put may fail yet: nobody takes them for put, and what was let go of for them is remembered."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncflow.errors import PutPending, RowsExist
from tq import TaskSpec
from tq.control.events import RecalledFinished, UnitGone, UnitLost
from tq.messages import RemovalReason, RowsAccepted, RowsRemoved

World = Callable[..., Any]
LOOK = TaskSpec("look", frozenset({"x"}))
TRAIN = TaskSpec("train", frozenset({"x"}), keeps_leases=True)


def test_nobody_hears_that_a_row_exists_whose_put_may_fail_yet(make_world: World) -> None:
    world = make_world(LOOK)
    world.register("storage-0")
    world.put([0], announced=True)
    with pytest.raises(PutPending, match="row 0 is just being put, at storage-0"):
        world.put([0, 1], "storage-1", announced=True)
    world.confirm([0])
    assert world.granted(world.ask("look", 9)).units == ["storage-0"]
    with pytest.raises(RowsExist, match="row 0 exists already, at storage-0"):
        world.put([0, 1], "storage-1", announced=True)


def let_go_of(make_world: World) -> Any:
    """Return a world in which storage-1 let go of rows 0 and 1, done by the trainer, for a put of storage-0."""
    world = make_world(LOOK, TRAIN)
    world.register("storage-0")
    world.put([0, 1], "storage-0", announced=True)
    assert world.register("storage-1", [0, 1], done=["train"]).drop == [0, 1]
    world.handle(RowsRemoved("storage-1", 1, [0, 1], RemovalReason.DROPPED))
    assert world.lost == [], "the put may succeed"
    return world


def test_row_that_a_unit_let_go_of_for_a_put_that_fails_is_lost(make_world: World) -> None:
    """Nobody but this controller knew of it."""
    world = let_go_of(make_world)
    world.handle(RowsRemoved("storage-0", 1, [1], RemovalReason.REFUSED))
    assert (world.lost, world.state.stats().lost_rows) == ([1], 1)
    assert world.answers[world.put([1], "storage-1", announced=True)] == RowsAccepted({"train": [0]})
    world.confirm([1], "storage-1")
    assert world.granted(world.ask("look", 9)).rows == [1]
    world.handle(UnitGone("storage-0"))
    world.handle(UnitLost("storage-0"))
    assert world.lost == [1, 0]


def test_row_that_a_unit_let_go_of_stays_done_where_it_was(make_world: World) -> None:
    world = let_go_of(make_world)
    assert world.confirm([0, 1], "storage-0") == RowsAccepted({"train": [0, 1]})
    assert world.granted(world.ask("look", 9)).rows == [0, 1]
    assert (world.lost, world.state.stats().lost_rows) == ([], 0)


def test_stale_copy_of_a_finished_row_is_let_go_of_for_good(make_world: World) -> None:
    world = make_world(LOOK)
    world.handle(RecalledFinished(1, (0,)))
    world.register("storage-0")
    world.put([0], "storage-0", announced=True)
    assert world.register("storage-1", [0]).drop == [0]
    world.handle(RowsRemoved("storage-1", 1, [0], RemovalReason.DROPPED))
    world.handle(RowsRemoved("storage-0", 1, [0], RemovalReason.REFUSED))
    assert (world.lost, world.state.stats().live_rows) == ([], 0)


def test_put_is_not_refused_as_existing_while_one_of_its_rows_may_fail(make_world: World) -> None:
    world = make_world(LOOK)
    world.put([0], "storage-0")
    world.put([1], "storage-0", announced=True)
    for rows in ([0, 1], [1, 0]):
        with pytest.raises(PutPending, match="row 1"):
            world.put(rows, "storage-1", announced=True)
