"""A restarted controller waits for units and consumers, rebuilds leases and rounds, fences the rest, then serves."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncflow.errors import PeerRefused
from tq import TaskSpec
from tq.control.events import (
    DeadlinePassed,
    Fenced,
    OrderFenceTask,
    OwnerGone,
    RecalledFinished,
    RecoveryDeadline,
    UnitGone,
    UnitLost,
)
from tq.control.state import Recovering
from tq.messages import Held, LeaseGrant, Release

World = Callable[..., Any]
REF = TaskSpec("ref", frozenset({"x"}), frozenset({"ref"}))
TRAIN = TaskSpec("train", frozenset({"ref"}), whole_groups=True, keeps_leases=True)
WHO = Recovering(frozenset({"storage-0"}), frozenset({"a"}))


def test_nothing_is_served_before_everybody_is_back_and_old_leases_are_fenced(make_world: World) -> None:
    world = make_world(REF, first_token=1000, recovering=WHO)
    request = world.ask("ref", 9)
    world.register("storage-0", [0, 1])
    assert world.fences == []
    world.join("a", Held("ref", 7, 1, [1]))
    (fence,) = world.fences
    assert fence == OrderFenceTask("ref", 1000, "storage-0", (7,))
    assert request not in world.answers and world.state.recovering
    world.confirm_fences()
    assert world.granted(request).rows == [0]
    assert not world.state.recovering


def test_those_who_do_not_come_are_given_up_at_the_deadline(make_world: World) -> None:
    world = make_world(REF, first_token=1000, recovering=Recovering(frozenset({"storage-0", "storage-1"}), frozenset()))
    world.register("storage-0", [0])
    request = world.ask("ref", 9)
    world.handle(DeadlinePassed(world.ask("ref", 9)))
    assert "waits for storage-1" in world.answers[3].waiting_for
    assert world.state.list_away_units() == ["storage-1"]
    world.handle(RecoveryDeadline())
    assert [fence.unit for fence in world.fences] == ["storage-0", "storage-1"], "it must hear of it when it is back"
    assert request not in world.answers
    world.handle(Fenced("ref", world.fences[0].token))
    assert world.granted(request).rows == [0], "a consumer that is away delays no other"
    world.register("storage-1", [5])
    assert world.granted(world.ask("ref")).rows == [5]


def test_first_start_of_a_queue_that_nobody_joined_serves_at_once(make_world: World) -> None:
    assert not make_world(REF, recovering=Recovering(frozenset(), frozenset())).state.recovering


def test_newest_token_wins_and_done_rows_are_not_leased(make_world: World) -> None:
    world = make_world(REF, first_token=1000, recovering=Recovering(frozenset({"storage-0"}), frozenset({"a", "b"})))
    world.register("storage-0", [0, 1])
    world.join("a", Held("ref", 7, 1, [0, 1]))
    world.join("b", Held("ref", 9, 1, [1, 5]))
    world.confirm_fences()
    assert world.join("a", Held("ref", 7, 1, [0, 1])).void == []
    world.handle(OwnerGone("b"))
    world.confirm_fences()
    assert world.granted(world.ask("ref", 5)).rows == [1]
    assert world.join("b", Held("ref", 9, 1, [1])).void == [9]


@pytest.mark.parametrize("keeps_leases", [False, True])
def test_lease_whose_work_was_dropped_before_it_was_rebuilt_returns(make_world: World, keeps_leases: bool) -> None:
    """The unit started empty, and the rows were put again; the consumer heard from the unit that its lease is void."""
    look = TaskSpec("look", frozenset({"x"}), keeps_leases=keeps_leases)
    who = Recovering(frozenset({"storage-0"}), frozenset({"a", "dead"}))
    world = make_world(look, first_token=1000, recovering=who)
    world.register("storage-0")
    world.join("a", Held("look", 7, 1, [0, 1]))
    world.handle(Release("look", 7, [0, 1], fenced=True))
    world.put([0, 1])
    world.handle(RecoveryDeadline())
    request = world.ask("look", 9, owner="b")
    world.confirm_fences()
    world.confirm_fences()
    if keeps_leases:
        assert request not in world.answers, "another rank may have this token now"
    else:
        assert world.granted(request).rows == [0, 1]


def test_partition_is_counted_from_tombstones_and_inventories(make_world: World) -> None:
    world = make_world(REF, TRAIN, first_token=1000, recovering=WHO)
    world.open(4)
    world.register("storage-0", [3], columns=["x", "ref"], done=["ref"], size=2, finished=[0, 1, 2])
    world.join("a")
    world.confirm_fences()
    granted = world.granted(world.ask_round("train", 0, 0))
    assert (granted.rows, granted.last) == ([3], True), "a group is complete without its finished row"
    world.write("train", granted)
    assert world.refused(world.ask_round("train", 1, 0)) == "partition_done"


def test_finished_rows_of_a_unit_that_died_earlier_are_remembered_for_the_next_start(make_world: World) -> None:
    look = TaskSpec("look", frozenset({"x"}))
    before = make_world(look)
    before.open(2)
    before.put([0, 1])
    before.write("look", before.granted(before.ask("look")))
    before.handle(UnitGone("storage-0"))
    assert list(before.state.take_finished()[1]) == [0]
    world = make_world(look, first_token=1000, recovering=WHO)
    world.open(2)
    world.handle(RecalledFinished(1, (0,)))
    world.register("storage-0", [1], finished=[0])
    world.join("a")
    world.confirm_fences()
    assert (world.task("look").done, world.task("look").ready) == (1, 1)
    assert world.state.known_rows() == {1: [0, 1]}


def test_rank_that_missed_its_share_of_a_formed_round_gets_one_from_the_rest(make_world: World) -> None:
    train = TaskSpec("train", frozenset({"x"}), keeps_leases=True)
    world = make_world(train, first_token=1000, recovering=WHO)
    world.open(6)
    world.register("storage-0", range(6))
    world.join(
        "a",
        Held("train", 7, 1, [0, 1], round_index=0, rank=0, num_ranks=2, largest_slice=2, total_rows=4, slice_rows=2),
    )
    world.confirm_fences()
    again = world.granted(world.ask_round("train", 0, 0, num_rows=2, owner="a"))
    assert (again.token, again.rows) == (7, [0, 1])
    other = world.granted(world.ask_round("train", 0, 1, num_rows=2))
    assert (other.rows, other.largest_slice, other.last) == ([2, 3], 2, False)
    last = [world.granted(world.ask_round("train", 1, rank, num_rows=2)) for rank in range(2)]
    assert [rank_slice.rows for rank_slice in last] == [[4], [5]]


def test_ranks_that_missed_the_last_round_share_all_the_rest(make_world: World) -> None:
    train = TaskSpec("train", frozenset({"x"}), keeps_leases=True)
    world = make_world(train, first_token=1000, recovering=WHO)
    world.open(5)
    world.register("storage-0", [0, 1, 2, 3])
    world.join(
        "a",
        Held(
            "train",
            7,
            1,
            [0],
            round_index=0,
            rank=0,
            num_ranks=3,
            largest_slice=2,
            last=True,
            total_rows=5,
            slice_rows=1,
        ),
    )
    world.confirm_fences()
    waiting = world.ask_round("train", 0, 1, num_rows=2, num_ranks=3)
    assert waiting not in world.answers, "a row of the rest is not there yet"
    world.put([4])
    assert world.granted(waiting).rows == [1, 2]
    assert world.granted(world.ask_round("train", 0, 2, num_rows=2, num_ranks=3)).rows == [3, 4]
    assert world.refused(world.ask_round("train", 1, 0, num_rows=2, num_ranks=3)) == "partition_done"


def test_rows_that_a_trainer_has_in_hand_and_no_unit_has_are_not_trained_again(make_world: World) -> None:
    world = make_world(REF, TRAIN, first_token=1000, recovering=WHO)
    world.open(2)
    world.register("storage-0")
    world.join("a", Held("train", 7, 1, [0, 1]))
    world.confirm_fences()
    assert world.lost == [], "whatever wrote the trainer's inputs was done"
    world.handle(UnitLost("storage-0"))
    world.ack_lost("train", lease_of(7, [0, 1]))
    assert world.task("train").done == 0 and world.state.stats().live_rows == 0
    assert world.refused(world.ask_round("train", 0, 0)) == "partition_done"


def test_ack_that_comes_before_leases_are_rebuilt_counts_for_a_trainer(make_world: World) -> None:
    train = TaskSpec("train", frozenset({"x"}), keeps_leases=True)
    world = make_world(train, REF, first_token=1000, recovering=WHO)
    world.join("a", Held("train", 7, 1, [0]), Held("ref", 8, 1, [1]))
    world.ack_lost("train", lease_of(7, [0]))
    with pytest.raises(PeerRefused, match="ack again"):
        world.ack_lost("ref", lease_of(8, [1]))
    world.register("storage-0", [0, 1])
    assert [commit.rows for commit in world.commits] == [{"storage-0": (0,)}]
    assert world.task("train").done == 1


def test_trainers_channel_that_breaks_during_recovery_costs_it_nothing(make_world: World) -> None:
    world = make_world(TRAIN, REF, first_token=1000, recovering=WHO)
    world.join("a", Held("train", 7, 1, [0]), Held("ref", 8, 1, [1]))
    world.handle(OwnerGone("a"))
    world.register("storage-0", [0, 1], columns=["x", "ref"])
    assert {fence.task: fence.alive for fence in world.fences} == {"train": (7,), "ref": ()}


def lease_of(token: int, rows: list[int]) -> LeaseGrant:
    return LeaseGrant("train", token, 1, rows, rows, ["storage-0"] * len(rows))


def test_rank_that_is_a_round_ahead_does_not_get_what_the_other_rank_misses(make_world: World) -> None:
    """Else it would get the other rank's rows in a round of its own, and ranks would not count the same rounds."""
    train = TaskSpec("train", frozenset({"x"}), keeps_leases=True)
    world = make_world(train, first_token=1000, recovering=WHO)
    world.open(2)
    world.register("storage-0", [0, 1])
    world.join(
        "a",
        Held(
            "train",
            7,
            1,
            [0],
            round_index=0,
            rank=0,
            num_ranks=2,
            largest_slice=1,
            last=True,
            total_rows=2,
            slice_rows=1,
        ),
    )
    world.confirm_fences()
    assert world.refused(world.ask_round("train", 1, 0, owner="a")) == "partition_done"
    assert world.granted(world.ask_round("train", 0, 1, owner="b")).rows == [1]
