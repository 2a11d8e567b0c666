"""Shared memory of version slots: created by the weight agent, written by trainer ranks, read by receivers."""

#     agent      SlotMemory: anonymous memfd, sealed size          offers (pid, descriptor, token)
#     others     map_slot(offer): opened through /proc/PID/fd; read-only for receivers
#
# Nothing has a name, so nothing needs unlinking after a kill. A mapping outlives the agent: an offered version stays
# readable, and is not written to again.

import contextlib
import ctypes
import logging
import mmap
import os
import struct
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from asyncflow.device import pin
from asyncflow.errors import TransportError, WeightSyncError
from asyncflow.transport.channel import buffer_pool
from asyncflow.transport.frame import create_memfd, open_memfd
from weightsync.plan import DTYPE_BYTES, Box, Bucket, Piece, TensorSpec, TransferPlan

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_HEADER_BYTES = mmap.PAGESIZE  # the token's page
_MADV_POPULATE_READ = 22  # Linux 5.14; absent from the mmap module of Python 3.11
_MADV_POPULATE_WRITE = 23
_SHMEM_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class SlotOffer(msgspec.Struct, frozen=True):
    """Where a process of this host finds a slot's memory."""

    pid: int  # the agent's
    fd: int  # in the agent's process
    num_bytes: int  # of the region
    token: bytes  # tells this memory from any other that had the same numbers


class SlotMemory:
    """A slot's shared memory, as its agent holds it."""

    def __init__(self, num_bytes: int) -> None:
        """Reserve `num_bytes`; pages are allocated on first use.

        Raises WeightSyncError if it is out of descriptors or address space.
        """
        try:
            fd, token = create_memfd(_HEADER_BYTES + num_bytes)
            weakref.finalize(self, os.close, fd)
            self.memory = _map(fd, num_bytes, write=True)
        except OSError as error:
            raise WeightSyncError(
                f"weights: a slot of {num_bytes:,} bytes cannot be created ({error.strerror})"
            ) from error
        self.offer = SlotOffer(os.getpid(), fd, num_bytes, token)


def map_slot(
    offer: SlotOffer, *, write: bool, device: torch.device = _CPU, extents: Sequence[tuple[int, int]] | None = None
) -> Tensor:
    """Map an agent's slot; returns uint8 [num_bytes], which lives as long as a view of it does.

    Args:
        device: that copies to or from the slot.
        extents: byte ranges (start, stop) that it copies, which are page-locked; None: all.

    Raises:
        WeightSyncError: it cannot be opened: the agent is on another host, or gone.
    """
    try:
        fd = open_memfd(offer.pid, offer.fd, _HEADER_BYTES + offer.num_bytes, offer.token)
    except TransportError as error:
        raise WeightSyncError(f"weights: the agent's memory cannot be mapped ({error})") from error
    try:
        return _map(fd, offer.num_bytes, write=write, device=device, extents=extents)
    except OSError as error:
        raise WeightSyncError(f"weights: {offer.num_bytes:,} bytes cannot be mapped ({error.strerror})") from error
    finally:
        os.close(fd)


class SlotMappings:
    """The slots that one process of the agent's host has mapped. Used by one thread."""

    def __init__(self, *, write: bool, device: torch.device) -> None:
        self._write = write
        self._device = device
        self._memories: dict[bytes, tuple[tuple[tuple[int, int], ...], Tensor]] = {}

    def __contains__(self, token: bytes | None) -> bool:
        return token in self._memories

    def get(self, offer: SlotOffer, extents: tuple[tuple[int, int], ...]) -> Tensor:
        """Return a slot's memory, uint8 [num_bytes]; the byte ranges `extents` are present and page-locked.

        Raises like `map_slot`.
        """
        known, memory = self._memories.get(offer.token, (None, None))
        if memory is None or known != extents:
            memory = map_slot(offer, write=self._write, device=self._device, extents=extents)
            for start, stop in extents:
                populate(memory[start:stop], write=self._write)
            self._memories[offer.token] = extents, memory
        return memory

    def keep(self, live: Collection[bytes]) -> None:
        """Forget all but the agent's live memories (tokens)."""
        # A mapping would keep alive the memory of a slot that the agent has replaced.
        for token in self._memories.keys() - set(live):
            del self._memories[token]

    def clear(self) -> None:
        """Forget all: the agent is gone. Memory in use stays mapped."""
        self._memories.clear()


def huge_pages_line(switch: Path = _SHMEM_SWITCH) -> str:
    """Say whether this system has huge pages for slots: they take less time to populate and to page-lock."""
    try:
        granted = "[never]" not in (text := switch.read_text()) and "[deny]" not in text
    except OSError:
        granted = False
    if granted:
        return "slots of weights lie in huge pages where the kernel finds them"
    return f"slots of weights lie in ordinary pages; `echo advise > {switch}` on this host allows huge ones"


def merged(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return byte ranges (start, stop) in order, joined where they touch or overlap."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(extents):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def private_memory(num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes] of this process alone, page-aligned, in huge pages where the kernel has them.

    Raises WeightSyncError if there is not enough memory.
    """
    try:
        memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise WeightSyncError(f"weights: no memory of {num_bytes:,} bytes for a version ({error.strerror})") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))[:num_bytes]


def populate(memory: Tensor, *, write: bool) -> None:
    """Make a mapping's pages present, so that its users meet no page faults. Runs without the GIL."""
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = memory.data_ptr() + memory.numel() - start
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    if _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice):
        logger.debug("populate: %s", os.strerror(ctypes.get_errno()))  # an older kernel: pages come on first use


def _map(
    fd: int,
    num_bytes: int,
    *,
    write: bool,
    device: torch.device = _CPU,
    extents: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    memory = mmap.mmap(fd, _HEADER_BYTES + num_bytes, flags=mmap.MAP_SHARED, prot=protection)
    with contextlib.suppress(OSError):  # see `huge_pages_line`
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8)[_HEADER_BYTES:]
    page = mmap.PAGESIZE  # lock whole pages, none twice: a copy's range must be locked entirely or not at all
    used = [(0, num_bytes)] if extents is None else extents
    pages = merged((start // page * page, -(-stop // page) * page) for start, stop in used)
    for start, stop in pages:
        unpin = pin(array.ctypes.data + start, min(stop, num_bytes) - start, device, writable=write)
        if unpin is not None:
            weakref.finalize(array, unpin).atexit = False  # by then the views are gone, but not yet the mapping
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch knows no read-only tensors
        return torch.from_numpy(array)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


# What changed in a bucket since an older version of it, bit by bit. Pure; knows neither dtypes nor peers.
#
# A small optimizer step leaves most low-precision weights unchanged, so the changed elements and their positions take
# far fewer bytes than the bucket. A sender encodes; a receiver that still has the older version applies. Elements are
# compared and copied as integers, so NaN payloads and -0.0 survive. A delta has no checksum and does not know its base:
# its carrier vouches for both.
#
#     header | gaps: one or more codes each | the changed elements' new values, in order
#
# The header has a magic number (4 bytes), the sizes of an element and of a code (2 bytes each), then the number of
# elements in the bucket, the number of changed ones and the bytes of the gaps (8 bytes each). A gap is the number of
# unchanged elements before a changed one. Its codes are little-endian integers of 1, 2 or 4 bytes, whichever makes the
# delta smallest; the largest integer means "this many, and another code follows". If elements 1 and 302 of a bucket
# changed, with codes of one byte:
#
#     positions 1, 302     gaps 1, 300     codes 1, 255, 45
#
# Both directions work in blocks that fit a cache, so they need little scratch memory; encoding also holds the changes.

_MAGIC = b"AFd1"
_HEADER = struct.Struct("<4sHHQQQ")
_CODE_BYTES = (1, 2, 4)
# Elements or codes per block.
_BLOCK = 1 << 18

_Array = npt.NDArray[np.unsignedinteger[Any]]
_Positions = npt.NDArray[np.int64]


def encode_delta(new: Tensor, base: Tensor, *, element_bytes: int) -> Tensor | None:
    """Return what turns `base` into `new` (uint8, shorter than `new`); None: send `new` whole.

    Args:
        new: uint8 [bytes], on the CPU, contiguous; whole elements.
        base: uint8 [bytes], the same bucket of an older version.
        element_bytes: 1, 2, 4 or 8.
    """
    assert new.numel() == base.numel(), f"{new.numel()} bytes against a base of {base.numel()}"
    elements, old = _elements(new, element_bytes), _elements(base, element_bytes)
    # A change costs at least one code byte and the element.
    changes = _find_changes(elements, old, most=(new.numel() - _HEADER.size) // (1 + element_bytes))
    if changes is None:
        return None
    gaps, values = changes
    num_changed = sum(map(len, values))
    # A gap takes one code, and one more for every full escape in it.
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
    """Turn `target` from the delta's base into the encoded version, in place.

    Args:
        delta: uint8 [bytes], on the CPU, contiguous; from `encode_delta`, or whatever a peer sent in its place.
        target: uint8 [bytes], on the CPU, contiguous; holds the base.
        element_bytes: 1, 2, 4 or 8.

    Raises:
        WeightSyncError: the delta is malformed or for a bucket of another size or element size; `target` is unchanged.
    """
    # Check everything before the first write.
    layout = _parse(delta.numpy(), target.numel(), element_bytes)
    elements = _elements(target, element_bytes)
    taken = 0
    for positions in _decode_gaps(layout.codes):
        elements[positions] = layout.values[taken : taken + positions.size]
        taken += positions.size


class _Layout(NamedTuple):
    """A delta that passed all checks: every position that `codes` yield lies inside the target."""

    codes: _Array
    values: _Array


def _find_changes(new: _Array, base: _Array, *, most: int) -> tuple[list[_Array], list[_Array]] | None:
    """Return gaps and new values of the changed elements, by block; None as soon as there are more than `most`."""
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
        raise WeightSyncError(f"a delta of {delta.size} bytes is truncated: its header alone has {_HEADER.size}")
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
    # Positions only grow, so checking the last one, which follows from sums alone, checks them all.
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


# One version of the weights in memory: a flat buffer that holds every whole tensor under its Hugging Face name.
#
# Weights are written, checked, sent and loaded through a region: the trainer's ranks write their pieces into it,
# receivers view whole tensors in it. A region does not care whose memory it is.


class RegionLayout:
    """Where the tensors of a plan, or a share of them, lie; made once per plan.

    Args:
        share: by number of a tensor, the box of it that has a place; None: all of every tensor.
    """

    def __init__(self, plan: TransferPlan, share: Mapping[int, Box] | None = None) -> None:
        self.plan = plan
        self._specs = tuple(plan.tensors.values())
        self._starts: dict[int, int] = {}
        self._whole = share is None
        self._boxes = dict(share or {})
        # Size of memory with this layout.
        self.num_bytes = 0
        for number, spec in enumerate(self._specs):
            if share is None:
                self._boxes[number] = Box.from_shape(spec.shape)
            if number in self._boxes:
                self._starts[number] = self.num_bytes
                self.num_bytes += TensorSpec(self._boxes[number].size, spec.dtype).room_bytes

    def box(self, number: int) -> Box | None:
        """Return the box of a tensor that has a place; None: nothing of it has."""
        return self._boxes.get(number)

    def piece_run(self, piece: Piece) -> tuple[int, int] | None:
        """Return (first byte, bytes) of a piece that is one run of the region, else None; all of it has a place."""
        held = self._boxes[piece.tensor]
        run = self.relative_box(piece).contiguous_run(held.size)
        if run is None:
            return None
        element_bytes = DTYPE_BYTES[self._specs[piece.tensor].dtype]
        return self._starts[piece.tensor] + run[0] * element_bytes, run[1] * element_bytes

    def relative_box(self, piece: Piece) -> Box:
        """Return a piece's box relative to what has a place of its tensor; all of it has."""
        held = self._boxes[piece.tensor]
        if self._whole:
            return piece.box
        inside = piece.box.relative_to(held)
        assert inside is not None, f"{piece} is not in {held}"
        return inside

    def tensor_extent(self, number: int) -> tuple[int, int]:
        """Return (first byte, bytes) of what has a place of a tensor."""
        num_bytes = TensorSpec(self._boxes[number].size, self._specs[number].dtype).num_bytes
        return self._starts[number], num_bytes

    def bucket_extents(self, buckets: Iterable[Bucket]) -> list[tuple[int, int]]:
        """Return the byte ranges (start, stop) of buckets, merged where they meet."""
        runs = []
        for piece in (piece for bucket in buckets for piece in bucket.pieces):
            # A piece that is no single run counts as its whole tensor.
            start, num_bytes = self.piece_run(piece) or self.tensor_extent(piece.tensor)
            runs.append((start, start + num_bytes))
        return merged(runs)

    def tensor_spec(self, number: int) -> TensorSpec:
        return self._specs[number]


class Region:
    """Memory laid out by a plan.

    Args:
        memory: uint8 [at least layout.num_bytes], 64-byte aligned; on the CPU wherever bytes are hashed or packed.
    """

    def __init__(self, memory: Tensor, layout: RegionLayout) -> None:
        self._memory = memory
        self.layout = layout

    def view_tensor(self, number: int) -> Tensor:
        """Return a view of a tensor's box that has a place, or of the whole one on device `meta` if none has."""
        spec, box = self.layout.tensor_spec(number), self.layout.box(number)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if box is None:
            return torch.empty(spec.shape, dtype=dtype, device="meta")
        start, num_bytes = self.layout.tensor_extent(number)
        return self._memory[start : start + num_bytes].view(dtype).view(box.size)

    def view_piece(self, piece: Piece) -> Tensor:
        """Return a view of a part of a tensor, in the box's shape; all or nothing of it has a place."""
        box = piece.box if self.layout.box(piece.tensor) is None else self.layout.relative_box(piece)
        return self.view_tensor(piece.tensor)[box.slices]

    def view_overlap(self, piece: Piece) -> tuple[tuple[slice, ...], Tensor] | None:
        """Return which part of a piece has a place (slices of the piece), and a view of it; None: none has."""
        held = self.layout.box(piece.tensor)
        part = None if held is None else piece.box.overlap(held)
        if part is None:
            return None
        within = part.relative_to(piece.box)
        assert within is not None, "an overlap is inside both"
        return within.slices, self.view_piece(Piece(piece.tensor, part))

    def view_matched(self, matched: Mapping[str, Piece]) -> dict[str, Tensor]:
        """Return what a receiver wants, by its own names; see `match_needs`."""
        return {name: self.view_piece(piece) for name, piece in matched.items()}

    def bytes_at(self, start: int, num_bytes: int) -> Tensor:
        """Return a view, uint8 [num_bytes]."""
        return self._memory[start : start + num_bytes]

    def packed(self, bucket: Bucket) -> Tensor:
        """Return a bucket's bytes, uint8 [num_bytes]: a view where they are one run of memory, else a copy."""
        if len(bucket.pieces) == 1:
            return self._bytes_of(bucket.pieces[0])
        out = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        self.pack_pieces(bucket.pieces, out)
        return out

    def pack_pieces(self, pieces: Sequence[Piece], out: Tensor) -> None:
        if pieces:
            torch.cat([self._bytes_of(piece) for piece in pieces], out=out)

    def unpack(self, pieces: Sequence[Piece], packed: Tensor) -> None:
        offset = 0
        for piece in pieces:
            target = self.view_piece(piece)
            num_bytes = target.numel() * target.element_size()
            source = packed[offset : offset + num_bytes]
            run = self.layout.piece_run(piece)
            if run is not None:
                self.bytes_at(*run).copy_(source)
            else:
                target.copy_(source.clone().view(target.dtype).view(target.shape))
            offset += num_bytes

    def list_parts(self, bucket: Bucket) -> list[Tensor]:
        """Return a bucket's pieces, uint8: views where they are one run of memory, else copies."""
        return [self._bytes_of(piece) for piece in bucket.pieces]

    def landing(self, bucket: Bucket) -> list[Tensor]:
        """Return memory to receive a bucket's pieces in, uint8; then `settle` them. Most of it is the region's own."""
        return [
            self.bytes_at(*run) if (run := self.layout.piece_run(piece)) is not None else self._borrow_for(piece)
            for piece in bucket.pieces
        ]

    def settle(self, bucket: Bucket, landed: Sequence[Tensor]) -> None:
        """Move what was received to where it belongs, if it is not there yet."""
        for piece, data in zip(bucket.pieces, landed, strict=True):
            if self.layout.piece_run(piece) is None:
                target = self.view_piece(piece)
                target.copy_(data.view(target.dtype).view(target.shape))

    def _borrow_for(self, piece: Piece) -> Tensor:
        view = self.view_piece(piece)
        return buffer_pool().borrow_buffer(view.numel() * view.element_size())

    def copy_bucket(self, bucket: Bucket, source: "Region") -> None:
        for piece in bucket.pieces:
            run = self.layout.piece_run(piece)
            if run is not None:
                # One thread, unlike torch's copy: the other cores are generating.
                np.copyto(self.bytes_at(*run).numpy(), source.bytes_at(*run).numpy())
            else:
                self.view_piece(piece).copy_(source.view_piece(piece))

    def bucket_checksum(self, bucket: Bucket) -> int:
        """Return the 64-bit xxh3 of a bucket's bytes; reads all of them."""
        hasher = xxhash.xxh3_64()
        for piece in bucket.pieces:
            hasher.update(self._bytes_of(piece).numpy().data)
        return hasher.intdigest()

    def _bytes_of(self, piece: Piece) -> Tensor:
        run = self.layout.piece_run(piece)
        if run is not None:
            return self.bytes_at(*run)
        return self.view_piece(piece).contiguous().view(-1).view(torch.uint8)


def version_checksum(checksums: Sequence[int]) -> int:
    """Return the checksum of a whole version: 64-bit xxh3 of its buckets' checksums, in order."""
    return int(xxhash.xxh3_64_intdigest(b"".join(each.to_bytes(8, "little") for each in checksums)))
