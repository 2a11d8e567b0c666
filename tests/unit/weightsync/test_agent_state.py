"""Agent state: who writes, who reads, who waits. Events in, instructions out."""

import pytest
from agent_events import ALONE, DONE, PLAN, V0, V1, V2, V3, agent, grant, held, offer, pull, seal, take, write

from weightsync.agent.agent_state import AnswerCall, Grant, RefuseCall, Renew
from weightsync.messages import HeldVersion, NoRoom, SwapTurn, Unneeded
from weightsync.version import Version


def test_a_version_is_offered_once_every_rank_has_sealed() -> None:
    state = agent()
    assert state.watch("watch", "receiver", None) == []
    assert take(state, 0, V1) == [grant(0, V1, 0)]
    assert take(state, 1, V1) == [grant(1, V1, 0)]
    assert seal(state, 0, V1) == [DONE]
    assert seal(state, 1, V1) == [DONE, offer("watch", V1, 0)]


def test_a_fast_rank_does_not_throw_away_what_a_slow_one_will_complete() -> None:
    state = agent()
    write(state, V1)
    take(state, 0, V2)
    seal(state, 0, V2)
    assert take(state, 0, V3) == []
    assert take(state, 1, V2) == [grant(1, V2, 1)]
    assert seal(state, 1, V2) == [DONE, grant(0, V3, 0)]


def test_an_older_version_that_is_read_holds_a_writer_up_until_it_is_released() -> None:
    state = agent()
    write(state, V1)
    state.watch("watch", "receiver", None)
    write(state, V2)
    assert take(state, 0, V3) == []
    assert state.release_version("receiver", V1) == [grant(0, V3, 0)]


def test_a_slow_reader_is_left_behind_with_the_memory() -> None:
    state = agent()
    write(state, V1)
    state.watch("watch", "receiver", None)
    write(state, V2)
    take(state, 0, V3, deadline=5.0)
    assert state.tick(4.9) == []
    assert state.tick(5.0) == [Renew(0), grant(0, V3, 0)]
    assert state.release_version("receiver", V1) == []


def test_no_writer_waits_for_a_best_effort_reader() -> None:
    state = agent()
    write(state, V1)
    state.watch("watch", "feed", None, best_effort=True)
    write(state, V2)
    assert state.list_holders() == {"feed": [V1]}
    assert take(state, 0, V3) == [Renew(0), grant(0, V3, 0)]


def test_the_newest_version_is_left_to_nobody() -> None:
    state = agent()
    write(state, V1)
    state.watch("watch", "receiver", None)
    take(state, 0, V2, deadline=9.0)
    take(state, 0, V3, deadline=5.0)
    state.tick(5.0)
    assert state.newest == V1


def test_a_writer_that_waits_too_long_for_writers_is_told_who_uses_the_slots() -> None:
    state = agent()
    write(state, V1)
    take(state, 0, V2)
    take(state, 1, V2)
    seal(state, 0, V2)
    take(state, 0, V3, deadline=5.0)
    (answer,) = state.tick(5.0)
    assert isinstance(answer, AnswerCall)
    assert answer.call == "take 0 step 3"
    assert isinstance(answer.reply, NoRoom)
    assert "step 1 (complete), step 2 (being written); raise weightsync.num_slots" in answer.reply.reason


def test_a_rank_learns_that_a_newer_version_is_complete() -> None:
    state = agent()
    write(state, V2)
    assert take(state, 0, V1) == [AnswerCall("take 0 step 1", Unneeded(V2))]


def test_a_rank_under_another_plan_is_refused() -> None:
    state = agent(PLAN, ALONE)
    take(state, 0, V1)
    (refusal,) = take(state, 1, V1, plan=ALONE)
    assert refusal == RefuseCall("take 1 step 1", "weights of step 1: other ranks write them under another plan")


def test_buckets_of_others_and_slots_that_were_not_granted_are_refused() -> None:
    state = agent()
    take(state, 0, V1)
    for refusal in (*seal(state, 0, V1, b1=5), *seal(state, 1, V1), *seal(state, 0, V1, session="stranger")):
        assert isinstance(refusal, RefuseCall)
    assert state.held() == [HeldVersion(V1, PLAN.digest(), {})]


def test_a_rank_that_delivered_its_part_is_not_asked_for_it_again() -> None:
    state = agent()
    take(state, 0, V1)
    seal(state, 0, V1)
    assert take(state, 0, V1) == [AnswerCall("take 0 step 1", Unneeded(V1))]


def test_a_rank_that_asks_again_in_the_middle_writes_its_part_once_more() -> None:
    state = agent(ALONE)
    take(state, 0, V1, plan=ALONE)
    seal(state, 0, V1, b0=5)
    assert take(state, 0, V1, plan=ALONE) == [grant(0, V1, 0, ALONE)]
    assert state.get_checksum(V1, 0) is None
    seal(state, 0, V1, b0=5)
    assert state.newest is None
    seal(state, 0, V1, b1=6)
    assert state.newest == V1


def test_a_rank_that_lost_its_channel_completes_the_version_that_others_wrote() -> None:
    state = agent()
    take(state, 0, V1)
    take(state, 1, V1)
    seal(state, 0, V1)
    assert state.closed("rank1") == []
    assert take(state, 1, V1, session="rank1 again") == [grant(1, V1, 0)]
    assert seal(state, 1, V1, session="rank1 again") == [DONE]
    assert state.newest == V1


def test_memory_that_a_vanished_writer_may_touch_is_renewed() -> None:
    state = agent(num_slots=1)
    take(state, 0, V1)
    state.closed("rank0")
    assert take(state, 0, V2, session="rank0 again") == [Renew(0), Grant("take 0 step 2", V2, 0, PLAN)]


def test_memory_that_a_vanished_reader_may_read_is_renewed() -> None:
    state = agent()
    write(state, V1)
    state.watch("watch", "receiver", None)
    write(state, V2)
    assert take(state, 0, V3) == []
    assert state.closed("receiver") == [Renew(0), grant(0, V3, 0)]


def test_a_seal_of_a_version_that_was_overtaken_is_accepted_and_forgotten() -> None:
    state = agent(num_slots=3)
    take(state, 0, V1)
    take(state, 1, V1)
    write_newer = [held(V2, 0, 1)]
    assert state.peer_has("peer", write_newer) == [pull(V2, 0, 1), pull(V2, 1, 1)]
    state.end_pull("peer", V2, 0, 10)
    state.end_pull("peer", V2, 1, 11)
    assert seal(state, 0, V1) == [DONE]
    assert state.held() == [held(V2, 0, 1)]


def test_a_rank_that_goes_on_gives_up_what_it_had_not_finished() -> None:
    state = agent()
    write(state, V0)
    take(state, 0, V1)
    take(state, 1, V1)
    assert take(state, 0, V2) == []
    assert take(state, 1, V2) == [grant(0, V2, 1), grant(1, V2, 1)]


def test_a_wait_for_an_older_version_ends_when_its_rank_asks_for_a_newer_one() -> None:
    state = agent()
    write(state, V0)
    take(state, 0, V1)
    seal(state, 0, V1)
    assert take(state, 0, V2) == []
    assert take(state, 0, V3) == [AnswerCall("take 0 step 2", Unneeded(V2))]


def test_parts_of_a_dead_trainer_do_not_use_up_the_slots() -> None:
    state = agent(num_slots=3)
    write(state, V0)
    for version in (V1, V2):
        take(state, 0, version)
        seal(state, 0, version)
    state.closed("rank0")
    state.closed("rank1")
    assert take(state, 0, Version(1, 0), session="a") == [Grant("take 0 step 0 of lineage 1", Version(1, 0), 1, PLAN)]
    assert take(state, 0, Version(2, 0), session="b") == [Grant("take 0 step 0 of lineage 2", Version(2, 0), 2, PLAN)]


def test_a_new_lineage_is_served_before_one_that_is_over() -> None:
    state = agent()
    write(state, V1)
    state.watch("watch", "receiver", None)
    write(state, V2)
    take(state, 0, V3)
    assert take(state, 0, Version(1, 0), session="new") == [AnswerCall("take 0 step 3", Unneeded(V3))]
    assert state.release_version("receiver", V1) == [Grant("take 0 step 0 of lineage 1", Version(1, 0), 0, PLAN)]


def test_a_watcher_is_offered_only_what_is_newer() -> None:
    state = agent(num_slots=3)
    write(state, V1)
    assert state.watch("first", "receiver", None) == [offer("first", V1, 0)]
    assert state.watch("second", "receiver", V1) == []
    assert write(state, V2) == [DONE, offer("second", V2, 1)]
    assert state.list_holders() == {"receiver": [V1, V2]}


def test_no_parked_call_of_a_closed_session_is_answered() -> None:
    state = agent(max_updating=1)
    state.watch("watch", "receiver", None)
    state.watch_peer("watch peer", "agent", 1)
    state.ask_swap("swap", "other", 9.0)
    state.ask_swap("swap", "receiver", 9.0)
    for session in ("receiver", "agent"):
        assert state.closed(session) == []
    assert write(state, V1) == [DONE]
    assert state.end_swap("other") == []


def test_a_turn_is_passed_on_when_its_holder_dies() -> None:
    state = agent(max_updating=1)
    assert state.ask_swap("a", "receiver a", None) == [AnswerCall("a", SwapTurn(True))]
    assert state.ask_swap("b", "receiver b", 9.0) == []
    assert state.closed("receiver a") == [AnswerCall("b", SwapTurn(True))]
    assert state.ask_swap("c", "receiver c", 9.0) == []
    assert state.tick(9.0) == [AnswerCall("c", SwapTurn(False))]


@pytest.mark.parametrize("checksum", [-1, 2**64])
def test_what_is_no_checksum_is_refused(checksum: int) -> None:
    state = agent()
    take(state, 0, V1)
    (refused,) = seal(state, 0, V1, b0=checksum)
    assert isinstance(refused, RefuseCall) and "a value that is not a checksum" in refused.reason
    assert seal(state, 0, V1) == [DONE]
