"""What a controller knows of lost rows outlives it: no unit remembers them, and nobody may work on them twice."""

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from counting_store import shell_of

from tq import TaskSpec
from tq.control.durable_facts import DurableMark, Mark, Memory
from tq.control.events import RecalledFinished, RecalledLosses, RecoveryDeadline, UnitGone
from tq.control.row_table import RowSet
from tq.control.state import ControlState, Recovering
from tq.messages import (
    AckLost,
    Held,
    LostRows,
    RegisterUnit,
    RemovalReason,
    RowRecords,
    RowsAccepted,
    RowsRemoved,
)

World = Callable[..., Any]
LOOK = TaskSpec("look", frozenset({"x"}))
REF = TaskSpec("ref", frozenset({"x"}), frozenset({"ref"}))
TRAIN = TaskSpec("train", frozenset({"x"}), keeps_leases=True)
WHO = Recovering(frozenset({"storage-1"}), frozenset({"a"}))


def lost_world(make_world: World, *tasks: TaskSpec, **settings: Any) -> Any:
    """Return a world that lost rows 0 and 1 with storage-0 after the trainer was done with row 0."""
    world = make_world(*tasks, **settings)
    world.put([0, 1])
    world.write("train", world.granted(world.ask("train", owner="trainer")))
    world.lose("storage-0")
    return world


def restarted(make_world: World, *tasks: TaskSpec, lost: list[RowRecords], **settings: Any) -> Any:
    """Return the next incarnation, which waits for storage-1 and the consumer `a`."""
    world = make_world(*tasks, first_token=1000, recovering=WHO, **settings)
    world.handle(RecalledLosses(tuple(lost)))
    world.lost_rows()  # durable already
    return world


def recovered(make_world: World, *tasks: TaskSpec, lost: list[RowRecords], **settings: Any) -> Any:
    """Return the next incarnation, with everybody back and nothing in storage-1."""
    world = restarted(make_world, *tasks, lost=lost, **settings)
    world.register("storage-1")
    world.join("a")
    world.confirm_fences()
    return world


def test_lost_rows_are_described_by_what_is_needed_to_ask_for_them_again(make_world: World) -> None:
    world = lost_world(make_world, LOOK, TRAIN)
    assert world.lost_rows() == [
        RowRecords(1, [0], [0], [1], [1], [0], ["x"], ["train"]),
        RowRecords(1, [1], [1], [1], [1], [0], ["x"], []),
    ]


def test_losses_change_with_a_loss_and_with_an_ack_of_a_lost_row_only(make_world: World) -> None:
    world = make_world(LOOK, TRAIN)
    world.put([0, 1])
    granted = world.granted(world.ask("train", 2, owner="trainer"))
    world.write("look", world.granted(world.ask("look")))
    world.handle(UnitGone("storage-0"))
    assert not world.state.losses_changed, "it may be back"
    world.lose("storage-0")
    assert world.state.losses_changed
    world.lost_rows()
    assert not world.state.losses_changed
    world.handle(AckLost("train", granted.token, [1]))
    assert world.state.losses_changed
    assert [(one.rows, one.done) for one in world.lost_rows()] == [([0], ["look"]), ([1], ["train"])]


def test_losses_change_when_a_lost_row_is_removed(make_world: World) -> None:
    world = lost_world(make_world, LOOK, TRAIN)
    world.put([2], "storage-1")
    world.lost_rows()
    world.remove([2])
    assert world.state.losses_changed
    assert world.lost_rows() == []


@pytest.mark.parametrize("last", ["unit", "consumer", "deadline"])
def test_losses_of_an_earlier_incarnation_are_reported_once_everybody_was_heard(make_world: World, last: str) -> None:
    world = restarted(make_world, LOOK, TRAIN, lost=lost_world(make_world, LOOK, TRAIN).lost_rows())
    watch = world.watch()
    if last == "unit":
        world.join("a")
    elif last == "consumer":
        world.register("storage-1")
    assert world.lost == [] and watch not in world.answers
    if last == "unit":
        world.register("storage-1")
    elif last == "consumer":
        world.join("a")
    else:
        world.handle(RecoveryDeadline())
    assert world.lost == [0, 1]
    reply = world.answers[watch]
    assert isinstance(reply, LostRows)
    assert (reply.rows, reply.groups, reply.partitions) == ([0, 1], [0, 1], [1, 1])


def test_losses_of_a_controller_that_nobody_joined_before_are_reported_at_once(make_world: World) -> None:
    world = make_world(LOOK, TRAIN, recovering=Recovering(frozenset(), frozenset()))
    world.handle(RecalledLosses(tuple(lost_world(make_world, LOOK, TRAIN).lost_rows())))
    assert world.lost == [0, 1]


def test_task_that_was_done_with_a_lost_row_stays_done_in_the_next_incarnation(make_world: World) -> None:
    world = recovered(make_world, LOOK, TRAIN, lost=lost_world(make_world, LOOK, TRAIN).lost_rows())
    assert world.answers[world.put([0, 1], "storage-1", announced=True)] == RowsAccepted({"train": [0]})
    world.confirm([0, 1], "storage-1", commits={"train": [0]})
    assert world.granted(world.ask("train", 9, owner="trainer")).rows == [1]
    assert world.granted(world.ask("look", 9)).rows == [0, 1]


def test_task_whose_outputs_went_with_the_row_is_asked_again_in_the_next_incarnation(make_world: World) -> None:
    before = make_world(REF, LOOK)
    before.put([0])
    before.write("ref", before.granted(before.ask("ref")), columns=["ref"])
    before.lose("storage-0")
    world = recovered(make_world, REF, LOOK, lost=before.lost_rows())
    assert world.answers[world.put([0], "storage-1", announced=True)] == RowsAccepted()
    world.confirm([0], "storage-1")
    assert world.granted(world.ask("ref")).rows == [0]


def test_ack_of_lost_rows_of_an_earlier_incarnation_finishes_them(make_world: World) -> None:
    world = restarted(make_world, TRAIN, lost=[RowRecords(1, [0], [0], [1], [1], [0], ["x"], [])])
    world.register("storage-1")
    world.join("a", Held("train", 7, 1, [0]))
    world.confirm_fences()
    assert world.lost == [], "the trainer has it in hand"
    world.handle(AckLost("train", 7, [0]))
    assert world.state.losses_changed and world.lost_rows() == []
    assert world.answers[world.put([0], "storage-1", announced=True)] == RowsAccepted({"train": [0]})


def test_ack_that_is_deferred_counts_for_the_next_but_one_incarnation_too(make_world: World) -> None:
    lost = lost_world(make_world, LOOK, TRAIN).lost_rows()
    world = restarted(make_world, LOOK, TRAIN, lost=lost)
    world.join("a", Held("train", 7, 1, [1]))
    world.handle(AckLost("train", 7, [1]))
    world.register("storage-1")
    assert world.state.losses_changed
    third = recovered(make_world, LOOK, TRAIN, lost=world.lost_rows())
    assert third.answers[third.put([0, 1], "storage-1", announced=True)] == RowsAccepted({"train": [0, 1]})


# Records that are older than what the units say


@pytest.mark.parametrize("announced", [False, True])
def test_row_that_an_inventory_shows_is_not_lost(make_world: World, announced: bool) -> None:
    world = restarted(make_world, LOOK, TRAIN, lost=lost_world(make_world, LOOK, TRAIN).lost_rows())
    reply = world.register("storage-1", [0], announced=announced)
    assert reply.commits == {"train": [0]}, "the earlier incarnation may have died before it could say so"
    world.join("a")
    world.confirm_fences()
    if announced:
        world.confirm([0], "storage-1", commits={"train": [0]})
    assert 1 in world.lost
    assert world.granted(world.ask("look", 9)).rows == [0]
    assert world.ask("train", 9) not in world.answers


def test_row_that_a_tombstone_shows_is_not_lost(make_world: World) -> None:
    world = restarted(make_world, LOOK, TRAIN, lost=lost_world(make_world, LOOK, TRAIN).lost_rows())
    world.open(2)
    world.register("storage-1", finished=[0])
    world.join("a")
    assert world.lost == [1]
    assert world.state.stats().live_rows == 1
    assert world.answers[world.put([0], "storage-1", announced=True)] == RowsAccepted({"look": [0], "train": [0]})


def test_row_that_was_finished_before_the_restart_is_not_lost(make_world: World) -> None:
    world = make_world(LOOK, TRAIN, first_token=1000, recovering=WHO)
    world.open(2)
    world.handle(RecalledFinished(1, (0,)))
    world.handle(RecalledLosses(tuple(lost_world(make_world, LOOK, TRAIN).lost_rows())))
    world.handle(RecoveryDeadline())
    assert world.lost == [1]


def test_records_are_written_again_when_the_unit_that_finished_the_rows_goes(make_world: World) -> None:
    world = lost_world(make_world, LOOK, TRAIN)
    world.lost_rows()
    world.register("storage-1")
    world.put([0, 1], "storage-1", announced=True)
    world.confirm([0, 1], "storage-1", commits={"train": [0]})
    world.write("look", world.granted(world.ask("look", 2)))
    world.write("train", world.granted(world.ask("train", 2, owner="trainer")))
    world.handle(UnitGone("storage-1"))
    assert world.state.losses_changed, "nobody else could show that the records are old"
    assert world.lost_rows() == []
    world.handle(UnitGone("storage-1"))
    assert not world.state.losses_changed


@pytest.mark.parametrize("ends", ["finished", "cleared"])
def test_records_of_rows_that_came_back_and_went_for_good_are_written_again(make_world: World, ends: str) -> None:
    """The unit forgets its tombstones at a checkpoint; the records must not outlive them."""
    world = lost_world(make_world, LOOK, TRAIN)
    durable = world.lost_rows()
    world.put([0, 1], "storage-1", announced=True)
    world.confirm([0, 1], "storage-1", commits={"train": [0]})
    if ends == "finished":
        world.write("look", world.granted(world.ask("look", 2)))
        world.write("train", world.granted(world.ask("train", 2, owner="trainer")))
    else:
        world.handle(RowsRemoved("storage-1", 1, [0, 1], RemovalReason.CLEARED))
    if world.state.losses_changed:
        durable = world.lost_rows()
    assert recovered(make_world, LOOK, TRAIN, lost=durable).lost == []


def test_records_are_kept_while_the_unit_may_not_know_yet_who_was_done(make_world: World) -> None:
    """Its inventory does not say so, should the controller die before its answer arrives."""
    world = lost_world(make_world, LOOK, TRAIN)
    durable = world.lost_rows()
    world.put([0, 1], "storage-1")
    if world.state.losses_changed:
        durable = world.lost_rows()
    world = restarted(make_world, LOOK, TRAIN, lost=durable)
    assert world.register("storage-1", [0, 1]).commits == {"train": [0]}


def test_ack_that_finishes_a_lost_row_outlives_the_controller(make_world: World) -> None:
    """Nobody has a tombstone of it: without the record admission would put the row again, and it were trained twice."""
    world = make_world(TRAIN)
    world.open(2)
    world.put([0, 1])
    granted = world.granted(world.ask("train", owner="trainer"))
    world.lose("storage-0")
    shell = Shell(world.state)
    shell.send([])
    world.ack_lost("train", granted)
    shell.send([])
    assert [record.rows for record in shell.lost[0]] == [[1]]
    assert list(shell.finished[1]) == [0]


class Shell:
    """The part of a controller that makes losses durable, without its threads and its store."""

    def __init__(self, state: ControlState) -> None:
        self.lost: dict[int, list[RowRecords]] = {}
        self.finished: dict[int, RowSet] = {}
        self.send = shell_of(state, Memory(cast(DurableMark, self), version=0)).send

    def load_mark(self) -> Mark:
        """See `DurableMark`."""
        return Mark()

    def load_rows(self, kind: str) -> dict[int, RowSet]:
        """See `DurableMark`."""
        return {}

    def save_rows(self, kind: str, partition: int, part: int, rows: RowSet) -> None:
        """See `DurableMark`."""
        assert kind == "finished"
        self.finished.setdefault(partition, RowSet()).merge_rows(rows)

    def save_lost(self, part: int, records: list[RowRecords]) -> None:
        """See `DurableMark`."""
        self.lost[part] = records


def test_who_hears_of_a_loss_waits_for_the_thread_that_writes_it(make_world: World) -> None:
    """Another thread took the records and has not written them yet: answering now would be too early."""
    world = make_world(LOOK)
    world.put([0, 1])
    world.lose("storage-0")
    shell = Shell(world.state)
    writing, written = threading.Event(), threading.Event()

    def save(part: int, records: list[RowRecords]) -> None:
        writing.set()
        assert written.wait(10)
        shell.lost[part] = records

    shell.save_lost = save  # type: ignore[method-assign]
    first = threading.Thread(target=shell.send, args=([],))
    first.start()
    assert writing.wait(10)
    assert not world.state.losses_changed
    second = threading.Thread(target=shell.send, args=([],))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    written.set()
    first.join(10)
    second.join(10)
    assert shell.lost and not second.is_alive()


def test_ack_that_a_trainer_was_told_counts_while_the_unit_is_away_outlives_controller_and_unit(
    make_world: World,
) -> None:
    before = make_world(LOOK, TRAIN)
    before.put([0, 1])
    granted = before.granted(before.ask("train", owner="trainer"))
    before.handle(UnitGone("storage-0"))
    before.ack_lost("train", granted)
    assert before.state.losses_changed, "no unit knows of it"
    world = restarted(make_world, LOOK, TRAIN, lost=before.lost_rows())
    world.register("storage-1")
    ones = [1, 1]
    held = RowRecords(1, [0, 1], [0, 1], ones, ones, ones, ["x"], [])
    world.request(RegisterUnit("storage-0", "2", [], {}, earlier=[RegisterUnit("storage-0", "1", [held], {})]))
    world.join("a")
    world.confirm_fences()
    assert world.lost == [0, 1]
    world.put([0, 1], "storage-1")
    assert world.granted(world.ask("train", 9, owner="trainer")).rows == [1]
    assert world.granted(world.ask("look", 9)).rows == [0, 1]


def test_row_that_was_finished_by_an_ack_while_its_unit_was_away_is_remembered_at_once(make_world: World) -> None:
    world = make_world(TRAIN)
    world.put([0])
    granted = world.granted(world.ask("train", owner="trainer"))
    world.handle(UnitGone("storage-0"))
    world.ack_lost("train", granted)
    assert world.state.losses_changed and world.lost_rows() == []
    assert {partition: list(rows) for partition, rows in world.state.take_finished().items()} == {1: [0]}
