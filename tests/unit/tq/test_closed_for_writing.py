"""A queue that is closed for writing: no new rows, and consumers learn when their task is done with all."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncflow.errors import PeerRefused
from tq import TaskSpec
from tq.messages import CloseWriting, RowsAccepted

World = Callable[..., Any]
SCORE = TaskSpec("score", frozenset({"x"}), frozenset({"y"}))
TRAIN = TaskSpec("train", frozenset({"x", "y"}), keeps_leases=True)


def test_consumers_that_wait_hear_the_end_when_the_last_row_is_done(make_world: World) -> None:
    world = make_world(SCORE, TaskSpec("last", frozenset({"y"})))
    world.create(range(2))
    held = world.granted(world.ask("score", 2))
    waiting, downstream = world.ask("score", owner="b"), world.ask("last", owner="c")
    world.handle(CloseWriting())
    assert not {waiting, downstream} & world.answers.keys()
    world.write("score", held, columns=["y"])
    assert world.refused(waiting) == "closed"
    world.write("last", world.granted(downstream))
    last = world.granted(world.ask("last", 2))
    world.write("last", last)
    assert world.refused(world.ask("last")) == "closed"


def test_an_empty_queue_ends_at_once_and_a_stop_goes_first(make_world: World) -> None:
    world = make_world(SCORE)
    waiting = world.ask("score")
    world.handle(CloseWriting())
    assert world.refused(waiting) == "closed"


def test_rows_in_the_hands_of_a_consumer_that_dies_come_again_before_the_end(make_world: World) -> None:
    world = make_world(SCORE)
    world.create([0])
    held = world.granted(world.ask("score"))
    waiting = world.ask("score", owner="b")
    world.handle(CloseWriting())
    world.release("score", held)
    world.confirm_fences()
    again = world.granted(waiting)
    assert again.rows == [0]
    world.write("score", again)
    assert world.refused(world.ask("score")) == "closed"


def test_new_rows_are_refused_but_lost_ones_may_be_put_again(make_world: World) -> None:
    world = make_world(SCORE)
    world.create(range(2))
    world.handle(CloseWriting())
    with pytest.raises(PeerRefused, match="closed for writing"):
        world.put([2])
    world.lose("storage-0")
    with pytest.raises(PeerRefused, match="closed for writing"):
        world.put([0, 2], "storage-1")
    assert isinstance(world.answers[world.put([0], "storage-1")], RowsAccepted)
    assert sorted(world.granted(world.ask("score", 2)).rows) == [0, 1]


def test_puts_that_wait_for_room_are_taken_first(make_world: World) -> None:
    world = make_world(SCORE, row_limit=1)
    world.create([0])
    parked = world.put([1])
    world.handle(CloseWriting())
    world.write("score", world.granted(world.ask("score", 2)))
    assert isinstance(world.answers[parked], RowsAccepted)
    world.unit_of[1] = "storage-0"
    world.write("score", world.granted(world.ask("score", 2)))
    assert world.refused(world.ask("score")) == "closed"


def test_rounds_of_a_partition_that_was_never_declared_come_to_an_end(make_world: World) -> None:
    world = make_world(TaskSpec("train", frozenset({"x"}), keeps_leases=True))
    world.create(range(3))
    nowhere = world.ask_round("train", 0, 0, num_ranks=1, partition=7)
    waiting = world.ask_round("train", 0, 0, num_rows=9, num_ranks=1)
    assert not {waiting, nowhere} & world.answers.keys()
    world.handle(CloseWriting())
    assert world.granted(waiting).rows == [0, 1, 2]
    assert world.granted(waiting).last
    assert world.refused(nowhere) == "partition_done"
    assert world.refused(world.ask_round("train", 1, 0, num_ranks=1)) == "partition_done"
