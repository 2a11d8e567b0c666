"""Channels carry frames and payloads between two processes. When one end dies, only its channel fails."""

#     client                                server
#       |-- frame [body] [payload] ---------->|   any thread may send; body and payload travel in the frame,
#       |<--------- frame [body] [payload] ---|   in shared memory, or behind it; one thread per end receives
#       |-- goodbye ------------------------->|   close(): the peer's receive ends and answers goodbye
#       X  abort                              X   pending operations of both ends fail at once
#
# `meeting.open_channel` makes one: a `PipeChannel` between processes of one host, else a `GlooChannel`. Idle receives
# have no timeout. The thread that waits for a reply keeps the deadline; once it passes, drop the channel and open
# another.

import contextlib
import fcntl
import itertools
import mmap
import os
import select
import stat
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from asyncflow.errors import DeadlineExceeded, TransportError
from asyncflow.job import GLOO_INTERFACE, LOOPBACK
from asyncflow.transport.frame import (
    ALIGN_BYTES,
    FRAME_BYTES,
    MOST_RELEASES,
    ROOM_BYTES,
    Arena,
    Extents,
    Frame,
    FrameKind,
    Limits,
    Payload,
    PeerArena,
    PlacedPayload,
    Route,
    aligned,
    decode_frame,
    encode_frame,
    place,
    seal_frame,
    segment_bytes,
    segments,
    take_released,
    tracked_view,
)

# Gloo between two or more processes: groups, frames whose receives are posted ahead, and memory for bulk data.
#
# A group is built directly on a store, so it needs no global group, and only this group fails when one end dies. A Gloo
# timeout kills the pair, so idle receives have none.

NO_TIMEOUT = timedelta(days=365)
_TIMEOUTS_OF_A_MEETING = 5  # Gloo waits this many for an end that came but died before it was connected
_LEAST_MEETING = timedelta(seconds=4.0)  # a busy process may need this long for its half of the work
_SHORTEST_S = 0.001  # Gloo reads 0 as "no timeout"
_FRAME_TAG, _ABORT_TAG, _BULK_TAG = 0, 1, 2
_POSTED, _POSTED_LEAST = 8, 4
_POOL_BYTES = 2**33  # address space; pages are allocated on first use
_MAP_NORESERVE = 0x4000  # mmap.MAP_NORESERVE appeared in Python 3.13


_num_devices = 1
_next_device = itertools.count()


def spread_channels(num_threads: int) -> None:
    """Spread the groups that this process builds from now on over this many threads, in turn.

    Gloo reads all data of a device in its one thread, at the speed of one core. For a process that moves bulk data over
    several channels at the same time.
    """
    global _num_devices
    _num_devices = num_threads


@cache
def gloo_device(number: int = 0) -> Any:
    """Return one of this process's Gloo devices: a thread and a descriptor, however many channels share it."""
    interfaces = os.environ.get(GLOO_INTERFACE)
    if interfaces:  # PyTorch accepts a comma-separated list; a pair needs one
        return ProcessGroupGloo.create_device(interface=interfaces.split(",")[0])
    return ProcessGroupGloo.create_device(hostname=LOOPBACK)


def gloo_group(
    store: dist.Store, rank: int, size: int, *, timeout: timedelta, num_threads: int = 1
) -> dist.ProcessGroup:
    """Connect a private Gloo group under `store`'s prefix; blocks until all ranks have come or the time is up.

    Args:
        store: used by this group alone.
        timeout: of operations. Ranks must arrive within a fifth of it (at least a few seconds), since Gloo waits five
            times that long for one that came but died before it was connected.
        num_threads: operations that run at the same time; the others wait for their turn.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [gloo_device(next(_next_device) % _num_devices)]
    options._threads = num_threads
    options._timeout = max(_LEAST_MEETING, timeout / _TIMEOUTS_OF_A_MEETING)
    group = ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(timeout)
    return group  # type: ignore[return-value]


def abort_gloo(group: dist.ProcessGroup) -> None:
    """Close this rank's pairs, from any thread: every wait in `group`, here or at a peer, ends with an error."""
    # Gloo has no call for this, but a timeout kills the pair: so wait a moment for a message that never comes.
    for rank in range(group.size()):
        if rank != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], rank, _ABORT_TAG).wait(timedelta(milliseconds=1))


class GlooPair:
    """One end of a two-rank group. Frames and bulk messages have separate tags, so neither waits behind the other.

    Any thread may post and send; one thread receives. All methods raise RuntimeError if the pair is broken, or breaks
    because a timeout passed.

    Args:
        store: used by this pair alone.
        frame_bytes: size of every frame.
        timeout: for the other end to come.
    """

    def __init__(self, store: dist.Store, rank: int, *, frame_bytes: int, timeout: timedelta) -> None:
        self._group = gloo_group(store, rank, 2, timeout=timeout)
        self._other = 1 - rank
        self._frame_bytes = frame_bytes
        self._lock = threading.Lock()
        self._posted: deque[tuple[Tensor, dist.Work]] = deque()
        self._spare: list[Tensor] = []
        # A Gloo send waits until the other end has posted the receive: one more round trip, and forever if that process
        # is stopped. With receives posted ahead the bytes leave at once, and the kernel keeps them for a stopped
        # process.
        self.post_receives(_POSTED)

    def post_receives(self, frames: int) -> None:
        """Have at least `frames` receives posted."""
        if len(self._posted) >= frames:
            return
        with self._lock:
            while len(self._posted) < frames:
                buffer = self._spare.pop() if self._spare else torch.empty(self._frame_bytes, dtype=torch.uint8)
                self._posted.append((buffer, self._group.recv([buffer], self._other, _FRAME_TAG)))

    def send_frame(self, frame: Tensor, timeout_s: float | None) -> None:
        self._group.send([frame], self._other, _FRAME_TAG).wait(as_timeout(timeout_s))

    def next_frame(self, timeout: timedelta = NO_TIMEOUT) -> Tensor:
        """Wait for the next frame; give its buffer back with `reuse_buffer`."""
        if len(self._posted) <= _POSTED_LEAST:  # post several at once, since each post wakes the peer's Gloo thread
            self.post_receives(_POSTED)
        # Popped only once it has come: `post_receives` counts the receives that are still posted.
        buffer, work = self._posted[0]
        work.wait(timeout)
        self._posted.popleft()
        return buffer

    def reuse_buffer(self, buffer: Tensor) -> None:
        self._spare.append(buffer)

    def begin_send(self, part: Tensor) -> dist.Work:
        """Begin to send a bulk message; the other end must have asked for it or be about to."""
        return self._group.send([part], self._other, _BULK_TAG)

    def receive_into(self, buffers: list[Tensor], came: Callable[[int], object]) -> None:
        """Receive bulk messages of exactly these sizes, in order, without a timeout; `came` hears of each."""
        posted = [self._group.recv([buffer], self._other, _BULK_TAG) for buffer in buffers]
        for number, work in enumerate(posted):
            work.wait(NO_TIMEOUT)
            came(number)

    def abort(self) -> None:
        abort_gloo(self._group)


def as_timeout(timeout_s: float | None) -> timedelta:
    """Return seconds as Gloo expects them; None: no timeout."""
    return NO_TIMEOUT if timeout_s is None else timedelta(seconds=max(_SHORTEST_S, timeout_s))


class BufferPool:
    """Lends buffers out of one anonymous mapping for bulk messages; allocates what does not fit. Thread-safe.

    A fresh buffer of 288 MB costs 70,000 page faults, more than its transfer does. So channels borrow receive and
    staging buffers here. A buffer comes back when its last view is gone. The memory is never shared with other
    processes (see `Arena`).
    """

    def __init__(self, num_bytes: int = _POOL_BYTES) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            memory = mmap.mmap(-1, num_bytes, flags=flags)
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # address space is limited, or the kernel lacks huge pages
            memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self._extents = Extents(len(memory))
        self._released: deque[int] = deque()
        self._lock = threading.Lock()

    def borrow_buffer(self, num_bytes: int) -> Tensor:
        """Return uint8 [num_bytes] of undefined content; it comes back when its last view is gone."""
        with self._lock:
            # The views' finalizers only append offsets; they are merged here, under the lock.
            while self._released:
                self._extents.free_extent(self._released.popleft())
            start = self._extents.allocate_extent(num_bytes)
        if start is None or not num_bytes:
            return torch.empty(num_bytes, dtype=torch.uint8)
        return tracked_view(self._memory, start, num_bytes, self._released)

    @property
    def highest(self) -> int:
        """High-water mark of the memory used (bytes)."""
        return self._extents.highest


@cache
def buffer_pool() -> BufferPool:
    return BufferPool()


_GOODBYE_TIMEOUT_S = 5.0
_NOTHING = torch.empty(0, dtype=torch.uint8)
_IN_FLIGHT = 2  # segments of one payload: one is packed while the other is sent


class Channel(ABC):
    """One end of a pair whose peer proved that it knows the secret. Any thread may send; exactly one thread
    receives.
    """

    shared = False  # whether payloads sent from here go through shared memory

    def __init__(self, pair: GlooPair, peer: str, limits: Limits) -> None:
        self.peer = peer
        self._pair = pair
        self._limits = limits
        self._frame_lock = threading.Lock()
        # Taken before the frame lock, so that segments follow in the order of frames.
        self._bulk_lock = threading.Lock()
        self._broken = False
        self._out = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        self._out_view = self._out.numpy().data
        # Regions of the peer's memory that we no longer read; the next frames report them.
        self._released: deque[int] = deque()
        # Asked for each payload that comes over the wire, by request id and message: where it goes; None: anywhere.
        self.place_payload: Callable[[int, bytes], PlacedPayload | None] = lambda _, __: None

    @abstractmethod
    def post_receives(self, frames: int) -> None:
        """Let the peer send `frames` frames without waiting for this end. Raises TransportError if the channel is
        broken.
        """

    def send(
        self,
        kind: FrameKind,
        request_id: int,
        meta: bytes,
        payload: Payload | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Send one message; returns when its bytes have left this process or lie where the peer reads them.

        Args:
            payload: must not change until this returns.
            timeout_s: for the peer to take it; once it passes, the channel is broken.

        Raises:
            TransportError: the channel is broken.
        """
        frame = Frame(kind, request_id, body=meta)
        if payload is not None:
            frame.payload_bytes = payload.num_bytes
        if len(meta) + frame.payload_bytes <= ROOM_BYTES:
            self._send_frame(frame, payload, timeout_s)
            return
        frame.outside = len(meta) > ROOM_BYTES
        if self._place_in_arena(frame, payload):
            self._send_frame(frame, None, timeout_s)
        else:
            self._send_over_wire(frame, payload, timeout_s)

    def receive(self) -> tuple[Frame, bytes, Tensor]:
        """Wait for one message, without a deadline; returns (frame, meta, payload uint8 [payload_bytes]).

        The payload is the caller's while a view of it exists, and empty if it went where `place_payload` said. A
        goodbye is the last message. Raises TransportError if the peer is gone or broke the protocol; the channel cannot
        be used any more.
        """
        try:
            frame = self._next_frame()
            if frame.kind is FrameKind.HELLO:
                raise TransportError(f"channel to {self.peer}: a second hello")
            if frame.route is Route.FRAME:
                meta, payload = frame.body, tensor_of(frame.payload) if frame.payload else _NOTHING
            elif frame.route is Route.SHARED:
                payload = self._take_shared(frame)  # also fills in the body
                meta = frame.body
            else:
                meta, payload = self._take_from_wire(frame)
        except TransportError:
            self.abort()
            raise
        if frame.kind is FrameKind.GOODBYE:
            # Answer it, so that both ends stop receiving.
            self.send_goodbye()
            self._forget_shared()
        return frame, meta, payload

    def send_goodbye(self) -> None:
        """Announce that this end sends nothing more; idempotent, and silent if the peer is gone.

        A peer that does not take the goodbye in time is cut off.
        """
        try:
            self._send_frame(Frame(FrameKind.GOODBYE), None, _GOODBYE_TIMEOUT_S)
        except TransportError:
            if not self._broken:
                self.abort()
        # The peer stops receiving after a goodbye, so nothing may follow it.
        self._broken = True

    def abort(self) -> None:
        """Cut the pair: sends and receives at either end fail with a TransportError. Idempotent; any thread."""
        self._broken = True
        self._pair.abort()
        self._forget_shared()

    @abstractmethod
    def _put_frame(self, timeout_s: float | None) -> None:
        """Send the frame in `_out`, or raise TransportError; the caller holds the frame lock."""

    @abstractmethod
    def _next_frame(self) -> Frame:
        """Wait for a frame; raises TransportError if the peer is gone or sent something else."""

    def _place_in_arena(self, frame: Frame, payload: Payload | None) -> bool:
        """Copy what does not fit into the frame to shared memory; False: send it over the wire."""
        return False

    def _take_shared(self, frame: Frame) -> Tensor:
        """Return the payload in shared memory, and fill in a body that lies there, too."""
        raise TransportError(f"channel to {self.peer}: a handle, but no memory is shared")

    @abstractmethod
    def _end_frames(self) -> None:
        """A goodbye was sent; the caller holds the frame lock."""

    @abstractmethod
    def _forget_shared(self) -> None:
        """The channel ended: drop our shared memory as a whole; existing views stay valid."""

    def _send_frame(self, frame: Frame, payload: Payload | None, timeout_s: float | None) -> None:
        self._acquire_lock(self._frame_lock, timeout_s)
        try:
            if self._released:
                # Releases ride on frames that are sent anyway.
                frame.releases = take_released(self._released, MOST_RELEASES)
            end = encode_frame(frame, self._out_view)
            if payload is not None:
                payload.write(self._out[end : end + frame.payload_bytes])
                end += frame.payload_bytes
            seal_frame(self._out_view, end)
            self._put_frame(timeout_s)
            if frame.kind is FrameKind.GOODBYE:
                self._broken = True
                self._end_frames()
        finally:
            self._frame_lock.release()

    def _send_over_wire(self, frame: Frame, payload: Payload | None, timeout_s: float | None) -> None:
        parts = [] if payload is None else segments(payload)
        sizes = [segment_bytes(part) for part in parts]
        frame.route, frame.num_segments = Route.WIRE, len(sizes)
        frame.body = b"".join(size.to_bytes(8, "little") for size in sizes) + frame.body
        frame.outside = len(frame.body) > ROOM_BYTES
        if frame.outside:
            parts = [tensor_of(frame.body), *parts]
        self._acquire_lock(self._bulk_lock, timeout_s)
        try:
            self._send_frame(frame, None, timeout_s)
            try:
                self._send_parts(parts, timeout_s)
            except BaseException:
                self.abort()  # the peer waits for the segments that the frame announced
                raise
        finally:
            self._bulk_lock.release()

    def _send_parts(self, parts: list[Tensor | Payload], timeout_s: float | None) -> None:
        in_flight: deque[tuple[dist.Work, Tensor]] = deque()
        timeout = as_timeout(timeout_s)
        for part in parts:
            if isinstance(part, Payload):
                packed = buffer_pool().borrow_buffer(part.num_bytes)
                part.write(packed)
                part = packed
            try:
                in_flight.append((self._pair.begin_send(part), part))
                if len(in_flight) > _IN_FLIGHT:
                    in_flight.popleft()[0].wait(timeout)
            except RuntimeError as error:
                raise self._mark_broken("send failed; the peer is gone") from error
        try:
            for work, _ in in_flight:
                work.wait(timeout)
        except RuntimeError as error:
            raise self._mark_broken("send failed; the peer is gone") from error

    def _take_from_wire(self, frame: Frame) -> tuple[bytes, Tensor]:
        if frame.outside:
            body = torch.empty(frame.body_bytes, dtype=torch.uint8)
            self._receive_into([body])
            frame.accept_body(body.numpy().tobytes())
        sizes, meta = frame.split_body()
        placed = self.place_payload(frame.request_id, meta)
        if placed is not None and placed.num_bytes == frame.payload_bytes:
            self._receive_placed(placed, sizes)
            return meta, _NOTHING
        payload = buffer_pool().borrow_buffer(frame.payload_bytes)
        self._receive_into(place(payload, sizes))
        return meta, payload

    def _receive_placed(self, placed: PlacedPayload, sizes: list[int]) -> None:
        starts = [0, *accumulate(aligned(size) for size in sizes)]
        views = [placed.view(start, size) for start, size in zip(starts, sizes, strict=False)]
        buffers = [
            buffer_pool().borrow_buffer(size) if view is None else view for view, size in zip(views, sizes, strict=True)
        ]
        self._receive_into(buffers, lambda number: placed.accept_range(starts[number], buffers[number]))

    def _receive_into(self, buffers: list[Tensor], came: Callable[[int], object] = lambda _: None) -> None:
        try:
            self._pair.receive_into(buffers, came)
        except RuntimeError as error:
            raise self._mark_broken("the peer is gone") from error

    def _acquire_lock(self, lock: threading.Lock, timeout_s: float | None) -> None:
        if not lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            raise DeadlineExceeded(f"channel to {self.peer}: the peer took no message for {timeout_s:g} s")
        if self._broken:
            lock.release()
            raise TransportError(f"channel to {self.peer}: closed")

    def _mark_broken(self, reason: str) -> TransportError:
        self._broken = True
        return TransportError(f"channel to {self.peer}: {reason}")


class GlooChannel(Channel):
    """Sends everything over the network.

    A frame never waits behind a payload, nor for a peer that does not read, as long as receives are posted
    (`post_receives`).
    """

    def post_receives(self, frames: int) -> None:
        try:
            self._pair.post_receives(frames)
        except RuntimeError as error:
            raise self._mark_broken("the peer is gone") from error

    def _put_frame(self, timeout_s: float | None) -> None:
        try:
            self._pair.send_frame(self._out, timeout_s)
        except RuntimeError as error:
            raise self._mark_broken("send failed; the peer is gone") from error

    def _end_frames(self) -> None:
        """Gloo cannot end one direction."""

    def _forget_shared(self) -> None:
        """Nothing to drop: this channel shares no memory."""

    def _next_frame(self) -> Frame:
        try:
            buffer = self._pair.next_frame()
        except RuntimeError as error:
            raise self._mark_broken("the peer is gone") from error
        frame = decode_frame(buffer.numpy().data, self._limits)
        self._pair.reuse_buffer(buffer)
        if frame.releases:
            raise TransportError(f"channel to {self.peer}: releases, but no memory is shared")
        return frame


def tensor_of(data: bytes) -> Tensor:
    """Return a copy of `data`, which must not be empty, as uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)  # torch warns about a read-only buffer


# A channel between two processes of one host: frames go through a pipe each way, payloads through shared memory.
#
# Gloo sends three messages per frame, and its loop thread spins while another thread holds the pair; on a busy host a
# frame then takes milliseconds. Writing at most PIPE_BUF bytes into a pipe is one atomic system call that wakes the
# reader once. Nothing listens and nothing needs cleaning up: the writer opens the reader's pipe through /proc/PID/fd,
# as it does with the reader's arena, and when either process dies, the other sees end of file.
#
#     reader   pipe(), offers (descriptor, inode) in its hello ......... closes its copy of the write end
#     writer             opens /proc/PID/fd/N, checks the inode, writes frames

# Frames that may wait for a stopped process; each takes a page.
_PIPE_BYTES = 2**20
# How often a writer whose peer does not read checks whether the channel was given up (s).
_CHECK_S = 0.2
_ABORT_TIMEOUT_S = 1.0


class PipeOffer(msgspec.Struct):
    fd: int  # the write end's descriptor in the offering process
    inode: int  # of the pipe; reveals a descriptor that was reused


class Pipes:
    """One end: its own pipe, for reading, and the peer's, for writing. Frames have at most PIPE_BUF bytes."""

    def __init__(self) -> None:
        self._in, self._in_writer = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a user's pipe pages are limited; the default still holds 16 frames
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._frames = select.poll()
        self._frames.register(self._in, select.POLLIN)
        self._out = -1
        self._closed = False
        self.offer = PipeOffer(self._in_writer, os.fstat(self._in).st_ino)

    def __del__(self) -> None:
        self.close()

    def open_peer(self, pid: int, offer: PipeOffer) -> None:
        """Open the peer's pipe for writing. Raises TransportError if it does not exist, or may not be opened."""
        try:
            self._out = os.open(f"/proc/{pid}/fd/{offer.fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            found = os.fstat(self._out)
        except OSError as error:
            raise TransportError(f"the peer's pipe cannot be opened ({error.strerror})") from error
        if not stat.S_ISFIFO(found.st_mode) or found.st_ino != offer.inode:
            raise TransportError("the peer's descriptor is not the pipe that it offered")

    def let_end_with_peer(self) -> None:
        """Close our copy of the write end once the peer has opened it: now the pipe ends when the peer closes it or
        dies.
        """
        os.close(self._in_writer)
        self._in_writer = -1

    def send(self, frame: memoryview, timeout_s: float | None) -> None:
        """Write one frame, waiting while the pipe is full; the caller serializes.

        Raises TransportError if the peer is gone or did not read in time, or the pipes were closed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed:
            try:
                os.write(self._out, frame)
            except BlockingIOError:
                if deadline is not None and time.monotonic() > deadline:
                    raise TransportError("the peer took no message in time") from None
                # In slices: nothing else wakes this wait when the channel is given up.
                poll = select.poll()
                poll.register(self._out, select.POLLOUT)
                poll.poll(_CHECK_S * 1000)
            except OSError as error:
                raise TransportError(f"the peer is gone ({error.strerror})") from error
            else:
                return
        raise TransportError("closed")

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait until `receive` would not block, which includes end of file; False: timed out. One thread at a time."""
        return bool(self._frames.poll(max(0.0, timeout_s) * 1000))

    def watch(self, other: int) -> None:
        """Wait until the peer closes its end (frames do not wake this), or until the descriptor `other` is readable."""
        poll = select.poll()
        # Events of 0: only POLLHUP and POLLERR are reported, so waiting frames do not wake us.
        poll.register(self._in, 0)
        poll.register(other, select.POLLIN)
        poll.poll()

    def receive(self, into: memoryview) -> None:
        """Wait for one frame of exactly this size. Raises TransportError if the peer is gone or the pipes were
        closed.
        """
        number = os.readv(self._in, [into])
        if number != len(into) or self._closed:
            raise TransportError("closed" if self._closed else "the peer is gone")

    def wake_receiver(self) -> None:
        """End a `receive` that waits in another thread, now or later, and send nothing more. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):  # the pipe is full, so no thread waits
            # Our own write end may be closed already (`let_end_with_peer`), so open another one.
            writer = os.open(f"/proc/self/fd/{self._in}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(writer, b"\0")
            finally:
                os.close(writer)

    def close_out(self) -> None:
        """Let the peer read end of file; the caller makes sure that no thread is sending."""
        self._closed = True
        if self._out >= 0:
            os.close(self._out)
            self._out = -1

    def close(self) -> None:
        """Close everything; no other thread may be inside. Idempotent."""
        self.close_out()
        for fd in (self._in, self._in_writer):
            if fd >= 0:
                os.close(fd)
        self._in = self._in_writer = -1


@dataclass(frozen=True)
class HostLink:
    """What two ends on one host share, once each has opened the other's."""

    pipes: Pipes
    arena: Arena  # where this end writes payloads. Unused, it costs a page, but no thread and no descriptor
    peer_arena: PeerArena  # where the peer writes them


class PipeChannel(Channel):
    """Sends frames through pipes and payloads through shared memory; over the Gloo pair when the arena has no room."""

    shared = True

    def __init__(self, pair: GlooPair, peer: str, limits: Limits, link: HostLink) -> None:
        super().__init__(pair, peer, limits)
        # Here a reader may wait with a deadline, and be interrupted.
        self.pipes = link.pipes
        self._in = memoryview(bytearray(FRAME_BYTES))
        self._arena: Arena | None = link.arena
        self._peer_arena: PeerArena | None = link.peer_arena
        self._released = link.peer_arena.released

    def post_receives(self, frames: int) -> None:
        """A pipe needs no posted receives."""

    def abort(self) -> None:
        self._broken = True
        self.pipes.wake_receiver()
        # Close the descriptor only while no writer uses it: its number could be reused under the writer.
        if self._frame_lock.acquire(timeout=_ABORT_TIMEOUT_S):
            self.pipes.close_out()
            self._frame_lock.release()
        super().abort()

    def _put_frame(self, timeout_s: float | None) -> None:
        try:
            self.pipes.send(self._out_view, timeout_s)
        except TransportError as error:
            raise self._mark_broken(str(error)) from error

    def _next_frame(self) -> Frame:
        try:
            self.pipes.receive(self._in)
        except TransportError as error:
            raise self._mark_broken(str(error)) from error
        frame = decode_frame(self._in, self._limits)
        if frame.releases and self._arena is not None:
            self._arena.release_regions(frame.releases)
        return frame

    def _place_in_arena(self, frame: Frame, payload: Payload | None) -> bool:
        arena = self._arena
        body_bytes = _body_room(frame, len(frame.body))
        num_bytes = body_bytes + frame.payload_bytes
        offset = None if arena is None else arena.allocate_region(num_bytes)
        if arena is None or offset is None:
            return False
        region = arena.view_region(offset, num_bytes)
        try:
            if frame.outside:
                region.numpy()[: len(frame.body)] = memoryview(frame.body)
            if payload is not None:
                payload.write(region[body_bytes:])
        except BaseException:
            arena.release_regions([offset])
            raise
        frame.route, frame.offset, frame.generation = Route.SHARED, offset, arena.offer.generation
        return True

    def _take_shared(self, frame: Frame) -> Tensor:
        peer_arena = self._peer_arena
        if peer_arena is None:
            raise TransportError(f"channel to {self.peer}: closed")
        body_bytes = _body_room(frame, frame.body_bytes)
        region = peer_arena.borrow_region(frame.offset, body_bytes + frame.payload_bytes, frame.generation)
        if frame.outside:
            frame.accept_body(region[: frame.body_bytes].numpy().tobytes())
        return region[body_bytes:]

    def _end_frames(self) -> None:
        self.pipes.close_out()  # the peer sees end of file even if it is not reading

    def _forget_shared(self) -> None:
        self._arena = self._peer_arena = None


def _body_room(frame: Frame, body_bytes: int) -> int:
    return -(-body_bytes // ALIGN_BYTES) * ALIGN_BYTES if frame.outside else 0
