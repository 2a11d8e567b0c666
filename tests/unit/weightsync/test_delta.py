"""Deltas: bitwise the new version or an error, whatever arrives; never larger than the bucket."""

import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import weightsync.slot_memory
from asyncflow.errors import WeightSyncError
from weightsync.slot_memory import apply_delta, encode_delta

SIZES = (1, 2, 4, 8)
HEADER = struct.Struct("<4sHHQQQ")
MAGIC = b"AFd1"
GUARD = 64


def random_bytes(num_bytes: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8))


def changed_at(base: Tensor, positions: Sequence[int] | np.ndarray, element_bytes: int) -> Tensor:
    """Return `base` with exactly these elements changed, each in one of its bytes."""
    new = base.clone()
    elements = new.view(-1, element_bytes)
    index = torch.as_tensor(np.array(positions, np.int64))
    elements[index, index % element_bytes] ^= 1 + (index % 255).to(torch.uint8)
    return new


def guarded(content: Tensor) -> tuple[Tensor, Tensor]:
    """Return a buffer and, in the middle of it, a copy of `content`."""
    buffer = torch.full((content.numel() + 2 * GUARD,), 0xA5, dtype=torch.uint8)
    inside = buffer[GUARD : GUARD + content.numel()]
    inside.copy_(content)
    return buffer, inside


def guards_are_whole(buffer: Tensor) -> bool:
    return bool((buffer[:GUARD] == 0xA5).all() and (buffer[buffer.numel() - GUARD :] == 0xA5).all())


def smallest_delta(num_elements: int, positions: Sequence[int], element_bytes: int) -> int:
    """Size in bytes that the format allows at best, counted one gap at a time."""
    gaps = [position - previous - 1 for previous, position in zip([-1, *positions], positions, strict=False)]
    codes = min(width * sum(1 + gap // (256**width - 1) for gap in gaps) for width in (1, 2, 4))
    return HEADER.size + codes + len(positions) * element_bytes


def crafted(
    codes: Sequence[int], *, num_elements: int = 100, num_changed: int | None = None, code_bytes: int = 1
) -> Tensor:
    """Return a delta for elements of 2 bytes, with as many values as it says that elements changed."""
    count = len(codes) if num_changed is None else num_changed
    gaps = np.array(codes, f"<u{code_bytes}").tobytes()
    raw = HEADER.pack(MAGIC, 2, code_bytes, num_elements, count, len(gaps)) + gaps + bytes(2 * count)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, list[int]]:
    """How many elements a bucket has, and which of them changed: none, all, the ends, a share, or some far apart."""
    num_elements = draw(st.sampled_from([0, 1, 2, 7, 40, 254, 255, 256, 257, 511, 600, 70_000, 200_000]))
    if num_elements == 0:
        return 0, []
    ends = [0, num_elements - 1]
    anywhere = st.one_of(st.sampled_from(ends), st.integers(0, num_elements - 1))
    some = st.lists(anywhere, max_size=12)
    share = st.tuples(st.sampled_from([0.001, 0.01, 0.3, 0.49, 0.66, 0.9]), st.integers(0, 9)).map(
        lambda drawn: np.flatnonzero(np.random.default_rng(drawn[1]).random(num_elements) < drawn[0]).tolist()
    )
    everything = st.just(list(range(min(num_elements, 600))))
    return num_elements, sorted(set(draw(st.one_of(some, share, everything))))


@given(change=changes(), element_bytes=st.sampled_from(SIZES))
def test_delta_gives_the_new_version_and_is_as_small_as_the_format_allows(
    change: tuple[int, list[int]], element_bytes: int
) -> None:
    num_elements, positions = change
    base = random_bytes(num_elements * element_bytes)
    new = changed_at(base, positions, element_bytes)
    delta = encode_delta(new, base, element_bytes=element_bytes)
    best = smallest_delta(num_elements, positions, element_bytes)
    if delta is None:
        assert best >= new.numel()
        return
    assert delta.dtype == torch.uint8
    assert delta.numel() == best < new.numel()
    buffer, target = guarded(base)
    apply_delta(delta, target, element_bytes=element_bytes)
    assert torch.equal(target, new)
    assert guards_are_whole(buffer)


@pytest.mark.parametrize("element_bytes", SIZES)
@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 65534, 65535, 65536, 131070, 131071])
def test_gap_of_any_length_is_kept(gap: int, element_bytes: int) -> None:
    base = random_bytes((gap + 60) * element_bytes)
    new = changed_at(base, [10, 11 + gap], element_bytes)
    delta = encode_delta(new, base, element_bytes=element_bytes)
    assert delta is not None
    apply_delta(delta, base, element_bytes=element_bytes)
    assert torch.equal(base, new)


@pytest.mark.parametrize(("stride", "code_bytes"), [(1, 1), (255, 1), (256, 2), (5_000, 2), (65_535, 2), (200_000, 4)])
def test_codes_are_as_wide_as_the_gaps_ask_for(stride: int, code_bytes: int) -> None:
    num_changed = 3
    base = random_bytes(stride * num_changed + 100)
    new = changed_at(base, range(stride - 1, stride * num_changed, stride), 1)
    delta = encode_delta(new, base, element_bytes=1)
    assert delta is not None
    assert delta.numel() == HEADER.size + num_changed * (code_bytes + 1)


def test_a_far_change_costs_no_more_than_a_near_one() -> None:
    base = torch.zeros(30_000_000, dtype=torch.uint8)
    new = changed_at(base, [29_999_999], 1)
    delta = encode_delta(new, base, element_bytes=1)
    assert delta is not None
    assert delta.numel() == HEADER.size + 4 + 1


def test_delta_is_laid_out_as_documented() -> None:
    base = torch.zeros(800, dtype=torch.uint8)
    new = base.clone()
    new[2:4] = torch.tensor([0x34, 0x12])
    new[604:606] = torch.tensor([0x78, 0x56])
    delta = encode_delta(new, base, element_bytes=2)
    assert delta is not None
    header = HEADER.pack(MAGIC, 2, 1, 400, 2, 3)
    assert bytes(delta.tolist()) == header + bytes([1, 255, 45]) + bytes([0x34, 0x12, 0x78, 0x56])


@pytest.mark.parametrize("block", [1, 7, 256])
@pytest.mark.parametrize("share", [0.002, 0.1, 0.4])
def test_blocks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch, block: int, share: float) -> None:
    base = random_bytes(6_002)
    positions = np.flatnonzero(np.random.default_rng(1).random(3_001) < share)
    new = changed_at(base, positions, 2)
    at_once = encode_delta(new, base, element_bytes=2)
    assert at_once is not None
    monkeypatch.setattr(weightsync.slot_memory, "_BLOCK", block)
    delta = encode_delta(new, base, element_bytes=2)
    assert delta is not None
    assert torch.equal(delta, at_once)
    apply_delta(delta, base, element_bytes=2)
    assert torch.equal(base, new)


def test_values_are_compared_and_copied_as_bits() -> None:
    base = torch.zeros(64, dtype=torch.float32)
    base[1] = float("nan")
    new = base.clone()
    new.view(torch.int32)[:4] = torch.tensor([-(2**31), 0x7FC00001, 0x7F800001, -1], dtype=torch.int32)
    assert new[0] == base[0]  # -0.0 and 0.0
    delta = encode_delta(new.view(torch.uint8), base.view(torch.uint8), element_bytes=4)
    assert delta is not None
    assert delta.numel() == HEADER.size + 4 * (1 + 4)
    apply_delta(delta, base.view(torch.uint8), element_bytes=4)
    assert torch.equal(base.view(torch.int32), new.view(torch.int32))


def test_equal_nans_are_no_change() -> None:
    base = torch.full((64,), float("nan"), dtype=torch.bfloat16).view(torch.uint8)
    delta = encode_delta(base.clone(), base, element_bytes=2)
    assert delta is not None
    assert delta.numel() == HEADER.size


def test_bucket_is_sent_whole_from_the_change_on_that_makes_the_delta_no_smaller() -> None:
    base = random_bytes(202)
    delta = encode_delta(changed_at(base, range(56), 2), base, element_bytes=2)
    assert delta is not None
    assert delta.numel() == HEADER.size + 56 * 3
    assert encode_delta(changed_at(base, range(57), 2), base, element_bytes=2) is None
    base = random_bytes(200)
    assert encode_delta(changed_at(base, range(56), 2), base, element_bytes=2) is None


@pytest.mark.parametrize("element_bytes", SIZES)
def test_bucket_no_larger_than_a_header_is_sent_whole(element_bytes: int) -> None:
    for num_bytes in (0, 8, 32):
        assert encode_delta(random_bytes(num_bytes), random_bytes(num_bytes), element_bytes=element_bytes) is None


@pytest.mark.parametrize("element_bytes", SIZES)
def test_delta_without_changes_suits_even_an_empty_bucket(element_bytes: int) -> None:
    raw = HEADER.pack(MAGIC, element_bytes, 1, 0, 0, 0)
    apply_delta(torch.frombuffer(bytearray(raw), dtype=torch.uint8), random_bytes(0), element_bytes=element_bytes)


@pytest.mark.parametrize("element_bytes", SIZES)
def test_bytes_need_not_be_aligned(element_bytes: int) -> None:
    base = random_bytes(4_000 * element_bytes + 1)[1:]
    new = torch.cat([torch.zeros(1, dtype=torch.uint8), changed_at(base, range(3, 4_000, 9), element_bytes)])[1:]
    delta = encode_delta(new, base, element_bytes=element_bytes)
    assert delta is not None
    received = torch.cat([torch.zeros(1, dtype=torch.uint8), delta])[1:]
    apply_delta(received, base, element_bytes=element_bytes)
    assert torch.equal(base, new)


def refuse(delta: Tensor, base: Tensor, element_bytes: int) -> None:
    """Assert that a delta is refused before anything is written."""
    buffer, target = guarded(base)
    with pytest.raises(WeightSyncError):
        apply_delta(delta, target, element_bytes=element_bytes)
    assert torch.equal(target, base)
    assert guards_are_whole(buffer)


@pytest.mark.parametrize("element_bytes", SIZES)
def test_cut_or_extended_delta_is_refused(element_bytes: int) -> None:
    base = random_bytes(900 * element_bytes)
    delta = encode_delta(changed_at(base, [0, 5, 400, 899], element_bytes), base, element_bytes=element_bytes)
    assert delta is not None
    for num_bytes in range(delta.numel()):
        refuse(delta[:num_bytes], base, element_bytes)
    for extra in (1, 2, 4, 8):
        refuse(torch.cat([delta, torch.zeros(extra, dtype=torch.uint8)]), base, element_bytes)


@pytest.mark.parametrize("element_bytes", SIZES)
def test_delta_of_another_bucket_is_refused(element_bytes: int) -> None:
    base = random_bytes(800 * element_bytes)
    delta = encode_delta(changed_at(base, [1, 2], element_bytes), base, element_bytes=element_bytes)
    assert delta is not None
    for num_bytes in (0, 1, 799 * element_bytes, 801 * element_bytes, 800 * element_bytes + 1):
        refuse(delta, random_bytes(num_bytes), element_bytes)
    for other in set(SIZES) - {element_bytes}:
        refuse(delta, base, other)


@pytest.mark.parametrize(
    "delta",
    [
        pytest.param(crafted([100]), id="first position behind the end"),
        pytest.param(crafted([0, 99]), id="last position behind the end"),
        pytest.param(crafted([255, 0]), id="a value without a gap"),
        pytest.param(crafted([1, 255], num_changed=1), id="a gap that never ends"),
        pytest.param(crafted([255], num_changed=0), id="a gap without a change"),
        pytest.param(crafted([1, 2, 3], num_changed=2), id="a gap without a value"),
        pytest.param(crafted([1], num_changed=0), id="no value"),
        pytest.param(crafted([0] * 101), id="more changes than elements"),
        pytest.param(crafted([2**32 - 2, 2**32 - 2], code_bytes=4), id="positions far behind the end"),
        pytest.param(crafted([2**32 - 2, 2], code_bytes=4), id="positions that come round in 32 bits"),
        pytest.param(crafted([2**32 - 1] * 5 + [0], num_changed=1, code_bytes=4), id="a gap of many escapes"),
        pytest.param(crafted([1], code_bytes=8), id="codes of 8 bytes"),
    ],
)
def test_malformed_delta_is_refused(delta: Tensor) -> None:
    refuse(delta, random_bytes(200), 2)


@pytest.mark.parametrize(
    ("header", "rest"),
    [
        pytest.param((b"AFd2", 2, 1, 100, 1, 1), 3, id="another magic number"),
        pytest.param((MAGIC, 4, 1, 100, 1, 1), 3, id="another element size"),
        pytest.param((MAGIC, 2, 1, 99, 1, 1), 3, id="fewer elements"),
        pytest.param((MAGIC, 2, 2, 100, 0, 3), 3, id="half a code"),
        pytest.param((MAGIC, 2, 4, 100, 1, 6), 8, id="a code and a half"),
    ],
)
def test_header_that_does_not_fit_is_refused(header: tuple[bytes, int, int, int, int, int], rest: int) -> None:
    refuse(torch.frombuffer(bytearray(HEADER.pack(*header) + bytes(rest)), dtype=torch.uint8), random_bytes(200), 2)


@pytest.mark.parametrize("code_bytes", [0, 3, 8, 65535])
@pytest.mark.parametrize("gap_bytes", [0, 3, 2**63, 2**64 - 1])
def test_header_that_lies_is_refused(code_bytes: int, gap_bytes: int) -> None:
    for num_elements, num_changed in [(100, 0), (100, 2**64 - 1), (2**63, 1), (100, 2**63)]:
        raw = HEADER.pack(MAGIC, 2, code_bytes, num_elements, num_changed, gap_bytes) + bytes(3)
        refuse(torch.frombuffer(bytearray(raw), dtype=torch.uint8), random_bytes(200), 2)


@given(
    element_bytes=st.sampled_from(SIZES),
    stride=st.sampled_from([1, 3, 200, 300, 70_000]),
    damage=st.lists(st.tuples(st.integers(0, 2**16), st.integers(1, 255)), min_size=1, max_size=4),
)
def test_damaged_delta_is_refused_or_stays_inside(
    element_bytes: int, stride: int, damage: list[tuple[int, int]]
) -> None:
    base = random_bytes((stride * 12 + 100) * element_bytes)
    whole = encode_delta(
        changed_at(base, range(4, stride * 12, stride), element_bytes), base, element_bytes=element_bytes
    )
    assert whole is not None
    delta = whole.clone()
    for position, flip in damage:
        delta[position % delta.numel()] ^= flip
    buffer, target = guarded(base)
    try:
        apply_delta(delta, target, element_bytes=element_bytes)
    except WeightSyncError:
        assert torch.equal(target, base)
    assert guards_are_whole(buffer)


@st.composite
def code_lists(draw: st.DrawFn) -> tuple[list[int], int]:
    """Codes that mostly stay inside of 1000 elements, with many escapes, and their width in bytes."""
    code_bytes = draw(st.sampled_from([1, 2, 4]))
    escape = 256**code_bytes - 1
    code = st.one_of(st.integers(0, 60), st.integers(0, 60), st.just(escape), st.integers(0, escape))
    return draw(st.lists(code, max_size=12)), code_bytes


@given(drawn=code_lists(), lie=st.sampled_from([0, 0, 0, 1, -1]))
def test_arbitrary_codes_are_refused_or_yield_as_many_changes_as_announced(
    drawn: tuple[list[int], int], lie: int
) -> None:
    codes, code_bytes = drawn
    escape = 256**code_bytes - 1
    num_gaps = sum(code != escape for code in codes)
    num_changed = max(0, num_gaps + lie)
    raw = HEADER.pack(MAGIC, 2, code_bytes, 1_000, num_changed, code_bytes * len(codes))
    raw += np.array(codes, f"<u{code_bytes}").tobytes() + b"\xff\xee" * num_changed
    base = torch.zeros(2_000, dtype=torch.uint8)
    buffer, target = guarded(base)
    sound = num_changed == num_gaps and codes[-1:] != [escape] and sum(codes) + num_gaps <= 1_000
    try:
        apply_delta(torch.frombuffer(bytearray(raw), dtype=torch.uint8), target, element_bytes=2)
    except WeightSyncError:
        assert not sound
        assert torch.equal(target, base)
    else:
        assert sound
        assert int((target.view(-1, 2) == torch.tensor([0xFF, 0xEE])).all(1).sum()) == num_changed
    assert guards_are_whole(buffer)
