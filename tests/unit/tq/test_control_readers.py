"""Several readers of one lease, token budgets, policies, other controllers' tasks, and why a fetch got nothing."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from asyncflow.errors import PeerRefused
from tq import TaskSpec
from tq.control.events import DeadlinePassed, OwnerGone, OwnerWrites, UnitGone
from tq.messages import NEW_ROWS, OutputsWritten
from tq.policies import Fifo, Item, TokenBalanced, Want

World = Callable[..., Any]
REF = TaskSpec("ref", frozenset({"x"}), frozenset({"ref"}))
TRAIN = TaskSpec("train", frozenset({"x", "ref"}), keeps_leases=True)


def test_readers_of_a_replica_get_the_same_lease_for_the_same_fetch(make_world: World) -> None:
    world = make_world(REF)
    world.create(range(4))
    first = world.granted(world.ask("ref", 2, owner="a", replica="r", sequence=0))
    assert world.granted(world.ask("ref", 2, owner="b", replica="r", sequence=0)) == first
    assert world.granted(world.ask("ref", 2, owner="b", replica="r", sequence=1)).rows == [2, 3]
    assert world.task("ref").deliveries == 2
    world.write("ref", first)
    assert world.granted(world.ask("ref", 2, owner="c", replica="r", sequence=0)) == first


def test_readers_that_wait_for_the_same_lease_get_it_together(make_world: World) -> None:
    world = make_world(REF)
    first = world.ask("ref", owner="a", replica="r", sequence=3)
    other = world.ask("ref", owner="x")
    second = world.ask("ref", owner="b", replica="r", sequence=3)
    world.create([0])
    assert world.granted(first) == world.granted(second)
    assert other not in world.answers


def test_lease_lives_as_long_as_one_of_its_readers(make_world: World) -> None:
    world = make_world(REF)
    world.create([0])
    for owner in "ab":
        world.ask("ref", owner=owner, replica="r")
    world.handle(OwnerGone("a"))
    assert world.fences == []
    world.handle(OwnerGone("b"))
    world.confirm_fences()
    assert world.granted(world.ask("ref", owner="c", replica="r")).rows == [0], "a void lease is not given again"


def test_token_budget_bounds_a_lease_and_fills_a_round(make_world: World) -> None:
    world = make_world(REF, TRAIN)
    world.open(9)
    for row, tokens in enumerate([4, 4, 4, 4]):
        world.put([row], columns=["x", "ref"], tokens=tokens)
    assert world.granted(world.ask("ref", 9, token_budget=9)).rows == [0, 1]
    round_ = world.granted(world.ask_round("train", 0, 0, num_rows=9, token_budget=8))
    assert (round_.rows, round_.tokens) == ([0, 1], [4, 4])


def test_tokens_that_a_task_adds_count_for_later_ones(make_world: World) -> None:
    world = make_world(REF, TRAIN)
    world.put([0, 1], tokens=1)
    world.granted(world.ask("ref", 2))
    world.handle(OutputsWritten("storage-0", "ref", [0, 1], ["ref"], [9, 2], 0))
    assert world.granted(world.ask("train", 2)).tokens == [10, 3]


def test_policy_shares_a_round(make_world: World) -> None:
    world = make_world(TaskSpec("train", frozenset({"x"}), keeps_leases=True, policy=TokenBalanced()))
    world.open(4)
    for row, tokens in enumerate([9, 1, 1, 9]):
        world.put([row], tokens=tokens)
    rank_slices = [world.granted(world.ask_round("train", 0, rank, num_rows=2)) for rank in range(2)]
    assert [sum(rank_slice.tokens) for rank_slice in rank_slices] == [10, 10]


@dataclass(frozen=True)
class Newest(Fifo):
    """Takes the last of the first three."""

    def pick(self, ready: Iterator[Item], want: Want) -> list[Item]:
        """Choose one."""
        return [item for item, _ in zip(ready, range(3), strict=False)][-1:]


def test_rows_that_a_policy_passes_over_keep_their_order(make_world: World) -> None:
    world = make_world(TaskSpec("ref", frozenset({"x"}), policy=Newest()))
    world.create(range(5))
    assert [world.granted(world.ask("ref")).rows[0] for _ in range(5)] == [2, 3, 4, 1, 0]


@dataclass(frozen=True)
class Broken(Fifo):
    """Makes rows up."""

    def pick(self, ready: Iterator[Item], want: Want) -> list[Item]:
        """Choose what is not there."""
        return [*super().pick(ready, want), Item((99,))]


def test_broken_policy_fails_its_own_fetch_and_loses_nothing(make_world: World) -> None:
    world = make_world(TaskSpec("ref", frozenset({"x"}), policy=Broken()))
    request = world.ask("ref")
    world.create(range(2))
    assert isinstance(world.error(request), PeerRefused)
    assert world.task("ref").ready == 2


@dataclass(frozen=True)
class Raising(Fifo):
    """Fails as a user's class may."""

    def pick(self, ready: Iterator[Item], want: Want) -> list[Item]:
        """Look at a row, and raise."""
        next(ready)
        raise ValueError("no idea")


def test_policy_that_raises_is_named_to_its_own_fetch_and_loses_nothing(make_world: World) -> None:
    world = make_world(TaskSpec("ref", frozenset({"x"}), policy=Raising()))
    request = world.ask("ref")
    world.create(range(2))  # the event that makes it choose is not refused
    assert str(world.error(request)) == "tq.policy: Raising raised ValueError: no idea"
    assert world.task("ref").ready == 2


@dataclass(frozen=True)
class Greedy(Fifo):
    """Counts items where rows are meant."""

    def pick(self, ready: Iterator[Item], want: Want) -> list[Item]:
        """Take as many items as rows are wanted."""
        return list(itertools.islice(ready, want.num_rows))


def test_policy_that_takes_more_rows_than_were_wanted_is_refused(make_world: World) -> None:
    world = make_world(TaskSpec("train", frozenset({"x"}), whole_groups=True, policy=Greedy()))
    world.create(range(4), size=2)
    assert "chose 4 rows where 2 were wanted" in str(world.error(world.ask("train", 2)))
    assert world.granted(world.ask("train", 1)).rows == [0, 1], "a group is never split"


def test_controller_serves_its_own_tasks_and_waits_for_all(make_world: World) -> None:
    world = make_world(REF, TRAIN, served=["ref"])
    world.create([0])
    with pytest.raises(PeerRefused, match="train is served by another controller"):
        world.ask("train")
    world.write("ref", world.granted(world.ask("ref")), columns=["ref"])
    assert world.state.stats().live_rows == 1
    assert [task.task for task in world.state.stats().tasks] == ["ref"]


def reason(world: Any, request: int) -> tuple[str, bool]:
    world.handle(DeadlinePassed(request))
    answer = world.answers[request]
    return answer.waiting_for, answer.producers_alive


def test_deadline_names_the_column_and_whether_somebody_writes_it(make_world: World) -> None:
    world = make_world(REF, TRAIN)
    world.open(3)
    world.put([0, 1, 2])
    expected = "partition 1: 3 of 3 rows wait for column ref"
    assert reason(world, world.ask("train")) == (expected, False)
    world.handle(OwnerWrites("scorer", ("ref",)))
    assert reason(world, world.ask_round("train", 0, 0)) == (expected, True)
    world.handle(OwnerGone("scorer"))
    assert reason(world, world.ask("train")) == (expected, False)


def test_deadline_tells_of_rows_that_were_not_put(make_world: World) -> None:
    world = make_world(REF)
    assert reason(world, world.ask("ref")) == ("no row waits for this task; none was put", False)
    world.open(3)
    world.handle(OwnerWrites("producer", (NEW_ROWS,)))
    assert reason(world, world.ask("ref")) == ("partition 1: 3 of 3 rows were not put yet", True)


def test_deadline_tells_of_rows_that_others_have_in_hand(make_world: World) -> None:
    world = make_world(REF)
    world.put([0, 1])
    world.granted(world.ask("ref", 2, owner="b"))
    expected = "no row waits for this task; 2 are leased"
    assert reason(world, world.ask("ref")) == (expected, False)


def test_deadline_tells_of_a_unit_that_is_away(make_world: World) -> None:
    world = make_world(REF)
    world.register("storage-0", [0])
    world.handle(UnitGone("storage-0"))
    assert "storage-0 is away with rows" in reason(world, world.ask("ref"))[0]


def test_deadline_of_a_gated_task_names_the_weights(make_world: World) -> None:
    world = make_world(TaskSpec("rollout", frozenset({"x"}), max_staleness=0))
    world.put([0], partition=5)
    text, alive = reason(world, world.ask("rollout", version=2))
    assert (text, alive) == ("partition 5 waits for newer weights than version 2", True)
