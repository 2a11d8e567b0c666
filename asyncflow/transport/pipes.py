"""Frames between two processes of one host: a pipe each way, instead of Gloo.

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

import msgspec

from asyncflow.errors import TransportError

_PIPE_BYTES = 2**20
"""So much may wait for a process that is stopped; a frame takes a page of it."""
_CHECK_S = 0.2
"""How often a writer whose peer does not read looks whether the channel was given up (s)."""


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

    def settle(self) -> None:
        """The peer has opened our pipe: from now on its end is the pipe's end."""
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
        with contextlib.suppress(OSError):  # full: then nobody waits
            writer = os.open(f"/proc/self/fd/{self._in}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(writer, b"\0")
            finally:
                os.close(writer)

    def close_out(self) -> None:
        """The peer reads the end; the caller has made sure that nobody sends."""
        self._closed = True
        if self._out >= 0:
            os.close(self._out)
            self._out = -1

    def close(self) -> None:
        """Close everything; nobody may be inside. Idempotent."""
        self.close_out()
        for fd in (self._in, self._in_writer):
            if fd >= 0:
                os.close(fd)
        self._in = self._in_writer = -1
