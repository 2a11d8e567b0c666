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


def join(
    rounds: BroadcastRounds, name: str, *, session: str = "", broken: str = "", least: int | None = None, of: str = ""
) -> Replies:
    """`least`: step of the first version that it takes part for; `of`: the members that take part only together."""
    wanted = None if least is None else Version(0, least)
    return rounds.join(f"join {name}", session or name, name, broken, least=wanted, together=of)


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


def test_nobody_waits_for_a_member_that_wants_a_later_version_only() -> None:
    rounds = BroadcastRounds("t")
    join(rounds, "a")
    join(rounds, "r", least=2)
    assert started(begin(rounds, 1)).members == ["a"]
    assert begin(rounds, 2) == []
    replies = join(rounds, "a")
    assert {call for call, _ in replies} == {"begin 2", "join a", "join r"}
    assert started(replies).members == ["a", "r"]


def test_members_that_take_some_versions_do_not_make_the_others_meet_again() -> None:
    rounds = BroadcastRounds("t")
    transfers = []
    for step in range(1, 9):
        join(rounds, "a")
        if step % 2:
            join(rounds, "r", least=step + 1)
        transfers.append(started(begin(rounds, step)))
    odd, even = transfers[0].epoch, transfers[1].epoch
    assert [transfer.epoch for transfer in transfers] == [odd, even] * 4
    assert transfers[0].live == [odd]
    assert set(transfers[-1].live) == {odd, even}


def test_two_groups_are_kept_and_none_with_somebody_who_is_gone() -> None:
    rounds = BroadcastRounds("t")
    for step in (1, 2, 3):
        join(rounds, "a")
        join(rounds, "b", least=2)
        join(rounds, "c", least=3)
        last = started(begin(rounds, step))
    assert (last.members, len(last.live)) == (["a", "b", "c"], 2)
    rounds.closed("c")
    join(rounds, "a")
    join(rounds, "b")
    after = started(begin(rounds, 4))
    assert (after.members, after.live) == (["a", "b"], [after.epoch])


def test_a_group_that_broke_ends_all_that_its_members_had() -> None:
    rounds = BroadcastRounds("t")
    join(rounds, "a")
    join(rounds, "r", least=2)
    first = started(begin(rounds, 1))
    join(rounds, "a")
    second = started(begin(rounds, 2))
    join(rounds, "a", broken=second.epoch)
    join(rounds, "r", least=9)
    third = started(begin(rounds, 3, broken=second.epoch))
    assert third.members == first.members
    assert third.live == [third.epoch]
    assert third.epoch not in (first.epoch, second.epoch)


def test_ranks_that_share_a_model_take_part_together_or_not_at_all() -> None:
    rounds = BroadcastRounds("t")
    join(rounds, "a")
    join(rounds, "0", of="01")
    assert started(begin(rounds, 1)).members == ["a"], "its other rank still starts"
    join(rounds, "a")
    join(rounds, "1", of="01")
    assert started(begin(rounds, 2)).members == ["0", "1", "a"]
    join(rounds, "a")
    join(rounds, "0", of="01")
    assert begin(rounds, 3) == []
    assert started(rounds.closed("1")).members == ["a"]
    join(rounds, "a")
    assert started(begin(rounds, 4)).members == ["a"]
    join(rounds, "1", session="restarted", of="01")
    join(rounds, "a")
    assert started(begin(rounds, 5)).members == ["0", "1", "a"]
