"""What travels of a bucket: long runs, straight from one region to the other, then a tail.

    sender's region    | w[0:2, :] ......... | b[0:2] | scalar |        runs: as they lie, no copy
    tail                                     | b[0:2] | scalar | trailer: version, bucket, checksum of all |
    receiver's region  | w[0:2, :] ......... | <- copied from the tail, then everything is checked

Short pieces and those that are no run of memory (columns) are packed into the tail: a message each would cost more.
"""

import struct

import torch
import xxhash

from asyncflow.errors import WeightSyncError
from weightsync.plan import Bucket
from weightsync.region import Region
from weightsync.version import Version

_TRAILER = struct.Struct("<4sIQQQQ")
_TRAILER_BYTES = _TRAILER.size
_CHECKSUM_BYTES = 8
_MAGIC = b"AFW2"
_RUN_BYTES = 2**18
"""Shorter runs go into the tail."""


class BucketParts:
    """One end's view of a bucket's transfer; both ends build it from the same plan."""

    def __init__(self, region: Region, bucket: Bucket) -> None:
        """Args:
        region: where the bucket is, or is to be.
        bucket: of the region's plan.
        """
        self._region = region
        self._bucket = bucket
        pieces = [(piece, region.layout.run(piece)) for piece in bucket.pieces]
        self.runs = [region.bytes_at(*run) for _, run in pieces if run is not None and run[1] >= _RUN_BYTES]
        """uint8 views of the region."""
        self._packed = tuple(piece for piece, run in pieces if run is None or run[1] < _RUN_BYTES)
        packed_bytes = bucket.num_bytes - sum(run.numel() for run in self.runs)
        self.tail = torch.empty(packed_bytes + _TRAILER_BYTES, dtype=torch.uint8)
        """uint8: what follows the runs."""

    def seal(self, version: Version) -> int:
        """Fill the tail from the region; returns the bucket's checksum."""
        bucket = self._bucket
        checksum = self._region.checksum(bucket)
        trailer = bytearray(_TRAILER.pack(_MAGIC, bucket.index, version.lineage, version.step, checksum, 0))
        trailer[-_CHECKSUM_BYTES:] = xxhash.xxh3_64_digest(bytes(trailer[:-_CHECKSUM_BYTES]))
        self._region.pack(self._packed, self.tail[:-_TRAILER_BYTES])
        self.tail[-_TRAILER_BYTES:] = torch.frombuffer(trailer, dtype=torch.uint8)
        return checksum

    def take(self, version: Version) -> None:
        """Write what is in the tail to the region, where the runs are already; check all of it.

        Raises:
            WeightSyncError: another version or bucket, or bytes that are not what was sent.
        """
        bucket = self._bucket
        trailer = self.tail[-_TRAILER_BYTES:].numpy().tobytes()
        magic, index, lineage, step, checksum, _ = _TRAILER.unpack(trailer)
        if magic != _MAGIC or trailer[-_CHECKSUM_BYTES:] != xxhash.xxh3_64_digest(trailer[:-_CHECKSUM_BYTES]):
            raise WeightSyncError(f"bucket {bucket.index} of {version}: its trailer cannot be read")
        if (index, Version(lineage, step)) != (bucket.index, version):
            raise WeightSyncError(
                f"bucket {bucket.index} of {version}: bucket {index} of {Version(lineage, step)} came instead"
            )
        self._region.unpack(self._packed, self.tail[:-_TRAILER_BYTES])
        if self._region.checksum(bucket) != checksum:
            raise WeightSyncError(f"bucket {bucket.index} of {version}: checksum does not match")
