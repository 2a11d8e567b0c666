"""A channel: a private two-rank Gloo group between two processes of the job.

Built directly on the job store, so it needs no global group, and when one end dies only this pair fails. A Gloo
timeout would kill the pair, so idle receives have none; deadlines are kept by whoever waits for an answer, and a
passed deadline means: drop the channel, open another.

    client                                server
      |-- hello ------><------------ hello -|   who they are, proved; each tries to map the other's memory
      |-- verdict ----><---------- verdict -|   whether it could
      |-- frame [body] [payload] ---------->|   any thread may send; body and payload may be in the frame,
      |<--------- frame [body] [payload] ---|   in shared memory, or follow; one thread per end receives
      |-- goodbye ------------------------->|   close(): the peer's receive ends and answers goodbye
      X  abort                              X   both ends' operations fail at once, whatever they wait for

Between processes of one host frames go through pipes, see `pipes`. Over Gloo they have their own tag, and their
receives are posted ahead: a frame never waits behind a payload, and neither for a peer that does not read, as long as
receives are posted (`expect`).
"""

import contextlib
import os
import threading
from collections import deque
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from asyncflow.errors import DeadlineExceeded, SealBroken, TransportError
from asyncflow.network import GLOO_INTERFACE, LOOPBACK
from asyncflow.sealed_store import GlooStore, SealedStore
from asyncflow.transport.cuts import cut, cut_bytes, place
from asyncflow.transport.frame import (
    FRAME_BYTES,
    ROOM_BYTES,
    UNREADABLE,
    Frame,
    FrameKind,
    Limits,
    Route,
    decode_frame,
    encode_frame,
    seal_frame,
)
from asyncflow.transport.hello import Hello, Introductions, Verdict
from asyncflow.transport.payload import Payload
from asyncflow.transport.pipes import Pipes
from asyncflow.transport.posted import PostedFrames
from asyncflow.transport.sharing import Sharing
from asyncflow.transport.warm import warm_pool

_NO_TIMEOUT = timedelta(days=365)
_GLOO_PATIENCE = 5  # so many timeouts Gloo waits for an end that came and died before the two were connected
_LEAST_MEETING = timedelta(seconds=4.0)  # a busy process may need it for its half of the work
_GOODBYE_TIMEOUT_S = 5.0
_ABORT_TIMEOUT_S = 1.0
_SHORTEST_S = 0.001  # Gloo takes 0 for none
_FRAME_TAG = 0
_ABORT_TAG = 1
_BULK_TAG = 2
_POSTED = 8
_POSTED_LEAST = 4
_NOTHING = torch.empty(0, dtype=torch.uint8)
_IN_FLIGHT = 2  # messages of one payload: packing one overlaps with sending the other


@cache
def gloo_device() -> Any:
    """Return this process's one Gloo device: one thread and one descriptor however many channels share it."""
    interfaces = os.environ.get(GLOO_INTERFACE)
    if interfaces:  # PyTorch takes several, with commas; a pair needs one
        return ProcessGroupGloo.create_device(interface=interfaces.split(",")[0])
    return ProcessGroupGloo.create_device(hostname=LOOPBACK)


def gloo_group(
    store: dist.Store, rank: int, size: int, *, timeout: timedelta, num_threads: int = 1
) -> dist.ProcessGroup:
    """Connect a private Gloo group under `store`'s prefix; blocks until all ranks came, or the time is up.

    Args:
        store: of this group alone.
        rank, size: of this process in it.
        timeout: of operations, and of the meeting: ranks must come within a fifth of it (some seconds at least), since
            Gloo waits five times for one that came and died before it was connected.
        num_threads: so many operations run at a time; the others wait for their turn.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [gloo_device()]
    options._threads = num_threads
    options._timeout = max(_LEAST_MEETING, timeout / _GLOO_PATIENCE)
    group = ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(timeout)
    return group  # type: ignore[return-value]


def abort_gloo(group: dist.ProcessGroup) -> None:
    """Close this rank's pairs from any thread: everybody who waits in `group`, here or at a peer, gets an error.

    Gloo has no call for this. What it has: a timeout kills the pair; so this waits a moment for what never comes.
    """
    for rank in range(group.size()):
        if rank != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], rank, _ABORT_TAG).wait(timedelta(milliseconds=1))


class Channel:
    """One end of a pair. Any thread may send; exactly one thread receives."""

    def __init__(
        self, store: SealedStore, key: bytes, *, is_server: bool, peer: str, limits: Limits, timeout_s: float
    ) -> None:
        """Connect; both ends must do so within the deadline.

        Args:
            store: where the pair meets; for it alone.
            key: the pair's, with which both ends prove themselves.
            is_server: takes rank 0.
            peer: the other end's name, for messages.
            limits: largest parts accepted, and whether memory is shared.
            timeout_s: deadline of the meeting (which has some seconds at least), and of the hellos.

        Raises:
            TransportError: the peer did not come, or somebody else did.
        """
        self.peer = peer
        self._limits = limits
        self._other = 1 if is_server else 0
        self._frame_lock = threading.Lock()
        self._bulk_lock = threading.Lock()  # taken before the frame lock: messages follow in the order of their frames
        self._broken = False
        self._out = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        self._out_view = self._out.numpy().data
        self._in = memoryview(bytearray(FRAME_BYTES))
        self._met = False
        self._sharing = Sharing(peer, limits)
        try:
            self._group = gloo_group(GlooStore(store), 1 - self._other, 2, timeout=timedelta(seconds=timeout_s))
            self._frames = PostedFrames(self._group, self._other, _FRAME_TAG, FRAME_BYTES)
            self._frames.post(_POSTED)
        except RuntimeError as error:
            raise TransportError(f"channel to {peer}: the peer did not connect") from error
        except SealBroken as error:
            raise TransportError(f"channel to {peer}: somebody else meets it ({error})") from error
        try:
            self._meet(Introductions(key, is_server=is_server), timeout_s)
        except (TransportError, *UNREADABLE) as error:
            self.abort()
            raise TransportError(f"channel to {peer}: no proper hello ({error})") from error

    @property
    def pipes(self) -> Pipes | None:
        """What carries frames on one host: there, a reader may wait with a deadline. None: Gloo, where it may not."""
        return self._sharing.pipes

    @property
    def shared(self) -> bool:
        """Whether payloads sent from here go through shared memory."""
        return self._sharing.usable

    def expect(self, frames: int) -> None:
        """Let the peer send so many frames without waiting for this end.

        Raises:
            TransportError: the channel is broken.
        """
        if self._sharing.pipes is not None:
            return
        try:
            self._frames.post(frames)
        except RuntimeError as error:
            raise self._gone("the peer is gone") from error

    def send(
        self,
        kind: FrameKind,
        request_id: int,
        meta: bytes,
        payload: Payload | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Send one message; returns when the bytes left this process or are where the peer reads them.

        Args:
            kind: request or reply.
            request_id: see `Frame`.
            meta: encoded message.
            payload: must not change until this returns.
            timeout_s: for the peer to take what it must; then the channel is broken.

        Raises:
            TransportError: the channel is broken.
        """
        frame = Frame(kind, request_id, body=meta)
        if payload is not None:
            frame.payload_bytes = payload.num_bytes
        if len(meta) + frame.payload_bytes <= ROOM_BYTES:
            self._send(frame, payload, timeout_s)
            return
        frame.outside = len(meta) > ROOM_BYTES
        frame.route = Route.SHARED
        if self._sharing.place(frame, payload):
            self._send(frame, None, timeout_s)
        else:
            self._send_over_wire(frame, payload, timeout_s)

    def receive(self) -> tuple[Frame, bytes, Tensor]:
        """Wait for one message, without a deadline; returns (frame, meta, payload uint8 [payload_bytes]).

        The payload is the caller's as long as there is a view of it. A goodbye is the last message; it is answered, so
        that both ends stop receiving.

        Raises:
            TransportError: the peer is gone or broke the protocol; the channel cannot be used any more.
        """
        try:
            frame = self._next_frame(_NO_TIMEOUT)
            if frame.kind is FrameKind.HELLO:
                raise TransportError(f"channel to {self.peer}: a second hello")
            meta, payload = self._take_parts(frame)
        except TransportError:
            self.abort()
            raise
        if frame.kind is FrameKind.GOODBYE:
            self.goodbye()
            self._sharing.end()
        return frame, meta, payload

    def goodbye(self) -> None:
        """Announce that nothing more comes from this end; idempotent, and silent when the peer is gone.

        Nothing is sent after it, since the peer stops receiving. A peer that does not take it in time is cut off.
        """
        try:
            self._send(Frame(FrameKind.GOODBYE), None, _GOODBYE_TIMEOUT_S)
        except TransportError:
            if not self._broken:
                self.abort()
        self._broken = True

    def abort(self) -> None:
        """Cut the pair: whoever sends or receives on either end gets a TransportError. Idempotent, any thread."""
        self._broken = True
        pipes = self._sharing.pipes
        if pipes is not None:
            pipes.wake()
            if self._frame_lock.acquire(timeout=_ABORT_TIMEOUT_S):
                pipes.close_out()
                self._frame_lock.release()
        abort_gloo(self._group)
        self._sharing.end()

    def _meet(self, introductions: Introductions, timeout_s: float) -> None:
        """Prove who this end is; nothing is believed before the peer did."""
        timeout, hello = _timeout(timeout_s), self._sharing.hello
        self._send(Frame(FrameKind.HELLO, body=introductions.seal(hello)), None, timeout_s)
        verdict = self._sharing.judge(introductions.open(self._next_frame(timeout).body, Hello))
        self._send(Frame(FrameKind.HELLO, body=introductions.seal(verdict)), None, timeout_s)
        self._sharing.settle(introductions.open(self._next_frame(timeout).body, Verdict))
        self._met = True

    def _send(self, frame: Frame, payload: Payload | None, timeout_s: float | None) -> None:
        """Send a frame, with the payload in it."""
        self._hold(self._frame_lock, timeout_s)
        try:
            frame.releases = self._sharing.take_released()
            end = encode_frame(frame, self._out_view)
            if payload is not None:
                payload.write(self._out[end : end + frame.payload_bytes])
                end += frame.payload_bytes
            seal_frame(self._out_view, end)
            self._put_frame(timeout_s)
            if frame.kind is FrameKind.GOODBYE:
                self._broken = True
                if self._sharing.pipes is not None:
                    self._sharing.pipes.close_out()  # the peer sees the end even if it does not read
        finally:
            self._frame_lock.release()

    def _put_frame(self, timeout_s: float | None) -> None:
        pipes = self._sharing.pipes if self._met else None
        if pipes is None:
            self._wait(self._post(self._out, _FRAME_TAG), timeout_s)
            return
        try:
            pipes.send(self._out_view, timeout_s)
        except TransportError as error:
            raise self._gone(str(error)) from error

    def _send_over_wire(self, frame: Frame, payload: Payload | None, timeout_s: float | None) -> None:
        parts = [] if payload is None else cut(payload)
        sizes = [cut_bytes(part) for part in parts]
        frame.route, frame.num_cuts = Route.WIRE, len(sizes)
        frame.body = b"".join(size.to_bytes(8, "little") for size in sizes) + frame.body
        frame.outside = len(frame.body) > ROOM_BYTES
        self._hold(self._bulk_lock, timeout_s)
        try:
            self._send(frame, None, timeout_s)
            try:
                self._send_parts(frame, parts, timeout_s)
            except BaseException:
                self.abort()  # the peer waits for what was announced
                raise
        finally:
            self._bulk_lock.release()

    def _send_parts(self, frame: Frame, parts: list[Tensor | Payload], timeout_s: float | None) -> None:
        in_flight: deque[tuple[dist.Work, Tensor]] = deque()
        if frame.outside:
            parts = [_tensor_of(frame.body), *parts]
        for part in parts:
            if isinstance(part, Payload):
                packed = warm_pool().lend(part.num_bytes)
                part.write(packed)
                part = packed
            in_flight.append((self._post(part, _BULK_TAG), part))
            if len(in_flight) > _IN_FLIGHT:
                self._wait(in_flight.popleft()[0], timeout_s)
        for work, _ in in_flight:
            self._wait(work, timeout_s)

    def _next_frame(self, timeout: timedelta) -> Frame:
        pipes = self._sharing.pipes if self._met else None
        if pipes is not None:
            return self._frame_from(pipes)
        try:
            if self._frames.num_posted <= _POSTED_LEAST:  # several at once: each wakes the peer's Gloo thread
                self._frames.post(_POSTED)
            buffer = self._frames.take(timeout)
        except RuntimeError as error:
            raise self._gone("the peer is gone") from error
        frame = decode_frame(buffer.numpy().data, self._limits)
        self._frames.reuse(buffer)
        self._sharing.release(frame)
        return frame

    def _frame_from(self, pipes: Pipes) -> Frame:
        try:
            pipes.receive(self._in)
        except TransportError as error:
            raise self._gone(str(error)) from error
        frame = decode_frame(self._in, self._limits)
        self._sharing.release(frame)
        return frame

    def _take_parts(self, frame: Frame) -> tuple[bytes, Tensor]:
        if frame.route is Route.SHARED:
            taken = self._sharing.take(frame)  # brings the body
            return frame.body, taken
        if frame.route is Route.FRAME:
            return frame.body, _tensor_of(frame.payload)
        if frame.outside:
            body = torch.empty(frame.body_bytes, dtype=torch.uint8)
            self._receive_into([body])
            frame.accept_body(body.numpy().tobytes())
        cuts, meta = frame.split_body()
        payload = warm_pool().lend(frame.payload_bytes)
        self._receive_into(place(payload, cuts))
        return meta, payload

    def _receive_into(self, buffers: list[Tensor]) -> None:
        try:
            works = [self._group.recv([buffer], self._other, _BULK_TAG) for buffer in buffers]
            for work in works:
                work.wait(_NO_TIMEOUT)
        except RuntimeError as error:
            raise self._gone("the peer is gone") from error

    def _hold(self, lock: threading.Lock, timeout_s: float | None) -> None:
        """Take a lock of a channel that works; the caller releases it."""
        if not lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            raise DeadlineExceeded(f"channel to {self.peer}: it took no message for {timeout_s:g} s")
        if self._broken:
            lock.release()
            raise TransportError(f"channel to {self.peer}: closed")

    def _post(self, data: Tensor, tag: int) -> dist.Work:
        try:
            return self._group.send([data], self._other, tag)
        except RuntimeError as error:
            raise self._gone("send failed; the peer is gone") from error

    def _wait(self, work: dist.Work, timeout_s: float | None) -> None:
        try:
            work.wait(_timeout(timeout_s))
        except RuntimeError as error:
            raise self._gone("send failed; the peer is gone") from error

    def _gone(self, reason: str) -> TransportError:
        self._broken = True
        return TransportError(f"channel to {self.peer}: {reason}")


def _timeout(timeout_s: float | None) -> timedelta:
    return _NO_TIMEOUT if timeout_s is None else timedelta(seconds=max(_SHORTEST_S, timeout_s))


def _tensor_of(data: bytes) -> Tensor:
    # frombuffer refuses emptiness, and warns of what cannot be written to.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NOTHING
