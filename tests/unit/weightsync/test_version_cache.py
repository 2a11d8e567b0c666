"""The cache between a receiver's threads and its engine: the newest is loaded, nothing in use is written to again."""

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncflow.errors import PlanError, WeightSyncError
from weightsync import version_cache
from weightsync.plan import Box, Need, ShardSpec, plan_transfer
from weightsync.slot_memory import Region, RegionLayout
from weightsync.version import Version
from weightsync.version_cache import EngineViews, ReadyVersion, VersionCache

SPEC = ShardSpec("w", (4,), "float32", Box.from_shape((4,)))
LAYOUT = RegionLayout(plan_transfer([[SPEC]], bucket_bytes=1024, dtype="float32"))
NEVER = threading.Event()


def ready(step: int, released: list[int], *, own: bool = False) -> ReadyVersion:
    """A version without any weights."""
    return ReadyVersion(Version(0, step), {}, own=own, release=lambda: released.append(step))


def ignore(views: Mapping[str, Tensor]) -> None:
    """An engine without any weights."""


def test_newest_version_is_loaded_and_others_are_released_once() -> None:
    cache, released = VersionCache("weights-0", adopts=False), list[int]()
    assert cache.put(ready(1, released))
    assert cache.put(ready(3, released))
    assert not cache.put(ready(2, released))
    assert released == [1, 2]
    assert cache.load_newest(ignore, newer_than=Version(0, 3)) is None
    assert cache.load_newest(ignore, newer_than=None) == Version(0, 3)
    assert cache.loaded == Version(0, 3)
    cache.drop_loaded()
    cache.drop_loaded()
    assert released == [1, 2, 3]
    assert cache.newest == Version(0, 3), "it need not come again"
    assert cache.load_newest(ignore, newer_than=None) is None


def test_version_that_is_replaced_while_the_engine_reads_it_is_released_afterwards() -> None:
    cache, released = VersionCache("weights-0", adopts=False), list[int]()
    cache.put(ready(1, released))

    def replaced_meanwhile(views: Mapping[str, Tensor]) -> None:
        cache.put(ready(2, released))
        assert not released

    cache.load_newest(replaced_meanwhile, newer_than=None)
    assert released == [1]


def test_adopted_version_is_released_when_the_next_one_is_loaded() -> None:
    cache, released = VersionCache("weights-0", adopts=True), list[int]()
    for step in (1, 2):
        cache.put(ready(step, released))
        cache.load_newest(ignore, newer_than=None)
    assert released == [1]
    cache.drop_loaded()
    cache.put(ready(3, released))
    assert released == [1], "the engine still computes with 2"


def test_engine_that_fails_may_hold_parts_of_both() -> None:
    cache, released = VersionCache("weights-0", adopts=True), list[int]()
    cache.put(ready(1, released))
    cache.load_newest(ignore, newer_than=None)
    cache.put(ready(2, released))
    with pytest.raises(PlanError):
        cache.load_newest(lambda _: _fail(), newer_than=None)
    cache.put(ready(3, released))
    assert released == []
    assert cache.loaded == Version(0, 1)


def _fail() -> None:
    raise PlanError("does not fit")


@given(st.booleans(), st.lists(st.sampled_from(["memory", "put", "recycle", "load", "drop"]), max_size=40))
def test_memory_that_is_handed_out_is_used_by_nobody(adopts: bool, actions: list[str]) -> None:
    cache = VersionCache("weights-0", adopts=adopts)
    written: list[Region] = []
    contents: dict[int, Version] = {}
    engine: Any = None
    made = weakref.WeakSet[Region]()
    for step, action in enumerate(actions, 1):
        if action == "memory" and not written:
            region = cache.memory(LAYOUT)
            assert not adopts or engine is None or region is not engine[0], "the engine computes with it"
            contents.pop(id(region), None)
            made.add(region)
            written.append(region)
        elif action == "put" and written:
            region, version = written.pop(), Version(0, step)
            contents[id(region)] = version
            cache.put(ReadyVersion(version, {"": region}, True, lambda region=region: cache.recycle_memory(region)))  # type: ignore[misc, dict-item]
        elif action == "recycle" and written:
            cache.recycle_memory(written.pop())
        elif action == "load":
            loads: list[Any] = []
            version = cache.load_newest(lambda views, into=loads: into.append(views[""]), newer_than=None)  # type: ignore[misc]
            if version is not None:
                assert contents[id(loads[0])] == version, "what was at hand was written to"
                engine = (loads[0], version)
        elif action == "drop":
            cache.drop_loaded()
        if adopts and engine is not None:
            assert contents[id(engine[0])] == engine[1]
        assert len(made) <= 3


def taken_in(cache: VersionCache, step: int) -> Region:
    """Receive a version into memory of the cache, as a broadcast does."""
    region = cache.memory(LAYOUT)
    cache.put(ReadyVersion(Version(0, step), {}, own=True, release=lambda: cache.recycle_memory(region)))
    return region


def test_version_that_was_not_loaded_makes_room_for_the_next_one() -> None:
    cache = VersionCache("weights-0", adopts=False)
    taken_in(cache, 1)
    cache.load_newest(ignore, newer_than=None)
    first = taken_in(cache, 2)
    assert cache.memory(LAYOUT) is first, "the estimate of memory counts one"
    assert cache.newest == Version(0, 1), "the agent is to offer 2 again if 3 breaks"
    assert not cache.wait_for_coming(Version(0, 2), stop=NEVER)
    assert cache.load_newest(ignore, newer_than=Version(0, 1)) is None


def test_version_that_is_being_loaded_stays() -> None:
    cache = VersionCache("weights-0", adopts=False)
    first, others = taken_in(cache, 1), list[Region]()
    assert cache.load_newest(lambda _: others.append(cache.memory(LAYOUT)), newer_than=None) == Version(0, 1)
    assert others != [first]
    assert cache.newest == cache.loaded == Version(0, 1)


@pytest.mark.parametrize(("share", "extents"), [(None, ((0, 16), (64, 80))), (["b"], ((64, 80),)), ([], ())])
def test_a_process_touches_what_it_reads_of_a_slot(
    share: list[str] | None, extents: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_transfer(
        [[ShardSpec(name, (4,), "float32", Box.from_shape((4,))) for name in "ab"]], bucket_bytes=16, dtype="float32"
    )
    monkeypatch.setattr(version_cache, "fetch_plan", lambda *_: plan)
    views = EngineViews(None if share is None else {name: Need((4,)) for name in "ab"}, whole=True, share=share)
    connection: Any = None
    assert views.slot_extents(views.layout(plan.digest(), connection)) == extents


def test_wait_says_why_nothing_comes() -> None:
    cache = VersionCache("weights-0", adopts=False)
    with pytest.raises(WeightSyncError, match=r"^weights of step 1 did not come within 0 s; weights-0 has none$"):
        cache.wait(lambda: False, "weights of step 1", timeout_s=0, over=lambda: False)
    assert cache.fail(WeightSyncError("bucket 3 stays damaged"))
    assert not cache.fail(WeightSyncError("bucket 3 stays damaged")), "known"
    with pytest.raises(WeightSyncError, match=r"did not come within 0 s: bucket 3 stays damaged$"):
        cache.wait(lambda: False, "weights of step 1", timeout_s=0, over=lambda: False)
    assert not cache.wait(lambda: False, "weights", timeout_s=0, over=lambda: True)
    cache.fail(PlanError("w: shapes differ"))
    with pytest.raises(PlanError):
        cache.wait(lambda: False, "weights", timeout_s=5, over=lambda: False)
    cache.put(ready(1, []))
    assert cache.wait(lambda: cache.has_newer(None), "weights", timeout_s=0, over=lambda: False)


def test_version_that_is_being_received_is_waited_for() -> None:
    cache = VersionCache("weights-0", adopts=False)
    assert not cache.wait_for_coming(Version(0, 1), stop=NEVER)
    with cache.coming_version(Version(0, 2)):
        assert not cache.wait_for_coming(Version(0, 1), stop=NEVER), "better an older one now than nothing"
    cache.put(ready(0, []))
    seen: list[bool] = []
    with cache.coming_version(Version(0, 2)):
        waits = threading.Thread(target=lambda: seen.append(cache.wait_for_coming(Version(0, 1), stop=NEVER)))
        waits.start()
        assert not cache.wait_for_coming(Version(0, 3), stop=NEVER), "that is another one"
        cache.put(ready(2, []))
        assert not seen
    waits.join(10)
    assert seen == [True]


def test_version_that_is_held_stays_until_it_is_let_go_or_another_is_held() -> None:
    cache, released = VersionCache("weights-0", adopts=False), list[int]()
    cache.put(ready(1, released))
    assert cache.hold(lambda version: version.step == 1) is not None
    cache.put(ready(2, released))
    assert cache.hold(lambda version: version.step == 1) is None, "there is a newer one"
    assert released == []
    held = cache.hold(lambda version: version.step == 2)
    assert held is not None and released == [1]
    cache.let_go(held)
    cache.put(ready(3, released))
    assert (released, cache.loaded) == ([1, 2], Version(0, 2))
