"""What tasks write is learnt: a task stays done with a lost row only if what it wrote for that row is put again."""

from collections.abc import Callable
from typing import Any

import pytest

from tq import TaskSpec
from tq.control.events import DoneElsewhere, RecalledLosses, TasksWrite
from tq.control.state import Recovering
from tq.messages import Held, RowsAccepted

World = Callable[..., Any]
FIRST = TaskSpec("first", frozenset({"x"}))
SECOND = TaskSpec("second", frozenset({"x", "h"}))
LOOK = TaskSpec("look", frozenset({"x"}))
WHO = Recovering(frozenset({"storage-0"}), frozenset({"a"}))


def world_that_lost(make_world: World, *rows: int, wrote: tuple[int, ...]) -> Any:
    """Return a world that lost rows; `first` and `look` were done with all, and `first` wrote `h` for some."""
    world = make_world(FIRST, LOOK, SECOND)
    world.put(rows)
    granted = world.granted(world.ask("first", len(rows)))
    world.write("first", granted, wrote, ["h"])
    world.write("first", granted, [row for row in rows if row not in wrote])
    world.write("look", world.granted(world.ask("look", len(rows))))
    world.lose("storage-0")
    return world


def restarted(make_world: World, before: Any, outputs: dict[str, list[str]]) -> Any:
    """Return the next incarnation, with everybody back and nothing at the unit."""
    world = make_world(FIRST, LOOK, SECOND, first_token=1000, recovering=WHO)
    world.handle(TasksWrite(outputs))
    world.handle(RecalledLosses(tuple(before.lost_rows())))
    world.register("storage-0")
    world.join("a")
    world.confirm_fences()
    return world


@pytest.mark.parametrize("restart", [False, True])
def test_who_wrote_a_column_that_is_lost_writes_it_again_and_nobody_else(make_world: World, restart: bool) -> None:
    world = world_that_lost(make_world, 0, wrote=(0,))
    if restart:
        world = restarted(make_world, world, {"first": ["h"]})
    accepted = world.answers[world.put([0], "storage-0")]
    assert accepted == RowsAccepted({"look": [0]})
    waiting = world.ask("second")
    world.write("first", world.granted(world.ask("first")), columns=["h"])
    assert world.granted(waiting).rows == [0]


@pytest.mark.parametrize("restart", [False, True])
def test_a_row_for_which_a_task_wrote_nothing_stays_done_though_it_wrote_for_others(
    make_world: World, restart: bool
) -> None:
    world = world_that_lost(make_world, 0, 1, wrote=(0,))
    if restart:
        world = restarted(make_world, world, {"first": ["h"]})
    world.put([0, 1], "storage-0")
    assert world.granted(world.ask("first", 9)).rows == [0]


def test_a_column_that_is_put_again_keeps_its_writer_done(make_world: World) -> None:
    world = world_that_lost(make_world, 0, wrote=(0,))
    accepted = world.answers[world.put([0], "storage-0", columns=["x", "h"])]
    assert accepted == RowsAccepted({"first": [0], "look": [0]})


def test_a_controller_that_was_not_told_of_a_put_hears_from_the_lead_what_went_with_it(make_world: World) -> None:
    world = make_world(FIRST, LOOK, SECOND)
    world.put([0])
    world.lose("storage-0")
    world.handle(TasksWrite({"first": ["h"]}))
    world.handle(DoneElsewhere({"first": [0], "look": [0]}))
    assert world.answers[world.put([0], "storage-1")] == RowsAccepted({"look": [0]})


def test_an_ack_that_a_controller_was_told_of_stays_an_ack_whatever_the_lead_says(make_world: World) -> None:
    world = world_that_lost(make_world, 0, 1, wrote=(0,))
    world.handle(DoneElsewhere({"first": [0, 1], "look": [0, 1]}))
    world.put([0, 1], "storage-1")
    assert world.granted(world.ask("first", 9)).rows == [0]


def test_a_lead_that_answers_after_a_row_was_put_again_changes_nothing(make_world: World) -> None:
    world = make_world(FIRST, SECOND)
    world.put([0])
    world.lose("storage-0")
    world.put([0], "storage-1")
    world.handle(DoneElsewhere({"first": [0]}))
    assert world.granted(world.ask("first")).rows == [0]


def test_the_tasks_before_a_trainer_are_done_with_what_it_holds_until_that_is_put_again(make_world: World) -> None:
    """Nobody declared that `first` writes `h`, `middle` reads it and writes `g`, and the trainer reads `g`."""
    middle, train = TaskSpec("middle", frozenset({"h"})), TaskSpec("train", frozenset({"g"}), keeps_leases=True)
    world = make_world(FIRST, middle, LOOK, train, first_token=1000, recovering=WHO)
    world.handle(TasksWrite({"first": ["h"], "middle": ["g"]}))
    world.join("a", Held("train", 7, 1, [0]))
    world.register("storage-0")
    world.confirm_fences()
    (record,) = world.lost_rows()
    assert (record.rows, record.done) == ([0], ["first", "middle"])
    assert world.answers[world.put([0], "storage-1")] == RowsAccepted()
    assert world.granted(world.ask("first")).rows == [0]
    assert world.granted(world.ask("look")).rows == [0]
