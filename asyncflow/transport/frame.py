"""The fixed first part of every message: lengths, checksum, and the message itself when it is short. Pure.

    | magic 4 | kind 2 | 0 2 | request id 8 | meta bytes 4 | 0 4 | payload bytes 8 | meta xxh3 8 | meta ... |
    '------------------------------------ HEADER_BYTES -----------------------------------------'
    '---------------------------------------- FRAME_BYTES -------------------------------------------------'

A frame always has FRAME_BYTES, because a Gloo receive must be posted with the exact size. Meta that does not fit
follows as a message of its own, then the payload. Lengths are checked against limits before they are believed.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from asyncflow.errors import TransportError

FRAME_BYTES = 4096
_HEADER = struct.Struct("<4sHHQIIQQ")
HEADER_BYTES = _HEADER.size
INLINE_BYTES = FRAME_BYTES - HEADER_BYTES
_MAGIC = b"AFW1"


class FrameKind(IntEnum):
    """What a frame is."""

    REQUEST = 1
    REPLY = 2
    GOODBYE = 3


@dataclass(frozen=True)
class Limits:
    """Largest parts that an end accepts (bytes)."""

    meta_bytes: int = 2**26
    payload_bytes: int = 2**31


@dataclass(frozen=True)
class Frame:
    """A decoded header.

    Attributes:
        kind: request, reply or goodbye.
        request_id: pairs a reply with its request; unique per channel.
        meta_bytes, payload_bytes: sizes of the parts.
        checksum: xxh3-64 of the meta part.
        inline: the meta part when it fits, else empty.
    """

    kind: FrameKind
    request_id: int
    meta_bytes: int
    payload_bytes: int
    checksum: int
    inline: bytes

    def verify(self, meta: bytes) -> None:
        """Raise TransportError when `meta` is not what was sent."""
        if xxhash.xxh3_64_intdigest(meta) != self.checksum:
            raise TransportError("frame: checksum of the message does not match; the channel is dropped")


def encode_frame(kind: FrameKind, request_id: int, meta: bytes, payload_bytes: int) -> bytes:
    """Return FRAME_BYTES bytes."""
    checksum = xxhash.xxh3_64_intdigest(meta)
    header = _HEADER.pack(_MAGIC, kind, 0, request_id, len(meta), 0, payload_bytes, checksum)
    inline = meta if len(meta) <= INLINE_BYTES else b""
    return (header + inline).ljust(FRAME_BYTES, b"\0")


def decode_frame(data: bytes, limits: Limits) -> Frame:
    """Parse FRAME_BYTES bytes.

    Raises:
        TransportError: not a frame, unknown kind, or a length beyond `limits`.
    """
    if len(data) != FRAME_BYTES:
        raise TransportError(f"frame: {len(data)} bytes, not {FRAME_BYTES}")
    magic, kind, _, request_id, meta_bytes, _, payload_bytes, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise TransportError(f"frame: starts with {magic!r}, not {_MAGIC!r}; the peer speaks another protocol")
    if kind not in FrameKind.__members__.values():
        raise TransportError(f"frame: unknown kind {kind}")
    if meta_bytes > limits.meta_bytes:
        raise TransportError(f"frame: message of {meta_bytes} bytes, limit {limits.meta_bytes}")
    if payload_bytes > limits.payload_bytes:
        raise TransportError(f"frame: payload of {payload_bytes} bytes, limit {limits.payload_bytes}")
    inline = data[HEADER_BYTES : HEADER_BYTES + meta_bytes] if meta_bytes <= INLINE_BYTES else b""
    return Frame(FrameKind(kind), request_id, meta_bytes, payload_bytes, checksum, inline)
