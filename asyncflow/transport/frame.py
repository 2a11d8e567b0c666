"""A message as it travels: the frame that begins it, and a payload of raw values. Pure."""

# The frame carries lengths, handles and checksums, and body and payload, too, when they are short:
#
#     | checksum 8 | magic 4 | kind 1 | route 1 | releases 2 | request id 8 | body bytes 4 | segments 4 | payload 8 |
#     | offset 8 | generation 4 | body outside 4 | body checksum 8 || released offsets 8 each | body | payload ... |
#     '----------------------- HEADER_BYTES ----------------------''---------- up to FRAME_BYTES -------------'
#
# Every frame has FRAME_BYTES, because a Gloo receive must be posted with the exact size. The body is the sizes of the
# messages that follow (8 bytes each), then the typed message. `Route` says where the payload is, and the body if it
# does not fit. Nothing is trusted before its checksum matches, and no length before it is compared with the limits.
#
# A sender describes the payload's bytes (`PayloadPiece`s). The channel decides whether they are written into shared
# memory or sent over the wire, so a payload costs one copy either way. Receivers get one contiguous uint8 tensor. On
# the wire a payload is *segments*: long tensors that need no conversion are sent from where they are; whatever lies
# between them is packed first.

import contextlib
import fcntl
import os
import secrets
import struct
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from asyncflow.errors import TransportError

# Every piece starts at a multiple of this (bytes), so that any dtype can be viewed in place.
ALIGN = 8
# A tensor of this size is worth a message of its own: the message costs less than a copy.
DIRECT_BYTES = 2**18
# Messages are closed at this size, so that packing one, and the kernel's copying, overlaps with sending the other.
MESSAGE_BYTES = 2**20

FRAME_BYTES = 4096
MOST_RELEASES = 32
_HEADER = struct.Struct("<Q4sBBHQIIQQIIQ")
_CHECKSUM = struct.Struct("<Q")
_MAGIC = b"AFW2"
_LEAST_SEGMENT_BYTES = 2**16  # senders of every version make larger ones
HEADER_BYTES = _HEADER.size
# A body and payload of up to this size always fit into the frame.
ROOM_BYTES = FRAME_BYTES - HEADER_BYTES - 8 * MOST_RELEASES - ALIGN


class FrameKind(IntEnum):
    REQUEST = 1
    REPLY = 2
    GOODBYE = 3
    HELLO = 4


class Route(IntEnum):
    """Where the payload is: in the frame, in shared memory, or in messages that follow."""

    FRAME = 0
    SHARED = 1
    WIRE = 2


@dataclass(frozen=True)
class Limits:
    """What one end accepts and uses."""

    meta_bytes: int = 2**26  # largest message accepted
    payload_bytes: int = 2**31  # largest payload accepted
    shared_memory: bool = True  # use it when the peer is on the same host
    # Address space for payloads that the peer has not released; anything beyond goes over the wire.
    arena_bytes: int = 2**33


class Frame(msgspec.Struct):
    """What begins every message."""

    kind: FrameKind
    request_id: int = 0  # pairs a reply with its request; unique per channel
    route: Route = Route.FRAME
    body: bytes = b""  # sizes of segments and message; empty when it is outside the frame
    outside: bool = False  # the body takes the payload's route
    num_segments: int = 0  # number of sizes at the front of the body
    payload_bytes: int = 0
    offset: int = 0  # with `generation`: handle of the region (`Route.SHARED`)
    generation: int = 0
    # Offsets in the receiver's arena of regions that the sender of this frame no longer views.
    releases: Sequence[int] = ()
    body_bytes: int = 0  # of the body, wherever it is
    body_checksum: int = 0
    payload: bytes = b""  # empty unless it is in the frame

    def split_body(self) -> tuple[list[int], bytes]:
        """Return (sizes of the segments, message).

        Raises TransportError if the segments do not add up to the payload.
        """
        if self.route is not Route.WIRE:
            return [], self.body
        sizes = list(struct.unpack_from(f"<{self.num_segments}Q", self.body))
        if sum(map(aligned, sizes)) != self.payload_bytes or not all(sizes):
            raise TransportError(f"frame: segments {sizes[:8]} do not make up a payload of {self.payload_bytes} bytes")
        return sizes, self.body[8 * self.num_segments :]

    def accept_body(self, body: bytes) -> None:
        """Take a body that came from outside the frame. Raises TransportError if its length or checksum differs."""
        if len(body) != self.body_bytes or xxhash.xxh3_64_intdigest(body) != self.body_checksum:
            raise TransportError("frame: checksum of the message does not match; the channel is dropped")
        self.body = body


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class PayloadPiece:
    """Tensors that travel back to back, without gaps."""

    # 1-D, contiguous, on the CPU, of one dtype; they must not change until the send has returned.
    parts: Sequence[Tensor]
    dtype: torch.dtype  # on the wire; the one copy also casts
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        numel = sum(part.numel() for part in self.parts)
        object.__setattr__(self, "num_bytes", numel * self.dtype.itemsize)

    @property
    def in_place(self) -> Tensor | None:
        """The bytes as one uint8 tensor if they are contiguous and of the right dtype already, else None."""
        if len(self.parts) == 1 and self.parts[0].dtype == self.dtype and self.parts[0].stride() == (1,):
            return self.parts[0].view(torch.uint8)
        return None

    def write(self, out: Tensor) -> None:
        target = out.view(self.dtype)
        if len(self.parts) == 1:
            target.copy_(self.parts[0])
        elif self.parts:
            torch.cat(list(self.parts), out=target)


class Payload:
    """Pieces, each aligned to `ALIGN` bytes; the gaps hold undefined bytes."""

    def __init__(self, pieces: Iterable[PayloadPiece]) -> None:
        self.pieces = tuple(pieces)
        self.num_bytes = sum(aligned(piece.num_bytes) for piece in self.pieces)

    @staticmethod
    def from_tensor(tensor: Tensor) -> "Payload":
        return Payload([PayloadPiece((tensor.reshape(-1),), tensor.dtype)])

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
    return part.numel() if isinstance(part, Tensor) else part.num_bytes


def place(payload: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return where the messages go in a received payload: back to back, each at a multiple of `ALIGN`."""
    places, offset = [], 0
    for size in sizes:
        places.append(payload[offset : offset + size])
        offset += aligned(size)
    return places


class PlacedPayload:
    """Where a payload's pieces go, so that what is received need not be copied again, and what came.

    Args:
        parts: uint8, 1-D, contiguous: memory for each piece of the sender's `Payload`, in order.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts
        self._starts: list[int] = []
        self.num_bytes = 0
        for part in parts:
            self._starts.append(self.num_bytes)
            self.num_bytes += aligned(part.numel())
        self._hasher = xxhash.xxh3_64()

    @property
    def checksum(self) -> int:
        """64-bit xxh3 of the pieces that came."""
        return self._hasher.intdigest()

    def view(self, offset: int, num_bytes: int) -> Tensor | None:
        """Return the memory of a range of the payload; None: it spans several pieces, so receive it elsewhere."""
        number = bisect_right(self._starts, offset) - 1
        start = offset - self._starts[number]
        part = self.parts[number]
        return part[start : start + num_bytes] if start + num_bytes <= part.numel() else None

    def accept_range(self, offset: int, data: Tensor) -> None:
        """A range of the payload came, uint8 [bytes]: move it to where it goes, unless it is there. In order."""
        # Hashed at once, while it is in the cache and the next range is being received.
        end = offset + data.numel()
        first = max(0, bisect_right(self._starts, offset) - 1)
        for start, part in zip(self._starts[first:], self.parts[first:], strict=True):
            if start >= end:
                return
            low, high = max(start, offset), min(start + part.numel(), end)
            if low < high:
                came, target = data[low - offset : high - offset], part[low - start : high - start]
                if came.data_ptr() != target.data_ptr():
                    target.copy_(came)
                self._hasher.update(came.numpy().data)


def _segments(payload: Payload) -> Iterator[Tensor | Payload]:
    gathered: list[PayloadPiece] = []
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
    """Write all but payload and checksum into `out` (FRAME_BYTES); returns where the payload goes."""
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
    """Write the checksum of the used part, [0, end)."""
    _CHECKSUM.pack_into(out, 0, xxhash.xxh3_64_intdigest(out[_CHECKSUM.size : end]))


def decode_frame(data: memoryview, limits: Limits) -> Frame:
    """Parse FRAME_BYTES bytes; the result does not refer to them.

    Raises TransportError if it is not a frame, is damaged, or has an unknown kind or a length beyond `limits`.
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
    # The releases and segments are counted here too: all of this is read before the checksum vouches for it.
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


# Shared memory of one direction of a channel: the sender writes payloads into it, the receiver reads them in place.
#
#     sender                                       receiver
#       Arena: anonymous memfd, sparse               PeerArena: maps /proc/PID/fd/N of the sender (then it is closed)
#       allocate -> write -> handle in a frame ----> borrow: a tensor over the region
#       region may be used again <------ release --- last view gone; rides on the next frame that goes back
#
# Nothing has a name, so nothing needs unlinking after a kill. A region is reused only after its release. An arena goes
# away as a whole with its channel, while mappings live on. So a slow, stopped or dead peer never sees bytes that were
# not sent to it, and its death costs other processes nothing.

ALIGN_BYTES = 64
_NAME = "asyncflow"
_TOKEN_BYTES = 16
_DATA_START = 4096  # the token's page


class ArenaOffer(msgspec.Struct):
    """Where a peer finds an arena."""

    fd: int  # the sender's descriptor
    num_bytes: int  # of the whole file
    generation: int  # repeated in every handle
    token: bytes  # the file's first bytes


class Arena:
    """Shared memory that the sender writes payloads into. Thread-safe."""

    def __init__(self, num_bytes: int) -> None:
        """Reserve address space; pages are allocated on first use. Raises OSError if there is none left, or no
        descriptor.
        """
        fd, token = create_memfd(num_bytes)
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._memory = _mapped(fd, num_bytes)
        self._extents = Extents(num_bytes - _DATA_START)
        self._lock = threading.Lock()
        self.offer = ArenaOffer(fd, num_bytes, secrets.randbits(32), token)

    def allocate_region(self, num_bytes: int) -> int | None:
        with self._lock:
            start = self._extents.allocate_extent(num_bytes)
        return None if start is None else start + _DATA_START

    def view_region(self, offset: int, num_bytes: int) -> Tensor:
        return self._memory[offset : offset + num_bytes]

    def release_regions(self, offsets: Iterable[int]) -> None:
        """The receiver has no views of these regions any more. Raises TransportError if no such region is in use."""
        with self._lock:
            for offset in offsets:
                try:
                    self._extents.free_extent(offset - _DATA_START)
                except KeyError as error:
                    raise TransportError(f"arena: the peer released {offset}, where no region is in use") from error

    def close(self) -> None:
        """Close the descriptor: the receiver has mapped it, or never will. Mappings keep the memory alive."""
        self._close_fd()

    @property
    def highest(self) -> int:
        """High-water mark of the memory used (bytes)."""
        return self._extents.highest

    @property
    def idle(self) -> bool:
        return not self._extents.in_use


class PeerArena:
    """The receiver's end. One thread borrows; the last view of a region may be dropped in any thread."""

    def __init__(self, pid: int, offer: ArenaOffer) -> None:
        """Map the sender's memory. Raises TransportError if it cannot be opened, or is not what was offered."""
        self._offer = offer
        fd = open_memfd(pid, offer.fd, offer.num_bytes, offer.token)
        try:
            self._memory = _mapped(fd, offer.num_bytes).numpy()
        except RuntimeError as error:
            raise TransportError(f"arena: {offer.num_bytes} bytes cannot be mapped") from error
        finally:
            os.close(fd)
        # Offsets of regions that the sender may reuse but has not been told of.
        self.released: deque[int] = deque()

    def borrow_region(self, offset: int, num_bytes: int, generation: int) -> Tensor:
        """Return a region as uint8 [num_bytes]; the caller owns it until its last view is gone.

        Raises TransportError if the handle does not belong to this arena.
        """
        inside = _DATA_START <= offset <= self._offer.num_bytes - num_bytes and offset % ALIGN_BYTES == 0
        if generation != self._offer.generation or num_bytes <= 0 or not inside:
            raise TransportError(
                f"arena: handle {offset}+{num_bytes} of generation {generation:08x} does not belong to "
                f"{self._offer.num_bytes} bytes of generation {self._offer.generation:08x}"
            )
        return tracked_view(self._memory, offset, num_bytes, self.released)


class Extents:
    """Allocator of aligned parts of [0, num_bytes): first fit, neighbours merged. Not thread-safe.

    The lowest address wins, so that memory that was used before, and therefore is in RAM, is reused first.
    """

    def __init__(self, num_bytes: int) -> None:
        # Rounded down.
        self.num_bytes = num_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._starts = [0] if self.num_bytes else []  # of the free extents, sorted
        self._sizes = [self.num_bytes] if self.num_bytes else []
        self._used: dict[int, int] = {}
        # End of the highest part ever handed out.
        self.highest = 0

    @property
    def in_use(self) -> int:
        return len(self._used)

    def allocate_extent(self, num_bytes: int) -> int | None:
        """Return the start of a part of at least `num_bytes`, or None if no free part is long enough."""
        size = max(1, -(-num_bytes // ALIGN_BYTES)) * ALIGN_BYTES
        for k, free in enumerate(self._sizes):
            if free < size:
                continue
            start = self._starts[k]
            if free == size:
                del self._starts[k], self._sizes[k]
            else:
                self._starts[k] += size
                self._sizes[k] -= size
            self._used[start] = size
            self.highest = max(self.highest, start + size)
            return start
        return None

    def free_extent(self, start: int) -> None:
        """Take a part back. Raises KeyError if no part in use starts there."""
        size = self._used.pop(start)
        k = bisect_left(self._starts, start)
        if k < len(self._starts) and start + size == self._starts[k]:
            size += self._sizes[k]
            del self._starts[k], self._sizes[k]
        if k > 0 and self._starts[k - 1] + self._sizes[k - 1] == start:
            self._sizes[k - 1] += size
        else:
            self._starts.insert(k, start)
            self._sizes.insert(k, size)


def tracked_view(memory: NDArray[np.uint8], start: int, num_bytes: int, released: deque[int]) -> Tensor:
    """Return a view of uint8 `memory`; `start` is appended to `released` when the last tensor or array over it is gone.

    The view must not be empty. Any such view keeps the whole memory alive.
    """
    view = memory[start : start + num_bytes]
    # This runs in whichever thread drops the last view, at any point of its work: an append needs no lock.
    weakref.finalize(view, released.append, start).atexit = False
    return torch.from_numpy(view)


def take_released(released: deque[int], most: int) -> list[int]:
    taken: list[int] = []
    with contextlib.suppress(IndexError):
        while len(taken) < most:
            taken.append(released.popleft())
    return taken


def create_memfd(num_bytes: int) -> tuple[int, bytes]:
    """Return (descriptor, token) of new shared memory that can neither shrink nor grow."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        os.ftruncate(fd, num_bytes)
        os.pwrite(fd, token, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd, token


def open_memfd(pid: int, fd: int, num_bytes: int, token: bytes) -> int:
    """Open memory that another process made with `create_memfd`; returns a descriptor of our own.

    Raises TransportError if it is not that memory, or this process may not open it.
    """
    path = f"/proc/{int(pid)}/fd/{int(fd)}"
    try:
        # The number may denote something else by now, or in another namespace: open only a memfd, and let the token
        # decide.
        if not str(Path(path).readlink()).startswith(f"/memfd:{_NAME}"):
            raise TransportError(f"arena: {path} is not shared memory of AsyncFlow")
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"arena: {path} cannot be opened ({error.strerror})") from error
    # The size must be sealed: touching a page beyond a shrunken end would kill this process.
    sealed = fcntl.fcntl(own, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    if not sealed or os.fstat(own).st_size != num_bytes or os.pread(own, _TOKEN_BYTES, 0) != token:
        os.close(own)
        raise TransportError(f"arena: {path} is not what the peer offered")
    return own


def _mapped(fd: int, num_bytes: int) -> Tensor:
    # Not mmap.mmap: it would keep a descriptor per mapping.
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)
