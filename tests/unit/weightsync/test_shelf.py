"""The shelf between a receiver's threads and its engine: the newest is loaded, nothing in use is written to again."""

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncflow.errors import PlanError, WeightSyncError
from weightsync.boxes import Box
from weightsync.plan import ShardSpec, plan_transfer
from weightsync.region import Region, RegionLayout
from weightsync.shelf import AtHand, Shelf
from weightsync.version import Version

SPEC = ShardSpec("w", (4,), "float32", Box.whole((4,)))
LAYOUT = RegionLayout(plan_transfer([[SPEC]], bucket_bytes=1024, dtype="float32"))
NEVER = threading.Event()


def at_hand(step: int, released: list[int], *, own: bool = False) -> AtHand:
    """A version without any weights."""
    return AtHand(Version(0, step), {}, own=own, release=lambda: released.append(step))


def ignore(views: Mapping[str, Tensor]) -> None:
    """An engine without any weights."""


def test_newest_version_is_loaded_and_others_are_released_once() -> None:
    shelf, released = Shelf("weights-0", adopts=False), list[int]()
    assert shelf.put(at_hand(1, released))
    assert shelf.put(at_hand(3, released))
    assert not shelf.put(at_hand(2, released))
    assert released == [1, 2]
    assert shelf.load(ignore, newer_than=Version(0, 3)) is None
    assert shelf.load(ignore, newer_than=None) == Version(0, 3)
    assert shelf.loaded == Version(0, 3)
    shelf.drop()
    shelf.drop()
    assert released == [1, 2, 3]
    assert shelf.newest == Version(0, 3), "it need not come again"
    assert shelf.load(ignore, newer_than=None) is None


def test_version_that_is_replaced_while_the_engine_reads_it_is_released_afterwards() -> None:
    shelf, released = Shelf("weights-0", adopts=False), list[int]()
    shelf.put(at_hand(1, released))

    def replaced_meanwhile(views: Mapping[str, Tensor]) -> None:
        shelf.put(at_hand(2, released))
        assert not released

    shelf.load(replaced_meanwhile, newer_than=None)
    assert released == [1]


def test_adopted_version_is_released_when_the_next_one_is_loaded() -> None:
    shelf, released = Shelf("weights-0", adopts=True), list[int]()
    for step in (1, 2):
        shelf.put(at_hand(step, released))
        shelf.load(ignore, newer_than=None)
    assert released == [1]
    shelf.drop()
    shelf.put(at_hand(3, released))
    assert released == [1], "the engine still computes with 2"


def test_engine_that_fails_may_hold_parts_of_both() -> None:
    shelf, released = Shelf("weights-0", adopts=True), list[int]()
    shelf.put(at_hand(1, released))
    shelf.load(ignore, newer_than=None)
    shelf.put(at_hand(2, released))
    with pytest.raises(PlanError):
        shelf.load(lambda _: _fail(), newer_than=None)
    shelf.put(at_hand(3, released))
    assert released == []
    assert shelf.loaded == Version(0, 1)


def _fail() -> None:
    raise PlanError("does not fit")


@given(st.booleans(), st.lists(st.sampled_from(["memory", "put", "give back", "load", "drop"]), max_size=40))
def test_memory_that_is_handed_out_is_used_by_nobody(adopts: bool, actions: list[str]) -> None:
    shelf = Shelf("weights-0", adopts=adopts)
    written: list[Region] = []
    contents: dict[int, Version] = {}
    engine: Any = None
    made = weakref.WeakSet[Region]()
    for step, action in enumerate(actions, 1):
        if action == "memory" and not written:
            region = shelf.memory(LAYOUT)
            assert not adopts or engine is None or region is not engine[0], "the engine computes with it"
            contents.pop(id(region), None)
            made.add(region)
            written.append(region)
        elif action == "put" and written:
            region, version = written.pop(), Version(0, step)
            contents[id(region)] = version
            shelf.put(AtHand(version, {"": region}, True, lambda region=region: shelf.give_back(region)))  # type: ignore[misc, dict-item]
        elif action == "give back" and written:
            shelf.give_back(written.pop())
        elif action == "load":
            loads: list[Any] = []
            version = shelf.load(lambda views, into=loads: into.append(views[""]), newer_than=None)  # type: ignore[misc]
            if version is not None:
                assert contents[id(loads[0])] == version, "what was at hand was written to"
                engine = (loads[0], version)
        elif action == "drop":
            shelf.drop()
        if adopts and engine is not None:
            assert contents[id(engine[0])] == engine[1]
        assert len(made) <= 3


def test_wait_says_why_nothing_comes() -> None:
    shelf = Shelf("weights-0", adopts=False)
    with pytest.raises(WeightSyncError, match=r"^weights of step 1 did not come within 0 s; weights-0 has none$"):
        shelf.wait(lambda: False, "weights of step 1", timeout_s=0, over=lambda: False)
    assert shelf.fail(WeightSyncError("bucket 3 stays damaged"))
    assert not shelf.fail(WeightSyncError("bucket 3 stays damaged")), "known"
    with pytest.raises(WeightSyncError, match=r"did not come within 0 s: bucket 3 stays damaged$"):
        shelf.wait(lambda: False, "weights of step 1", timeout_s=0, over=lambda: False)
    assert not shelf.wait(lambda: False, "weights", timeout_s=0, over=lambda: True)
    shelf.fail(PlanError("w: shapes differ"))
    with pytest.raises(PlanError):
        shelf.wait(lambda: False, "weights", timeout_s=5, over=lambda: False)
    shelf.put(at_hand(1, []))
    assert shelf.wait(lambda: shelf.has_newer(None), "weights", timeout_s=0, over=lambda: False)


def test_version_that_is_being_received_is_waited_for() -> None:
    shelf = Shelf("weights-0", adopts=False)
    assert not shelf.came(Version(0, 1), stop=NEVER)
    with shelf.coming(Version(0, 2)):
        assert not shelf.came(Version(0, 1), stop=NEVER), "better an older one now than nothing"
    shelf.put(at_hand(0, []))
    seen: list[bool] = []
    with shelf.coming(Version(0, 2)):
        waits = threading.Thread(target=lambda: seen.append(shelf.came(Version(0, 1), stop=NEVER)))
        waits.start()
        assert not shelf.came(Version(0, 3), stop=NEVER), "that is another one"
        shelf.put(at_hand(2, []))
        assert not seen
    waits.join(10)
    assert seen == [True]
