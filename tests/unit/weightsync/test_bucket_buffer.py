"""Buckets on the wire: what arrives is what was sent; a changed byte, wherever it is, is never taken for weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncflow.errors import WeightSyncError
from weightsync.broadcast_group import BucketLayout, bucket_layouts
from weightsync.checksums import checksum
from weightsync.plan import Box, ShardSpec, plan_transfer
from weightsync.slot_memory import RegionLayout
from weightsync.version import Version

VERSION = Version(1, 42)
HELD = [
    ShardSpec("long", (900, 2), "float32", Box.from_shape((900, 2))),
    ShardSpec("columns", (3, 6), "float32", Box((0, 0), (3, 3))),
    ShardSpec("flag", (), "bool", Box.from_shape(())),
    ShardSpec("scalar", (), "int64", Box.from_shape(())),
]
OTHER = [ShardSpec("columns", (3, 6), "float32", Box((0, 3), (3, 3)))]
BUCKETS = bucket_layouts(RegionLayout(plan_transfer([HELD, OTHER], bucket_bytes=2**21, dtype="bfloat16")))
BUCKET = BUCKETS[0]
VALUES = [torch.arange(1800.0).view(900, 2), torch.arange(9.0).view(3, 3) + 0.5, torch.tensor(True), torch.tensor(-7)]


def sent(version: Version = VERSION, bucket: BucketLayout = BUCKET) -> Tensor:
    """Return a buffer that holds the values and was stamped; what is between pieces is anything."""
    words = torch.full((bucket.num_words,), -1)
    for piece, value in zip(bucket.view_pieces(words), VALUES, strict=False):
        piece.copy_(value[: len(piece)] if value.dim() else value)
    bucket.stamp_trailer(words, version)
    return words


def check(words: Tensor, version: Version = VERSION, bucket: BucketLayout = BUCKET) -> None:
    bucket.check(bucket.make_summary(words).tolist(), version)


def by_definition(words: list[int]) -> int:
    """The sum of the docstring, in whole numbers of any size."""

    def odd(place: int, table: int) -> int:
        mixed = (place + (table << 40) + 1) * 0x9E3779B97F4A7C15 % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        return mixed ^ mixed >> 31 | 1

    total = sum(odd(k // 1024, 1) * odd(k % 1024, 2) * word for k, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


def test_pieces_arrive_as_they_were_sent() -> None:
    words = sent()
    check(words)
    long, columns, flag, scalar = BUCKET.view_pieces(words.clone())
    assert torch.equal(long, VALUES[0].bfloat16()) and torch.equal(columns, VALUES[1].bfloat16())
    assert flag.item() is True and scalar.item() == -7


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 5000])
def test_checksum_is_a_function_of_the_words_and_their_places_alone(size: int) -> None:
    words = torch.randint(-(2**62), 2**62, (size,), generator=torch.Generator().manual_seed(size))
    assert checksum(words).item() == by_definition(words.tolist())


def test_checksum_does_not_depend_on_how_the_device_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.randint(-(2**62), 2**62, (4000,), generator=torch.Generator().manual_seed(0))
    of_the_cpu = checksum(words).item()
    monkeypatch.setattr(Tensor, "mv", lambda body, columns: (body * columns).sum(1), raising=False)
    assert checksum(words).item() == of_the_cpu


@given(data=st.data(), flip=st.integers(1, 255))
def test_any_changed_byte_is_caught(data: st.DataObject, flip: int) -> None:
    words = sent()
    content = words.view(torch.uint8)
    content[data.draw(st.integers(0, content.numel() - 1))] ^= flip
    with pytest.raises(WeightSyncError, match="bucket 0 of step 42"):
        check(words)


@given(st.integers(1, 449))
def test_words_that_changed_places_are_caught(shift: int) -> None:
    words = sent()
    words[:450] = words[:450].roll(shift)
    with pytest.raises(WeightSyncError, match="checksum does not match"):
        check(words)


def test_bucket_of_another_version_is_caught() -> None:
    with pytest.raises(WeightSyncError, match="of step 43 of lineage 1: bucket 0 of step 42 of lineage 1 came instead"):
        check(sent(), Version(1, 43))


def test_bucket_in_another_ones_place_is_caught() -> None:
    other = BucketLayout(BUCKET.bucket.__class__(4, 0, BUCKET.bucket.num_bytes, BUCKET.bucket.pieces), RegionLayout(
        plan_transfer([HELD, OTHER], bucket_bytes=2**21, dtype="bfloat16")
    ))  # fmt: skip
    with pytest.raises(WeightSyncError, match="bucket 4 of .*: bucket 0 of step 42 of lineage 1 came instead"):
        check(sent(), bucket=other)


def test_a_buffer_that_is_used_again_carries_the_new_version() -> None:
    words = sent()
    BUCKET.stamp_trailer(words, Version(1, 43))
    check(words, Version(1, 43))
