"""Frames: what is encoded is what is decoded, and nothing else is believed."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import TransportError
from asyncflow.transport.frame import (
    FRAME_BYTES,
    HEADER_BYTES,
    INLINE_BYTES,
    FrameKind,
    Limits,
    decode_frame,
    encode_frame,
)

LIMITS = Limits(meta_bytes=100_000, payload_bytes=2**31)


@given(
    kind=st.sampled_from(FrameKind),
    request_id=st.integers(0, 2**64 - 1),
    meta=st.binary(max_size=5000),
    payload_bytes=st.integers(0, 2**31),
)
def test_frame_survives_the_round_trip(kind: FrameKind, request_id: int, meta: bytes, payload_bytes: int) -> None:
    data = encode_frame(kind, request_id, meta, payload_bytes)
    frame = decode_frame(data, LIMITS)
    assert len(data) == FRAME_BYTES
    assert (frame.kind, frame.request_id, frame.payload_bytes) == (kind, request_id, payload_bytes)
    assert frame.meta_bytes == len(meta)
    assert frame.inline == (meta if len(meta) <= INLINE_BYTES else b"")
    frame.verify(meta)


@pytest.mark.parametrize("length", [0, 1, INLINE_BYTES - 1, INLINE_BYTES])
def test_meta_up_to_the_inline_size_travels_inside_the_frame(length: int) -> None:
    meta = b"x" * length
    assert decode_frame(encode_frame(FrameKind.REQUEST, 1, meta, 0), LIMITS).inline == meta


def test_meta_beyond_the_inline_size_travels_on_its_own() -> None:
    frame = decode_frame(encode_frame(FrameKind.REQUEST, 1, b"x" * (INLINE_BYTES + 1), 0), LIMITS)
    assert frame.inline == b""
    assert frame.meta_bytes == INLINE_BYTES + 1


@given(data=st.binary(max_size=64).filter(lambda data: not data.startswith(b"AFW1")))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(TransportError, match="protocol"):
        decode_frame(data.ljust(FRAME_BYTES, b"x"), LIMITS)


@pytest.mark.parametrize("length", [0, 4, HEADER_BYTES, FRAME_BYTES - 1])
def test_truncated_bytes_are_refused(length: int) -> None:
    with pytest.raises(TransportError, match=f"{length} bytes"):
        decode_frame(encode_frame(FrameKind.REQUEST, 1, b"x" * 4000, 0)[:length], LIMITS)


def test_unknown_kind_is_refused() -> None:
    data = bytearray(encode_frame(FrameKind.REQUEST, 1, b"", 0))
    struct.pack_into("<H", data, 4, 9)
    with pytest.raises(TransportError, match="kind 9"):
        decode_frame(bytes(data), LIMITS)


def test_length_beyond_the_limit_is_refused_before_it_is_believed() -> None:
    small = Limits(meta_bytes=10, payload_bytes=1000)
    with pytest.raises(TransportError, match="11 bytes, limit 10"):
        decode_frame(encode_frame(FrameKind.REQUEST, 1, b"x" * 11, 0), small)
    with pytest.raises(TransportError, match="1001 bytes, limit 1000"):
        decode_frame(encode_frame(FrameKind.REQUEST, 1, b"x", 1001), small)
    decode_frame(encode_frame(FrameKind.REQUEST, 1, b"x" * 10, 1000), small)


@given(meta=st.binary(min_size=1, max_size=200), position=st.integers(0), flip=st.integers(1, 255))
def test_changed_meta_is_noticed(meta: bytes, position: int, flip: int) -> None:
    data = bytearray(encode_frame(FrameKind.REPLY, 3, meta, 0))
    data[HEADER_BYTES + position % len(meta)] ^= flip
    frame = decode_frame(bytes(data), LIMITS)
    with pytest.raises(TransportError, match="checksum"):
        frame.verify(frame.inline)
