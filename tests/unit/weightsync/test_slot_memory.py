"""Slots: the same bytes for everybody, no way to write for readers, nothing left behind."""

import gc
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from asyncflow.errors import WeightSyncError
from weightsync import slot_memory
from weightsync.slot_memory import (
    SlotMappings,
    SlotMemory,
    SlotOffer,
    huge_pages_line,
    map_slot,
    populate,
    private_memory,
)

NUM_BYTES = 3 * 4096 + 17


def test_everybody_sees_the_same_bytes() -> None:
    slot = SlotMemory(NUM_BYTES)
    writer, reader = map_slot(slot.offer, write=True), map_slot(slot.offer, write=False)
    assert slot.memory.shape == writer.shape == reader.shape == (NUM_BYTES,)
    assert writer.data_ptr() % 64 == 0
    writer.copy_(torch.arange(NUM_BYTES) % 251)
    assert reader.equal(slot.memory) and reader[250] == 250


@pytest.mark.parametrize(
    ("switch", "said"),
    [
        ("always within_size [advise] never deny force", "huge pages where the kernel finds them"),
        ("always within_size advise [never] deny force", "ordinary pages; `echo advise > "),
        (None, "ordinary pages"),
    ],
)
def test_what_the_system_grants_is_said_in_one_line(tmp_path: Path, switch: str | None, said: str) -> None:
    path = tmp_path / "shmem_enabled"
    if switch is not None:
        path.write_text(switch)
    line = huge_pages_line(path)
    assert said in line and "\n" not in line


def test_large_slots_lie_in_huge_pages_where_the_system_grants_them() -> None:
    if "ordinary" in huge_pages_line():
        pytest.skip("this system has no huge pages for shared memory")
    slot = SlotMemory(8 * 2**20)
    writer = map_slot(slot.offer, write=True)
    writer.fill_(7)
    address, huge = writer.data_ptr(), 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, stop = (int(part, 16) for part in line.split()[0].split("-"))
            inside = start <= address < stop
        elif inside and line.startswith("ShmemPmdMapped:"):
            huge = int(line.split()[1])
    assert huge > 0 or _huge_pages_are_short()


def _huge_pages_are_short() -> bool:
    """Return whether memory is too fragmented for a huge page: a private mapping gets none, either."""
    memory = private_memory(8 * 2**20)
    memory.fill_(1)
    return "AnonHugePages:         0 kB" in Path("/proc/self/smaps_rollup").read_text()


def test_readers_mapping_is_read_only() -> None:
    slot = SlotMemory(NUM_BYTES)
    address = map_slot(slot.offer, write=False)
    start = address.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= start < last:
            assert line.split()[1].startswith("r--s")
            return
    raise AssertionError("the mapping is not there")


def test_mapping_outlives_the_agents_memory_which_is_offered_no_more() -> None:
    slot = SlotMemory(NUM_BYTES)
    reader = map_slot(slot.offer, write=False)
    slot.memory.fill_(7)
    offer = slot.offer
    del slot
    gc.collect()
    assert bool((reader == 7).all())
    with pytest.raises(WeightSyncError, match="cannot be mapped"):
        map_slot(offer, write=False)


@pytest.mark.parametrize("changes", [{"token": b"x" * 16}, {"num_bytes": NUM_BYTES + 1}, {"pid": 2**22 + 1}, {"fd": 0}])
def test_memory_that_is_not_what_was_offered_is_not_mapped(changes: dict[str, object]) -> None:
    slot = SlotMemory(NUM_BYTES)
    with pytest.raises(WeightSyncError, match="cannot be mapped"):
        map_slot(msgspec.structs.replace(slot.offer, **changes), write=False)


def test_memory_that_cannot_be_made_is_a_named_error() -> None:
    with pytest.raises(WeightSyncError, match="a slot of .* bytes cannot be created"):
        SlotMemory(2**62)


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 100_001])
def test_pages_can_be_made_present_ahead(num_bytes: int) -> None:
    memory = private_memory(num_bytes)
    assert memory.shape == (num_bytes,)
    if num_bytes:
        populate(memory, write=True)
        populate(memory[num_bytes // 2 :], write=False)
    assert not bool(memory.any())


def test_a_process_locks_the_pages_that_it_copies_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[tuple[int, int]] = []

    def pin(address: int, num_bytes: int, device: torch.device, *, writable: bool) -> Callable[[], object]:
        locked.append((address, num_bytes))
        return lambda: locked.remove((address, num_bytes))

    slot = SlotMemory(NUM_BYTES)
    monkeypatch.setattr(slot_memory, "pin", pin)
    mappings = SlotMappings(write=False, device=torch.device("cpu"))
    extents = ((10, 20), (30, 4097), (3 * 4096 + 1, NUM_BYTES))
    start = mappings.get(slot.offer, extents).data_ptr()
    assert locked == [(start, 2 * 4096), (start + 3 * 4096, 17)]
    assert mappings.get(slot.offer, extents).data_ptr() == start
    other = mappings.get(slot.offer, ((5000, 6000),)).data_ptr()
    assert locked == [(other + 4096, 4096)], "another plan's: the first mapping is gone"
    mappings.clear()
    gc.collect()
    assert locked == []


def test_offer_travels() -> None:
    offer = SlotMemory(1).offer
    assert msgspec.convert(msgspec.to_builtins(offer), SlotOffer) == offer


def test_memory_that_there_is_not_is_named() -> None:
    with pytest.raises(WeightSyncError, match=r"no memory of 1,152,921,504,606,846,976 bytes for a version"):
        private_memory(2**60)
