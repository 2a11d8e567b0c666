"""Rounds: every rank of a gang gets equally many slices, possibly empty, and the same end."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import PeerRefused
from tq import TaskSpec
from tq.messages import Stop

World = Callable[..., Any]
TRAIN = TaskSpec("train", frozenset({"x"}), keeps_leases=True)
GROUPS = TaskSpec("train", frozenset({"x"}), whole_groups=True, keeps_leases=True)


def test_round_forms_when_it_is_full_and_every_rank_gets_its_slice(make_world: World) -> None:
    world = make_world(TRAIN)
    world.open(6)
    first = world.ask_round("train", 0, 0, num_rows=2)
    second = world.ask_round("train", 0, 1, num_rows=2)
    world.create(range(3))
    assert not {first, second} & world.answers.keys()
    world.create([3])
    assert [world.granted(request).rows for request in (first, second)] == [[0, 1], [2, 3]]
    assert not world.granted(first).last


def test_last_round_is_smaller_and_may_be_empty_for_some(make_world: World) -> None:
    world = make_world(TRAIN)
    world.open(3)
    world.create(range(3))
    rank_slices = [world.granted(world.ask_round("train", 0, rank, num_rows=2, num_ranks=4)) for rank in range(4)]
    assert [rank_slice.rows for rank_slice in rank_slices] == [[0], [1], [2], []]
    assert {(rank_slice.largest_slice, rank_slice.last) for rank_slice in rank_slices} == {(1, True)}
    assert {world.refused(world.ask_round("train", 1, rank, num_ranks=4)) for rank in range(4)} == {"partition_done"}


def test_barrier_forms_no_round_before_the_partition_is_complete(make_world: World) -> None:
    world = make_world(TaskSpec("train", frozenset({"x"}), barrier=True, keeps_leases=True))
    world.open(4)
    request = world.ask_round("train", 0, 0)
    world.create(range(3))
    assert request not in world.answers
    world.create([3])
    assert world.granted(request).rows == [0]


def test_rank_with_an_empty_share_is_told_the_end_after_the_others_finished(make_world: World) -> None:
    world = make_world(TRAIN)
    world.open(1)
    world.create([0])
    granted = world.granted(world.ask_round("train", 0, 0))
    assert world.granted(world.ask_round("train", 0, 1)).rows == []
    world.write("train", granted)
    assert world.freed == [0]
    assert world.refused(world.ask_round("train", 1, 0)) == "partition_done"
    assert world.refused(world.ask_round("train", 1, 1)) == "partition_done"


def test_asking_again_for_a_formed_round_grants_what_is_left_of_it(make_world: World) -> None:
    world = make_world(TRAIN, TaskSpec("other", frozenset({"x"})))
    world.open(4)
    world.create(range(4))
    first = world.granted(world.ask_round("train", 0, 0, num_rows=2))
    world.write("train", first, [0])
    again = world.granted(world.ask_round("train", 0, 0, num_rows=2))
    assert (again.rows, again.largest_slice) == ([1], 2)
    assert again.token == first.token
    assert world.task("train").leased == 3, "the other rank's slice is kept for it"
    world.write("train", again)
    assert world.task("train").leased == 2


def test_formed_round_is_granted_again_after_its_rows_were_freed(make_world: World) -> None:
    world = make_world(TRAIN)
    world.open(4)
    world.create(range(4))
    world.write("train", world.granted(world.ask_round("train", 0, 0)))
    assert world.freed == [0]
    assert world.granted(world.ask_round("train", 0, 0)).rows == []
    assert world.granted(world.ask_round("train", 0, 1)).rows == [1]


def test_stop_lets_a_half_asked_round_finish_and_ends_before_the_next(make_world: World) -> None:
    world = make_world(TRAIN)
    world.open(4)
    world.create(range(4))
    assert world.granted(world.ask_round("train", 0, 0)).rows == [0]
    ahead = world.ask_round("train", 1, 0)
    assert world.granted(ahead).rows == [2]
    world.handle(Stop())
    assert world.granted(world.ask_round("train", 0, 1)).rows == [1]
    assert world.granted(world.ask_round("train", 1, 1)).rows == [3]


def test_stop_ends_a_parked_round_for_all_ranks_alike(make_world: World) -> None:
    world = make_world(TRAIN)
    world.open(4)
    world.create([0])
    first = world.ask_round("train", 0, 0)
    world.handle(Stop())
    world.create([1, 2, 3])
    assert world.refused(first) == "stop"
    assert world.refused(world.ask_round("train", 0, 1)) == "stop"


def test_stop_after_the_partitions_end_is_still_its_end_for_every_rank(make_world: World) -> None:
    """Else one rank would go into the optimizer's collectives and the other would leave."""
    world = make_world(TRAIN)
    world.open(2)
    world.create(range(2))
    for rank in range(2):
        world.granted(world.ask_round("train", 0, rank))
    assert world.refused(world.ask_round("train", 1, 0)) == "partition_done"
    world.handle(Stop())
    assert world.refused(world.ask_round("train", 1, 1)) == "partition_done"


def test_partition_that_is_opened_after_a_stop_stays_stopped(make_world: World) -> None:
    world = make_world(TRAIN)
    world.handle(Stop())
    assert world.refused(world.ask_round("train", 0, 0)) == "stop"
    world.open(0)
    assert world.refused(world.ask_round("train", 0, 1)) == "stop"


def test_impossible_round_is_refused_and_harms_nobody(make_world: World) -> None:
    world = make_world(TRAIN)
    world.open(4)
    waiting = world.ask_round("train", 0, 0)
    for index, rank, num_ranks in [(1, 0, 2), (-1, 0, 2), (0, 2, 2), (0, -1, 2), (0, 2, 3)]:
        with pytest.raises(PeerRefused):
            world.ask_round("train", index, rank, num_ranks=num_ranks)
    with pytest.raises(PeerRefused):
        world.ask_round("train", 0, 0, num_rows=0)
    world.create(range(4))
    assert world.granted(waiting).rows == [0]


@given(
    num_groups=st.integers(1, 9),
    size=st.integers(1, 3),
    num_ranks=st.integers(1, 4),
    num_rows=st.integers(1, 6),
    data=st.data(),
)
def test_ranks_get_equally_many_rounds_and_every_row_once(
    make_world: World, num_groups: int, size: int, num_ranks: int, num_rows: int, data: st.DataObject
) -> None:
    world = make_world(GROUPS)
    world.open(num_groups * size)
    left = data.draw(st.permutations(range(num_groups)))
    rank_slices: list[list[Any]] = [[] for _ in range(num_ranks)]
    parked: dict[int, int] = {}
    running = set(range(num_ranks))
    while running:
        for rank, request in list(parked.items()):
            if request in world.answers:
                del parked[rank]
                answer = world.answers[request]
                if hasattr(answer, "reason"):
                    assert answer.reason == "partition_done"
                    running.remove(rank)
                else:
                    rank_slices[rank].append(answer)
        idle = sorted(running - parked.keys())
        actions = [("ask", rank) for rank in idle] + [("put", group) for group in left[:1]]
        if not actions:
            assert not running or any(request in world.answers for request in parked.values()), "the gang is stuck"
            continue
        what, number = data.draw(st.sampled_from(actions))
        if what == "ask":
            parked[number] = world.ask_round(
                "train", len(rank_slices[number]), number, num_rows=num_rows, num_ranks=num_ranks
            )
        else:
            left = left[1:]
            world.create(range(number * size, number * size + size), size=size)
    assert len({len(rank_slice) for rank_slice in rank_slices}) == 1
    for together in zip(*rank_slices, strict=True):
        assert len({(rank_slice.largest_slice, rank_slice.last) for rank_slice in together}) == 1
        assert together[0].largest_slice == max(len(rank_slice.rows) for rank_slice in together)
        groups = [group for rank_slice in together for group in rank_slice.groups]
        assert all(groups.count(group) == size for group in set(groups)), "a group was split over rounds"
        assert all(rank_slice.groups.count(group) == size for rank_slice in together for group in rank_slice.groups)
    delivered = [row for rank_slice in rank_slices for granted in rank_slice for row in granted.rows]
    assert sorted(delivered) == list(range(num_groups * size))
