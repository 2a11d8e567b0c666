"""Who takes part in a broadcast: all that are ready, in one group for as long as nothing changes."""

from weightsync.agent.agent_service import BroadcastRounds
from weightsync.messages import Transfer
from weightsync.version import Version

PLAN = "digest"
Replies = list[tuple[object, Transfer]]


def begin(
    rounds: BroadcastRounds, step: int, *, trainer: str = "trainer", broken: str = "", deadline: float = 9.0
) -> Replies:
    return rounds.begin(f"begin {step}", trainer, Version(0, step), PLAN, broken=broken, deadline=deadline)


def join(rounds: BroadcastRounds, name: str, *, session: str = "", broken: str = "") -> Replies:
    return rounds.join(f"join {name}", session or name, name, broken)


def started(replies: Replies) -> Transfer:
    assert len({id(transfer) for _, transfer in replies}) == 1
    return replies[0][1]


def test_broadcast_begins_when_everybody_is_ready() -> None:
    rounds = BroadcastRounds("t")
    assert join(rounds, "b") == join(rounds, "a") == []
    replies = begin(rounds, 1)
    assert {call for call, _ in replies} == {"begin 1", "join a", "join b"}
    assert started(replies).members == ["a", "b"]
    assert begin(rounds, 2) == join(rounds, "a") == []
    assert started(join(rounds, "b")).version == Version(0, 2)


def test_nobody_is_waited_for_when_nobody_joined() -> None:
    assert started(begin(BroadcastRounds("t"), 1)).members == []


def test_epoch_is_the_same_for_as_long_as_the_members_are() -> None:
    rounds = BroadcastRounds("t")
    epochs = []
    for step in range(3):
        join(rounds, "a")
        epochs.append(started(begin(rounds, step)).epoch)
    join(rounds, "a")
    join(rounds, "b")
    epochs.append(started(begin(rounds, 3)).epoch)
    rounds.closed("b")
    join(rounds, "a")
    epochs.append(started(begin(rounds, 4)).epoch)
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(set(epochs)) == 3


def test_member_that_dies_is_not_waited_for() -> None:
    rounds = BroadcastRounds("t")
    join(rounds, "a")
    join(rounds, "b")
    started(begin(rounds, 1))
    join(rounds, "a")
    assert begin(rounds, 2) == []
    assert started(rounds.closed("b")).members == ["a"]


def test_member_that_is_late_is_left_out_until_it_joins_again() -> None:
    rounds = BroadcastRounds("t")
    join(rounds, "a")
    join(rounds, "b")
    first = started(begin(rounds, 1))
    join(rounds, "a")
    assert begin(rounds, 2, deadline=5.0) == rounds.tick(4.9) == []
    second = started(rounds.tick(5.0))
    assert second.members == ["a"]
    join(rounds, "a")
    join(rounds, "b")
    third = started(begin(rounds, 3))
    assert third.members == ["a", "b"]
    assert len({first.epoch, second.epoch, third.epoch}) == 3


def test_group_that_broke_is_built_again_once() -> None:
    rounds = BroadcastRounds("t")
    for name in "ab":
        join(rounds, name)
    broken = started(begin(rounds, 1)).epoch
    for name in "ab":
        join(rounds, name, broken=broken)
    after = started(begin(rounds, 2, broken=broken)).epoch
    for name in "ab":
        join(rounds, name)
    assert started(begin(rounds, 3, broken=broken)).epoch == after != broken


def test_receiver_that_comes_back_before_its_death_was_seen_is_one_member() -> None:
    rounds = BroadcastRounds("t")
    join(rounds, "a", session="first")
    join(rounds, "a", session="second")
    replies = begin(rounds, 1)
    assert [call for call, _ in replies] == ["begin 1", "join a"]
    assert started(replies).members == ["a"]
    assert rounds.closed("first") == []
    join(rounds, "a", session="second")
    assert started(begin(rounds, 2)).epoch == replies[0][1].epoch


def test_another_trainer_process_meets_its_receivers_in_new_groups() -> None:
    rounds = BroadcastRounds("t")
    join(rounds, "a")
    first = started(begin(rounds, 1, trainer="one"))
    join(rounds, "a")
    assert started(begin(rounds, 2, trainer="two")).epoch != first.epoch


def test_trainer_that_dies_while_it_waits_begins_nothing() -> None:
    rounds = BroadcastRounds("t")
    join(rounds, "a")
    started(begin(rounds, 1))
    assert begin(rounds, 2) == rounds.closed("trainer") == join(rounds, "a") == []


def test_epochs_of_two_agents_differ() -> None:
    assert started(begin(BroadcastRounds(), 1)).epoch != started(begin(BroadcastRounds(), 1)).epoch
