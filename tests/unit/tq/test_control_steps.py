"""Rounds of steps that take rows of several partitions: one decision for all ranks, also after a restart."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncflow.errors import PeerRefused
from tq import TaskSpec
from tq.control.events import DeadlinePassed, UnitGone
from tq.control.state import Recovering
from tq.messages import Held, PublishVersion, Stop
from tq.policies import StepSpec

World = Callable[..., Any]
TRAIN = TaskSpec("train", frozenset({"x"}), keeps_leases=True, steps=StepSpec(num_rows=4, lateness=1))
WHO = Recovering(frozenset({"storage-0"}), frozenset({"rank-0", "rank-1"}))


def opened(make_world: World, *partitions: int, **settings: Any) -> Any:
    world = make_world(TRAIN, **settings)
    for number in partitions:
        world.open(4, partition=number)
    return world


def held(token: int, rows: list[int], *, rank: int, step: int = 1, index: int = 0, partition: int = 1) -> Held:
    return Held(
        "train", token, partition, rows, round_index=index, rank=rank, num_ranks=2, largest_slice=1, total_rows=2,
        step=step, slice_rows=1,
    )  # fmt: skip


def test_step_takes_a_later_partition_that_is_ready_and_all_ranks_get_the_same_round(make_world: World) -> None:
    world = opened(make_world, 1, 2)
    world.put([0], partition=1)
    first = world.ask_round("train", 0, 0)
    assert first not in world.answers
    world.put([4, 5, 6], partition=2)
    world.put([1], partition=1)
    rank_slices = [world.granted(request) for request in (first, world.ask_round("train", 0, 1))]
    assert [(rank_slice.rows, rank_slice.partition, rank_slice.total_rows) for rank_slice in rank_slices] == [
        ([4], 2, 2),
        ([5], 2, 2),
    ]
    rest = [world.granted(world.ask_round("train", 1, rank)) for rank in range(2)]
    assert [(rank_slice.rows, rank_slice.partition, rank_slice.last) for rank_slice in rest] == [
        ([0], 1, True),
        ([1], 1, True),
    ]
    assert {world.refused(world.ask_round("train", 2, rank)) for rank in range(2)} == {"partition_done"}


def test_next_step_trains_what_the_last_one_left_before_it_ends(make_world: World) -> None:
    world = opened(make_world, 1, 2)
    world.put([4, 5, 6, 7], partition=2)
    for index in range(2):
        assert world.granted(world.ask_round("train", index, 0)).partition == 2
    world.open(4, partition=3)
    world.put([8, 9, 10, 11], partition=3)
    request = world.ask_round("train", 0, 0, partition=2)
    assert request not in world.answers, "all rows of partition 1 are due"
    world.put([0, 1, 2, 3], partition=1)
    assert world.granted(request).partition == 1


def test_published_step_is_over_for_whoever_asks_late(make_world: World) -> None:
    world = opened(make_world, 1, 2)
    world.put([0, 1, 2, 3], partition=1)
    for index in range(2):
        world.write("train", world.granted(world.ask_round("train", index, 0)))
    world.handle(PublishVersion(1))
    assert world.refused(world.ask_round("train", 2, 1)) == "partition_done"
    assert world.task("train").leased == 2, "slices of the other rank"


def test_rank_that_waits_for_a_step_hears_at_once_that_it_is_over(make_world: World) -> None:
    world = opened(make_world, 1, 2)
    waiting, ahead = world.ask_round("train", 0, 0), world.ask_round("train", 0, 0, partition=2)
    world.handle(PublishVersion(1))
    assert world.refused(waiting) == "partition_done"
    assert ahead not in world.answers


def test_stop_ends_a_step_unless_it_is_assigned(make_world: World) -> None:
    world = opened(make_world, 1, 2)
    world.put([0, 1], partition=1)
    world.granted(world.ask_round("train", 0, 0))
    waiting = world.ask_round("train", 1, 0)
    world.handle(Stop())
    assert world.refused(waiting) == "stop"
    assert world.granted(world.ask_round("train", 0, 1)).rows == [1]
    assert world.refused(world.ask_round("train", 1, 1)) == "stop"


def test_token_budget_is_refused(make_world: World) -> None:
    with pytest.raises(PeerRefused, match="rounds of rows, not of tokens"):
        opened(make_world, 1).ask_round("train", 0, 0, token_budget=5)


def test_reason_names_the_partition_that_the_step_waits_for(make_world: World) -> None:
    world = opened(make_world, 1, 2)
    world.put([4], partition=2)
    request = world.ask_round("train", 0, 0, partition=1)
    world.handle(DeadlinePassed(request))
    assert world.answers[request].waiting_for.startswith("partition 1: 4 of 4 rows were not put yet")


def test_restarted_controller_goes_on_with_the_rounds_that_ranks_hold(make_world: World) -> None:
    world = opened(make_world, 1, 2, first_token=1000, recovering=WHO)
    world.register("storage-0", [4, 5, 6, 7], partition=2)
    world.join("rank-0", held(7, [4], rank=0, partition=2))
    world.join("rank-1", held(8, [5], rank=1, partition=2))
    world.confirm_fences()
    assert world.granted(world.ask_round("train", 0, 1)).token == 8
    world.put([0, 1, 2, 3], partition=1)
    assert world.granted(world.ask_round("train", 1, 0)).rows == [0]
    assert world.refused(world.ask_round("train", 2, 0)) == "partition_done"


def test_slice_that_no_rank_came_for_is_assigned_again_before_a_new_round_takes_its_rows(make_world: World) -> None:
    world = opened(make_world, 1, first_token=1000, recovering=WHO)
    world.register("storage-0", [0, 1])
    world.join("rank-0", held(7, [0], rank=0))
    world.join("rank-1")
    world.confirm_fences()
    world.put([3])
    ahead = world.ask_round("train", 1, 0)
    assert ahead not in world.answers, "row 1 is the other rank's"
    assert world.granted(world.ask_round("train", 0, 1)).rows == [1]
    world.put([2])
    assert world.granted(ahead).rows == [2]


def test_share_that_nobody_came_for_waits_for_its_rows(make_world: World) -> None:
    world = opened(make_world, 1, 2, first_token=1000, recovering=WHO)
    world.register("storage-0", [0])
    world.join("rank-0", held(7, [0], rank=0))
    world.join("rank-1")
    world.confirm_fences()
    request = world.ask_round("train", 0, 1)
    world.put([4, 5, 6, 7], partition=2)
    ahead = world.ask_round("train", 1, 0)
    assert not {request, ahead} & world.answers.keys(), "else the first round would be smaller than it was"
    world.put([1])
    assert (world.granted(request).rows, world.granted(ahead).partition) == ([1], 2)


def test_acked_rows_of_a_slice_count_as_assigned_after_a_restart(make_world: World) -> None:
    world = opened(make_world, 1, first_token=1000, recovering=WHO)
    world.register("storage-0", [1, 2, 3], finished=[0])
    world.join("rank-0", held(7, [], rank=0))
    world.join("rank-1")
    world.confirm_fences()
    assert world.granted(world.ask_round("train", 0, 1)).rows == [1]
    assert [world.granted(world.ask_round("train", 1, rank)).rows for rank in range(2)] == [[2], [3]]


def test_partition_whose_trained_rows_a_restarted_controller_forgot_is_not_waited_for(make_world: World) -> None:
    world = opened(make_world, 1, 4, first_token=1000, version=3, recovering=WHO)
    world.register("storage-0", [12, 13, 14, 15], partition=4)
    world.join("rank-0")
    world.join("rank-1")
    world.confirm_fences()
    assert world.granted(world.ask_round("train", 0, 0, partition=4)).rows == [12]


def test_finished_partition_is_remembered_when_its_unit_goes(make_world: World) -> None:
    """Step 1 trained all of partition 1, yet some of it could be late: a restarted lead must not put its rows again."""
    world = opened(make_world, 1, 2)
    world.put([0, 1, 2, 3])
    for index in range(2):
        for rank in range(2):
            world.write("train", world.granted(world.ask_round("train", index, rank)))
    world.handle(PublishVersion(1))
    world.handle(UnitGone("storage-0"))
    assert {partition: list(rows) for partition, rows in world.state.take_finished().items()} == {1: [0, 1, 2, 3]}
