"""The calling side of a channel: many requests in flight, each with its own deadline."""

import itertools
import logging
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import msgspec
from torch import Tensor

from asyncflow.clock import awake_result
from asyncflow.decoding import UNREADABLE, msgpack_decoder
from asyncflow.errors import DeadlineExceeded, TransportError, one_line
from asyncflow.transport.frame import FrameKind, Limits, Payload
from asyncflow.transport.handshake import Credentials, ask_for_channel, pair_store
from asyncflow.transport.meeting import open_channel
from asyncflow.transport.pipe_channel import PipeChannel
from asyncflow.transport.reading_turns import ExpectedReply, ReadingTurns
from asyncflow.transport.server import Refused, refusal

logger = logging.getLogger(__name__)

Reply = tuple[Any, Tensor]

_CLOSE_TIMEOUT_S = 5.0
_SPARE_FRAMES = 1  # a goodbye comes unasked


class Connection:
    """A client's channel to one service. Thread-safe; a broken one stays broken, open another.

    Replies are read by the thread that waits for one (`ReadingTurns`), or, with `callbacks_only`, by its own thread.
    """

    def __init__(
        self,
        credentials: Credentials,
        service: str,
        client: str,
        replies: Any,
        *,
        limits: Limits | None = None,
        callbacks_only: bool = False,
        timeout_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Prove the secret and connect.

        Args:
            credentials: store and secret.
            service: whom to call.
            client: this process's name, for the other side's messages.
            replies: msgspec type (tagged union) of what the service answers, without `Refused`.
            limits: largest reply accepted, and whether memory is shared.
            callbacks_only: all replies have callbacks, none has a waiter, so turns would only cost time.
            timeout_s: for the service to answer, if that is less than the handshake's deadline.
            stop: once set, an answer that did not come yet is not waited for.

        Raises:
            PeerRefused: the service has as many clients as it takes.
            TransportError: the service does not answer within the deadline, or fails its proof; or no thread is to be
                had.
        """
        self.service = service
        self._client = client
        self._decoder = msgpack_decoder(replies | Refused)
        self._encoder = msgspec.msgpack.Encoder()
        with credentials.borrowed_store() as store:
            wait_s = min(credentials.timeout_s, timeout_s or credentials.timeout_s)
            key = ask_for_channel(store, credentials.secret, service, client, timeout_s=wait_s, stop=stop)
            pair = pair_store(store, service, key)
            self._channel = open_channel(
                pair, key, is_server=False, peer=service, limits=limits or Limits(), timeout_s=credentials.meeting_s
            )
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Reply]] = {}
        self._closed = threading.Event()
        self._turns: ReadingTurns | None = None
        if isinstance(self._channel, PipeChannel) and not callbacks_only:
            self._turns = ReadingTurns(self._channel.pipes, self._read_one)
        self._thread = threading.Thread(target=self._receive, name=f"replies-{service}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            self._fail(str(error))
            raise TransportError(f"channel to {service}: {error}") from error

    def submit(
        self, message: Any, payload: Payload | None = None, *, timeout_s: float | None = None
    ) -> "Future[Reply]":
        """Send a request; the future yields (reply, payload uint8) or raises PeerRefused or TransportError.

        Args:
            message: of the service's requests.
            payload: must not change until this returns. The reply's belongs to the caller.
            timeout_s: for the service to take it, if it is busy; then the channel is given up.

        Raises:
            TransportError: the channel is broken.
        """
        request_id = next(self._ids)
        future: Future[Reply]
        if self._turns is not None:
            future = ExpectedReply(self._turns)
        else:
            future = Future()
            future.set_running_or_notify_cancel()  # a cancelled one would break the thread that settles it
        meta = self._encoder.encode(message)
        with self._lock:
            if self._closed.is_set():
                raise TransportError(f"channel to {self.service}: closed")
            self._pending[request_id] = future
            open_requests = len(self._pending)
        try:
            self._channel.expect(open_requests + _SPARE_FRAMES)
            self._channel.send(FrameKind.REQUEST, request_id, meta, payload, timeout_s=timeout_s)
        except TransportError:
            with self._lock:
                self._pending.pop(request_id, None)
            raise
        return future

    def call(self, message: Any, payload: Payload | None = None, *, timeout_s: float) -> Reply:
        """Send a request and wait for its reply.

        Raises:
            DeadlineExceeded: no reply within `timeout_s`; the channel is given up.
            TransportError: the peer is gone.
            PeerRefused, LeaseFenced: the service answered no.
        """
        deadline = time.monotonic() + timeout_s
        future = self.submit(message, payload, timeout_s=timeout_s)
        try:
            return awake_result(future, deadline - time.monotonic())
        except FutureTimeout as error:
            self._fail(f"no reply to {type(message).__name__} within {timeout_s:g} s")
            raise DeadlineExceeded(
                f"{self._client}: {self.service} gave no reply to {type(message).__name__} within {timeout_s:g} s"
            ) from error

    @property
    def closed(self) -> bool:
        """Whether requests are refused from now on: closed here, by the service, or broken."""
        return self._closed.is_set()

    @property
    def shared(self) -> bool:
        """Whether payloads of requests go through shared memory: the service runs on this host."""
        return self._channel.shared

    def wait_closed(self, timeout_s: float | None = None) -> bool:
        """Wait until it is `closed`; returns whether it is."""
        return self._closed.wait(timeout_s)

    def close(self) -> None:
        """Say goodbye; idempotent. Requests in flight fail."""
        with self._lock:
            closed = self._closed.is_set()
            self._closed.set()
        if not closed:
            self._channel.goodbye()
            self._thread.join(timeout=_CLOSE_TIMEOUT_S)
        self._fail("closed", cut=self._thread.is_alive())
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _receive(self) -> None:
        if self._turns is not None:
            self._turns.stand_by(self._closed.is_set)
            return
        while self._read_one():
            pass

    def _read_one(self) -> bool:
        """Take in one message; False when none will follow."""
        try:
            frame, meta, payload = self._channel.receive()
            if frame.kind is FrameKind.REQUEST:
                raise TransportError(f"channel to {self.service}: a request from the serving side")
            if frame.kind is FrameKind.GOODBYE:
                self._fail("the service closed it", cut=False)
                return False
            with self._lock:
                future = self._pending.pop(frame.request_id, None)
            if future is not None:
                self._settle(future, meta, payload)
        except TransportError as error:
            self._fail(str(error))
            return False
        except Exception as error:  # the boundary of a thread: the waiters hear of it
            logger.exception("channel to %s", self.service)
            self._fail(one_line(error))
            return False
        return True

    def _settle(self, future: "Future[Reply]", meta: bytes, payload: Tensor) -> None:
        try:
            reply = self._decoder.decode(meta)
        except UNREADABLE as error:
            future.set_exception(TransportError(f"channel to {self.service}: a reply that cannot be read ({error})"))
            raise TransportError(f"a reply could not be read ({error})") from error
        if not isinstance(reply, Refused):
            future.set_result((reply, payload))
        else:
            future.set_exception(refusal(reply, self.service))

    def _fail(self, reason: str, *, cut: bool = True) -> None:
        with self._lock:
            self._closed.set()
            pending, self._pending = self._pending, {}
        if cut:
            self._channel.abort()
        for future in pending.values():
            future.set_exception(TransportError(f"channel to {self.service}: {reason}"))
        if self._turns is not None:
            self._turns.end()
