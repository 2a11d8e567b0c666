"""Damaged buckets: repaired from elsewhere, written again by their rank, or the version is given up."""

from agent_events import DONE, PLAN, V1, V2, V3, agent, grant, held, offer, pull, seal, take, write

from weightsync.agent.agent_state import AgentState, AnswerCall, Grant, RefuseCall, Renew
from weightsync.messages import Done, Repair


def damaged(num_reporters: int = 1, *, menders: tuple[int, ...] = (0, 1)) -> AgentState:
    """An agent with V1 and V2, the latter held by receivers that found bucket 1 damaged."""
    state = agent(num_slots=3)
    for rank in menders:
        state.await_repair(f"await {rank}", f"rank{rank}", rank=rank)
    write(state, V1)
    write(state, V2)
    for k in range(num_reporters):
        state.watch(f"watch {k}", f"receiver {k}", None)
    return state


REASON = "weights of step 2: bucket 1 does not match its checksum, and no other copy exists"


def test_every_reporter_of_a_bucket_is_answered_once_its_rank_wrote_it_again() -> None:
    state = damaged(2)
    assert state.report_corrupt("a", "receiver 0", V2, 1) == [AnswerCall("await 1", Repair(V2, [1]))]
    assert state.report_corrupt("b", "receiver 1", V2, 1) == []
    assert seal(state, 1, V2) == [DONE, AnswerCall("a", Done()), AnswerCall("b", Done())]
    assert state.await_repair("await 1", "rank1", rank=1) == []


def test_a_reporter_that_died_is_not_answered() -> None:
    state = damaged(2)
    state.report_corrupt("a", "receiver 0", V2, 1)
    state.report_corrupt("b", "receiver 1", V2, 1)
    state.closed("receiver 0")
    assert seal(state, 1, V2) == [DONE, AnswerCall("b", Done())]


def test_a_rank_between_two_waits_is_still_asked() -> None:
    state = damaged(2)
    state.report_corrupt("a", "receiver 0", V2, 1)
    seal(state, 1, V2)
    assert state.report_corrupt("b", "receiver 1", V2, 1) == []
    assert state.await_repair("again", "rank1", rank=1) == [AnswerCall("again", Repair(V2, [1]))]


def test_a_rank_that_comes_on_a_new_channel_before_its_old_one_ended_is_asked_again() -> None:
    state = damaged()
    state.report_corrupt("a", "receiver 0", V2, 1)
    assert state.await_repair("again", "new", rank=1) == [AnswerCall("again", Repair(V2, [1]))]
    assert state.closed("rank1") == []
    assert seal(state, 1, V2, session="new") == [DONE, AnswerCall("a", Done())]


def test_a_version_that_nobody_can_repair_falls_back_to_the_older_one() -> None:
    state = damaged(menders=())
    assert state.report_corrupt("a", "receiver 0", V2, 1) == [RefuseCall("a", REASON)]
    assert state.watch("new", "newcomer", None) == [offer("new", V1, 0)]
    assert state.watch("old", "receiver 0", V2) == []


def test_a_repair_ends_when_its_rank_dies_or_cannot_or_writes_something_else() -> None:
    for event in ("dies", "cannot", "differs"):
        state = damaged()
        state.report_corrupt("a", "receiver 0", V2, 1)
        match event:
            case "dies":
                assert state.closed("rank1") == [RefuseCall("a", REASON)]
            case "cannot":
                assert state.no_repair(V2) == [RefuseCall("a", REASON)]
            case "differs":
                assert seal(state, 1, V2, b1=99) == [DONE, RefuseCall("a", REASON)]
        assert state.newest == V1


def test_a_late_no_does_not_end_what_was_not_asked() -> None:
    state = damaged()
    assert state.no_repair(V2) == []
    assert state.newest == V2


def test_memory_under_repair_is_not_given_to_another_version() -> None:
    state = agent()
    state.await_repair("await", "rank1", rank=1)
    write(state, V1)
    state.watch("watch", "receiver", None)
    write(state, V2)
    state.report_corrupt("a", "receiver", V1, 1)
    assert take(state, 0, V3) == []
    assert state.closed("receiver") == []
    assert seal(state, 1, V1) == [DONE, Renew(0), grant(0, V3, 0)]


def test_a_bucket_of_another_agent_is_preferred_and_the_next_source_is_tried() -> None:
    state = damaged()
    state.peer_has("peer", [held(V2, 0, 1)])
    assert state.report_corrupt("a", "receiver 0", V2, 1) == [pull(V2, 1, 1)]
    assert state.end_pull("peer", V2, 1, None) == [AnswerCall("await 1", Repair(V2, [1]))]
    assert seal(state, 1, V2) == [DONE, AnswerCall("a", Done())]


def test_a_version_is_written_again_while_its_damaged_copy_is_still_read() -> None:
    state = damaged(menders=())
    state.report_corrupt("a", "receiver 0", V2, 1)
    state.closed("rank0")
    state.closed("rank1")
    assert take(state, 0, V2, session="a") == [Grant("take 0 step 2", V2, 2, PLAN)]
    assert take(state, 1, V2, session="b") == [Grant("take 1 step 2", V2, 2, PLAN)]
    seal(state, 0, V2, session="a")
    seal(state, 1, V2, session="b")
    assert state.watch("new", "newcomer", None) == [offer("new", V2, 2)]
    assert state.list_holders() == {"receiver 0": [V2], "newcomer": [V2]}
