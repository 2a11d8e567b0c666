"""Groups that a task fails on too often leave the queue; leases that come back; cleared partitions."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncflow.errors import PeerRefused
from tq import TaskSpec
from tq.control.events import GroupRemoved
from tq.messages import (
    CloseWriting,
    RegisterUnit,
    Release,
    RemovalReason,
    RowRecords,
    RowsRemoved,
    TellLost,
    UnitLoss,
)
from tq.refill import UNKNOWN, RemovalCause

World = Callable[..., Any]
REF = TaskSpec("ref", frozenset({"x"}), frozenset({"ref"}), max_deliveries=2)
LOOK = TaskSpec("look", frozenset({"x"}))
TRAIN = TaskSpec("train", frozenset({"x"}), keeps_leases=True)


def fail(world: Any, task: str, num_rows: int = 1) -> Any:
    granted = world.granted(world.ask(task, num_rows))
    world.release(task, granted)
    world.confirm_fences()
    return granted


def test_rows_that_are_released_are_fenced_and_ready_in_their_old_place(make_world: World) -> None:
    world = make_world(LOOK)
    world.create(range(3))
    granted = world.granted(world.ask("look", 2))
    world.release("look", granted, [0])
    assert world.granted(world.ask("look", 5)).rows == [2]
    world.confirm_fences()
    assert world.granted(world.ask("look", 5)).rows == [0]
    assert world.task("look").released == 1
    world.write("look", granted, [1])
    assert world.freed == [1]


def test_releasing_twice_or_what_is_done_changes_nothing(make_world: World) -> None:
    world = make_world(LOOK, TRAIN)
    world.create([0])
    granted = world.granted(world.ask("look"))
    world.write("look", granted)
    world.release("look", granted)
    assert world.fences == []
    with pytest.raises(PeerRefused):
        world.release("lock", granted)


def test_group_of_a_row_that_comes_back_too_often_is_withheld_from_every_task(make_world: World) -> None:
    world = make_world(REF, LOOK)
    world.create(range(8), size=4)
    fail(world, "ref")
    assert world.removals == []
    fail(world, "ref")
    (removal,) = world.removals
    assert removal.rows == {"storage-0": (0, 1, 2, 3)}
    assert world.granted(world.ask("ref", 9)).rows == [4, 5, 6, 7]
    assert world.granted(world.ask("look", 9)).rows == [4, 5, 6, 7]


@pytest.mark.parametrize(("refill", "end"), [(False, "partition_done"), (True, "")])
def test_a_dead_letter_shrinks_the_partition_unless_admission_refills_it(
    make_world: World, refill: bool, end: str
) -> None:
    world = make_world(REF, TRAIN, refill=refill)
    world.open(4)
    world.create(range(4), size=2)
    rank_slices = [world.granted(world.ask_round("train", 0, rank)) for rank in range(2)]
    assert [rank_slice.rows for rank_slice in rank_slices] == [[0], [1]]
    for _ in range(2):
        fail(world, "ref")
    world.remove([0, 1], reason="group_left")
    assert world.removed_groups == [GroupRemoved(1, 0, 2, RemovalCause("ref", 2))]
    assert world.state.stats().dead_letter_groups == 1
    rest = [world.granted(world.ask_round("train", 1, rank)) for rank in range(2)]
    assert [rank_slice.rows for rank_slice in rest] == [[2], [3]]
    assert rest[0].last is not refill
    last = world.ask_round("train", 2, 0)
    if not refill:
        assert world.refused(last) == end
        return
    assert last not in world.answers
    world.put([8, 9], size=2)
    assert world.granted(last).rows == [8]


def test_group_among_dead_letters_is_reported_once_however_its_rows_are_spread(make_world: World) -> None:
    world = make_world(REF)
    world.put([0], "storage-0", size=2, group_size=2)
    world.put([1], "storage-1", size=2, group_size=2)
    for _ in range(2):
        fail(world, "ref")
    world.remove([0], reason="group_left")
    world.remove([1], reason="group_left")
    assert world.removed_groups == [GroupRemoved(1, 0, 2, RemovalCause("ref", 2))]
    assert world.state.stats().live_rows == 0


def test_late_rows_of_a_group_among_dead_letters_leave_at_once(make_world: World) -> None:
    world = make_world(REF)
    world.put([0], size=2, group_size=2)
    for _ in range(2):
        fail(world, "ref")
    world.put([1], size=2, group_size=2)
    assert world.ask("ref") not in world.answers
    late = world.removals[-1]
    assert (late.rows, late.cause) == ({"storage-0": (1,)}, RemovalCause("ref", 2))


def test_other_controllers_withhold_a_group_when_its_first_rows_leave(make_world: World) -> None:
    world = make_world(LOOK, REF, served=["look"])
    world.put([0], "storage-0", size=2, group_size=2)
    world.put([1], "storage-1", size=2, group_size=2)
    cause = RemovalCause("ref", 2)
    world.handle(RowsRemoved("storage-0", 1, [0], RemovalReason.GROUP_LEFT, cause))
    assert world.ask("look") not in world.answers
    assert world.removed_groups == [GroupRemoved(1, 0, 2, cause)]


@pytest.mark.parametrize("told_late", [False, True])
def test_lost_rows_of_a_group_that_another_controller_removes_leave_with_it(make_world: World, told_late: bool) -> None:
    world = make_world(LOOK, REF, served=["look"])
    world.open(2)
    world.put([0], "storage-0", size=2, group_size=2)
    lost = RowRecords(1, [1], [0], [2], [1], [1], ["x"], [])
    if not told_late:
        world.put([1], "storage-1", size=2, group_size=2)
        world.lose("storage-1")
    world.handle(RowsRemoved("storage-0", 1, [0], RemovalReason.GROUP_LEFT, RemovalCause("ref", 2)))
    if told_late:
        world.request(TellLost([UnitLoss("storage-1", "1", [lost])]))
    assert (world.state.stats().live_rows, world.state.stats().lost_rows) == (0, 0)
    assert list(world.state.removed_rows(1)) == [0, 1]
    world.handle(CloseWriting())
    assert world.refused(world.ask("look")) == "closed"


def test_rows_that_a_unit_brings_back_leave_if_their_group_did(make_world: World) -> None:
    world = make_world(REF)
    world.put([0], size=2, group_size=2)
    for _ in range(2):
        fail(world, "ref")
    world.remove([0], reason="group_left")
    world.register("storage-1", [1], size=2)
    late = world.removals[-1]
    assert (late.rows, late.cause) == ({"storage-1": (1,)}, RemovalCause("ref", 2))


def test_step_waits_for_the_refill_also_where_another_controller_serves_the_trainer(make_world: World) -> None:
    lead = make_world(REF, TRAIN, served=["ref"], refill=True)
    other = make_world(REF, TRAIN, served=["train"], refill=True)
    for world in (lead, other):
        world.open(4)
        world.put(range(4), size=2)
    for _ in range(2):
        fail(lead, "ref")
    for world in (lead, other):
        world.remove([0, 1], reason="group_left")
    first = other.ask_round("train", 0, 0, num_ranks=1, num_rows=2)
    assert (other.granted(first).rows, other.granted(first).last) == ([2, 3], False)
    rest = other.ask_round("train", 1, 0, num_ranks=1, num_rows=2)
    assert rest not in other.answers
    other.put([8, 9], size=2)
    assert (other.granted(rest).rows, other.granted(rest).last) == ([8, 9], True)


@pytest.mark.parametrize("known", [True, False])
def test_controller_that_could_not_hear_of_a_dead_letter_finds_it_in_the_inventory(
    make_world: World, *, known: bool
) -> None:
    """Nobody would replace the group otherwise, and its step never be full."""
    world = make_world(REF, TRAIN, served=["train"], refill=True)
    records = [RowRecords(1, [2, 3], [1, 1], [2, 2], [1, 1], [1, 1], ["x"], [])]
    removed = [RowsRemoved("storage-0", 1, [0, 1], RemovalReason.GROUP_LEFT, RemovalCause("ref", 2))]
    if known:
        world.register("storage-0", range(4), size=2)
    world.request(RegisterUnit("storage-0", "1", records, {}, removed))
    assert world.removed_groups == ([GroupRemoved(1, 0, 2, RemovalCause("ref", 2))] if known else [])
    assert world.state.known_rows() == {1: [2, 3]}


def test_cause_is_unknown_when_nobody_who_knew_it_is_left(make_world: World) -> None:
    world = make_world(REF)
    world.put([0])
    world.remove([0], reason="group_left")
    assert world.removed_groups == [GroupRemoved(1, 0, 1, UNKNOWN)]


def test_deliveries_that_failed_before_a_restart_count(make_world: World) -> None:
    world = make_world(REF)
    world.register("storage-0", [0], deliveries={"ref": [1]})
    fail(world, "ref")
    assert [removal.rows for removal in world.removals] == [{"storage-0": (0,)}]


def test_cleared_partition_is_over_for_whoever_waits_for_it(make_world: World) -> None:
    world = make_world(TRAIN, LOOK)
    world.open(9)
    world.create(range(3))
    lease = world.granted(world.ask("look", 3))
    waiting = world.ask_round("train", 0, 0, num_rows=8)
    world.remove(range(3))
    assert world.refused(waiting) == "partition_done"
    assert world.refused(world.ask_round("train", 0, 1, num_rows=8)) == "partition_done"
    world.write("look", lease)
    assert (world.state.stats().live_rows, world.task("look").done) == (0, 0)


def test_partition_that_was_cleared_may_be_filled_again(make_world: World) -> None:
    world = make_world(TRAIN)
    world.open(1)
    world.put([0])
    world.remove([0])
    world.open(1)
    world.put([1])
    assert world.granted(world.ask_round("train", 0, 0)).rows == [1]
    assert world.granted(world.ask_round("train", 0, 1)).rows == []


def test_partition_is_cleared_when_no_unit_has_rows_of_it_any_more(make_world: World) -> None:
    """Units without rows of it say so, too: it may only be declared."""
    world = make_world(TRAIN)
    world.open(4)
    world.put([0, 1], "storage-0")
    other = world.ask_round("train", 0, 1, num_rows=2)
    world.handle(RowsRemoved("storage-1", 1, [], RemovalReason.CLEARED))
    assert other not in world.answers
    world.handle(RowsRemoved("storage-0", 1, [0, 1], RemovalReason.CLEARED))
    assert world.refused(other) == "partition_done"
    world.open(4, partition=2)
    declared = world.ask_round("train", 0, 0, partition=2)
    world.handle(RowsRemoved("storage-0", 2, [], RemovalReason.CLEARED))
    world.handle(RowsRemoved("storage-1", 2, [], RemovalReason.CLEARED))
    assert world.refused(declared) == "partition_done"


def filter_groups(world: Any, granted: Any, rows: list[int]) -> None:
    world.handle(Release(granted.task, granted.token, rows, filtered=True))


def test_filtered_groups_leave_and_the_rest_of_the_lease_goes_on(make_world: World) -> None:
    world = make_world(REF, TRAIN, refill=True)
    world.open(4)
    world.create(range(4), size=2)
    granted = world.granted(world.ask("ref", 4))
    filter_groups(world, granted, [0, 1])
    (removal,) = world.removals
    cause = RemovalCause("ref", filtered=True)
    assert (removal.rows, removal.cause) == ({"storage-0": (0, 1)}, cause)
    filter_groups(world, granted, [0, 1])
    world.remove([0, 1], reason="group_left")
    assert world.removed_groups == [GroupRemoved(1, 0, 2, cause)]
    world.write("ref", granted, [2, 3])
    stats = world.state.stats()
    assert (stats.filtered_groups, stats.dead_letter_groups, stats.live_rows) == (1, 0, 2)
    whole_step = world.ask_round("train", 0, 0, num_ranks=1, num_rows=4)
    assert whole_step not in world.answers
    world.put([8, 9], size=2)
    assert world.granted(whole_step).rows == [2, 3, 8, 9]


def test_a_consumer_that_fails_on_a_row_by_itself_makes_its_group_a_dead_letter(make_world: World) -> None:
    world = make_world(REF, TRAIN, refill=True)
    world.open(4)
    world.create(range(4), size=2)
    granted = world.granted(world.ask("ref", 4))
    world.handle(Release(granted.task, granted.token, [1], failures=3))
    (removal,) = world.removals
    assert (removal.rows, removal.cause) == ({"storage-0": (0, 1)}, RemovalCause("ref", deliveries=3))
    world.remove([0, 1], reason="group_left")
    stats = world.state.stats()
    assert (stats.filtered_groups, stats.dead_letter_groups, stats.live_rows) == (0, 1, 2)


def test_whoever_has_a_void_lease_filters_nothing(make_world: World) -> None:
    world = make_world(LOOK, TRAIN, refill=True)
    world.open(2)
    world.create(range(2), size=2)
    granted = world.granted(world.ask("look", 2))
    world.release("look", granted)
    world.confirm_fences()
    filter_groups(world, granted, [0, 1])
    assert world.removals == []
    assert world.granted(world.ask("look", 2)).rows == [0, 1]


def test_filtering_a_group_whose_rows_were_lost_reports_it_at_once(make_world: World) -> None:
    world = make_world(REF, refill=True)
    world.open(2)
    world.create(range(2), size=2)
    granted = world.granted(world.ask("ref", 2))
    world.lose("storage-0")
    filter_groups(world, granted, [0, 1])
    assert [(one.group, one.cause.filtered) for one in world.removed_groups] == [(0, True)]
    assert world.state.known_rows().get(1, []) == []
