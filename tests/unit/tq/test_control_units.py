"""Storage units in the control state: they register, vanish, come back, start empty; lost rows are put again."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from asyncflow.errors import LeaseFenced, PeerRefused, RowsExist
from tq import TaskSpec
from tq.control.events import Fenced, OrderFenceTask, OwnerGone, RecoveryDeadline, UnitGone, UnitLost
from tq.control.state import Recovering
from tq.messages import (
    AckLost,
    CloseWriting,
    LostRows,
    OutputsWritten,
    RegisterUnit,
    RowRecords,
    RowsAccepted,
    UnitAccepted,
)
from tq.unit.unit_state import UnitState

World = Callable[..., Any]
REF = TaskSpec("ref", frozenset({"x"}), frozenset({"ref"}))
ROLLOUT = TaskSpec("rollout", frozenset({"x"}), frozenset({"rollout"}))
REF_OF_ROLLOUT = TaskSpec("ref", frozenset({"x", "rollout"}), frozenset({"ref"}))
LOOK = TaskSpec("look", frozenset({"x"}))
TRAIN = TaskSpec("train", frozenset({"x"}), keeps_leases=True)


def lose(world: Any, unit: str) -> None:
    world.handle(UnitGone(unit))
    world.handle(UnitLost(unit))


def test_rows_of_a_unit_that_is_away_are_not_handed_out_until_it_is_back(make_world: World) -> None:
    world = make_world(REF)
    world.register("storage-0", [0, 1], incarnation="a")
    world.handle(UnitGone("storage-0"))
    request = world.ask("ref", 2)
    assert request not in world.answers
    assert world.state.units() == {}
    world.register("storage-0", [0, 1], incarnation="a")
    assert world.granted(request).rows == [0, 1]
    assert list(world.state.units()) == ["storage-0"]


def test_unit_is_away_until_it_is_back_or_given_up(make_world: World) -> None:
    world = make_world(REF)
    for unit in ("storage-0", "storage-1"):
        world.register(unit, incarnation="a")
        world.handle(UnitGone(unit))
    assert world.state.list_away_units() == ["storage-0", "storage-1"]
    world.register("storage-0", incarnation="b")
    world.handle(UnitLost("storage-1"))
    assert world.state.list_away_units() == []


def test_commit_whose_notification_was_lost_is_learnt_from_the_inventory(make_world: World) -> None:
    world = make_world(REF, LOOK)
    world.register("storage-0", [0], incarnation="a")
    world.granted(world.ask("ref"))
    world.handle(UnitGone("storage-0"))
    world.register("storage-0", [0], incarnation="a", columns=["x", "ref"], done=["ref"])
    assert (world.task("ref").leased, world.task("ref").done) == (0, 1)


def test_row_that_was_finished_while_the_channel_was_down_counts_once(make_world: World) -> None:
    world = make_world(TRAIN)
    world.open(2)
    world.register("storage-0", [0, 1], incarnation="a")
    world.granted(world.ask("train", 2))
    world.handle(UnitGone("storage-0"))
    for _ in range(2):
        world.register("storage-0", [1], incarnation="a", finished=[0])
    assert (world.task("train").done, world.state.stats().live_rows) == (1, 1)


def test_row_that_was_cleared_while_the_channel_was_down_is_gone(make_world: World) -> None:
    world = make_world(TRAIN)
    world.register("storage-0", [0, 1], incarnation="a")
    world.handle(UnitGone("storage-0"))
    world.register("storage-0", [1], incarnation="a")
    assert world.granted(world.ask("train", 5)).rows == [1]
    assert world.state.stats().live_rows == 1


@pytest.mark.parametrize("returns_empty", [False, True])
def test_lost_rows_are_reported_and_served_again_once_they_are_put_again(
    make_world: World, returns_empty: bool
) -> None:
    world = make_world(REF, LOOK)
    world.register("storage-0", [4, 5], incarnation="a")
    watch = world.watch()
    world.granted(world.ask("look", 2))
    assert watch not in world.answers
    if returns_empty:
        world.register("storage-0", incarnation="b")
    else:
        lose(world, "storage-0")
    lost = world.answers[watch]
    assert isinstance(lost, LostRows)
    assert (lost.rows, lost.groups, lost.partitions) == ([4, 5], [4, 5], [1, 1])
    assert world.lost == [4, 5]
    assert world.state.stats().lost_rows == 2
    request = world.ask("ref", 2)
    world.put([4, 5], "storage-1")
    assert world.granted(request).units == ["storage-1", "storage-1"]
    assert world.state.stats().lost_rows == 0
    later = world.watch(lost.sequence)
    assert later not in world.answers


def test_a_task_stays_done_with_a_lost_row_only_if_its_outputs_are_put_again(make_world: World) -> None:
    world = make_world(REF, LOOK, TRAIN)
    world.put([0])
    for name in ("ref", "look"):
        world.write(name, world.granted(world.ask(name)), columns=[name] if name == "ref" else [])
    lose(world, "storage-0")
    accepted = world.answers[world.put([0], "storage-1")]
    assert isinstance(accepted, RowsAccepted) and accepted.commits == {"look": [0]}
    assert world.granted(world.ask("ref")).rows == [0]
    assert world.ask("look") not in world.answers


def test_outputs_that_are_put_again_keep_their_task_done(make_world: World) -> None:
    world = make_world(REF, LOOK)
    world.put([0])
    world.write("ref", world.granted(world.ask("ref")), columns=["ref"])
    lose(world, "storage-0")
    accepted = world.answers[world.put([0], "storage-1", columns=["x", "ref"])]
    assert accepted.commits == {"ref": [0]}
    assert world.ask("ref") not in world.answers


def test_rows_that_only_a_trainer_needs_and_holds_are_not_asked_for(make_world: World) -> None:
    world = make_world(TRAIN)
    world.open(2)
    world.put([0, 1])
    granted = world.granted(world.ask("train", 1, owner="trainer"))
    lose(world, "storage-0")
    assert world.lost == [1]
    world.ack_lost("train", granted)
    assert (world.state.stats().live_rows, world.task("train").done) == (1, 1)
    world.ack_lost("train", granted)
    assert world.task("train").done == 1


def test_ack_of_a_consumer_that_has_lost_rows_in_hand_counts_until_they_are_put_again(make_world: World) -> None:
    world = make_world(LOOK)
    world.put([0, 1])
    first, second = world.granted(world.ask("look")), world.granted(world.ask("look"))
    with pytest.raises(PeerRefused, match="row 0 is not lost: storage-0"):
        world.ack_lost("look", first)
    lose(world, "storage-0")
    world.ack_lost("look", first)
    world.put([1], "storage-1")
    with pytest.raises(LeaseFenced):
        world.ack_lost("look", second)
    assert world.ask("look") not in world.answers, "the void lease is not fenced yet"
    world.confirm_fences()
    assert world.task("look").leased == 1


def test_trainer_keeps_a_row_that_was_put_again_and_its_ack_is_passed_on(make_world: World) -> None:
    world = make_world(REF, TRAIN)
    world.put([0])
    granted = world.granted(world.ask("train", owner="trainer"))
    lose(world, "storage-0")
    world.put([0], "storage-1")
    assert world.ask("train") not in world.answers
    world.ack_lost("train", granted)
    assert [commit.rows for commit in world.commits] == [{"storage-1": (0,)}]
    world.write("ref", world.granted(world.ask("ref")), columns=["ref"])
    assert world.freed == [0]


def test_ack_is_taken_over_by_a_controller_that_does_not_serve_the_task(make_world: World) -> None:
    world = make_world(REF, TRAIN, served=["ref"])
    world.put([0])
    lose(world, "storage-0")
    world.handle(AckLost("train", 77, [0]))
    accepted = world.answers[world.put([0], "storage-1")]
    assert accepted.commits == {"train": [0]}


def test_row_that_was_finished_though_it_was_reported_lost_is_not_worked_on_again(make_world: World) -> None:
    world = make_world(LOOK)
    world.put([0])
    granted = world.granted(world.ask("look"))
    lose(world, "storage-0")
    world.ack_lost("look", granted)
    accepted = world.answers[world.put([0], "storage-1")]
    assert accepted.commits == {"look": [0]}
    assert world.ask("look") not in world.answers


def test_unit_that_returns_after_it_was_given_up_brings_its_rows_with_their_outputs(make_world: World) -> None:
    world = make_world(REF, LOOK)
    world.register("storage-0", [0], incarnation="a")
    world.write("ref", world.granted(world.ask("ref")), columns=["ref"])
    lose(world, "storage-0")
    world.register("storage-0", [0], incarnation="a", columns=["x", "ref"], done=["ref"])
    assert world.ask("ref") not in world.answers
    assert world.granted(world.ask("look")).units == ["storage-0"]


def test_returning_unit_drops_rows_that_live_elsewhere_now(make_world: World) -> None:
    world = make_world(REF)
    world.register("storage-0", [0], incarnation="a")
    lose(world, "storage-0")
    world.put([0], "storage-1")
    assert world.register("storage-0", [0], incarnation="a").drop == [0]
    assert world.granted(world.ask("ref")).units == ["storage-1"]


def test_row_that_another_unit_has_is_refused_and_the_same_unit_may_repeat_itself(make_world: World) -> None:
    world = make_world(REF)
    world.register("storage-0", [0], incarnation="a")
    assert isinstance(world.answers[world.put([0], "storage-0")], RowsAccepted)
    with pytest.raises(RowsExist):
        world.put([0], "storage-1")
    assert world.state.stats().live_rows == 1


def test_late_notification_of_a_lost_unit_changes_nothing(make_world: World) -> None:
    world = make_world(REF)
    world.put([0])
    world.granted(world.ask("ref"))
    lose(world, "storage-0")
    world.put([0], "storage-1")
    world.handle(OutputsWritten("storage-0", "ref", [0], ["ref"], [1], 0))
    assert world.task("ref").done == 0


def test_rows_of_a_dead_owner_that_are_lost_meanwhile_are_fenced_where_they_are_put_again(make_world: World) -> None:
    world = make_world(REF)
    world.put([0])
    world.granted(world.ask("ref", owner="dead"))
    world.handle(OwnerGone("dead"))
    lose(world, "storage-0")
    world.confirm_fences()
    world.put([0], "storage-1")
    (fence,) = world.fences
    assert (fence.unit, fence.rows) == ("storage-1", (0,))
    assert world.task("ref").ready == 0
    world.handle(Fenced("ref", fence.token))
    assert world.granted(world.ask("ref")).rows == [0]


def test_unit_that_is_up_is_not_lost_by_an_old_timer(make_world: World) -> None:
    world = make_world(REF)
    world.register("storage-0", [0], incarnation="a")
    world.handle(UnitLost("storage-0"))
    assert world.granted(world.ask("ref")).rows == [0]


def test_share_that_nobody_came_for_waits_for_its_lost_rows(make_world: World) -> None:
    world = make_world(TRAIN)
    world.open(2)
    world.put([0], "storage-0")
    world.put([1], "storage-1")
    assert world.granted(world.ask_round("train", 0, 0)).rows == [0]
    lose(world, "storage-1")
    request = world.ask_round("train", 0, 1)
    assert request not in world.answers
    assert world.lost == [1]
    world.put([1], "storage-0")
    assert world.granted(request).rows == [1]


@pytest.mark.parametrize("asks_again", ["after the loss", "while the unit is away"])
def test_share_that_a_trainer_was_granted_and_could_not_read_waits_for_its_lost_rows(
    make_world: World, asks_again: str
) -> None:
    world = make_world(TRAIN)
    world.open(2)
    world.put([0], "storage-0")
    world.put([1], "storage-1")
    first = [world.granted(world.ask_round("train", 0, rank, owner=f"rank-{rank}")) for rank in range(2)]
    world.handle(UnitGone("storage-1"))
    if asks_again == "while the unit is away":
        request = world.ask_round("train", 0, 1, owner="rank-1")
    world.handle(UnitLost("storage-1"))
    if asks_again != "while the unit is away":
        assert world.lost == [], "the trainer may have the row in hand"
        request = world.ask_round("train", 0, 1, owner="rank-1")
    assert world.lost == [1]
    world.put([1], "storage-0")
    again = world.granted(request)
    assert (again.token, again.rows, again.units) == (first[1].token, [1], ["storage-0"])


def test_rows_put_elsewhere_while_their_unit_is_away_move_there(make_world: World) -> None:
    """Their put may have reached this controller only: refusing it would leave them unknown to the others."""
    world = make_world(REF)
    world.register("storage-0", [0, 1], incarnation="a")
    world.register("storage-1", [], incarnation="a")
    world.handle(UnitGone("storage-0"))
    world.put([0], "storage-1")
    assert world.granted(world.ask("ref", 2)).units == ["storage-1"]
    reply = world.register("storage-0", [0, 1], incarnation="a")
    assert reply.drop == [0]
    assert world.granted(world.ask("ref", 2)).rows == [1]


def test_outputs_that_a_holder_put_where_its_lost_row_is_only_pending_are_there_when_it_is_confirmed(
    make_world: World,
) -> None:
    """The controller that granted the lease has not seen the unit die yet; this one has."""
    world = make_world(REF, TaskSpec("score", frozenset({"ref"})), served=["score"], byte_limit=100)
    world.register("storage-0", [0], incarnation="a")
    world.register("storage-0", [], incarnation="b")
    world.put([0], "storage-0", num_bytes=30, announced=True)
    world.handle(OutputsWritten("storage-0", "ref", [0], ["ref"], [5], 40))
    waiting = world.put([1], "storage-1", num_bytes=31, announced=True)
    assert waiting not in world.answers, "70 bytes are taken"
    world.confirm([0], "storage-0", commits={"ref": [0]})
    granted = world.granted(world.ask("score"))
    assert (granted.rows, granted.tokens) == ([0], [6])
    world.write("score", granted)
    assert world.answers[waiting] == RowsAccepted()


@pytest.mark.parametrize("given_up", ["by a fence", "by a restart"])
@pytest.mark.parametrize("unit", ["storage-0", "storage-1"])
def test_void_lease_puts_nothing_into_a_row_that_was_lost_and_put_again(
    make_world: World, given_up: str, unit: str
) -> None:
    """What it read of the row is lost, so what it computed would stand beside other values."""
    world = make_world(ROLLOUT, REF_OF_ROLLOUT)
    world.register("storage-0")
    world.register("storage-1")
    world.put([0], "storage-0")
    world.write("rollout", world.granted(world.ask("rollout")), columns=["rollout"])
    late = world.granted(world.ask("ref", owner="stalled")).token
    if given_up == "by a fence":
        world.handle(OwnerGone("stalled"))
    else:
        units = Recovering(frozenset({"storage-0", "storage-1"}), frozenset())
        world = make_world(ROLLOUT, REF_OF_ROLLOUT, first_token=1 << 20, recovering=units)
        world.register("storage-0", [0], columns=["x", "rollout"], done=["rollout"])
        world.register("storage-1")
    world.confirm_fences()
    lose(world, "storage-0")
    assert world.lost == [0]

    again = UnitState()
    again.set_tasks(["rollout", "ref"])
    for fence in world.fences:
        if isinstance(fence, OrderFenceTask) and fence.unit == unit:
            again.fence_task(fence.task, fence.token, fence.alive)
    again.create_rows([0], None, partition=1, groups=[0])
    with pytest.raises(LeaseFenced):
        again.commit_outputs("ref", late, [0], None)
    world.register(unit, incarnation="1" if unit == "storage-1" else "2")
    world.put([0], unit)
    again.commit_outputs("rollout", world.granted(world.ask("rollout")).token, [0], None)


def over(*records: RowRecords, incarnation: str = "1", finished: dict[int, list[int]] | None = None) -> RegisterUnit:
    """What a life of storage-0 held at its end."""
    return RegisterUnit("storage-0", incarnation, list(records), finished or {})


def begin(world: Any, *earlier: RegisterUnit, incarnation: str = "9") -> UnitAccepted:
    """Register the next, empty life of storage-0."""
    request = world.request(RegisterUnit("storage-0", incarnation, [], {}, earlier=list(earlier)))
    return cast(UnitAccepted, world.answers[request])


def held(*rows: int, columns: Sequence[str] = ("x",), done: Sequence[str] = ()) -> RowRecords:
    ones = [1] * len(rows)
    return RowRecords(1, list(rows), list(rows), ones, ones, ones, list(columns), list(done))


@pytest.mark.parametrize("recovering", [None, Recovering(frozenset({"storage-0"}), frozenset())])
def test_rows_of_a_life_that_no_controller_survived_are_told_as_lost(
    make_world: World, recovering: Recovering | None
) -> None:
    world = make_world(ROLLOUT, REF, LOOK, recovering=recovering)
    watch = world.watch()
    begin(world, over(held(1, done=["look"]), held(2), finished={1: [3]}))
    world.confirm_fences()
    assert world.lost == [1, 2]
    assert world.answers[watch].rows == [1, 2] and world.answers[watch].partitions == [1, 1]
    assert world.state.losses_changed, "they are durable before any process is told"
    assert world.state.stats().lost_rows == 2 and world.task("look").done == 2
    world.put([1, 2, 3], "storage-1")
    assert world.granted(world.ask("look", 9)).rows == [2]
    assert world.granted(world.ask("rollout", 9)).rows == [1, 2]


def test_life_that_was_met_has_nothing_new_to_tell(make_world: World) -> None:
    world = make_world(LOOK)
    world.register("storage-0", [1, 2])
    world.write("look", world.granted(world.ask("look", 1)))
    begin(world, over(held(1, 2)), incarnation="2")
    assert world.lost == [2]
    world.put([2], "storage-1")
    begin(world, over(held(1, 2)), over(incarnation="2"), incarnation="3")
    assert world.lost == [2] and world.granted(world.ask("look", 9)).rows == [2]


def test_row_that_was_put_again_before_its_life_was_told_of_is_not_lost_and_stays_done(make_world: World) -> None:
    world = make_world(ROLLOUT, LOOK)
    world.put([1], "storage-1")
    begin(world, over(held(1, columns=["x", "rollout"], done=["look", "rollout"])))
    assert world.lost == [] and world.state.losses_changed
    assert [(commit.task, commit.rows) for commit in world.commits] == [("look", {"storage-1": (1,)})]
    assert world.granted(world.ask("rollout", 9)).rows == [1], "what it wrote is lost"


def test_later_life_knows_more_of_a_row_than_an_earlier_one(make_world: World) -> None:
    world = make_world(ROLLOUT, LOOK)
    begin(world, over(held(1)), over(held(1, done=["look"]), incarnation="2"))
    assert world.lost == [1]
    world.put([1], "storage-1")
    assert world.task("look").done == 1 and world.task("rollout").ready == 1


def test_row_that_all_tasks_were_done_with_is_finished_and_not_lost(make_world: World) -> None:
    world = make_world(LOOK)
    begin(world, over(held(1, done=["look"]), finished={1: [2]}))
    assert world.lost == [] and world.task("look").done == 2
    assert {partition: list(rows) for partition, rows in world.state.take_finished().items()} == {1: [1, 2]}


def test_queue_that_was_closed_does_not_end_before_units_of_an_earlier_incarnation_told_their_rows(
    make_world: World,
) -> None:
    """Recovery does not wait for them for ever, but nobody may be told that all rows are done."""
    world = make_world(LOOK, recovering=Recovering(frozenset({"storage-0"}), frozenset()))
    world.handle(CloseWriting())
    world.handle(RecoveryDeadline())
    waiting = world.ask("look")
    assert waiting not in world.answers and world.state.list_away_units() == ["storage-0"]
    begin(world, over(held(1)))
    assert world.lost == [1] and waiting not in world.answers and world.state.list_away_units() == []
    world.put([1], "storage-1")
    world.confirm_fences()
    world.write("look", world.granted(waiting))
    assert world.refused(world.ask("look")) == "closed"


def test_unit_that_starts_empty_while_rows_are_lost_is_fenced_again(make_world: World) -> None:
    """They may be put there, and a life knows nothing of the fences of the one before."""
    world = make_world(LOOK, recovering=Recovering(frozenset({"storage-0"}), frozenset()))
    begin(world, over(held(1)))
    world.confirm_fences()
    assert world.lost == [1] and not world.fences
    begin(world, incarnation="10")
    assert [(fence.task, fence.unit) for fence in world.fences] == [("look", "storage-0")]
