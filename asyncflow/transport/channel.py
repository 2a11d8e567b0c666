"""A channel: frames and payloads between two processes of the job. When one end dies only this channel fails.

    client                                server
      |-- frame [body] [payload] ---------->|   any thread may send; body and payload may be in the frame,
      |<--------- frame [body] [payload] ---|   in shared memory, or follow; one thread per end receives
      |-- goodbye ------------------------->|   close(): the peer's receive ends and answers goodbye
      X  abort                              X   both ends' operations fail at once, whatever they wait for

`meeting.open_channel` makes one: a `pipe_channel.PipeChannel` between processes of one host, else a `GlooChannel`. Idle
receives have no timeout; deadlines are kept by the thread that waits for a reply, and a passed deadline means: drop the
channel, open another.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.errors import DeadlineExceeded, TransportError
from asyncflow.transport.arena import take_released
from asyncflow.transport.frame import (
    FRAME_BYTES,
    MOST_RELEASES,
    ROOM_BYTES,
    Frame,
    FrameKind,
    Limits,
    Payload,
    Route,
    decode_frame,
    encode_frame,
    place,
    seal_frame,
    segment_bytes,
    segments,
)
from asyncflow.transport.gloo import GlooPair, as_timeout, buffer_pool

_GOODBYE_TIMEOUT_S = 5.0
_NOTHING = torch.empty(0, dtype=torch.uint8)
_IN_FLIGHT = 2  # segments of one payload: packing one overlaps with sending the other


class Channel(ABC):
    """One end of a pair. Any thread may send; exactly one thread receives."""

    shared = False
    """Whether payloads sent from here go through shared memory."""

    def __init__(self, pair: GlooPair, peer: str, limits: Limits) -> None:
        """Args:
        pair: connected and proved.
        peer: the other end's name, for messages.
        limits: largest parts accepted.
        """
        self.peer = peer
        self._pair = pair
        self._limits = limits
        self._frame_lock = threading.Lock()
        self._bulk_lock = threading.Lock()  # taken before the frame lock: segments follow in the order of their frames
        self._broken = False
        self._out = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        self._out_view = self._out.numpy().data
        self._released: deque[int] = deque()
        """Regions of the peer's memory that it may use again; the next frames say so."""

    @abstractmethod
    def expect(self, frames: int) -> None:
        """Let the peer send so many frames without waiting for this end.

        Raises:
            TransportError: the channel is broken.
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
        if self._place(frame, payload):
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
            frame = self._next_frame()
            if frame.kind is FrameKind.HELLO:
                raise TransportError(f"channel to {self.peer}: a second hello")
            if frame.route is Route.FRAME:
                meta, payload = frame.body, tensor_of(frame.payload) if frame.payload else _NOTHING
            elif frame.route is Route.SHARED:
                payload = self._take_shared(frame)  # brings the body
                meta = frame.body
            else:
                meta, payload = self._take_from_wire(frame)
        except TransportError:
            self.abort()
            raise
        if frame.kind is FrameKind.GOODBYE:
            self.goodbye()
            self._forget_shared()
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
        """Cut the pair: sends and receives on either end fail with a TransportError. Idempotent, any thread."""
        self._broken = True
        self._pair.abort()
        self._forget_shared()

    @abstractmethod
    def _put_frame(self, timeout_s: float | None) -> None:
        """Send the frame in `_out`; the caller holds the lock.

        Raises:
            TransportError: the channel is broken.
        """

    @abstractmethod
    def _next_frame(self) -> Frame:
        """Wait for a frame.

        Raises:
            TransportError: the peer is gone, or it is no frame.
        """

    def _place(self, frame: Frame, payload: Payload | None) -> bool:
        """Copy what does not fit into the frame to shared memory; False: send it over the wire."""
        return False

    def _take_shared(self, frame: Frame) -> Tensor:
        """Return the payload that is in shared memory; takes the body in if it is there, too.

        Raises:
            TransportError: it is not the peer's memory.
        """
        raise TransportError(f"channel to {self.peer}: a handle, but no memory is shared")

    @abstractmethod
    def _end_frames(self) -> None:
        """A goodbye was sent; the caller holds the lock."""

    @abstractmethod
    def _forget_shared(self) -> None:
        """The channel ended: our shared memory goes as a whole; views of it live on."""

    def _send(self, frame: Frame, payload: Payload | None, timeout_s: float | None) -> None:
        """Send a frame, with the payload in it."""
        self._acquire(self._frame_lock, timeout_s)
        try:
            if self._released:
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
        self._acquire(self._bulk_lock, timeout_s)
        try:
            self._send(frame, None, timeout_s)
            try:
                self._send_parts(parts, timeout_s)
            except BaseException:
                self.abort()  # the peer waits for what was announced
                raise
        finally:
            self._bulk_lock.release()

    def _send_parts(self, parts: list[Tensor | Payload], timeout_s: float | None) -> None:
        in_flight: deque[tuple[dist.Work, Tensor]] = deque()
        timeout = as_timeout(timeout_s)
        for part in parts:
            if isinstance(part, Payload):
                packed = buffer_pool().borrow(part.num_bytes)
                part.write(packed)
                part = packed
            try:
                in_flight.append((self._pair.begin_send(part), part))
                if len(in_flight) > _IN_FLIGHT:
                    in_flight.popleft()[0].wait(timeout)
            except RuntimeError as error:
                raise self._gone("send failed; the peer is gone") from error
        try:
            for work, _ in in_flight:
                work.wait(timeout)
        except RuntimeError as error:
            raise self._gone("send failed; the peer is gone") from error

    def _take_from_wire(self, frame: Frame) -> tuple[bytes, Tensor]:
        if frame.outside:
            body = torch.empty(frame.body_bytes, dtype=torch.uint8)
            self._receive_into([body])
            frame.accept_body(body.numpy().tobytes())
        sizes, meta = frame.split_body()
        payload = buffer_pool().borrow(frame.payload_bytes)
        self._receive_into(place(payload, sizes))
        return meta, payload

    def _receive_into(self, buffers: list[Tensor]) -> None:
        try:
            self._pair.receive_into(buffers)
        except RuntimeError as error:
            raise self._gone("the peer is gone") from error

    def _acquire(self, lock: threading.Lock, timeout_s: float | None) -> None:
        """Take a lock of a channel that works; the caller releases it."""
        if not lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            raise DeadlineExceeded(f"channel to {self.peer}: it took no message for {timeout_s:g} s")
        if self._broken:
            lock.release()
            raise TransportError(f"channel to {self.peer}: closed")

    def _gone(self, reason: str) -> TransportError:
        self._broken = True
        return TransportError(f"channel to {self.peer}: {reason}")


class GlooChannel(Channel):
    """Everything goes over the network.

    A frame never waits behind a payload, and neither for a peer that does not read, as long as receives are posted
    (`expect`).
    """

    def expect(self, frames: int) -> None:
        """See `Channel`."""
        try:
            self._pair.expect(frames)
        except RuntimeError as error:
            raise self._gone("the peer is gone") from error

    def _put_frame(self, timeout_s: float | None) -> None:
        try:
            self._pair.send_frame(self._out, timeout_s)
        except RuntimeError as error:
            raise self._gone("send failed; the peer is gone") from error

    def _end_frames(self) -> None:
        """Gloo has no end of one direction."""

    def _forget_shared(self) -> None:
        """Forget memory shared with the peer: this channel has none."""

    def _next_frame(self) -> Frame:
        try:
            buffer = self._pair.next_frame()
        except RuntimeError as error:
            raise self._gone("the peer is gone") from error
        frame = decode_frame(buffer.numpy().data, self._limits)
        self._pair.reuse(buffer)
        if frame.releases:
            raise TransportError(f"channel to {self.peer}: releases, but no memory is shared")
        return frame


def tensor_of(data: bytes) -> Tensor:
    """Return uint8 of a copy; `data` is not empty."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)  # of the bytes themselves it would warn
