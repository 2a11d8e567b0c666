"""How a payload is cut into messages when it goes over the wire. Pure.

Long tensors that are already right are sent from where they are; what lies between them is packed first.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from asyncflow.transport.payload import Payload, Piece, aligned

DIRECT_BYTES = 2**18
"""A tensor of this size is worth a message of its own: it costs less than the copy."""
MESSAGE_BYTES = 2**20
"""Messages are closed at this size: packing one overlaps with sending the other, and so does copying in the kernel."""


def cut(payload: Payload) -> list[Tensor | Payload]:
    """Return what to send as it is (uint8) and what to pack first, in the order of the payload."""
    return list(_cut(payload))


def cut_bytes(part: Tensor | Payload) -> int:
    """Return the length of the message."""
    return part.numel() if isinstance(part, Tensor) else part.num_bytes


def place(payload: Tensor, cuts: Sequence[int]) -> list[Tensor]:
    """Return where the messages go in a received payload: one after the other, each at a multiple of `ALIGN`."""
    places, offset = [], 0
    for size in cuts:
        places.append(payload[offset : offset + size])
        offset += aligned(size)
    return places


def _cut(payload: Payload) -> Iterator[Tensor | Payload]:
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
