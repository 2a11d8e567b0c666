"""Payloads that go over the wire: what is packed, what goes as it is, and where it lands."""

import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncflow.transport.frame import (
    DIRECT_BYTES,
    MESSAGE_BYTES,
    Payload,
    PayloadPiece,
    PlacedPayload,
    aligned,
    place,
    segment_bytes,
    segments,
)

SIZES = st.sampled_from([0, 1, 7, 1000, DIRECT_BYTES - 1, DIRECT_BYTES, DIRECT_BYTES + 3])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=6))
def test_segmented_payload_arrives_as_the_packed_one_would(pieces: list[tuple[int, bool]]) -> None:
    payload = Payload([_piece(size, cast=cast, value=k) for k, (size, cast) in enumerate(pieces, 1)])
    expected = torch.zeros(payload.num_bytes, dtype=torch.uint8)
    payload.write(expected)
    parts = segments(payload)
    received = torch.zeros(payload.num_bytes, dtype=torch.uint8)
    for target, part in zip(place(received, [segment_bytes(part) for part in parts]), parts, strict=True):
        assert target.numel() == segment_bytes(part) > 0
        if isinstance(part, Tensor):
            target.copy_(part)
        else:
            part.write(target)
    assert torch.equal(received, expected)


@settings(deadline=None, max_examples=40)
@given(st.lists(SIZES, max_size=6))
def test_what_is_sent_lands_where_each_piece_goes(sizes: list[int]) -> None:
    sent = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    landed = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    payload, placed = Payload([PayloadPiece((part,), part.dtype) for part in sent]), PlacedPayload(landed)
    assert placed.num_bytes == payload.num_bytes
    offset = 0
    for part in segments(payload):
        data = torch.zeros(segment_bytes(part), dtype=torch.uint8)
        data.copy_(part) if isinstance(part, Tensor) else part.write(data)
        view = placed.view(offset, data.numel())
        # Long pieces go straight to their memory.
        assert view is not None or not isinstance(part, Tensor)
        placed.accept_range(offset, data if view is None else view.copy_(data))
        offset += aligned(data.numel())
    assert placed.checksum == xxhash.xxh3_64_intdigest(b"".join(part.numpy().tobytes() for part in sent))
    assert all(torch.equal(one, other) for one, other in zip(landed, sent, strict=True))


def test_long_tensors_go_as_they_are_and_what_is_between_is_packed() -> None:
    long = torch.zeros(DIRECT_BYTES, dtype=torch.uint8)
    small = torch.zeros(100, dtype=torch.uint8)
    parts = segments(Payload([PayloadPiece((x,), x.dtype) for x in (small, small, long, long, small)]))
    assert [segment_bytes(part) for part in parts] == [208, DIRECT_BYTES, DIRECT_BYTES, 104]
    assert isinstance(parts[1], Tensor)
    assert parts[1].data_ptr() == long.data_ptr()


def test_packed_messages_stay_short() -> None:
    small = torch.zeros(DIRECT_BYTES // 2, dtype=torch.uint8)
    parts = segments(Payload([PayloadPiece((small,), small.dtype)] * 100))
    assert {segment_bytes(part) for part in parts[:-1]} == {MESSAGE_BYTES}


def test_nothing_has_no_segments() -> None:
    assert segments(Payload([])) == []
    assert segments(Payload.from_tensor(torch.zeros(0))) == []


def _piece(size: int, *, cast: bool, value: int) -> PayloadPiece:
    if cast:
        return PayloadPiece((torch.full((size,), value, dtype=torch.int64),), torch.uint8)
    return PayloadPiece((torch.full((size,), value, dtype=torch.uint8),), torch.uint8)
