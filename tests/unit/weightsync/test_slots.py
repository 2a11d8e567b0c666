"""Slots: what is replaced first, and what never is."""

import pytest
from agent_clients import plan_of

from weightsync.agent.agent_state import Slot, Slots
from weightsync.version import Version

PLAN = plan_of([0, 1])


def take(slots: Slots, version: Version, *, dispensable: tuple[int, ...] = ()) -> Slot:
    slot = slots.take_slot(version, PLAN, "plan", dispensable=dispensable)
    assert slot is not None
    return slot


def complete(slots: Slots, version: Version) -> Slot:
    slot = take(slots, version)
    slot.checksums = {0: 1, 1: 2}
    return slot


def test_the_newest_lineage_wins_over_the_newest_step() -> None:
    slots = Slots(3)
    complete(slots, Version(0, 9))
    newest = complete(slots, Version(1, 2))
    assert slots.newest is newest


def test_an_unused_slot_goes_before_a_dispensable_part_and_that_before_the_oldest_complete_version() -> None:
    slots = Slots(4)
    oldest = complete(slots, Version(0, 1))
    complete(slots, Version(0, 2))
    oldest.readers.add("receiver")  # otherwise its slot goes before one that was never used
    part = take(slots, Version(0, 3))
    unused = take(slots, Version(0, 4))
    oldest.readers.clear()
    assert unused.number not in (oldest.number, part.number)
    unused.dropped = True
    assert take(slots, Version(0, 5), dispensable=(part.number,)) is unused
    assert take(slots, Version(0, 6), dispensable=(part.number,)) is part
    assert take(slots, Version(0, 7)) is oldest


def test_two_versions_take_turns_while_nobody_lags() -> None:
    slots = Slots(3)
    used = [complete(slots, Version(0, step)).number for step in range(1, 6)]
    assert used == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("lag", ["reader", "other agent"])
def test_a_third_slot_is_used_once_somebody_lags(lag: str) -> None:
    slots = Slots(3)
    oldest = complete(slots, Version(0, 1))
    complete(slots, Version(0, 2))
    if lag == "reader":
        oldest.readers.add("receiver")
    third = slots.take_slot(Version(0, 3), PLAN, "plan", dispensable=(), lagging=() if lag == "reader" else (0,))
    assert third is not None and third.number == 2


def test_deltas_keep_the_version_before_the_newest() -> None:
    slots = Slots(3, keeps_base=True)
    assert [complete(slots, Version(0, step)).number for step in range(1, 6)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("use", ["read", "repaired by its rank", "repaired from another agent"])
def test_an_older_version_in_use_is_not_replaced(use: str) -> None:
    slots = Slots(2)
    older = complete(slots, Version(0, 1))
    complete(slots, Version(0, 2))
    if use == "read":
        older.readers.add("receiver")
    elif use == "repaired by its rank":
        older.let_write(0, "session")
    else:
        older.pulling[0] = "peer"
    assert slots.take_slot(Version(0, 3), PLAN, "plan", dispensable=()) is None


def test_the_newest_complete_version_is_never_replaced() -> None:
    slots = Slots(1)
    complete(slots, Version(0, 1))
    assert slots.take_slot(Version(0, 2), PLAN, "plan", dispensable=()) is None


def test_a_part_that_waits_for_other_ranks_is_not_replaced_by_a_newer_step() -> None:
    slots = Slots(1)
    take(slots, Version(0, 1)).checksums = {0: 1}
    assert slots.take_slot(Version(0, 2), PLAN, "plan", dispensable=()) is None


def test_a_part_of_an_older_lineage_is_replaced_even_while_it_is_written() -> None:
    slots = Slots(1)
    part = take(slots, Version(0, 5))
    part.let_write(0, "session")
    assert take(slots, Version(1, 0)) is part
    assert part.stained


def test_a_vanished_client_stains_what_it_may_touch_and_only_that() -> None:
    slots = Slots(3)
    read, written, other = (take(slots, Version(0, step)) for step in (1, 2, 3))
    read.readers.add("gone")
    written.let_write(0, "gone")
    written.let_write(1, "here")
    for slot in slots:
        slot.lose("gone")
    assert [slot.stained for slot in (read, written, other)] == [True, True, False]
    assert (read.readers, written.writers) == (set(), {1: "here"})


def test_a_rank_that_comes_again_on_a_new_channel_stains_its_slot() -> None:
    slot = take(Slots(1), Version(0, 1))
    slot.let_write(0, "old")
    slot.let_write(0, "old")
    assert not slot.stained
    slot.let_write(0, "new")
    assert slot.stained


def test_a_dropped_version_is_nowhere_and_its_readers_keep_the_memory() -> None:
    slots = Slots(1)
    slot = complete(slots, Version(0, 1))
    slot.readers.add("receiver")
    slot.dropped = True
    assert slots.find_slot(Version(0, 1)) is None
    assert slots.newest is None
    assert take(slots, Version(0, 1)) is slot
    assert slot.stained
    assert not slot.readers
    assert slots.find_slot(Version(0, 1)) is slot


def test_a_dropped_version_that_is_read_is_replaced_last() -> None:
    slots = Slots(3)
    older, dropped = complete(slots, Version(0, 1)), complete(slots, Version(0, 2))
    older.readers.add("receiver")
    complete(slots, Version(0, 3))
    older.readers.clear()
    dropped.readers.add("receiver")
    dropped.dropped = True
    assert take(slots, Version(0, 4)) is older
    assert take(slots, Version(0, 5)) is dropped


def test_older_parts_are_dropped_and_complete_versions_kept() -> None:
    slots = Slots(3)
    older, part, newest = complete(slots, Version(0, 1)), take(slots, Version(0, 2)), complete(slots, Version(0, 3))
    part.readers.add("agent")
    slots.drop_older_parts(Version(0, 3))
    assert [older.dropped, part.dropped, newest.dropped] == [False, True, False]
    assert part.readers == {"agent"}
