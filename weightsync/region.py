"""One version of the weights in memory: a flat buffer in which every tensor lies whole, under its Hugging Face name.

Weights are written, checked, sent and loaded through a region: the trainer's ranks write their pieces into it,
receivers view whole tensors in it. A region does not know whose memory it is.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from weightsync.plan import DTYPE_BYTES, Bucket, Piece, TensorSpec, TransferPlan
from weightsync.slot_memory import merged


class RegionLayout:
    """Where everything of a plan lies, or a share of it; made once per plan."""

    def __init__(self, plan: TransferPlan, share: Collection[int] | None = None) -> None:
        """Args:
        plan: of all tensors.
        share: numbers of those that have a place; None: all.
        """
        self.plan = plan
        self._specs = tuple(plan.tensors.values())
        self._starts: dict[int, int] = {}
        self.num_bytes = 0
        """Of memory with this layout."""
        for number, spec in enumerate(self._specs):
            if share is None or number in share:
                self._starts[number] = self.num_bytes
                self.num_bytes += spec.room_bytes

    def has(self, number: int) -> bool:
        """Return whether a tensor has a place."""
        return number in self._starts

    def run(self, piece: Piece) -> tuple[int, int] | None:
        """Return (first byte, bytes) of a piece that is one run of the region, else None."""
        tensor = self._specs[piece.tensor]
        run = piece.box.run(tensor.shape)
        if run is None:
            return None
        element_bytes = DTYPE_BYTES[tensor.dtype]
        return self._starts[piece.tensor] + run[0] * element_bytes, run[1] * element_bytes

    def extent(self, number: int) -> tuple[int, int]:
        """Return (first byte, bytes) of a whole tensor."""
        return self._starts[number], self._specs[number].num_bytes

    def extents(self, buckets: Iterable[Bucket]) -> list[tuple[int, int]]:
        """Return the bytes (start, stop) that buckets lie in, merged where they meet."""
        runs = []
        for piece in (piece for bucket in buckets for piece in bucket.pieces):
            start, num_bytes = self.run(piece) or self.extent(piece.tensor)
            runs.append((start, start + num_bytes))
        return merged(runs)

    def spec(self, number: int) -> TensorSpec:
        """Return the shape and dtype of a whole tensor."""
        return self._specs[number]


class Region:
    """Memory laid out by a plan."""

    def __init__(self, memory: Tensor, layout: RegionLayout) -> None:
        """Args:
        memory: uint8 [at least layout.num_bytes], 64-byte aligned; what hashes or packs needs it on the CPU.
        layout: of the plan.
        """
        self._memory = memory
        self.layout = layout

    def tensor(self, number: int) -> Tensor:
        """Return a whole tensor, a view; on device `meta` if it has no place."""
        spec = self.layout.spec(number)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if not self.layout.has(number):
            return torch.empty(spec.shape, dtype=dtype, device="meta")
        start, num_bytes = self.layout.extent(number)
        return self._memory[start : start + num_bytes].view(dtype).view(spec.shape)

    def piece(self, piece: Piece) -> Tensor:
        """Return a part of a tensor, a view in the box's shape."""
        return self.tensor(piece.tensor)[piece.box.slices]

    def views(self, matched: Mapping[str, Piece]) -> dict[str, Tensor]:
        """Return what a receiver wants, by its own names; see `match_needs`."""
        return {name: self.piece(piece) for name, piece in matched.items()}

    def bytes_at(self, start: int, num_bytes: int) -> Tensor:
        """Return uint8 [num_bytes], a view."""
        return self._memory[start : start + num_bytes]

    def packed(self, bucket: Bucket) -> Tensor:
        """Return a bucket's bytes, uint8 [num_bytes]: a view where it is one run of memory, else a copy."""
        if len(bucket.pieces) == 1:
            return self._bytes_of(bucket.pieces[0])
        out = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        self.pack(bucket.pieces, out)
        return out

    def pack(self, pieces: Sequence[Piece], out: Tensor) -> None:
        """Copy the bytes of pieces to `out`, uint8 of their size."""
        if pieces:
            torch.cat([self._bytes_of(piece) for piece in pieces], out=out)

    def unpack(self, pieces: Sequence[Piece], packed: Tensor) -> None:
        """Write the bytes of pieces to where they belong."""
        offset = 0
        for piece in pieces:
            target = self.piece(piece)
            num_bytes = target.numel() * target.element_size()
            source = packed[offset : offset + num_bytes]
            run = self.layout.run(piece)
            if run is not None:
                self.bytes_at(*run).copy_(source)
            else:
                target.copy_(source.clone().view(target.dtype).view(target.shape))
            offset += num_bytes

    def copy(self, bucket: Bucket, source: "Region") -> None:
        """Copy a bucket from a region of the same layout."""
        for piece in bucket.pieces:
            run = self.layout.run(piece)
            if run is not None:
                np.copyto(self.bytes_at(*run).numpy(), source.bytes_at(*run).numpy())  # one thread: others generate
            else:
                self.piece(piece).copy_(source.piece(piece))

    def checksum(self, bucket: Bucket) -> int:
        """Return the xxh3 (64 bits) of a bucket's bytes; reads them all."""
        hasher = xxhash.xxh3_64()
        for piece in bucket.pieces:
            hasher.update(self._bytes_of(piece).numpy().data)
        return hasher.intdigest()

    def _bytes_of(self, piece: Piece) -> Tensor:
        run = self.layout.run(piece)
        if run is not None:
            return self.bytes_at(*run)
        return self.piece(piece).contiguous().view(-1).view(torch.uint8)


def version_checksum(checksums: Sequence[int]) -> int:
    """Return the checksum of a whole version: xxh3 (64 bits) of its buckets' checksums in order."""
    return int(xxhash.xxh3_64_intdigest(b"".join(each.to_bytes(8, "little") for each in checksums)))
