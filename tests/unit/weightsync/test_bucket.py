"""Buckets on the wire: a changed byte, wherever it is, is never taken for weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import WeightSyncError
from weightsync.boxes import Box
from weightsync.plan import ShardSpec, TransferPlan, plan_transfer
from weightsync.region import BucketParts, Region, RegionLayout
from weightsync.version import Version

VERSION = Version(1, 42)
LONG = (2**17, 2)  # rows long enough to travel by themselves


def make_plan() -> TransferPlan:
    held = [
        ShardSpec("long", LONG, "float32", Box.whole(LONG)),
        ShardSpec("columns", (4, 6), "float32", Box((0, 0), (4, 3))),
        ShardSpec("scalar", (), "int64", Box.whole(())),
    ]
    other = [ShardSpec("columns", (4, 6), "float32", Box((0, 3), (4, 3)))]
    return plan_transfer([held, other], bucket_bytes=2**21, dtype="float32")


PLAN = make_plan()
LAYOUT = RegionLayout(PLAN)
BUCKET = PLAN.of_sender(0)[0]


def region(fill: int = 0) -> Region:
    return Region(torch.full((PLAN.region_bytes,), fill, dtype=torch.uint8), LAYOUT)


def tensor_of(region: Region, name: str) -> torch.Tensor:
    return region.tensor(PLAN.names.index(name))


def filled() -> Region:
    made = region()
    tensor_of(made, "long").copy_(torch.arange(2**18).view(LONG))
    tensor_of(made, "columns").copy_(torch.arange(24).view(4, 6) + 0.5)
    tensor_of(made, "scalar").fill_(-7)
    return made


def sent(version: Version = VERSION) -> tuple[BucketParts, Region, BucketParts]:
    """Return the sender's parts, and the receiver's region and parts with everything arrived."""
    source, target = BucketParts(filled(), BUCKET), region(0xEE)
    source.seal(version)
    arrived = BucketParts(target, BUCKET)
    for one, other in zip([*arrived.runs, arrived.tail], [*source.runs, source.tail], strict=True):
        one.copy_(other)
    return source, target, arrived


def test_parts_carry_the_bucket_and_nothing_else() -> None:
    source, target, arrived = sent()
    assert [run.numel() for run in source.runs] == [2**20]
    arrived.take(VERSION)
    expected = filled()
    assert torch.equal(tensor_of(target, "long"), tensor_of(expected, "long"))
    assert torch.equal(tensor_of(target, "columns")[:, :3], tensor_of(expected, "columns")[:, :3])
    assert tensor_of(target, "scalar").item() == -7
    assert set(tensor_of(target, "columns")[:, 3:].contiguous().view(torch.uint8).flatten().tolist()) == {0xEE}


def test_checksum_is_that_of_the_region() -> None:
    assert BucketParts(filled(), BUCKET).seal(VERSION) == filled().checksum(BUCKET)


@given(data=st.data(), flip=st.integers(1, 255))
def test_any_changed_byte_is_caught(data: st.DataObject, flip: int) -> None:
    _, _, arrived = sent()
    part = data.draw(st.sampled_from([*arrived.runs, arrived.tail]))
    part[data.draw(st.integers(0, part.numel() - 1))] ^= flip
    with pytest.raises(WeightSyncError, match="bucket 0"):
        arrived.take(VERSION)


def test_bucket_of_another_version_is_caught() -> None:
    _, _, arrived = sent()
    with pytest.raises(WeightSyncError, match="of step 43 of lineage 1: bucket 0 of step 42 of lineage 1 came instead"):
        arrived.take(Version(1, 43))


def test_bucket_in_another_ones_place_is_caught() -> None:
    other = BUCKET.__class__(4, 0, BUCKET.num_bytes, BUCKET.pieces)
    _, target, arrived = sent()
    there = BucketParts(target, other)
    there.tail.copy_(arrived.tail)
    with pytest.raises(WeightSyncError, match="bucket 4 of .*: bucket 0 of step 42 of lineage 1 came instead"):
        there.take(VERSION)


def test_tail_that_is_sealed_again_carries_the_new_version() -> None:
    source, target, _ = sent()
    source.seal(Version(1, 43))
    arrived = BucketParts(target, BUCKET)
    arrived.tail.copy_(source.tail)
    arrived.take(Version(1, 43))
