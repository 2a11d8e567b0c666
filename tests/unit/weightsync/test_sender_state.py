"""Where a trainer rank copies its next version to, and when the agent has it."""

import torch

from weightsync.plan import TransferPlan
from weightsync.sender import SenderState, Staged, Target, Where
from weightsync.slot_memory import Region, RegionLayout
from weightsync.version import Version

V1, V2, V3 = Version(0, 1), Version(0, 2), Version(0, 3)


def _staged(version: Version, slot: bytes | None = b"slot") -> Staged:
    layout = RegionLayout(TransferPlan(1, {}, ()))
    return Staged(version, Target(Region(torch.empty(0, dtype=torch.uint8), layout), {}), slot)


def _linked() -> SenderState:
    state = SenderState()
    assert state.link() is None
    return state


def test_a_slot_is_asked_for_once_and_belongs_to_who_takes_it() -> None:
    state = _linked()
    assert state.place(V1) is Where.ASK
    assert state.place(V1) is Where.SOON
    granted = _staged(V1)
    state.grant_slot(granted)
    assert state.place(V1) is granted
    assert state.place(V1) is Where.ASK


def test_before_the_first_link_the_slot_is_waited_for_and_without_an_agent_it_is_not() -> None:
    state = SenderState()
    assert state.place(V1) is Where.ASK
    state.unlink()
    assert state.place(V1) is Where.OWN_MEMORY


def test_a_version_that_was_asked_for_is_asked_for_again_after_the_agent_is_back() -> None:
    state = SenderState()
    state.place(V1)
    state.unlink()
    assert state.link() == V1


def test_a_copy_is_delivered_again_to_the_agent_that_takes_the_place_of_a_dead_one() -> None:
    state = _linked()
    copy = state.staged = _staged(V1)
    assert state.is_due(copy) and state.undelivered == V1
    state.note_arrived(V1)
    assert not state.is_due(copy) and state.undelivered is None
    state.unlink()
    assert state.link() is copy
    assert state.is_due(copy) and state.undelivered == V1


def test_a_version_that_the_agent_has_is_not_copied() -> None:
    state = _linked()
    state.settle_request(complete=V2)
    assert state.place(V2) is Where.NEEDLESS
    assert state.place(V3) is Where.ASK


def test_a_refusal_counts_for_the_version_that_was_refused() -> None:
    state = _linked()
    state.place(V1)
    state.settle_request(refused="another plan")
    assert state.place(V1) is Where.REFUSED
    state.begin()
    assert state.place(V2) is Where.ASK


def test_own_memory_is_used_again_only_while_nobody_can_read_it() -> None:
    state = SenderState()
    state.unlink()
    copy = state.staged = _staged(V1, slot=None)
    state.link()
    assert state.take_own_memory() is None
    state.unlink()
    assert state.take_own_memory() is copy.target
    assert state.take_own_memory() is None


def test_an_agents_slot_is_not_taken_for_own_memory() -> None:
    state = SenderState()
    state.unlink()
    state.staged = _staged(V1)
    assert state.take_own_memory() is None


def test_the_next_slot_is_asked_for_ahead_unless_it_is_there_or_on_its_way() -> None:
    state = _linked()
    assert state.take_ahead(V2)
    assert not state.take_ahead(V2)
    state.grant_slot(_staged(V2))
    assert not state.take_ahead(V2)
    assert state.take_ahead(V3), "a slot of an older version that went another way is of no use"


def test_a_newer_copy_is_not_replaced_by_an_older_one_that_was_moved() -> None:
    state = _linked()
    old = state.staged = _staged(V1, slot=None)
    new = state.staged = _staged(V2)
    state.move_staged(old, _staged(V1))
    assert state.staged is new
    assert not state.is_due(old)


def test_no_room_asks_again_for_what_was_asked_for() -> None:
    state = _linked()
    state.place(V1)
    assert state.wait_on("rollout-0 reads step 0") == V1
    assert state.no_room == "rollout-0 reads step 0"
