"""What a bucket travels in from device to device: its pieces, cast to the wire's type, and what they are.

    int64 words   | piece ..... | piece . | ... | bucket, lineage, step, checksum |
                    each begins with a word       the trailer

The checksum is a sum of all words, each times an odd number that depends on its place, modulo 2**64. Whole numbers are
exact in any order of adding, so every device computes the same one; a word that changed, whatever else is as it was,
always changes it. All is done by the device: nothing is copied to the host but the trailers, once per version.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from asyncflow.errors import WeightSyncError
from weightsync.plan import DTYPE_BYTES, Bucket, Piece
from weightsync.region import RegionLayout
from weightsync.version import Version

_WORD_BYTES = 8
_TRAILER_WORDS = 4
_COLUMNS = 1024
_ROW_FACTORS, _COLUMN_FACTORS = 1, 2
"""Where the two tables of factors begin, in units of 2**40."""


class BucketLayout:
    """Where everything of one bucket lies in a buffer; both ends make it from the same plan."""

    def __init__(self, bucket: Bucket, layout: RegionLayout) -> None:
        self.bucket = bucket
        self._places: list[tuple[Piece, torch.dtype, int, int]] = []  # piece, its dtype, first and last byte
        start = 0
        for piece in bucket.pieces:
            dtype = layout.spec(piece.tensor).dtype
            num_bytes = piece.box.numel * DTYPE_BYTES[dtype]
            self._places.append((piece, getattr(torch, dtype), start, start + num_bytes))
            start += -(-num_bytes // _WORD_BYTES) * _WORD_BYTES
        self._content_words = start // _WORD_BYTES
        self.num_words = self._content_words + _TRAILER_WORDS
        """Of a buffer that holds it."""

    def pieces(self, words: Tensor) -> list[Tensor]:
        """Return the pieces in a buffer, int64 [num_words]: views in the shapes of their boxes."""
        content = words.view(torch.uint8)
        return [content[start:end].view(dtype).view(piece.box.size) for piece, dtype, start, end in self._places]

    def stamp(self, words: Tensor, version: Version) -> None:
        """Write the trailer behind the pieces."""
        trailer = words[self._content_words :]
        for place, value in enumerate((self.bucket.index, *version)):
            trailer[place].fill_(value)
        trailer[3].copy_(checksum(words[: self._content_words]))

    def summary(self, words: Tensor) -> Tensor:
        """Return int64 [5] on the buffer's device: the trailer, and the checksum of what is there."""
        content = words[: self._content_words]
        return torch.cat((words[self._content_words :], checksum(content).view(1)))

    def check(self, summary: list[int], version: Version) -> None:
        """Compare what `summary` gave with what was to come.

        Raises:
            WeightSyncError: another bucket or version, or not the bytes that were sent.
        """
        index, lineage, step, sent, arrived = summary
        if sent != arrived:
            raise WeightSyncError(f"bucket {self.bucket.index} of {version}: checksum does not match")
        if (index, Version(lineage, step)) != (self.bucket.index, version):
            raise WeightSyncError(
                f"bucket {self.bucket.index} of {version}: bucket {index} of {Version(lineage, step)} came instead"
            )


@lru_cache(maxsize=8)
def bucket_layouts(layout: RegionLayout) -> tuple[BucketLayout, ...]:
    """Return those of a plan's buckets, by index."""
    return tuple(BucketLayout(bucket, layout) for bucket in layout.plan.buckets)


def checksum(words: Tensor) -> Tensor:
    """Return int64 []: sum over r, c of row(r) * column(c) * words[1024 r + c], modulo 2**64, on the words' device.

    Args:
        words: int64 [any number].
    """
    rows, device = words.numel() // _COLUMNS, words.device
    body, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    columns = _odd_numbers(_COLUMNS, _COLUMN_FACTORS, device)
    # Accelerators have no product of integer matrices; on the CPU it needs no second buffer and takes a sixth.
    sums = body.mv(columns) if device.type == "cpu" else (body * columns).sum(1)
    sums = torch.cat((sums, (rest * columns[: rest.numel()]).sum().view(1)))
    return (sums * _odd_numbers(rows + 1, _ROW_FACTORS, device)).sum()


@lru_cache(maxsize=256)
def _odd_numbers(count: int, table: int, device: torch.device) -> Tensor:
    """Return int64 [count]: splitmix64 of their places, with the lowest bit set (Steele et al. 2014, figure 14)."""
    mixed = (np.arange(count, dtype=np.uint64) + np.uint64((table << 40) + 1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(mixed.view(np.int64)).to(device)
