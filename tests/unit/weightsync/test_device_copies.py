"""Versions that stay on the trainer's devices: what is read there, and what comes from shared memory instead."""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncflow import device as devices
from asyncflow.errors import DeviceMemoryError, WeightSyncError
from asyncflow.timeline import NoTimeline
from weightsync.agent.agent_state import AgentState
from weightsync.broadcast_group import bucket_layouts
from weightsync.device_copies import (
    BucketTensors,
    DeviceCopyWriter,
    DeviceReader,
    HandedOver,
    bucket_starts,
    without_reading,
)
from weightsync.messages import DeviceCopy
from weightsync.plan import Box, Bucket, Need, TransferPlan, match_needs, plan_transfer
from weightsync.sender import ShardWriter, describe
from weightsync.slot_memory import Region, RegionLayout
from weightsync.version import Version
from workers.engines.base import LocalShard

CPU = torch.device("cpu")
V1, V2 = Version(0, 1), Version(0, 2)
SHAPES = {"embed": (40, 6), "layer": (16, 12), "norm": (13,), "scale": (), "empty": (0, 4), "head": (40, 6)}
NUM_RANKS = 3


class HostIpc:
    """The vendor's calls in memory of this process. `opened`: how often each handle is open."""

    def __init__(self) -> None:
        self.memories: dict[bytes, Tensor] = {}
        self.opened: dict[bytes, int] = {}
        self.refused: set[bytes] = set()
        self.tried: list[bytes] = []

    def allocate(self, num_bytes: int) -> int:
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.memories[b"%d" % len(self.memories)] = memory
        return memory.data_ptr()

    def free(self, address: int) -> None:
        raise AssertionError("nothing is freed")

    def export(self, address: int, num_bytes: int) -> bytes:
        return next(name for name, memory in self.memories.items() if memory.data_ptr() == address)

    def open(self, handle: bytes) -> int:
        self.tried.append(handle)
        if handle in self.refused:
            raise DeviceMemoryError("no way to that device")
        self.opened[handle] = self.opened.get(handle, 0) + 1
        return self.memories[handle].data_ptr()

    def close(self, handle: bytes, address: int) -> None:
        self.opened[handle] -= 1

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)


@pytest.fixture(name="ipc")
def _ipc(monkeypatch: pytest.MonkeyPatch) -> HostIpc:
    ipc = HostIpc()
    monkeypatch.setattr(devices, "vendor_of", lambda _: SimpleNamespace(ipc=lambda: ipc))
    return ipc


def weights(version: Version) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version.step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def shards_of(rank: int, version: Version) -> list[LocalShard]:
    """Return a rank's rows; each small tensor belongs to one rank, and `layer` is cut by columns."""
    held = []
    for number, (name, values) in enumerate(weights(version).items()):
        shape = tuple(values.shape)
        if name == "layer":
            box = Box((0, 4 * rank), (16, 4))
        elif len(shape) == 2:
            rows = [0, shape[0] // 2, shape[0] // 2 + shape[0] // 4, shape[0]]
            box = Box.rows(shape, rows[rank], rows[rank + 1])
        elif number % NUM_RANKS == rank:
            box = Box.from_shape(shape)
        else:
            continue
        held.append(LocalShard(name, shape, box, values[box.slices].contiguous()))
    return held


@dataclass
class Lab:
    """A trainer of three ranks with device copies; a slot whose bytes are wrong until the test `fill`s it."""

    plan: TransferPlan
    layout: RegionLayout
    writers: list[DeviceCopyWriter]
    region: Region
    memory: Tensor
    checked: list[int] = field(default_factory=list)

    @property
    def copies(self) -> list[DeviceCopy]:
        return [writer.device_copy for writer in self.writers]

    @property
    def needs(self) -> dict[str, Need]:
        return {name: Need(shape) for name, shape in SHAPES.items()} | {"tied": Need((40, 6), ("embed",))}

    def publish(self, version: Version, *, ranks: Any = range(NUM_RANKS)) -> None:
        for rank in ranks:
            shards, writer = shards_of(rank, version), ShardWriter(self.plan, rank)
            writer.match_shards(shards)
            for bucket in writer.buckets:
                layout = bucket_layouts(self.layout)[bucket.index]
                words = torch.zeros(layout.num_words, dtype=torch.int64)
                writer.write(bucket.index, layout.view_pieces(words), shards)
                self.writers[rank].write(layout, words, version)

    def fill(self, version: Version) -> None:
        """Write the slot."""
        for number, name in enumerate(self.plan.names):
            self.region.view_tensor(number).copy_(weights(version)[name])

    def hand_over(self, reader: DeviceReader, version: Version) -> HandedOver:
        def check(bucket: Bucket) -> None:
            self.checked.append(bucket.index)

        matched = match_needs(self.plan, self.needs)
        return HandedOver(reader, version, self.copies, self.region, matched, check_on_host=check)

    def buckets_of(self, rank: int) -> list[int]:
        return [bucket.index for bucket in self.plan.of_sender(rank)]


@pytest.fixture(name="lab")
def _lab(ipc: HostIpc) -> Lab:
    plan = plan_transfer(
        [describe(shards_of(rank, V1)) for rank in range(NUM_RANKS)], bucket_bytes=200, dtype="float32"
    )
    layout = RegionLayout(plan)
    assert all(len(plan.of_sender(rank)) > 2 for rank in range(NUM_RANKS))
    writers = [DeviceCopyWriter(layout, rank, CPU) for rank in range(NUM_RANKS)]
    memory = torch.randint(0, 256, (plan.region_bytes,), dtype=torch.uint8)
    return Lab(plan, layout, writers, Region(memory, layout), memory)


def reader_of(**named: Any) -> DeviceReader:
    return DeviceReader("rollout-0", CPU, timeline=NoTimeline(), **named)


def same(found: Mapping[str, Tensor], version: Version) -> bool:
    expected = weights(version)
    expected["tied"] = expected["embed"]
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def load(handed: HandedOver) -> tuple[dict[str, Tensor], BucketTensors]:
    with handed.opened() as tensors:
        return {name: values.clone() for name, values in tensors.items()}, tensors


def test_everything_is_read_on_the_devices_and_nothing_from_shared_memory(lab: Lab, ipc: HostIpc) -> None:
    lab.publish(V1)
    found, tensors = load(lab.hand_over(reader_of(), V1))
    assert same(found, V1)
    assert (tensors.bytes_on_device, tensors.bytes_on_host) == (lab.plan.num_bytes, 0)
    assert lab.checked == []
    assert set(ipc.opened.values()) == {0}, "nothing is open after the load"


def test_tensors_may_be_asked_for_in_any_order_and_shapes_without_reading(lab: Lab) -> None:
    lab.publish(V1)
    with lab.hand_over(reader_of(), V1).opened() as tensors:
        assert {name: tuple(like.shape) for name, like in without_reading(tensors).items()} == SHAPES | {
            "tied": (40, 6)
        }
        assert tensors.bytes_on_device == 0
        names = [*reversed(list(tensors)), "embed"]
        assert all(
            "tied" in tensors and torch.equal(tensors[name], weights(V1)[name]) for name in names if name != "tied"
        )


def test_few_buckets_are_kept_at_a_time(lab: Lab) -> None:
    lab.publish(V1)
    with lab.hand_over(reader_of(), V1).opened() as tensors:
        kept = [len(tensors._kept) for _ in tensors.values()]
    assert max(kept) <= 2 * NUM_RANKS < len(lab.plan.buckets) / 2


@pytest.mark.parametrize("place", ["first word", "trailer"])
def test_damaged_bucket_and_the_rest_of_its_copy_come_from_shared_memory(
    lab: Lab, ipc: HostIpc, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    lab.publish(V1)
    lab.fill(V1)
    starts, end = bucket_starts(lab.layout, 1)
    damaged = lab.buckets_of(1)[1]
    following = starts.get(lab.buckets_of(1)[2], end)
    ipc.memories[lab.copies[1].handle][starts[damaged] + 3 if place == "first word" else following - 1] ^= 64
    found, tensors = load(lab.hand_over(reader_of(), V1))
    assert same(found, V1)
    assert set(lab.checked) == set(lab.buckets_of(1)[1:])
    assert tensors.bytes_on_host == sum(lab.plan.buckets[index].num_bytes for index in set(lab.checked))
    assert sum("checksum does not match" in record.message for record in caplog.records) == 1


def test_a_version_that_was_overwritten_comes_from_shared_memory(lab: Lab) -> None:
    """It cannot happen while both sides keep to the turn; the bytes tell whether they did."""
    lab.publish(V1)
    lab.fill(V1)
    lab.publish(V2, ranks=[0, 2])
    found, tensors = load(lab.hand_over(reader_of(), V1))
    assert same(found, V1)
    assert tensors.bytes_on_device == sum(lab.plan.buckets[index].num_bytes for index in lab.buckets_of(1))


def test_memory_that_nothing_was_written_to_is_not_taken_for_the_first_version(lab: Lab) -> None:
    first = Version(0, 0)
    lab.fill(first)
    found, tensors = load(lab.hand_over(reader_of(), first))
    assert same(found, first) and tensors.bytes_on_device == 0


def test_a_version_that_is_overwritten_while_it_is_read_is_not_mixed(lab: Lab) -> None:
    lab.publish(V1)
    lab.fill(V1)
    found = {}
    with lab.hand_over(reader_of(), V1).opened() as tensors:
        for number, (name, values) in enumerate(tensors.items()):
            found[name] = values.clone()
            if number == 2:
                lab.publish(V2)
    assert same(found, V1)
    assert tensors.bytes_on_device > 0 and tensors.bytes_on_host > 0


def test_a_copy_that_cannot_be_opened_is_said_once_and_not_tried_again(
    lab: Lab, ipc: HostIpc, caplog: pytest.LogCaptureFixture
) -> None:
    lab.publish(V1)
    lab.fill(V1)
    ipc.refused = {lab.copies[0].handle}
    reader = reader_of()
    assert reader.covered_senders(lab.copies) == {0, 1, 2}
    for _ in range(2):
        found, tensors = load(lab.hand_over(reader, V1))
        assert same(found, V1) and tensors.bytes_on_host > 0
    assert ipc.tried.count(lab.copies[0].handle) == 1
    assert reader.covered_senders(lab.copies) == {1, 2}, "its buckets are checked ahead from now on"
    assert sum("no way to that device" in record.message for record in caplog.records) == 1


def test_a_bucket_that_is_damaged_on_both_ways_ends_the_load_and_leaves_nothing_open(lab: Lab, ipc: HostIpc) -> None:
    lab.publish(V1)
    handed = lab.hand_over(reader_of(), V2)  # which is nowhere

    def refuse(bucket: Bucket) -> None:
        raise WeightSyncError(f"bucket {bucket.index} stays damaged")

    handed.check_on_host = refuse
    with pytest.raises(WeightSyncError, match="stays damaged"):
        load(handed)
    assert set(ipc.opened.values()) == {0}


def test_bytes_of_each_way_are_in_the_timeline_and_in_the_log(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    spans: list[dict[str, Any]] = []

    class Timeline(NoTimeline):
        def record_span(self, name: str, seconds: float, **attributes: int | float | str) -> None:
            spans.append({"name": name} | attributes)

    reader = DeviceReader("rollout-0", CPU, timeline=Timeline())
    lab.publish(V1)
    for _ in range(2):
        load(lab.hand_over(reader, V1))
    expected = {"name": "hand over weights", "version": 1, "device_bytes": lab.plan.num_bytes, "host_bytes": 0}
    assert spans == [expected] * 2
    assert sum("were read on the device" in record.message for record in caplog.records) == 1


class Wire:
    """Passes tensors between the ranks of one engine, which all share the same ones in the same order."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=30)
        self._shared: Tensor | None = None

    def share_of(self, rank: int) -> Callable[[Tensor, int], None]:
        def share(values: Tensor, owner: int) -> None:
            if rank == owner:
                self._shared = values
            self._barrier.wait()
            assert self._shared is not None and self._shared.shape == values.shape, "the ranks share different buckets"
            if rank != owner:
                values.copy_(self._shared)
            self._barrier.wait()

        return share


@pytest.mark.parametrize("refused", [False, True])
def test_ranks_of_an_engine_read_each_bucket_once_and_pass_it_on(lab: Lab, ipc: HostIpc, refused: bool) -> None:
    """Also if one of them can open less than the others."""
    lab.publish(V1)
    lab.fill(V1)
    wire, results = Wire(2), dict[int, tuple[dict[str, Tensor], BucketTensors]]()

    def run(rank: int) -> None:
        handed = lab.hand_over(reader_of(rank=rank, num_ranks=2), V1)
        if refused and rank == 1:
            handed.copies = handed.copies[:1]
        with handed.opened(wire.share_of(rank)) as tensors:
            results[rank] = {name: values.clone() for name, values in tensors.items()}, tensors

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [0, 1]
    assert all(same(found, V1) for found, _ in results.values())
    assert list(results[0][0]) == list(results[1][0])
    read = [tensors.bytes_on_device + tensors.bytes_on_host for _, tensors in results.values()]
    assert sum(read) == lab.plan.num_bytes and min(read) > 0
    assert (results[1][1].bytes_on_host > 0) is refused and results[0][1].bytes_on_host == 0


def test_the_agent_offers_what_trainer_ranks_on_its_node_have_until_their_channel_ends() -> None:
    state, one, other = AgentState(num_slots=2), object(), object()
    first, second, again = DeviceCopy(0, b"a"), DeviceCopy(1, b"b"), DeviceCopy(0, b"c")
    state.note_device_copy(other, "plan", second)
    state.note_device_copy(one, "plan", first)
    assert state.list_device_copies("plan") == [first, second]
    assert state.list_device_copies("another") == []
    successor = object()
    state.note_device_copy(successor, "plan", again)
    state.closed(one)  # noticed only after its successor came
    assert state.list_device_copies("plan") == [again, second]
    state.closed(other)
    assert state.list_device_copies("plan") == [again]


def test_memory_that_cannot_be_exported_is_freed(ipc: HostIpc, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []

    def refuse(address: int, num_bytes: int) -> bytes:
        raise DeviceMemoryError("not here")

    monkeypatch.setattr(ipc, "export", refuse)
    monkeypatch.setattr(ipc, "free", freed.append)
    with pytest.raises(DeviceMemoryError, match="not here"):
        devices.ExportedMemory(64, CPU)
    assert freed == [next(iter(ipc.memories.values())).data_ptr()]


def test_a_device_without_such_calls_says_so() -> None:
    with pytest.raises(DeviceMemoryError, match="^the runtime of cpu shares no memory between processes$"):
        devices.ExportedMemory(64, CPU)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
