"""A channel between two processes of one host: frames go through a pipe each way, payloads through shared memory.

Gloo sends three messages for one, and its loop thread spins while another thread holds the pair; on a busy host a frame
then takes milliseconds. A write of at most PIPE_BUF bytes into a pipe is one system call, atomic, and wakes the reader
once. Nothing listens and nothing has to be removed: the writer opens the reader's pipe through /proc/PID/fd, as it does
with the reader's arena, and when either process dies the other sees the end.

    reader   pipe(), offers (descriptor, inode) in its hello ......... closes its copy of the write end
    writer             opens /proc/PID/fd/N, checks the inode, writes frames
"""

import contextlib
import fcntl
import os
import select
import stat
import time
from dataclasses import dataclass

import msgspec
from torch import Tensor

from asyncflow.errors import TransportError
from asyncflow.transport.arena import ALIGN_BYTES, Arena, PeerArena
from asyncflow.transport.channel import Channel
from asyncflow.transport.frame import FRAME_BYTES, Frame, Limits, Payload, Route, decode_frame
from asyncflow.transport.gloo import GlooPair

_PIPE_BYTES = 2**20
"""So much may wait for a process that is stopped; a frame takes a page of it."""
_CHECK_S = 0.2
"""How often a writer whose peer does not read looks whether the channel was given up (s)."""
_ABORT_TIMEOUT_S = 1.0


class PipeOffer(msgspec.Struct):
    """Where to write to an end.

    Attributes:
        fd: descriptor of the write end in the offering process.
        inode: of the pipe, so that a descriptor that was used again is noticed.
    """

    fd: int
    inode: int


class Pipes:
    """One end: its own pipe, to read from, and the peer's, to write to. Frames are at most PIPE_BUF bytes."""

    def __init__(self) -> None:
        self._in, self._in_writer = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a user has so many pages for pipes; 16 frames fit without
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._frames = select.poll()
        self._frames.register(self._in, select.POLLIN)
        self._out = -1
        self._closed = False
        self.offer = PipeOffer(self._in_writer, os.fstat(self._in).st_ino)

    def __del__(self) -> None:
        self.close()

    def open_peer(self, pid: int, offer: PipeOffer) -> None:
        """Open the peer's pipe for writing.

        Raises:
            TransportError: it is not there, or may not be opened.
        """
        try:
            self._out = os.open(f"/proc/{pid}/fd/{offer.fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            found = os.fstat(self._out)
        except OSError as error:
            raise TransportError(f"the peer's pipe cannot be opened ({error.strerror})") from error
        if not stat.S_ISFIFO(found.st_mode) or found.st_ino != offer.inode:
            raise TransportError("the peer's descriptor is not the pipe that it offered")

    def let_end_with_peer(self) -> None:
        """The peer has opened our pipe: when it closes that end, or dies, the pipe ends."""
        os.close(self._in_writer)
        self._in_writer = -1

    def send(self, frame: memoryview, timeout_s: float | None) -> None:
        """Write one frame; the caller serialises. Waits while the peer has not read what is there.

        Raises:
            TransportError: the peer is gone, the pipes were closed, or the peer did not read in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed:
            try:
                os.write(self._out, frame)
            except BlockingIOError:
                if deadline is not None and time.monotonic() > deadline:
                    raise TransportError("it took no message in time") from None
                poll = select.poll()
                poll.register(self._out, select.POLLOUT)
                poll.poll(_CHECK_S * 1000)
            except OSError as error:
                raise TransportError(f"the peer is gone ({error.strerror})") from error
            else:
                return
        raise TransportError("closed")

    def readable(self, timeout_s: float) -> bool:
        """Wait until `receive` would not block; False when the timeout passes. The peer's end counts, too.

        One thread at a time.
        """
        return bool(self._frames.poll(max(0.0, timeout_s) * 1000))

    def watch(self, other: int) -> None:
        """Wait for the peer's end, whether or not frames are there, or for the descriptor `other` to be readable."""
        poll = select.poll()
        poll.register(self._in, 0)
        poll.register(other, select.POLLIN)
        poll.poll()

    def receive(self, into: memoryview) -> None:
        """Wait for one frame of exactly this size.

        Raises:
            TransportError: the peer is gone, or the pipes were closed.
        """
        number = os.readv(self._in, [into])
        if number != len(into) or self._closed:
            raise TransportError("closed" if self._closed else "the peer is gone")

    def wake(self) -> None:
        """End a `receive` that waits in another thread, now and later; sends nothing more. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):  # full: then no thread waits
            writer = os.open(f"/proc/self/fd/{self._in}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(writer, b"\0")
            finally:
                os.close(writer)

    def close_out(self) -> None:
        """The peer reads the end; the caller has made sure that no thread sends."""
        self._closed = True
        if self._out >= 0:
            os.close(self._out)
            self._out = -1

    def close(self) -> None:
        """Close everything; no thread may be inside. Idempotent."""
        self.close_out()
        for fd in (self._in, self._in_writer):
            if fd >= 0:
                os.close(fd)
        self._in = self._in_writer = -1


@dataclass(frozen=True)
class HostLink:
    """What two ends on one host share, once each has opened the other's.

    Attributes:
        pipes: carry the frames.
        arena: where this end writes payloads. It costs a page until then, no thread, and no descriptor any more.
        peer_arena: where the peer does.
    """

    pipes: Pipes
    arena: Arena
    peer_arena: PeerArena


class PipeChannel(Channel):
    """See `Channel`. A payload for which the arena has no room goes over the Gloo pair."""

    shared = True

    def __init__(self, pair: GlooPair, peer: str, limits: Limits, link: HostLink) -> None:
        """Args:
        pair, peer, limits: see `Channel`.
        link: with this peer.
        """
        super().__init__(pair, peer, limits)
        self.pipes = link.pipes
        """Here a reader may wait with a deadline, and be interrupted."""
        self._in = memoryview(bytearray(FRAME_BYTES))
        self._arena: Arena | None = link.arena
        self._peer_arena: PeerArena | None = link.peer_arena
        self._released = link.peer_arena.released

    def expect(self, frames: int) -> None:
        """See `Channel`: a pipe takes them as they come."""

    def abort(self) -> None:
        """See `Channel`."""
        self._broken = True
        self.pipes.wake()
        if self._frame_lock.acquire(timeout=_ABORT_TIMEOUT_S):
            self.pipes.close_out()
            self._frame_lock.release()
        super().abort()

    def _put_frame(self, timeout_s: float | None) -> None:
        try:
            self.pipes.send(self._out_view, timeout_s)
        except TransportError as error:
            raise self._gone(str(error)) from error

    def _next_frame(self) -> Frame:
        try:
            self.pipes.receive(self._in)
        except TransportError as error:
            raise self._gone(str(error)) from error
        frame = decode_frame(self._in, self._limits)
        if frame.releases and self._arena is not None:
            self._arena.release(frame.releases)
        return frame

    def _place(self, frame: Frame, payload: Payload | None) -> bool:
        arena = self._arena
        body_bytes = _body_room(frame, len(frame.body))
        num_bytes = body_bytes + frame.payload_bytes
        offset = None if arena is None else arena.allocate(num_bytes)
        if arena is None or offset is None:
            return False
        region = arena.region(offset, num_bytes)
        try:
            if frame.outside:
                region.numpy()[: len(frame.body)] = memoryview(frame.body)
            if payload is not None:
                payload.write(region[body_bytes:])
        except BaseException:
            arena.release([offset])
            raise
        frame.route, frame.offset, frame.generation = Route.SHARED, offset, arena.offer.generation
        return True

    def _take_shared(self, frame: Frame) -> Tensor:
        peer_arena = self._peer_arena
        if peer_arena is None:
            raise TransportError(f"channel to {self.peer}: closed")
        body_bytes = _body_room(frame, frame.body_bytes)
        region = peer_arena.borrow(frame.offset, body_bytes + frame.payload_bytes, frame.generation)
        if frame.outside:
            frame.accept_body(region[: frame.body_bytes].numpy().tobytes())
        return region[body_bytes:]

    def _end_frames(self) -> None:
        self.pipes.close_out()  # the peer sees the end even if it does not read

    def _forget_shared(self) -> None:
        self._arena = self._peer_arena = None


def _body_room(frame: Frame, body_bytes: int) -> int:
    return -(-body_bytes // ALIGN_BYTES) * ALIGN_BYTES if frame.outside else 0
