"""Other agents: what is fetched from them, in which order, and what they are told."""

from agent_clients import plan_of
from agent_events import DONE, PLAN, V0, V1, V2, V3, agent, grant, held, offer, pull, seal, take, write

from weightsync.agent.agent_state import AgentState, AnswerCall, LacksPlan, Pull, Renew
from weightsync.messages import HeldVersion, PeerHas, Unneeded
from weightsync.version import Version


def test_a_plan_that_is_not_known_is_asked_for() -> None:
    state = AgentState(num_slots=2)
    state.watch("watch", "receiver", None)
    assert state.peer_has("peer", [held(V1, 0)]) == [LacksPlan("peer", PLAN.digest())]
    state.open_plan(PLAN)
    assert state.peer_has("peer", [held(V1, 0)]) == [pull(V1, 0, 0)]


def test_a_slower_node_finishes_what_it_began_and_then_jumps_to_the_newest() -> None:
    state = agent()
    assert state.peer_has("peer", [held(V0, 0, 1)]) == [pull(V0, 0, 0), pull(V0, 1, 0)]
    assert state.peer_has("peer", [held(V0, 0, 1), held(V1, 0, 1), held(V2, 0, 1)]) == []
    assert state.end_pull("peer", V0, 0, 10) == []
    assert state.end_pull("peer", V0, 1, 11) == [pull(V2, 0, 1, V0), pull(V2, 1, 1, V0)]


def test_a_version_that_can_be_had_whole_goes_before_a_newer_one_that_cannot() -> None:
    state = agent()
    assert state.peer_has("peer", [held(V1, 0, 1), held(V2, 0)]) == [pull(V1, 0, 0), pull(V1, 1, 0)]


def test_what_a_lost_agent_was_asked_for_is_given_to_others() -> None:
    state = agent()
    state.peer_has("peer", [held(V1, 0, 1)])
    state.peer_has("other", [held(V1, 0, 1)])
    assert state.peer_lost("peer") == []
    assert state.end_pull("peer", V1, 0, None) == [pull(V1, 0, 0, peer="other")]
    assert state.end_pull("peer", V1, 1, None) == [pull(V1, 1, 0, peer="other")]


def test_a_bucket_that_its_rank_is_writing_is_not_pulled() -> None:
    state = agent()
    take(state, 0, V1)
    assert state.peer_has("peer", [held(V1, 0, 1)]) == [pull(V1, 1, 0)]


def test_a_rank_waits_while_its_buckets_are_pulled() -> None:
    state = agent()
    state.peer_has("peer", [held(V1, 0)])
    assert take(state, 0, V1) == []
    assert state.end_pull("peer", V1, 0, None) == [grant(0, V1, 0)]
    state.peer_has("peer", [held(V1, 1)])
    assert take(state, 1, V1) == []
    assert state.end_pull("peer", V1, 1, 11) == [AnswerCall("take 1 step 1", Unneeded(V1))]


def test_what_was_fetched_ahead_gives_way_to_what_a_rank_writes_first() -> None:
    state = agent()
    write(state, V0)
    assert state.peer_has("peer", [held(V2, 1)]) == [pull(V2, 1, 1, V0)]
    state.end_pull("peer", V2, 1, 11)
    assert take(state, 0, V1) == [grant(0, V1, 1)]


def test_a_bucket_for_memory_that_was_given_up_does_not_count_for_its_successor() -> None:
    state = agent(num_slots=1)
    assert state.peer_has("peer", [held(V1, 0, 1)]) == [pull(V1, 0, 0), pull(V1, 1, 0)]
    state.end_pull("peer", V1, 1, 11)
    restarted = Version(1, 0)
    assert take(state, 0, restarted, session="new") == [Renew(0), grant(0, restarted, 0)]
    assert state.closed("new") == [Renew(0), pull(V1, 1, 0)], "bucket 0 is still on its way to the old memory"
    assert state.end_pull("peer", V1, 0, 10) == [pull(V1, 0, 0)]
    assert state.held() == [HeldVersion(V1, PLAN.digest(), {}, True)]


def test_another_agent_is_told_when_there_is_more() -> None:
    state = agent()
    assert state.watch_peer("first", "agent", 0) == [AnswerCall("first", PeerHas(1, []))]
    assert state.watch_peer("second", "agent", 1) == []
    take(state, 0, V1)
    assert seal(state, 0, V1) == [DONE, AnswerCall("second", PeerHas(2, [held(V1, 0)]))]


def test_a_part_that_another_agent_reads_is_kept_until_it_has_read() -> None:
    state = agent(num_slots=2)
    take(state, 0, V1)
    seal(state, 0, V1)
    assert state.borrow_version("token", V1) == (0, PLAN)
    state.peer_has("peer", [held(V2, 0, 1)])
    state.end_pull("peer", V2, 0, 10)
    state.end_pull("peer", V2, 1, 11)
    assert state.borrow_version("late", V1) is None
    assert state.list_holders() == {"token": [V1]}
    assert state.release_version("token", V1) == []
    assert take(state, 1, V3) == [grant(1, V3, 0)]


def test_a_node_without_readers_fetches_nothing_until_one_comes() -> None:
    state = agent(has_reader=False)
    assert state.peer_has("peer", [held(V1, 0, 1)]) == []
    assert state.watch("watch", "receiver", None) == [pull(V1, 0, 0), pull(V1, 1, 0)]
    state.end_pull("peer", V1, 0, 10)
    assert state.end_pull("peer", V1, 1, 11)[-1] == offer("watch", V1, 0)
    assert state.peer_has("peer", [held(V1, 0, 1), held(V2, 0, 1)]) == [pull(V2, 0, 1, V1), pull(V2, 1, 1, V1)]
    state.closed("receiver")
    state.end_pull("peer", V2, 0, 10)
    state.end_pull("peer", V2, 1, 11)
    assert state.peer_has("peer", [held(V3, 0, 1)]) == []


def test_a_node_of_trainer_ranks_alone_lets_go_of_parts_that_newer_ones_followed() -> None:
    """Rank 1 is on another node; neither node has a reader, so no version is ever complete here."""
    state = agent(has_reader=False)
    for step, slot in ((1, 0), (2, 1), (3, 0), (4, 1)):
        version = Version(0, step)
        assert take(state, 0, version) == [grant(0, version, slot)]
        seal(state, 0, version)
        state.peer_has("peer", [held(Version(0, each), 1) for each in range(max(1, step - 1), step + 1)])
    assert state.held() == [held(V3, 0), held(Version(0, 4), 0)]


def test_a_part_that_is_being_sent_does_not_give_way_on_a_node_without_readers() -> None:
    state = agent(has_reader=False)
    for version in (V1, V2):
        take(state, 0, version)
        seal(state, 0, version)
        state.peer_has("peer", [held(V1, 1), held(V2, 1)])
    state.borrow_version("sending", V1)
    assert take(state, 0, V3) == []
    assert state.release_version("sending", V1) == [grant(0, V3, 0)]


def test_a_version_that_another_node_still_fetches_is_not_replaced_while_there_is_an_unused_slot() -> None:
    state = agent(num_slots=3)
    write(state, V0)
    write(state, V1)
    state.peer_has("peer", [HeldVersion(V0, PLAN.digest(), {0: 10}, True)])
    assert take(state, 0, V2) == [grant(0, V2, 2)]


def test_a_rank_waits_for_readers_that_are_about_to_go_rather_than_take_more_memory() -> None:
    state = agent(num_slots=3)
    write(state, V0)
    state.watch("watch", "receiver", None)
    write(state, V1)
    assert take(state, 0, V2, patient_until=4.0) == []
    assert state.release_version("receiver", V0) == [grant(0, V2, 0)]


def test_a_rank_that_is_ahead_waits_for_the_others_rather_than_take_more_memory() -> None:
    state = agent(num_slots=3)
    write(state, V0)
    take(state, 0, V1)
    seal(state, 0, V1)
    assert take(state, 0, V2, patient_until=4.0) == []
    take(state, 1, V1)
    assert seal(state, 1, V1)[-1] == grant(0, V2, 0)


def test_a_restarted_trainer_does_not_wait_for_parts_of_the_last_one() -> None:
    state = agent(num_slots=3)
    write(state, V0)
    take(state, 0, V1)
    state.closed("rank0")
    restarted = Version(1, 0)
    assert take(state, 0, restarted, session="new", patient_until=4.0) == [Renew(1), grant(0, restarted, 1)]


def test_a_rank_takes_more_memory_once_readers_lag() -> None:
    state = agent(num_slots=3)
    write(state, V0)
    state.watch("watch", "receiver", None)
    write(state, V1)
    take(state, 0, V2, patient_until=4.0)
    assert state.tick(3.9) == []
    assert state.tick(4.0) == [grant(0, V2, 2)]


def test_as_many_buckets_are_in_flight_as_the_channels_to_an_agent_take() -> None:
    plan = plan_of([0] * 6)
    state = AgentState(num_slots=2, pulls_per_peer=4)
    state.open_plan(plan)
    state.watch("watch", "receiver", None)
    pulls = state.peer_has("peer", [held(V1, *range(6), plan=plan)])
    assert [each.bucket for each in pulls if isinstance(each, Pull)] == [0, 1, 2, 3]
    (following,) = state.end_pull("peer", V1, 0, 10)
    assert isinstance(following, Pull) and following.bucket == 4


def test_readers_of_a_damaged_version_do_not_hold_the_next_one_up() -> None:
    state = agent()
    write(state, V1)
    state.watch("watch", "receiver", None)
    state.report_corrupt("report", "receiver", V1, 0)
    write(state, V2)
    assert state.newest == V2
    state.report_corrupt("report", "other", V2, 0)
    assert take(state, 0, V3) == [grant(0, V3, 1)]
    seal(state, 0, V3)
    take(state, 1, V3)
    seal(state, 1, V3)
    assert take(state, 0, Version(0, 4)) == [Renew(0), grant(0, Version(0, 4), 0)]
