"""Control state: readiness, leases, gate, barrier, parking, freeing."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncflow.errors import PeerRefused
from tq import TaskSpec
from tq.control.events import Answer, DeadlinePassed, Fenced, OwnerGone
from tq.messages import FetchRows, OutputsWritten, PublishVersion, RowsCreated, Stop

World = Callable[..., Any]
REF = TaskSpec("ref", frozenset({"x"}))
TRAIN = TaskSpec("train", frozenset({"x", "ref"}), whole_groups=True, keeps_leases=True)


def test_row_is_delivered_once_per_task(make_world: World) -> None:
    world = make_world(REF, TaskSpec("rewards", frozenset({"x"})))
    world.create(range(3))
    assert world.granted(world.ask("ref", 2)).rows == [0, 1]
    assert world.granted(world.ask("ref", 2)).rows == [2]
    assert world.ask("ref", 2) not in world.answers
    assert world.granted(world.ask("rewards", 5)).rows == [0, 1, 2]


def test_granted_says_group_and_unit_of_every_row(make_world: World) -> None:
    world = make_world(REF)
    world.create(range(4), size=2)
    granted = world.granted(world.ask("ref", 4))
    assert granted.groups == [0, 0, 1, 1]
    assert granted.units == ["storage-0", "storage-0", "storage-1", "storage-1"]


def test_request_parks_until_the_write_that_completes_its_inputs(make_world: World) -> None:
    world = make_world(REF, TRAIN)
    world.create(range(2), size=2)
    request = world.ask("train", 2)
    ref = world.granted(world.ask("ref", 2))
    world.write("ref", ref, [0], ["ref"])
    assert request not in world.answers
    world.write("ref", ref, [1], ["ref"])
    assert world.granted(request).rows == [0, 1]


def test_parked_requests_are_served_in_their_order(make_world: World) -> None:
    world = make_world(REF)
    first, second = world.ask("ref"), world.ask("ref")
    world.create([0])
    assert world.granted(first).rows == [0]
    assert second not in world.answers


def test_whole_group_waits_for_its_last_row_and_is_never_split(make_world: World) -> None:
    world = make_world(TaskSpec("train", frozenset({"x"}), whole_groups=True))
    world.create(range(8), size=4)
    assert world.granted(world.ask("train", 2)).rows == [0, 1, 2, 3]
    assert world.granted(world.ask("train", 7)).rows == [4, 5, 6, 7]


def test_oldest_partition_comes_first_and_partitions_do_not_mix(make_world: World) -> None:
    world = make_world(REF)
    world.create([4, 5], partition=2)
    world.create([0, 1], partition=1)
    granted = world.granted(world.ask("ref", 9))
    assert (granted.partition, granted.rows) == (1, [0, 1])
    assert world.granted(world.ask("ref", 9)).partition == 2


def test_barrier_holds_rows_back_until_the_partition_is_complete(make_world: World) -> None:
    world = make_world(TaskSpec("ref", frozenset({"x"}), barrier=True))
    world.open(3)
    world.create([0, 1])
    request = world.ask("ref", 2)
    assert request not in world.answers
    world.create([2])
    assert world.granted(request).rows == [0, 1]
    assert world.granted(world.ask("ref", 2)).rows == [2]


def test_gate_holds_back_what_the_consumers_weights_are_too_old_for(make_world: World) -> None:
    world = make_world(TaskSpec("rollout", frozenset({"x"}), max_staleness=1))
    world.create([0], partition=2)
    world.create([1], partition=3)
    assert world.granted(world.ask("rollout", version=0)).rows == [0]
    request = world.ask("rollout", version=0)
    assert request not in world.answers
    world.handle(PublishVersion(1))
    assert (world.refused(request), world.answers[request].newest_version) == ("newer_version", 1)
    assert world.granted(world.ask("rollout", version=1)).rows == [1]


def test_every_task_has_a_gate_of_its_own(make_world: World) -> None:
    rollout = TaskSpec("rollout", frozenset({"x"}), max_staleness=2)
    forward = TaskSpec("actor_fwd", frozenset({"x"}), max_staleness=0)
    world = make_world(rollout, forward, TaskSpec("ref", frozenset({"x"})))
    world.create([0], partition=2)
    assert world.granted(world.ask("rollout", version=0)).rows == [0]
    assert world.granted(world.ask("ref", version=0)).rows == [0]
    request = world.ask("actor_fwd", version=0)
    assert request not in world.answers
    world.handle(PublishVersion(1))
    assert (world.refused(request), world.answers[request].newest_version) == ("newer_version", 1)
    assert world.granted(world.ask("actor_fwd", version=1)).rows == [0]


def test_reference_gets_the_rows_of_its_steps_and_is_told_only_of_weights_that_are_one(make_world: World) -> None:
    """It changes every 3 steps: the weights of step 3 are for steps 4 to 6."""
    world = make_world(TaskSpec("ref", frozenset({"x"}), max_staleness=2, version_interval=3))
    world.create([0], partition=3)
    world.create([1], partition=4)
    assert world.granted(world.ask("ref", version=0)).rows == [0]
    request = world.ask("ref", version=0)
    for version in (1, 2):
        world.handle(PublishVersion(version))
        assert request not in world.answers, "those between are of no use to it"
    world.create([2], partition=3)  # put again, after a loss
    assert world.granted(request).rows == [2], "while it waits, it is there for what needs the weights that it holds"
    request = world.ask("ref", version=0)
    world.handle(PublishVersion(4))  # it did not look for a while
    assert (world.refused(request), world.answers[request].newest_version) == ("newer_version", 3)
    assert world.granted(world.ask("ref", version=3)).rows == [1]
    with pytest.raises(PeerRefused, match="weights of step 4; only those of every 3 steps are of use"):
        world.ask("ref", version=4)


def test_consumer_that_asks_is_told_that_its_rows_wait_for_weights(make_world: World) -> None:
    world = make_world(TaskSpec("ref", frozenset({"x"}), max_staleness=0))
    request = world.ask("ref", version=0, tell_held_back=True)
    assert request not in world.answers, "there are no rows yet"
    world.create([0], partition=2)
    assert (world.refused(request), world.answers[request].newest_version) == ("held_back", 0)
    parked = world.ask("ref", version=0)
    assert parked not in world.answers, "it knows"
    world.create([1], partition=1)
    assert world.granted(parked).rows == [1]


def test_consumer_with_old_weights_still_gets_rows_that_they_may_start(make_world: World) -> None:
    world = make_world(TaskSpec("rollout", frozenset({"x"}), max_staleness=1))
    world.handle(PublishVersion(5))
    world.create([0], partition=2)
    assert world.granted(world.ask("rollout", version=1)).rows == [0]


def test_version_that_is_announced_late_does_not_go_back(make_world: World) -> None:
    world = make_world(REF)
    world.handle(PublishVersion(5))
    world.handle(PublishVersion(3))
    assert world.state.newest_version == 5


def test_deadline_answers_a_parked_request_once(make_world: World) -> None:
    world = make_world(REF)
    request = world.ask("ref")
    world.handle(DeadlinePassed(request))
    assert world.refused(request) == "deadline"
    assert world.handle(DeadlinePassed(request)) == []
    world.create([0])
    assert world.granted(world.ask("ref")).rows == [0]


def test_stop_answers_parked_and_later_requests(make_world: World) -> None:
    world = make_world(REF)
    parked = world.ask("ref")
    world.handle(Stop())
    world.create([0])
    assert world.refused(parked) == "stop"
    assert world.refused(world.ask("ref")) == "stop"


def test_rows_of_a_dead_owner_wait_for_the_fence_and_come_back_in_their_place(make_world: World) -> None:
    world = make_world(REF)
    world.create(range(4))
    world.ask("ref", 2, owner="dead")
    assert world.granted(world.ask("ref", 1, owner="alive")).rows == [2]
    world.handle(OwnerGone("dead"))
    assert [(fence.unit, fence.rows) for fence in world.fences] == [("storage-0", (0,)), ("storage-1", (1,))]
    assert world.granted(world.ask("ref", 1)).rows == [3]
    world.confirm_fences()
    assert world.granted(world.ask("ref", 4)).rows == [0, 1]


def test_row_whose_teacher_and_reference_died_waits_for_the_columns_of_both(make_world: World) -> None:
    """What one of them had put is not computed again."""
    teacher = TaskSpec("teacher", frozenset({"x"}), outputs=frozenset({"teacher"}))
    ref = TaskSpec("ref", frozenset({"x"}), outputs=frozenset({"ref"}))
    world = make_world(teacher, ref, TaskSpec("train", frozenset({"x", "teacher", "ref"}), keeps_leases=True))
    world.create([0, 1])
    waiting = world.ask("train", 2)
    world.granted(world.ask("teacher", 2, owner="teacher"))
    world.write("ref", world.granted(world.ask("ref", 2, owner="reference")), [0], ["ref"])
    for owner in ("teacher", "reference"):
        world.handle(OwnerGone(owner))
    world.confirm_fences()
    assert world.granted(world.ask("ref", 2)).rows == [1]
    again = world.granted(world.ask("teacher", 2, owner="the next"))
    assert again.rows == [0, 1]
    world.write("teacher", again, columns=["teacher"])
    assert world.granted(waiting).rows == [0], "row 1 still lacks its reference"


def test_rows_of_a_unit_come_back_though_another_one_does_not_answer(make_world: World) -> None:
    world = make_world(REF)
    world.create(range(4))
    world.ask("ref", 4, owner="dead")
    waiting = world.ask("ref", 4)
    world.handle(OwnerGone("dead"))
    world.handle(Fenced("ref", next(fence.token for fence in world.fences if fence.unit == "storage-1")))
    assert world.granted(waiting).rows == [1, 3]


def test_fence_token_is_above_the_void_lease_and_below_every_later_one(make_world: World) -> None:
    world = make_world(REF)
    world.create([0])
    void = world.granted(world.ask("ref", owner="dead"))
    world.handle(OwnerGone("dead"))
    fence = world.fences[0]
    world.confirm_fences()
    assert void.token < fence.token < world.granted(world.ask("ref")).token


def test_parked_request_of_a_dead_owner_takes_no_rows(make_world: World) -> None:
    world = make_world(REF)
    dead = world.ask("ref", owner="dead")
    world.handle(OwnerGone("dead"))
    world.create([0])
    assert dead not in world.answers
    assert world.granted(world.ask("ref")).rows == [0]


def test_put_that_arrives_before_the_fence_counts_and_the_row_is_not_handed_out_again(make_world: World) -> None:
    world = make_world(REF, TaskSpec("other", frozenset({"x"})))
    world.create([0, 1])
    granted = world.granted(world.ask("ref", 2, owner="dead"))
    world.handle(OwnerGone("dead"))
    world.write("ref", granted, [0])
    world.confirm_fences()
    assert world.granted(world.ask("ref", 1)).rows == [1]


def test_last_put_before_the_fence_may_free_the_row(make_world: World) -> None:
    world = make_world(REF)
    world.open(1)
    world.create([0])
    granted = world.granted(world.ask("ref", owner="dead"))
    world.handle(OwnerGone("dead"))
    world.write("ref", granted)
    world.confirm_fences()
    assert world.freed == [0]
    assert world.ask("ref") not in world.answers


def test_groups_of_a_void_lease_come_back_one_by_one(make_world: World) -> None:
    world = make_world(TaskSpec("rollout", frozenset({"x"}), whole_groups=True))
    world.create(range(6), size=2)
    granted = world.granted(world.ask("rollout", 4, owner="dead"))
    world.write("rollout", granted, [0])
    world.handle(OwnerGone("dead"))
    world.confirm_fences()
    assert [world.granted(world.ask("rollout", 2)).rows for _ in range(3)] == [[1], [2, 3], [4, 5]]


def test_leases_of_a_trainer_survive_its_channel(make_world: World) -> None:
    world = make_world(TaskSpec("train", frozenset({"x"}), keeps_leases=True))
    world.create([0])
    granted = world.granted(world.ask("train", owner="trainer"))
    assert world.handle(OwnerGone("trainer")) == []
    world.write("train", granted)
    assert world.freed == [0]


def test_rows_are_freed_only_after_every_task(make_world: World) -> None:
    world = make_world(REF, TRAIN)
    world.create([0])
    world.write("ref", world.granted(world.ask("ref")), columns=["ref"])
    assert world.freed == []
    world.write("train", world.granted(world.ask("train")))
    assert world.freed == [0]
    assert world.state.stats().live_rows == 0


def test_repeated_notification_changes_nothing(make_world: World) -> None:
    world = make_world(REF, TRAIN)
    world.create([0, 1])
    ref = world.granted(world.ask("ref", 2))
    for _ in range(2):
        world.write("ref", ref, [0], ["ref"])
    train = world.granted(world.ask("train", 2))
    assert train.rows == [0]
    for _ in range(2):
        world.write("train", train)
    world.write("ref", ref, [0, 1], ["ref"])
    assert world.freed == [0]
    assert world.granted(world.ask("train", 2)).rows == [1]


def test_unknown_task_is_refused_and_nothing_stays_parked(make_world: World) -> None:
    world = make_world(REF)
    with pytest.raises(PeerRefused, match="no task is named 'reff'; known: ref"):
        world.ask("reff")
    with pytest.raises(PeerRefused, match="no task"):
        world.handle(OutputsWritten("storage-0", "reff", [0], [], [], 0))
    with pytest.raises(PeerRefused, match="at least 1"):
        world.ask("ref", 0)
    assert world.state.stats().tasks[0].parked_requests == 0


@pytest.mark.parametrize(("rows", "groups"), [([1, 0], [1, 0]), ([1, 1], [1, 1]), ([1, 2], [1])])
def test_malformed_creation_is_refused_and_adds_nothing(make_world: World, rows: list[int], groups: list[int]) -> None:
    world = make_world(REF)
    world.create([0])
    with pytest.raises(PeerRefused):
        world.handle(RowsCreated("storage-1", 1, rows, groups, ["x"], [1] * len(rows), 0), 99)
    assert world.state.stats().live_rows == 1


def test_instructions_name_the_request_and_the_unit(make_world: World) -> None:
    world = make_world(REF)
    world.create([0])
    (answer,) = world.handle(FetchRows("ref", "a", 1, 0, 60), 7)
    assert isinstance(answer, Answer) and answer.request == 7
    (fence,) = world.handle(OwnerGone("a"))
    assert (fence.task, fence.unit, fence.rows) == ("ref", "storage-0", (0,))


def test_stats_count_rows_of_each_stage(make_world: World) -> None:
    world = make_world(REF, TRAIN)
    world.create(range(4))
    ref = world.granted(world.ask("ref", 2))
    world.write("ref", ref, [0], ["ref"])
    world.ask("train", 1)
    world.ask("train", 1)
    stats = world.state.stats(admitted_groups=4)
    by_task = {task.task: task for task in stats.tasks}
    assert (by_task["ref"].ready, by_task["ref"].leased, by_task["ref"].done) == (2, 1, 1)
    assert (by_task["train"].waiting, by_task["train"].leased, by_task["train"].parked_requests) == (3, 1, 1)
    assert (stats.live_rows, stats.admitted_groups) == (4, 4)


def test_fence_that_was_confirmed_wakes_parked_requests(make_world: World) -> None:
    world = make_world(REF)
    world.create([0])
    world.ask("ref", owner="dead")
    waiting = world.ask("ref", owner="alive")
    world.handle(OwnerGone("dead"))
    assert waiting not in world.answers
    world.handle(Fenced("ref", world.fences[0].token))
    assert world.granted(waiting).rows == [0]
