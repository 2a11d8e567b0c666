"""Sealed buckets: a changed byte, wherever it is, is never taken for weights."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import WeightSyncError
from weightsync.bucket import TrailerKind, bucket_buffer, seal, unseal, values_of
from weightsync.plan import Bucket, Piece
from weightsync.version import Version

BUCKET = Bucket(3, 0, (Piece("w", 0, 5), Piece("b", 0, 2)))


def sealed(dtype: torch.dtype = torch.float32, kind: TrailerKind = TrailerKind.WEIGHTS) -> torch.Tensor:
    buffer = bucket_buffer(BUCKET, dtype)
    values_of(buffer, dtype).copy_(torch.arange(7))
    seal(buffer, BUCKET, Version(1, 42), kind)
    return buffer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bucket_opens_with_its_version_and_values(dtype: torch.dtype) -> None:
    buffer = sealed(dtype)
    assert unseal(buffer, BUCKET) == Version(1, 42)
    assert values_of(buffer, dtype).tolist() == list(range(7))


def test_end_carries_no_version() -> None:
    assert unseal(sealed(kind=TrailerKind.END), BUCKET) is None


@given(position=st.integers(0, sealed().numel() - 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_caught(position: int, flip: int) -> None:
    buffer = sealed()
    buffer[position] ^= flip
    with pytest.raises(WeightSyncError, match="bucket 3"):
        unseal(buffer, BUCKET)


def test_bucket_in_another_ones_place_is_caught() -> None:
    with pytest.raises(WeightSyncError, match="bucket 3"):
        unseal(sealed(), Bucket(4, 0, BUCKET.pieces))


def test_resealed_buffer_carries_the_new_version() -> None:
    buffer = sealed()
    seal(buffer, BUCKET, Version(1, 43))
    assert unseal(buffer, BUCKET) == Version(1, 43)


def test_newer_lineage_beats_newer_step() -> None:
    ordered = [Version(0, 0), Version(0, 9), Version(1, 4), Version(1, 5), Version(2, 0)]
    assert all(one < other for one, other in itertools.pairwise(ordered))
