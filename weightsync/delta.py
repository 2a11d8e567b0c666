"""What changed in a bucket since an older version of it, bit by bit. Pure; knows neither tensors' types nor peers.

A small optimiser step leaves most low-precision weights as they were, so the changed elements and where they are take
far less than the bucket. A sender encodes, a receiver that still has the older version applies. Elements are compared
and copied as integers: NaN payloads and -0.0 survive. A delta has no checksum and does not know its base: its
carrier vouches for both.

    header | gaps: one or more codes each | the changed elements' new values, in order

The header has a magic number (4 bytes), the sizes of an element and of a code (2 bytes each), and how many elements
the bucket has, how many of them changed, and how many bytes the gaps take (8 bytes each). A gap is the number of
unchanged elements before a changed one. Its codes are little-endian integers of 1, 2 or 4 bytes, whichever makes the
delta smallest; the largest integer says "this many, and the next code goes on". Elements 1 and 302 of a bucket changed,
with codes of one byte:

    positions 1, 302     gaps 1, 300     codes 1, 255, 45

Both directions work in blocks that fit a cache, so scratch memory is small; encoding also holds the changes themselves.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncflow.errors import WeightSyncError

_MAGIC = b"AFd1"
_HEADER = struct.Struct("<4sHHQQQ")
_CODE_BYTES = (1, 2, 4)
_BLOCK = 1 << 18
"""Elements or codes taken at a time."""

_Array = npt.NDArray[np.unsignedinteger[Any]]
_Positions = npt.NDArray[np.int64]


def encode_delta(new: Tensor, base: Tensor, *, element_bytes: int) -> Tensor | None:
    """Return what turns `base` into `new`, if that is less than `new` itself.

    Args:
        new: uint8 [bytes], on the CPU, contiguous; whole elements.
        base: uint8 [bytes], the same bucket of an older version.
        element_bytes: size of an element: 1, 2, 4 or 8 bytes.

    Returns:
        uint8 [bytes], shorter than `new`; None: send `new` whole.
    """
    assert new.numel() == base.numel(), f"{new.numel()} bytes against a base of {base.numel()}"
    elements, old = _elements(new, element_bytes), _elements(base, element_bytes)
    changes = _find_changes(elements, old, most=(new.numel() - _HEADER.size) // (1 + element_bytes))
    if changes is None:
        return None
    gaps, values = changes
    num_changed = sum(map(len, values))
    num_codes = {width: num_changed + sum(int((gap // _escape(width)).sum()) for gap in gaps) for width in _CODE_BYTES}
    code_bytes = min(_CODE_BYTES, key=lambda width: width * num_codes[width])
    gap_bytes = code_bytes * num_codes[code_bytes]
    num_bytes = _HEADER.size + gap_bytes + num_changed * element_bytes
    if num_bytes >= new.numel():
        return None
    header = _HEADER.pack(_MAGIC, element_bytes, code_bytes, elements.size, num_changed, gap_bytes)
    delta = np.empty(num_bytes, np.uint8)
    delta[: _HEADER.size] = np.frombuffer(header, np.uint8)
    _join((_encode_gaps(gap, code_bytes) for gap in gaps), delta[_HEADER.size :][:gap_bytes])
    _join(values, delta[_HEADER.size + gap_bytes :])
    return torch.from_numpy(delta)


def apply_delta(delta: Tensor, target: Tensor, *, element_bytes: int) -> None:
    """Turn `target` from the delta's base into the version that was encoded, in place.

    The delta is checked as a whole before the first write; a refused one leaves `target` as it was.

    Args:
        delta: uint8 [bytes], on the CPU, contiguous; from `encode_delta`, or whatever a peer sent in its place.
        target: uint8 [bytes], on the CPU, contiguous; holds the base.
        element_bytes: size of an element: 1, 2, 4 or 8 bytes.

    Raises:
        WeightSyncError: the delta is malformed or belongs to a bucket of another size or element size.
    """
    layout = _parse(delta.numpy(), target.numel(), element_bytes)
    elements = _elements(target, element_bytes)
    taken = 0
    for positions in _decode_gaps(layout.codes):
        elements[positions] = layout.values[taken : taken + positions.size]
        taken += positions.size


class _Layout(NamedTuple):
    """A delta that passed all checks: every position that `codes` yield lies inside of the target."""

    codes: _Array
    values: _Array


def _find_changes(new: _Array, base: _Array, *, most: int) -> tuple[list[_Array], list[_Array]] | None:
    """Return gaps and new values of the changed elements, by block; None as soon as they are more than `most`."""
    gap_type = np.promote_types(np.uint32, np.min_scalar_type(new.size))
    gaps, values = [], []
    num_changed, previous = 0, -1
    for start in range(0, new.size, _BLOCK):
        block = new[start : start + _BLOCK]
        positions = np.flatnonzero(block != base[start : start + _BLOCK])
        num_changed += positions.size
        if num_changed > most:
            return None
        if positions.size:
            gap = np.empty(positions.size, gap_type)
            gap[0] = start + positions[0] - previous
            np.subtract(positions[1:], positions[:-1], out=gap[1:], casting="unsafe")
            gap -= 1
            gaps.append(gap)
            values.append(block.take(positions))
            previous = start + int(positions[-1])
    return gaps, values


def _encode_gaps(gaps: _Array, code_bytes: int) -> _Array:
    escape = _escape(code_bytes)
    num_escapes = gaps // escape
    if not num_escapes.any():
        return gaps.astype(_code_type(code_bytes))
    ends = np.cumsum(num_escapes + 1, dtype=np.int64) - 1
    codes = np.full(int(ends[-1]) + 1, escape, _code_type(code_bytes))
    codes[ends] = gaps - num_escapes * escape
    return codes


def _decode_gaps(codes: _Array) -> Iterator[_Positions]:
    """Yield the changed positions, increasing, by block of codes."""
    escape = _escape(codes.itemsize)
    passed = 0
    for start in range(0, codes.size, _BLOCK):
        block = codes[start : start + _BLOCK]
        ends = block != escape
        following = np.cumsum(block + ends.astype(np.int64)) + passed
        passed = int(following[-1])
        yield following[ends] - 1


def _parse(delta: npt.NDArray[np.uint8], target_bytes: int, element_bytes: int) -> _Layout:
    if delta.size < _HEADER.size:
        raise WeightSyncError(f"a delta of {delta.size} bytes is cut off: its header alone has {_HEADER.size}")
    fields = _HEADER.unpack(delta[: _HEADER.size].tobytes())
    magic, header_element_bytes, code_bytes, num_elements, num_changed, gap_bytes = fields
    if magic != _MAGIC or code_bytes not in _CODE_BYTES:
        raise WeightSyncError(
            f"a delta starts with {magic!r} and codes of {code_bytes} bytes, not {_MAGIC!r} and 1, 2, 4"
        )
    if (header_element_bytes, num_elements * element_bytes) != (element_bytes, target_bytes):
        raise WeightSyncError(
            f"a delta for {num_elements} elements of {header_element_bytes} bytes does not belong to a bucket of "
            f"{target_bytes} bytes in elements of {element_bytes}; do sender and receiver have the same plan?"
        )
    if gap_bytes % code_bytes or delta.size != _HEADER.size + gap_bytes + num_changed * element_bytes:
        raise WeightSyncError(
            f"a delta of {delta.size} bytes does not hold {gap_bytes} bytes of gaps and {num_changed} changed elements"
        )
    gap_end = _HEADER.size + gap_bytes
    codes = delta[_HEADER.size : gap_end].view(_code_type(code_bytes))
    _check_codes(codes, num_changed, num_elements)
    return _Layout(codes, delta[gap_end:].view(f"u{element_bytes}"))


def _check_codes(codes: _Array, num_changed: int, num_elements: int) -> None:
    """Positions only grow, so the last one, known from sums alone, vouches for all."""
    escape = _escape(codes.itemsize)
    num_gaps, skipped = 0, 0
    for start in range(0, codes.size, _BLOCK):
        block = codes[start : start + _BLOCK]
        num_gaps += int(np.count_nonzero(block != escape))
        skipped += int(block.sum(dtype=np.uint64))
    if num_gaps != num_changed or (codes.size and codes[-1] == escape):
        raise WeightSyncError(f"a delta of {num_changed} changed elements has {num_gaps} whole gaps")
    if skipped + num_changed > num_elements:
        raise WeightSyncError(f"a delta changes element {skipped + num_changed - 1} of a bucket of {num_elements}")


def _join(parts: Iterable[_Array], out: npt.NDArray[np.uint8]) -> None:
    start = 0
    for part in parts:
        out[start : start + part.nbytes] = part.view(np.uint8)
        start += part.nbytes


def _elements(tensor: Tensor, element_bytes: int) -> _Array:
    return tensor.numpy().view(f"u{element_bytes}")


def _code_type(code_bytes: int) -> str:
    return f"<u{code_bytes}"


def _escape(code_bytes: int) -> int:
    return int((1 << 8 * code_bytes) - 1)
