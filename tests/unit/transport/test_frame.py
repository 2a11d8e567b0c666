"""Frames: what is encoded is what is decoded, and nothing else is believed."""

import struct

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from asyncflow.errors import TransportError
from asyncflow.transport.frame import (
    FRAME_BYTES,
    HEADER_BYTES,
    MOST_RELEASES,
    ROOM_BYTES,
    Frame,
    FrameKind,
    Limits,
    Route,
    aligned,
    decode_frame,
    encode_frame,
    seal_frame,
)

LIMITS = Limits(meta_bytes=100_000, payload_bytes=2**31)
U64 = st.integers(0, 2**64 - 1)


def encode(frame: Frame, payload: bytes = b"") -> bytearray:
    """Return the whole frame."""
    data = bytearray(FRAME_BYTES)
    end = encode_frame(frame, memoryview(data))
    data[end : end + len(payload)] = payload
    seal_frame(memoryview(data), end + len(payload))
    return data


def decode(data: bytes | bytearray, limits: Limits = LIMITS) -> Frame:
    """Parse."""
    return decode_frame(memoryview(data), limits)


@given(
    kind=st.sampled_from(FrameKind),
    request_id=U64,
    meta=st.binary(max_size=300),
    payload=st.binary(max_size=300),
    releases=st.lists(U64, max_size=MOST_RELEASES),
)
def test_short_message_survives_the_round_trip_in_its_frame(
    kind: FrameKind, request_id: int, meta: bytes, payload: bytes, releases: list[int]
) -> None:
    frame = decode(encode(Frame(kind, request_id, body=meta, payload_bytes=len(payload), releases=releases), payload))
    assert (frame.kind, frame.request_id, frame.route) == (kind, request_id, Route.FRAME)
    assert (frame.body, frame.payload, list(frame.releases)) == (meta, payload, releases)
    assert frame.split_body() == ([], meta)


def test_body_and_payload_up_to_the_room_fit_with_all_releases() -> None:
    for meta_bytes in (0, 1, ROOM_BYTES - 1, ROOM_BYTES):
        payload = b"p" * (ROOM_BYTES - meta_bytes)
        sent = Frame(FrameKind.REQUEST, 1, body=b"m" * meta_bytes, payload_bytes=len(payload))
        sent.releases = list(range(MOST_RELEASES))
        frame = decode(encode(sent, payload))
        assert (frame.body, frame.payload) == (sent.body, payload)


@given(payload_bytes=st.integers(0, 2**31), offset=U64, generation=st.integers(0, 2**32 - 1), outside=st.booleans())
def test_handle_survives_the_round_trip(payload_bytes: int, offset: int, generation: int, outside: bool) -> None:
    sent = Frame(FrameKind.REPLY, 7, Route.SHARED, b"meta", outside, 0, payload_bytes, offset, generation)
    frame = decode(encode(sent))
    assert (frame.route, frame.outside, frame.payload_bytes) == (Route.SHARED, outside, payload_bytes)
    assert (frame.offset, frame.generation, frame.body_bytes) == (offset, generation, 4)
    assert frame.body == (b"" if outside else b"meta")
    assert frame.payload == b""


@given(st.lists(st.integers(1, 2**28), max_size=3))
def test_segments_must_make_up_the_payload(sizes: list[int]) -> None:
    body = struct.pack(f"<{len(sizes)}Q", *sizes) + b"meta"
    total = sum(map(aligned, sizes))
    sent = Frame(FrameKind.REQUEST, 1, Route.WIRE, body, num_segments=len(sizes), payload_bytes=total)
    limits = Limits(payload_bytes=2**40)
    if len(sizes) <= 2:
        assert decode(encode(sent), limits).split_body() == (sizes, b"meta")
    sent.payload_bytes += 8
    with pytest.raises(TransportError, match="segments"):
        decode(encode(sent), limits).split_body()


def test_empty_cut_is_refused() -> None:
    sent = Frame(FrameKind.REQUEST, 1, Route.WIRE, struct.pack("<2Q", 0, 8), num_segments=2, payload_bytes=8)
    with pytest.raises(TransportError, match="segments"):
        decode(encode(sent)).split_body()


@given(st.binary(max_size=FRAME_BYTES))
@example(b"")
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(TransportError):
        decode(data)
    with pytest.raises(TransportError):
        decode(data.ljust(FRAME_BYTES, b"\0"))


@given(header=st.binary(min_size=HEADER_BYTES - 12, max_size=HEADER_BYTES - 12), small=st.booleans(), data=st.data())
def test_any_header_with_a_right_checksum_is_refused_or_within_the_limits(
    header: bytes, small: bool, data: st.DataObject
) -> None:
    frame = bytearray(encode(Frame(FrameKind.REQUEST, 1, body=b"x")))
    frame[12:HEADER_BYTES] = header
    if small:  # plausible kinds and lengths get further
        struct.pack_into("<BBH", frame, 12, *(data.draw(st.integers(0, high)) for high in (6, 3, 40)))
        struct.pack_into("<IIQ", frame, 24, *(data.draw(st.integers(0, high)) for high in (5000, 9, 5000)))
        struct.pack_into("<I", frame, 52, data.draw(st.integers(0, 1)))
    for end in {HEADER_BYTES, FRAME_BYTES, data.draw(st.integers(HEADER_BYTES, FRAME_BYTES))}:
        struct.pack_into("<Q", frame, 0, xxhash.xxh3_64_intdigest(frame[8:end]))
        _decode_anything(frame)


@given(meta=st.binary(min_size=1, max_size=200), position=st.integers(0), bit=st.integers(0, 7))
def test_every_flipped_bit_is_noticed(meta: bytes, position: int, bit: int) -> None:
    data = encode(Frame(FrameKind.REPLY, 3, body=meta, payload_bytes=4, releases=[4096]), b"data")
    data[position % (HEADER_BYTES + 8 + len(meta))] ^= 1 << bit
    with pytest.raises(TransportError):
        decode(data)


@pytest.mark.parametrize("length", [0, 4, HEADER_BYTES, FRAME_BYTES - 1])
def test_truncated_bytes_are_refused(length: int) -> None:
    with pytest.raises(TransportError, match=f"{length} bytes"):
        decode(encode(Frame(FrameKind.REQUEST, 1, body=b"x" * 3000))[:length])


def test_unknown_kind_and_route_are_refused() -> None:
    for position, what in ((12, "kind 9"), (13, "route 9")):
        data = encode(Frame(FrameKind.REQUEST, 1))
        data[position] = 9
        with pytest.raises(TransportError, match=what):
            decode(data)


def test_length_beyond_the_limit_is_refused_before_it_is_believed() -> None:
    small = Limits(meta_bytes=10, payload_bytes=1000)
    with pytest.raises(TransportError, match="11 bytes, limit 10"):
        decode(encode(Frame(FrameKind.REQUEST, 1, body=b"x" * 11)), small)
    with pytest.raises(TransportError, match="1001 bytes, limit 1000"):
        decode(encode(Frame(FrameKind.REQUEST, 1, Route.WIRE, payload_bytes=1001)), small)
    decode(encode(Frame(FrameKind.REQUEST, 1, Route.WIRE, body=b"x" * 10, payload_bytes=1000)), small)


def test_body_from_outside_must_be_what_was_announced() -> None:
    frame = decode(encode(Frame(FrameKind.REQUEST, 1, Route.WIRE, b"x" * 9000, outside=True)))
    for changed in (b"y" + b"x" * 8999, b"x" * 8999, b""):
        with pytest.raises(TransportError, match="checksum"):
            frame.accept_body(changed)
    frame.accept_body(b"x" * 9000)
    assert frame.split_body() == ([], b"x" * 9000)


def _decode_anything(data: bytearray) -> None:
    try:
        frame = decode(data)
    except TransportError:
        return
    assert frame.payload_bytes <= LIMITS.payload_bytes
    assert frame.body_bytes - 8 * frame.num_segments <= LIMITS.meta_bytes
    assert len(frame.releases) <= MOST_RELEASES
    if frame.outside:
        return
    assert len(frame.body) == frame.body_bytes
    try:
        sizes, _ = frame.split_body()
    except TransportError:
        return
    assert sum(map(aligned, sizes)) in (0, frame.payload_bytes)
