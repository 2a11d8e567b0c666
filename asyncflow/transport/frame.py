"""A message as it travels: the frame that begins it, and the payload of raw values. Pure.

The frame has lengths, handles, checksums, and all the rest when that is short:

    | checksum 8 | magic 4 | kind 1 | route 1 | releases 2 | request id 8 | body bytes 4 | segments 4 | payload 8 |
    | offset 8 | generation 4 | body outside 4 | body checksum 8 || released offsets 8 each | body | payload ... |
    '----------------------- HEADER_BYTES ----------------------''---------- up to FRAME_BYTES -------------'

A frame always has FRAME_BYTES, because a Gloo receive must be posted with the exact size. The body is the sizes of the
messages that follow (8 bytes each), then the typed message. `Route` says where the payload is, and the body when it
does not fit. Nothing is believed before the checksum, and no length before it was compared with the limits.

A sender describes the payload's bytes (`Piece`s); the channel decides whether they are written into memory that both
ends share or sent over the wire, so the same payload costs one copy either way. Receivers get one contiguous uint8
tensor. On the wire a payload is *segments*: long tensors that are already right are sent from where they are; what lies
between them is packed first.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec
import torch
import xxhash
from torch import Tensor

from asyncflow.errors import TransportError

ALIGN = 8
"""Every piece starts at a multiple of this (bytes), so that any dtype can be viewed in place."""
DIRECT_BYTES = 2**18
"""A tensor of this size is worth a message of its own: it costs less than the copy."""
MESSAGE_BYTES = 2**20
"""Messages are closed at this size: packing one overlaps with sending the other, and so does copying in the kernel."""

FRAME_BYTES = 4096
MOST_RELEASES = 32
_HEADER = struct.Struct("<Q4sBBHQIIQQIIQ")
_CHECKSUM = struct.Struct("<Q")
_MAGIC = b"AFW2"
_LEAST_SEGMENT_BYTES = 2**16  # senders make larger ones, whatever their version
HEADER_BYTES = _HEADER.size
ROOM_BYTES = FRAME_BYTES - HEADER_BYTES - 8 * MOST_RELEASES - ALIGN
"""Body and payload up to this always fit."""


class FrameKind(IntEnum):
    """What a frame is."""

    REQUEST = 1
    REPLY = 2
    GOODBYE = 3
    HELLO = 4


class Route(IntEnum):
    """Where the payload is: in the frame, in shared memory, in messages that follow."""

    FRAME = 0
    SHARED = 1
    WIRE = 2


@dataclass(frozen=True)
class Limits:
    """What an end accepts and uses.

    Attributes:
        meta_bytes, payload_bytes: largest parts accepted.
        shared_memory: use it when the peer is on the same host.
        arena_bytes: addresses reserved for payloads that the peer has not released; more of them go over the wire.
    """

    meta_bytes: int = 2**26
    payload_bytes: int = 2**31
    shared_memory: bool = True
    arena_bytes: int = 2**33


class Frame(msgspec.Struct):
    """A header, and what came with it.

    Attributes:
        kind: what it is.
        request_id: pairs a reply with its request; unique per channel.
        route: where the payload is.
        body: sizes of segments and message; empty when it is outside the frame.
        outside: the body goes the payload's route.
        num_segments: sizes at the front of the body.
        payload_bytes: length of the payload.
        offset, generation: handle of the region (`Route.SHARED`).
        releases: offsets of regions of the receiver's arena that its peer has no views of any more.
        body_bytes, body_checksum: of a body, wherever it is.
        payload: when it is in the frame.
    """

    kind: FrameKind
    request_id: int = 0
    route: Route = Route.FRAME
    body: bytes = b""
    outside: bool = False
    num_segments: int = 0
    payload_bytes: int = 0
    offset: int = 0
    generation: int = 0
    releases: Sequence[int] = ()
    body_bytes: int = 0
    body_checksum: int = 0
    payload: bytes = b""

    def split_body(self) -> tuple[list[int], bytes]:
        """Return (sizes of the segments, message).

        Raises:
            TransportError: the segments do not make up the payload.
        """
        if self.route is not Route.WIRE:
            return [], self.body
        sizes = list(struct.unpack_from(f"<{self.num_segments}Q", self.body))
        if sum(map(aligned, sizes)) != self.payload_bytes or not all(sizes):
            raise TransportError(f"frame: segments {sizes[:8]} do not make up a payload of {self.payload_bytes} bytes")
        return sizes, self.body[8 * self.num_segments :]

    def accept_body(self, body: bytes) -> None:
        """Take a body that came from outside the frame.

        Raises:
            TransportError: it is not what was sent.
        """
        if len(body) != self.body_bytes or xxhash.xxh3_64_intdigest(body) != self.body_checksum:
            raise TransportError("frame: checksum of the message does not match; the channel is dropped")
        self.body = body


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


def encode_frame(frame: Frame, out: memoryview) -> int:
    """Write all but the payload and the checksum; returns where the payload goes.

    Args:
        frame: `payload` and checksums are not read.
        out: FRAME_BYTES bytes.
    """
    end = HEADER_BYTES
    if frame.releases:
        struct.pack_into(f"<{len(frame.releases)}Q", out, end, *frame.releases)
        end += 8 * len(frame.releases)
    body_checksum = 0
    if frame.outside:
        body_checksum = xxhash.xxh3_64_intdigest(frame.body)
    else:
        out[end : end + len(frame.body)] = frame.body
        end += len(frame.body)
    _HEADER.pack_into(
        out, 0, 0, _MAGIC, frame.kind, frame.route, len(frame.releases), frame.request_id, len(frame.body),
        frame.num_segments, frame.payload_bytes, frame.offset, frame.generation, frame.outside, body_checksum,
    )  # fmt: skip
    return aligned(end) if frame.payload_bytes else end


def seal_frame(out: memoryview, end: int) -> None:
    """Write the checksum of all that is used, [0, end)."""
    _CHECKSUM.pack_into(out, 0, xxhash.xxh3_64_intdigest(out[_CHECKSUM.size : end]))


def decode_frame(data: memoryview, limits: Limits) -> Frame:
    """Parse FRAME_BYTES bytes; the result does not refer to them.

    Raises:
        TransportError: not a frame, changed on its way, unknown kind, or a length beyond `limits`.
    """
    if len(data) != FRAME_BYTES:
        raise TransportError(f"frame: {len(data)} bytes, not {FRAME_BYTES}")
    (
        checksum, magic, kind, route, num_releases, request_id, body_bytes, num_segments, payload_bytes,
        offset, generation, outside, body_checksum,
    ) = _HEADER.unpack_from(data)  # fmt: skip
    if magic != _MAGIC:
        raise TransportError(f"frame: starts with {magic!r}, not {_MAGIC!r}; the peer speaks another protocol")
    if kind not in _KINDS or route not in _ROUTES or (outside and route == Route.FRAME):
        raise TransportError(f"frame: unknown kind {kind} or route {route}")
    if payload_bytes > limits.payload_bytes:
        raise TransportError(f"frame: payload of {payload_bytes} bytes, limit {limits.payload_bytes}")
    if body_bytes - 8 * num_segments > limits.meta_bytes or num_segments > 2 + payload_bytes // _LEAST_SEGMENT_BYTES:
        raise TransportError(
            f"frame: message of {body_bytes} bytes, limit {limits.meta_bytes}; {num_segments} segments"
        )
    body_at = HEADER_BYTES + 8 * num_releases
    body_end = body_at if outside else body_at + body_bytes
    payload_at = aligned(body_end) if payload_bytes else body_end
    end = payload_at if route != Route.FRAME else payload_at + payload_bytes
    if end > FRAME_BYTES or num_releases > MOST_RELEASES or 8 * num_segments > body_bytes * (route == Route.WIRE):
        raise TransportError(f"frame: its parts end at {end}, beyond {FRAME_BYTES}")
    if xxhash.xxh3_64_intdigest(data[_CHECKSUM.size : end]) != checksum:
        raise TransportError("frame: checksum does not match; the channel is dropped")
    return Frame(
        kind=_KINDS[kind],
        request_id=request_id,
        route=_ROUTES[route],
        body=bytes(data[body_at:body_end]),
        outside=bool(outside),
        num_segments=num_segments,
        payload_bytes=payload_bytes,
        offset=offset,
        generation=generation,
        releases=struct.unpack_from(f"<{num_releases}Q", data, HEADER_BYTES) if num_releases else (),
        body_bytes=body_bytes,
        body_checksum=body_checksum,
        payload=bytes(data[payload_at:end]),
    )


_KINDS = {int(kind): kind for kind in FrameKind}
_ROUTES = {int(route): route for route in Route}
