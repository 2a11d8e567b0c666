"""Held puts: with several controllers nothing is handed out before all agreed and heard what the others know."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncflow.errors import LeaseFenced, PeerRefused, QueueFull
from tq import TaskSpec
from tq.control.events import DeadlinePassed, UnitGone, UnitLost
from tq.control.state import Recovering
from tq.messages import AckLost, Held, LostRows, RemovalReason, RowsAccepted, RowsRemoved

World = Callable[..., Any]
LOOK = TaskSpec("look", frozenset({"x"}))
REF = TaskSpec("ref", frozenset({"x"}), frozenset({"ref"}))
TRAIN = TaskSpec("train", frozenset({"x"}), keeps_leases=True)


def lost_and_done_by_train(make_world: World, **settings: Any) -> Any:
    """Return a world in which row 0 went with storage-0 after the trainer, but not `look`, was done with it."""
    world = make_world(LOOK, TRAIN, **settings)
    world.put([0])
    if settings.get("served") == ["look"]:
        world.handle(AckLost("train", 77, [0]))
    else:
        world.write("train", world.granted(world.ask("train", owner="trainer")))
    world.lose("storage-0")
    return world


def test_held_rows_are_handed_out_only_once_they_are_confirmed(make_world: World) -> None:
    world = make_world(LOOK, TRAIN)
    waiting = world.ask("look", 2)
    assert world.answers[world.put([0, 1], announced=True)] == RowsAccepted()
    assert waiting not in world.answers and world.state.stats().live_rows == 0
    assert world.confirm([0, 1]) == RowsAccepted()
    assert world.granted(waiting).rows == [0, 1]


def test_held_rows_that_are_announced_or_confirmed_twice_exist_once(make_world: World) -> None:
    world = make_world(LOOK)
    for _ in range(2):
        assert world.answers[world.put([0], announced=True)] == RowsAccepted()
    for _ in range(2):
        world.confirm([0])
    assert world.answers[world.put([0], announced=True)] == RowsAccepted()
    assert world.state.stats().live_rows == 1
    assert world.granted(world.ask("look", 9)).rows == [0]


def test_part_of_a_put_may_be_confirmed_alone(make_world: World) -> None:
    world = make_world(LOOK)
    world.put([0, 1], announced=True)
    world.confirm([1])
    assert world.granted(world.ask("look", 9)).rows == [1]


def test_confirmation_of_rows_that_were_never_announced_creates_nothing(make_world: World) -> None:
    world = make_world(LOOK)
    world.put([0], announced=True)
    assert world.confirm([0, 5], "storage-1") == RowsAccepted()
    assert world.state.stats().live_rows == 0


def test_rows_of_a_group_become_ready_when_the_last_is_confirmed(make_world: World) -> None:
    world = make_world(TaskSpec("look", frozenset({"x"}), whole_groups=True))
    world.put([0], size=2, announced=True, group_size=2)
    world.put([1], "storage-1", size=2, announced=True, group_size=2)
    world.confirm([0])
    waiting = world.ask("look", 2)
    assert waiting not in world.answers
    world.confirm([1], "storage-1")
    assert world.granted(waiting).rows == [0, 1]


# What controllers know


def test_an_announcement_is_answered_with_the_tasks_that_are_done_with_a_lost_row(make_world: World) -> None:
    world = lost_and_done_by_train(make_world)
    assert world.answers[world.put([5, 0], "storage-1", announced=True)] == RowsAccepted({"train": [1]})
    world.confirm([5, 0], "storage-1", commits={"train": [1]})
    assert world.granted(world.ask("look", 9)).rows == [0, 5]
    assert world.granted(world.ask("train", 9)).rows == [5]


def test_what_another_controller_knew_takes_effect_with_the_confirmation(make_world: World) -> None:
    world = make_world(LOOK, TRAIN)
    world.put([0, 1], announced=True)
    assert world.confirm([0, 1], commits={"train": [1]}) == RowsAccepted()
    assert world.granted(world.ask("train", 9)).rows == [0]
    assert world.granted(world.ask("look", 9)).rows == [0, 1]
    assert world.task("train").done == 1


def test_commits_of_the_put_the_controllers_and_the_confirmation_are_joined(make_world: World) -> None:
    world = make_world(LOOK, REF, TRAIN, served=["look"])
    world.put([0])
    world.handle(AckLost("train", 77, [0]))
    world.lose("storage-0")
    put = world.put([0], "storage-1", columns=["x", "ref"], commits={"ref": [0]}, announced=True)
    assert world.answers[put] == RowsAccepted({"train": [0]})
    world.confirm([0], "storage-1", commits={"look": [0], "ref": [0], "train": [0]})
    assert world.ask("look") not in world.answers
    assert world.state.stats().live_rows == 0


def test_row_that_everybody_was_done_with_elsewhere_goes_at_its_confirmation(make_world: World) -> None:
    world = make_world(LOOK, TRAIN)
    world.open(1)
    world.put([0], announced=True)
    world.confirm([0], commits={"look": [0], "train": [0]})
    assert world.state.stats().live_rows == 0
    assert world.refused(world.ask_round("train", 0, 0, owner="trainer")) == "partition_done"


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("declared", [True, False])
def test_finished_row_that_is_put_again_is_done_with_by_every_task(
    make_world: World, declared: bool, announced: bool
) -> None:
    """Its producer may have died before it heard that the row is in: the units know freed rows of their own only."""
    world = make_world(LOOK)
    if declared:
        world.open(2)
    world.put([0])
    world.write("look", world.granted(world.ask("look")))
    assert world.answers[world.put([0], "storage-1", announced=announced)] == RowsAccepted({"look": [0]})
    if announced:
        world.confirm([0], "storage-1")
    assert world.state.stats().live_rows == 0
    assert world.ask("look") not in world.answers


def test_outputs_that_were_lost_are_made_again_though_their_task_was_done(make_world: World) -> None:
    world = make_world(LOOK, REF)
    world.put([0])
    world.write("ref", world.granted(world.ask("ref")), columns=["ref"])
    world.lose("storage-0")
    assert world.answers[world.put([0], "storage-1", announced=True)] == RowsAccepted()
    world.confirm([0], "storage-1")
    assert world.granted(world.ask("ref")).rows == [0]


# Puts that fail


@pytest.mark.parametrize("unit", ["storage-0", "storage-1"])
def test_lost_row_whose_put_is_taken_back_stays_lost_with_its_done_marks(make_world: World, unit: str) -> None:
    world = lost_and_done_by_train(make_world)
    before = world.lost_rows()
    world.put([0], unit, announced=True)
    world.handle(RowsRemoved(unit, 1, [0], RemovalReason.REFUSED))
    assert (world.state.stats().live_rows, world.state.stats().lost_rows) == (1, 1)
    assert world.lost_rows() == before
    assert world.answers[world.watch()].rows == [0]
    assert world.answers[world.put([0], "storage-2", announced=True)] == RowsAccepted({"train": [0]})


def test_new_row_whose_put_is_taken_back_may_be_put_elsewhere(make_world: World) -> None:
    world = make_world(LOOK)
    world.register("storage-0")
    world.put([0], announced=True)
    world.handle(RowsRemoved("storage-0", 1, [0], RemovalReason.REFUSED))
    world.put([0], "storage-1", announced=True)
    world.handle(RowsRemoved("storage-0", 1, [0], RemovalReason.REFUSED))
    world.confirm([0], "storage-1")
    assert world.granted(world.ask("look")).units == ["storage-1"]


def test_unit_that_is_given_up_before_it_confirmed_leaves_nothing(make_world: World) -> None:
    world = lost_and_done_by_train(make_world)
    world.register("storage-1")
    world.put([0, 1], "storage-1", announced=True)
    world.lose("storage-1")
    assert (world.state.stats().live_rows, world.lost) == (1, [0]), "row 1 was nowhere yet: its producer puts it again"
    world.register("storage-1", incarnation="2")
    world.confirm([0, 1], "storage-1")
    assert world.ask("look") not in world.answers
    assert world.answers[world.put([0, 1], "storage-2", announced=True)] == RowsAccepted({"train": [0]})


def test_unit_that_started_empty_announced_nothing(make_world: World) -> None:
    world = make_world(LOOK)
    world.register("storage-0", incarnation="1")
    world.put([0], announced=True)
    world.register("storage-0", incarnation="2")
    world.put([0], "storage-1", announced=True)
    world.confirm([0], "storage-1")
    assert world.granted(world.ask("look")).units == ["storage-1"]


# Inventories


def test_pending_rows_of_an_inventory_wait_for_their_confirmation(make_world: World) -> None:
    world = make_world(LOOK)
    world.register("storage-0")
    world.put([0], announced=True)
    world.handle(UnitGone("storage-0"))
    world.register("storage-0", [0], announced=True)
    waiting = world.ask("look")
    assert waiting not in world.answers
    world.confirm([0])
    assert world.granted(waiting).rows == [0]


def test_pending_rows_of_an_inventory_are_answered_with_what_is_known_of_them(make_world: World) -> None:
    world = lost_and_done_by_train(make_world)
    assert world.register("storage-1", [0, 1], announced=True).commits == {"train": [0]}
    assert world.state.stats().lost_rows == 1
    world.confirm([0, 1], "storage-1")
    assert world.granted(world.ask("train", 9)).rows == [1]


def test_rows_that_were_confirmed_while_the_channel_was_down_come_with_the_inventory(make_world: World) -> None:
    world = make_world(LOOK, TRAIN)
    world.register("storage-0")
    world.put([0], announced=True)
    world.handle(UnitGone("storage-0"))
    world.register("storage-0", [0], done=["train"])
    assert world.granted(world.ask("look")).rows == [0]
    assert world.task("train").done == 1
    assert world.confirm([0], commits={"look": [0]}) == RowsAccepted()
    assert world.state.stats().live_rows == 0, "a late confirmation brings its commits nevertheless"


def test_rows_that_were_taken_back_while_the_channel_was_down_are_forgotten(make_world: World) -> None:
    world = make_world(LOOK)
    world.register("storage-0")
    world.put([0], announced=True)
    world.handle(UnitGone("storage-0"))
    world.register("storage-0")
    world.put([0], "storage-1", announced=True)
    world.confirm([0], "storage-1")
    assert world.granted(world.ask("look")).units == ["storage-1"]


def test_loss_stays_reported_while_the_row_is_only_pending(make_world: World) -> None:
    """Its unit may go before it confirms, and the producer with it."""
    world = lost_and_done_by_train(make_world)
    world.register("storage-1", [0], announced=True)
    world.lose("storage-1")
    reply = world.answers.get(world.watch())
    assert isinstance(reply, LostRows) and reply.rows == [0]


def test_pending_row_that_another_unit_announced_meanwhile_is_dropped(make_world: World) -> None:
    """Else the other unit's confirmation found nothing, and this controller would never hear of its row."""
    world = make_world(LOOK)
    world.register("storage-0")
    world.put([0], announced=True)
    world.handle(UnitGone("storage-0"))
    world.put([0], "storage-1", announced=True)
    reply = world.register("storage-0", [0], announced=True)
    world.confirm([0], "storage-1")
    assert world.granted(world.ask("look")).units == ["storage-1"]
    assert reply.drop == [0]


# The same row at two units


def test_row_announced_by_a_unit_that_is_away_may_be_put_elsewhere(make_world: World) -> None:
    world = make_world(LOOK)
    world.register("storage-0")
    world.put([0], announced=True)
    world.handle(UnitGone("storage-0"))
    assert world.answers[world.put([0], "storage-1", announced=True)] == RowsAccepted()
    world.confirm([0], "storage-0")
    request = world.ask("look")
    assert request not in world.answers, "what storage-0 says of it counts no more"
    world.confirm([0], "storage-1")
    assert world.granted(request).units == ["storage-1"]


# Backpressure


def test_announced_rows_count_toward_the_limits(make_world: World) -> None:
    world = make_world(LOOK, row_limit=3)
    world.put([0, 1], announced=True)
    second = world.put([2, 3], "storage-1", announced=True)
    assert second not in world.answers
    world.confirm([0, 1])
    assert second not in world.answers
    world.write("look", world.granted(world.ask("look")))
    assert world.answers[second] == RowsAccepted()
    assert world.ask("look", 9) in world.answers
    world.handle(DeadlinePassed(world.put([4], announced=True)))
    assert isinstance(world.error(max(world.answers)), QueueFull)


def test_announced_bytes_count_toward_the_limits(make_world: World) -> None:
    world = make_world(LOOK, byte_limit=100)
    world.put([0], num_bytes=60, announced=True)
    second = world.put([1], "storage-1", num_bytes=60, announced=True)
    assert second not in world.answers
    world.handle(RowsRemoved("storage-0", 1, [0], RemovalReason.REFUSED))
    assert world.answers[second] == RowsAccepted()


def test_room_of_rows_that_were_announced_returns_when_their_unit_is_given_up(make_world: World) -> None:
    world = make_world(LOOK, row_limit=2)
    world.register("storage-0")
    world.put([0, 1], announced=True)
    waiting = world.put([2], "storage-1", announced=True)
    world.handle(UnitGone("storage-0"))
    assert waiting not in world.answers, "its rows wait for its return"
    world.handle(UnitLost("storage-0"))
    assert world.answers[waiting] == RowsAccepted()


def test_rows_that_are_announced_again_take_room_once(make_world: World) -> None:
    world = make_world(LOOK, row_limit=3)
    world.put([0, 1], announced=True)
    assert world.answers[world.put([0, 1], announced=True)] == RowsAccepted()
    assert world.answers[world.put([2], announced=True)] == RowsAccepted()


# Acks of lost rows


def test_ack_between_announcement_and_confirmation_is_told_with_the_confirmation(make_world: World) -> None:
    world = make_world(LOOK, TRAIN)
    world.put([0])
    granted = world.granted(world.ask("train", owner="trainer"))
    world.lose("storage-0")
    assert world.answers[world.put([0], "storage-1", announced=True)] == RowsAccepted()
    world.ack_lost("train", granted)
    assert world.confirm([0], "storage-1") == RowsAccepted({"train": [0]})
    assert world.ask("train") not in world.answers
    assert world.granted(world.ask("look")).rows == [0]


def test_last_ack_between_announcement_and_confirmation_finishes_the_row(make_world: World) -> None:
    world = make_world(TRAIN)
    world.put([0])
    granted = world.granted(world.ask("train", owner="trainer"))
    world.lose("storage-0")
    world.put([0], "storage-1", announced=True)
    world.ack_lost("train", granted)
    assert world.confirm([0], "storage-1") == RowsAccepted({"train": [0]})
    assert world.state.stats().live_rows == 0


def test_ack_after_the_row_was_confirmed_elsewhere_is_refused_to_whom_it_was_fenced(make_world: World) -> None:
    world = make_world(LOOK)
    world.put([0])
    granted = world.granted(world.ask("look"))
    world.lose("storage-0")
    world.put([0], "storage-1", announced=True)
    assert world.fences == [], "nobody has the row yet"
    world.confirm([0], "storage-1")
    with pytest.raises(LeaseFenced):
        world.ack_lost("look", granted)
    world.confirm_fences()
    assert world.granted(world.ask("look")).rows == [0]


def test_ack_counts_where_the_task_is_not_served_and_the_loss_is_not_known_yet(make_world: World) -> None:
    world = make_world(LOOK, TRAIN, served=["look"])
    world.put([0])
    world.handle(AckLost("train", 77, [0]))
    assert world.commits == [], "the controller that serves the task tells the units"
    world.lose("storage-0")
    assert world.lost == [0]
    assert world.answers[world.put([0], "storage-1", announced=True)] == RowsAccepted({"train": [0]})


def test_ack_of_a_row_that_is_only_announced_here_is_no_error(make_world: World) -> None:
    """This controller never knew of the loss; the one that serves the task tells the commit with its confirmation."""
    world = make_world(LOOK, TRAIN, served=["look"])
    world.put([0], "storage-1", announced=True)
    world.handle(AckLost("train", 77, [0]))
    world.confirm([0], "storage-1", commits={"train": [0]})
    world.write("look", world.granted(world.ask("look")))
    assert world.state.stats().live_rows == 0


def test_ack_of_an_unknown_task_is_refused(make_world: World) -> None:
    world = make_world(LOOK)
    with pytest.raises(PeerRefused, match="no task is named"):
        world.handle(AckLost("train", 1, [0]))


def test_recovering_controller_defers_an_ack_and_tells_it_with_the_confirmation(make_world: World) -> None:
    who = Recovering(frozenset({"storage-1"}), frozenset({"trainer", "b"}))
    world = make_world(LOOK, TRAIN, first_token=1000, recovering=who)
    world.join("trainer", Held("train", 7, 1, [0]))
    world.handle(AckLost("train", 7, [0]))
    world.register("storage-1", [0], announced=True)
    world.join("b")
    assert world.confirm([0], "storage-1") == RowsAccepted({"train": [0]})
    world.confirm_fences()
    assert world.ask("train") not in world.answers
    assert world.granted(world.ask("look")).rows == [0]
