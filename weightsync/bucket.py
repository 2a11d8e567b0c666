"""A bucket's bytes: values, then a trailer that says which version and bucket they are, and their checksum."""

import struct
from enum import IntEnum

import torch
import xxhash
from torch import Tensor

from asyncflow.errors import WeightSyncError
from weightsync.plan import Bucket
from weightsync.version import Version

_TRAILER = struct.Struct("<4sIQQQQ")
TRAILER_BYTES = _TRAILER.size
_CHECKSUM_BYTES = 8
_MAGIC = b"AFWB"


class TrailerKind(IntEnum):
    """What the message is."""

    WEIGHTS = 1
    END = 2


def bucket_buffer(bucket: Bucket, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised uint8 buffer for the bucket and its trailer."""
    return torch.empty(bucket.numel * dtype.itemsize + TRAILER_BYTES, dtype=torch.uint8)


def values_of(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values part, a view of `buffer`."""
    return buffer[:-TRAILER_BYTES].view(dtype)


def seal(buffer: Tensor, bucket: Bucket, version: Version, kind: TrailerKind = TrailerKind.WEIGHTS) -> None:
    """Write the trailer; the values must be in place (and on the CPU)."""
    trailer = _TRAILER.pack(_MAGIC, kind, version.lineage, version.step, bucket.index, 0)
    buffer[-TRAILER_BYTES:] = torch.frombuffer(bytearray(trailer), dtype=torch.uint8)
    checksum = _checksum(buffer).to_bytes(_CHECKSUM_BYTES, "little")
    buffer[-_CHECKSUM_BYTES:] = torch.frombuffer(bytearray(checksum), dtype=torch.uint8)


def unseal(buffer: Tensor, bucket: Bucket) -> Version | None:
    """Check the trailer against the values; returns the version, or None when the sender ended.

    Raises:
        WeightSyncError: another bucket, or bytes that are not what was sent.
    """
    magic, kind, lineage, step, index, checksum = _TRAILER.unpack(buffer[-TRAILER_BYTES:].numpy().tobytes())
    if magic != _MAGIC or index != bucket.index:
        raise WeightSyncError(f"bucket {bucket.index}: its trailer says {magic!r}, bucket {index}")
    if _checksum(buffer) != checksum:
        raise WeightSyncError(f"bucket {bucket.index} of step {step}: checksum does not match")
    return None if kind == TrailerKind.END else Version(lineage, step)


def _checksum(buffer: Tensor) -> int:
    """Return the checksum of everything before it: the values and what the trailer says of them."""
    return int(xxhash.xxh3_64_intdigest(buffer[:-_CHECKSUM_BYTES].numpy().data))
