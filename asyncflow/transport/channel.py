"""A channel: a private two-rank Gloo group between two processes of the job.

Built directly on the job store, so it needs no global group, and when one end dies only this pair fails. A Gloo
timeout would kill the pair, so idle receives have none; deadlines are kept by whoever waits for an answer, and a
passed deadline means: drop the channel, open another.

    client                                server
      |-- frame [meta] [payload] ---------->|   sends are serialised by a lock, any thread may send
      |<--------- frame [meta] [payload] ---|   one thread per end receives
      |-- goodbye ------------------------->|   close(): the peer's receive ends and answers goodbye
      X  abort                              X   both ends' operations fail at once, whatever they wait for
"""

import contextlib
import logging
import os
import threading
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from asyncflow.errors import TransportError
from asyncflow.transport.frame import FRAME_BYTES, INLINE_BYTES, Frame, FrameKind, Limits, decode_frame, encode_frame

logger = logging.getLogger(__name__)

_NO_TIMEOUT = timedelta(days=365)
_GOODBYE_TIMEOUT_S = 5.0
_TAG = 0
_ABORT_TAG = 1


@cache
def gloo_device() -> Any:
    """Return this process's one Gloo device: one thread and one descriptor however many channels share it."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_device(hostname="127.0.0.1")


def gloo_group(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """Connect a private Gloo group under `store`'s prefix; blocks until all ranks came or the store times out."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [gloo_device()]
    options._threads = 1
    options._timeout = _NO_TIMEOUT
    return ProcessGroupGloo(store, rank, size, options)  # type: ignore[return-value]


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

    def __init__(self, store: dist.Store, *, is_server: bool, peer: str, limits: Limits) -> None:
        """Connect; both ends must do so within the store's timeout.

        Args:
            store: prefixed for this pair alone.
            is_server: takes rank 0.
            peer: the other end's name, for messages.
            limits: largest parts accepted.

        Raises:
            TransportError: the peer did not come.
        """
        self.peer = peer
        self._limits = limits
        self._other = 1 if is_server else 0
        self._send_lock = threading.Lock()
        self._broken = False
        try:
            self._group = gloo_group(store, 1 - self._other, 2)
        except RuntimeError as error:
            raise TransportError(f"channel to {peer}: the peer did not connect") from error
        self._frame_in = torch.empty(FRAME_BYTES, dtype=torch.uint8)

    def send(self, kind: FrameKind, request_id: int, meta: bytes, payload: Tensor | None = None) -> None:
        """Send one message; returns when the bytes left this process.

        Args:
            kind: request, reply or goodbye.
            request_id: see `Frame`.
            meta: encoded message.
            payload: uint8, contiguous, any length; must not change until this returns.

        Raises:
            TransportError: the channel is broken.
        """
        payload_bytes = 0 if payload is None else payload.numel()
        parts = [torch.frombuffer(bytearray(encode_frame(kind, request_id, meta, payload_bytes)), dtype=torch.uint8)]
        if len(meta) > INLINE_BYTES:
            parts.append(torch.frombuffer(bytearray(meta), dtype=torch.uint8))
        if payload is not None and payload_bytes:
            parts.append(payload)
        with self._send_lock:
            self._send_parts(parts, _NO_TIMEOUT)

    def receive(self) -> tuple[Frame, bytes, Tensor]:
        """Wait for one message, without a deadline; returns (frame, meta, payload uint8 [payload_bytes]).

        A goodbye is the last message; it is answered, so that both ends stop receiving.

        Raises:
            TransportError: the peer is gone or broke the protocol; the channel cannot be used any more.
        """
        try:
            self._receive_into(self._frame_in)
            frame = decode_frame(self._frame_in.numpy().tobytes(), self._limits)
            meta = frame.inline
            if frame.meta_bytes > INLINE_BYTES:
                rest = torch.empty(frame.meta_bytes, dtype=torch.uint8)
                self._receive_into(rest)
                meta = rest.numpy().tobytes()
            frame.verify(meta)
            payload = torch.empty(frame.payload_bytes, dtype=torch.uint8)
            if frame.payload_bytes:
                self._receive_into(payload)
        except TransportError:
            self.abort()
            raise
        if frame.kind is FrameKind.GOODBYE:
            self.goodbye()
        return frame, meta, payload

    def goodbye(self) -> None:
        """Announce that nothing more comes from this end; idempotent, and silent when the peer is gone.

        Nothing is sent after it, since the peer stops receiving. A peer that does not take it in time is cut off.
        """
        if not self._send_lock.acquire(timeout=_GOODBYE_TIMEOUT_S):
            self.abort()
            return
        try:
            if not self._broken:
                data = bytearray(encode_frame(FrameKind.GOODBYE, 0, b"", 0))
                self._send_parts([torch.frombuffer(data, dtype=torch.uint8)], timedelta(seconds=_GOODBYE_TIMEOUT_S))
        except TransportError as error:
            logger.debug("%s", error)
        finally:
            self._broken = True
            self._send_lock.release()

    def abort(self) -> None:
        """Cut the pair: whoever sends or receives on either end gets a TransportError. Idempotent, any thread."""
        self._broken = True
        abort_gloo(self._group)

    def _send_parts(self, parts: list[Tensor], timeout: timedelta) -> None:
        if self._broken:
            raise TransportError(f"channel to {self.peer}: closed")
        try:
            for part in parts:
                self._group.send([part], self._other, _TAG).wait(timeout)
        except RuntimeError as error:
            self._broken = True
            raise TransportError(f"channel to {self.peer}: send failed; the peer is gone") from error

    def _receive_into(self, buffer: Tensor) -> None:
        try:
            self._group.recv([buffer], self._other, _TAG).wait()
        except RuntimeError as error:
            raise TransportError(f"channel to {self.peer}: the peer is gone") from error
