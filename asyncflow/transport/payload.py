"""What a message carries besides its typed part: raw values, copied when they leave, straight to where they go.

A sender describes the bytes (`Piece`s); the channel decides whether they are written into memory that both ends share
or sent over the wire, so the same payload costs one copy either way. Receivers get one contiguous uint8 tensor.

On the wire a payload is *segments*: long tensors that are already right are sent from where they are; what lies between
them is packed first. Pure.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALIGN = 8
"""Every piece starts at a multiple of this (bytes), so that any dtype can be viewed in place."""
DIRECT_BYTES = 2**18
"""A tensor of this size is worth a message of its own: it costs less than the copy."""
MESSAGE_BYTES = 2**20
"""Messages are closed at this size: packing one overlaps with sending the other, and so does copying in the kernel."""


def aligned(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to `ALIGN`."""
    return -(-num_bytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class Piece:
    """Tensors that travel one after the other, without gaps.

    Attributes:
        parts: 1-D, contiguous, on the CPU, of one dtype; they must not change until the send has returned.
        dtype: as which they travel; a cast happens in the one copy.
    """

    parts: Sequence[Tensor]
    dtype: torch.dtype
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        numel = sum(part.numel() for part in self.parts)
        object.__setattr__(self, "num_bytes", numel * self.dtype.itemsize)

    @property
    def in_place(self) -> Tensor | None:
        """The bytes as one uint8 tensor where they are already contiguous and of the right dtype, else None."""
        if len(self.parts) == 1 and self.parts[0].dtype == self.dtype and self.parts[0].stride() == (1,):
            return self.parts[0].view(torch.uint8)
        return None

    def write(self, out: Tensor) -> None:
        """Copy everything into `out`, uint8 [num_bytes]."""
        target = out.view(self.dtype)
        if len(self.parts) == 1:
            target.copy_(self.parts[0])
        elif self.parts:
            torch.cat(list(self.parts), out=target)


class Payload:
    """Pieces, each aligned to `ALIGN` bytes; the gaps are not defined."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = tuple(pieces)
        self.num_bytes = sum(aligned(piece.num_bytes) for piece in self.pieces)

    @staticmethod
    def of(tensor: Tensor) -> "Payload":
        """Wrap one contiguous tensor."""
        return Payload([Piece((tensor.reshape(-1),), tensor.dtype)])

    def write(self, out: Tensor) -> None:
        """Copy everything into `out`, uint8 [num_bytes]."""
        offset = 0
        for piece in self.pieces:
            piece.write(out[offset : offset + piece.num_bytes])
            offset += aligned(piece.num_bytes)


def segments(payload: Payload) -> list[Tensor | Payload]:
    """Return what to send as it is (uint8) and what to pack first, in the order of the payload."""
    return list(_segments(payload))


def segment_bytes(part: Tensor | Payload) -> int:
    """Return the length of the message."""
    return part.numel() if isinstance(part, Tensor) else part.num_bytes


def place(payload: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return where the messages go in a received payload: one after the other, each at a multiple of `ALIGN`."""
    places, offset = [], 0
    for size in sizes:
        places.append(payload[offset : offset + size])
        offset += aligned(size)
    return places


def _segments(payload: Payload) -> Iterator[Tensor | Payload]:
    gathered: list[Piece] = []
    num_bytes = 0
    for piece in payload.pieces:
        direct = piece.in_place if piece.num_bytes >= DIRECT_BYTES else None
        if direct is None and piece.num_bytes:
            gathered.append(piece)
            num_bytes += piece.num_bytes
        if gathered and (direct is not None or num_bytes >= MESSAGE_BYTES):
            yield Payload(gathered)
            gathered, num_bytes = [], 0
        if direct is not None:
            yield from (direct[start : start + MESSAGE_BYTES] for start in range(0, piece.num_bytes, MESSAGE_BYTES))
    if gathered:
        yield Payload(gathered)
