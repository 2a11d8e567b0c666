"""The serving side: accepts channels under a service name and hands every request to one handler.

Threads: one waits for asks; one per handshake, so that a slow or dead client blocks no other; one per channel receives
and runs the handler. A reply may be sent later and from any thread (a parked request).
"""

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Protocol

import msgspec
import torch.distributed as dist
from torch import Tensor

from asyncflow.clock import awake_result
from asyncflow.decoding import UNREADABLE, msgpack_decoder
from asyncflow.errors import (
    AsyncFlowError,
    DeadlineExceeded,
    LeaseFenced,
    PeerRefused,
    PutPending,
    QueueFull,
    RowsExist,
    SealBroken,
    TransportError,
    one_line,
)
from asyncflow.process import ServiceThreads
from asyncflow.sealed_store import SealedStore
from asyncflow.transport.channel import Channel, PipeChannel, Pipes
from asyncflow.transport.frame import FrameKind, Limits, Payload, PlacedPayload
from asyncflow.transport.meeting import (
    ChannelAsk,
    Credentials,
    accept_channel,
    ask_for_channel,
    ask_key,
    open_channel,
    pair_store,
    refuse_channel,
)

logger = logging.getLogger(__name__)

_CLOSE = b"close"
_REPLY_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 6.0
_IDLE = timedelta(days=30)
_STORE_TRIES = 4
_STORE_PAUSE_S = 0.5
_ENCODER = msgspec.msgpack.Encoder()


class Call:
    """One request. Reply exactly once, now or later, from any thread.

    Attributes:
        payload: uint8; whoever holds a view of it owns it.
    """

    def __init__(
        self, channel: Channel, request_id: int, session: "ChannelSession", message: Any, payload: Tensor
    ) -> None:
        self.session = session
        self.message = message
        self.payload = payload
        self._channel = channel
        self._request_id = request_id

    @property
    def shared(self) -> bool:
        """Whether payloads of replies go through shared memory, because the client runs on this host."""
        return self._channel.shared

    def send_reply(self, message: Any, payload: Payload | None = None) -> None:
        """Answer. A client that is gone is no error here: its session ends on its own.

        A client that does not read delays only payloads that go over the wire, and is cut off in the end.
        """
        try:
            meta = _ENCODER.encode(message)
            self._channel.send(FrameKind.REPLY, self._request_id, meta, payload, timeout_s=_REPLY_TIMEOUT_S)
        except TransportError as error:
            logger.info("%s", error)
            self._channel.abort()

    def send_refusal(self, error: AsyncFlowError) -> None:
        self.send_reply(refused(error))


@dataclass(frozen=True)
class ChannelSession:
    """One client's channel: the unit of identity and of death."""

    number: int  # unique for the life of this server
    client: str  # the name that the client gave


class Handler(Protocol):
    """What a service does with requests; called from many threads at once."""

    def handle(self, call: Call) -> None:
        """Carry out a request and reply, or keep the call and reply later. An AsyncFlowError becomes a refusal."""

    def handle_disconnect(self, session: ChannelSession) -> None:
        """The client's channel ended, by goodbye or by death."""


class ChannelServer:
    """Serves `service` until `close`.

    Args:
        service: the name that clients ask for.
        requests: msgspec type (tagged union) of the requests.
        limits: largest request accepted, and whether memory is shared.
        max_clients: more clients than this are refused.
        threads: of the service, which fails when it can accept no more clients; None: that is only logged.
    """

    def __init__(
        self,
        credentials: Credentials,
        service: str,
        requests: Any,
        handler: Handler,
        *,
        limits: Limits | None = None,
        max_clients: int = 1024,
        threads: ServiceThreads | None = None,
    ) -> None:
        self._credentials = credentials
        self._service = service
        self._decoder = msgpack_decoder(requests)
        self._handler = handler
        self._limits = limits or Limits()
        self._max_clients = max_clients
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._channels: dict[int, tuple[Channel, threading.Thread]] = {}
        self._serving: set[threading.Thread] = set()  # includes threads whose channel ended, until they exit
        self._greeting = 0
        self._closed = threading.Event()
        self._acceptor = (threads or ServiceThreads(service)).start(self._accept_clients, name=f"accept-{service}")

    def close(self) -> None:
        """Say goodbye to every client and stop; idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            channels = list(self._channels.values())
            serving = set(self._serving)
        try:
            with self._credentials.borrowed_store() as store:
                store.queue_push(ask_key(self._service), _CLOSE)
        except (TransportError, dist.DistError) as error:
            logger.debug("%s: %s", self._service, error)  # then the acceptor loses the store, too
        # In parallel, since each may wait for a client that does not read.
        goodbyes = [threading.Thread(target=channel.send_goodbye, daemon=True) for channel, _ in channels]
        for goodbye in goodbyes:
            goodbye.start()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in (self._acceptor, *goodbyes, *serving):
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        for channel, thread in channels:
            if thread.is_alive():
                channel.abort()
                thread.join(timeout=1)

    def cut_off(self, session: int) -> None:
        """End a client's channel as if the client had died; ignored if it is gone already."""
        with self._lock:
            channel, _ = self._channels.get(session, (None, None))
        if channel is not None:
            channel.abort()

    def _accept_clients(self) -> None:
        store: SealedStore | None = None
        broken = 0
        while True:
            try:
                store = store or self._credentials.own_store(_IDLE.total_seconds())
                data = store.queue_pop(ask_key(self._service))
                broken = 0
                if data == _CLOSE and self._closed.is_set():  # otherwise left over from an earlier life of this service
                    return
                ask = msgpack_decoder(ChannelAsk).decode(data)
            except (SealBroken, *UNREADABLE) as error:
                logger.warning("%s: a request for a channel was dropped (%s)", self._service, error)
                continue
            except (TransportError, dist.DistError) as error:
                store, broken = None, broken + 1
                if self._closed.wait(_STORE_PAUSE_S):
                    return
                if broken == _STORE_TRIES:
                    raise
                logger.warning("%s: the job store does not answer; trying again (%s)", self._service, one_line(error))
                continue
            try:
                threading.Thread(
                    target=self._greet_client, args=(ask,), name=f"greet-{ask.client}", daemon=True
                ).start()
            except RuntimeError as error:  # out of threads: keep accepting, the client will ask again
                logger.warning("%s: %s was not heard: %s", self._service, ask.client, error)

    def _greet_client(self, ask: ChannelAsk) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            full = self._greeting + len(self._channels) >= self._max_clients
            self._greeting += not full
        if full:
            self._refuse_full(ask)
            return
        channel = None
        try:
            channel = self._open_client_channel(ask)
        except (TransportError, dist.DistError) as error:
            logger.warning("%s", error)
            return
        finally:
            if channel is None:
                with self._lock:
                    self._greeting -= 1
        session = ChannelSession(next(self._numbers), ask.client)
        name = f"serve-{ask.client}"
        thread = threading.Thread(target=self._serve_channel, args=(channel, session), name=name, daemon=True)
        try:
            with self._lock:
                # Checked and registered under one lock: either `close` sees this channel, or this sees the close; and
                # the client counts at any time.
                self._greeting -= 1
                closed = self._closed.is_set()
                if not closed:
                    self._channels[session.number] = (channel, thread)
                    thread.start()
                    self._serving = {each for each in self._serving if each.is_alive()} | {thread}
        except RuntimeError as error:  # out of threads: the client will connect again
            logger.warning("%s: %s is not served: %s", self._service, ask.client, error)
            with self._lock:
                self._channels.pop(session.number, None)
            channel.abort()
            return
        if closed:
            channel.send_goodbye()

    def _refuse_full(self, ask: ChannelAsk) -> None:
        reason = f"{self._service} is full: {self._max_clients} clients; raise max_clients (tq.max_clients of a run)"
        logger.warning("%s: %s was refused", reason, ask.client)
        try:
            with self._credentials.borrowed_store() as store:
                refuse_channel(store, self._service, ask, reason)
        except (TransportError, dist.DistError) as error:
            logger.warning("%s", error)

    def _open_client_channel(self, ask: ChannelAsk) -> Channel:
        with self._credentials.borrowed_store() as store:
            key = accept_channel(store, self._credentials.secret, self._service, ask)
            pair = pair_store(store, self._service, key)
            try:
                return open_channel(
                    pair,
                    key,
                    is_server=True,
                    peer=ask.client,
                    limits=self._limits,
                    timeout_s=self._credentials.meeting_s,
                )
            finally:  # both ends have met by now, or never will
                for name in pair.list_keys():
                    pair.delete_key(name)

    def _serve_channel(self, channel: Channel, session: ChannelSession) -> None:
        try:
            while True:
                frame, meta, payload = channel.receive()
                if frame.kind is FrameKind.GOODBYE:
                    break
                if frame.kind is not FrameKind.REQUEST:
                    raise TransportError(f"channel to {session.client}: a reply from the asking side")
                self._run_call(Call(channel, frame.request_id, session, None, payload), meta)
                del payload  # otherwise these bytes live until the next request
        except TransportError as error:
            logger.info("%s: %s", self._service, error)
            channel.abort()
        finally:
            try:
                self._handler.handle_disconnect(session)
            finally:
                with self._lock:
                    self._channels.pop(session.number, None)

    def _run_call(self, call: Call, meta: bytes) -> None:
        try:
            call.message = self._decoder.decode(meta)
        except UNREADABLE as error:
            logger.warning("%s: %s sent a message that cannot be read (%s)", self._service, call.session.client, error)
            call.send_refusal(PeerRefused(f"a request of {call.session.client} cannot be read: {error}"))
            return
        try:
            self._handler.handle(call)
        except AsyncFlowError as error:
            call.send_refusal(error)
        except Exception as error:  # one bad request must not end the service
            logger.exception("%s: %s failed", self._service, type(call.message).__name__)
            call.send_refusal(TransportError(f"internal error: {error!r}; see the log of {self._service}"))


class RefusedKind(StrEnum):
    INVALID = "invalid"
    FENCED = "fenced"
    FULL = "full"
    EXISTS = "exists"
    PENDING = "pending"


class CallRefused(msgspec.Struct, tag=True):
    """The one reply that every service may give: the request was not carried out, and nothing changed."""

    kind: RefusedKind
    message: str


_ERRORS: dict[RefusedKind, type[TransportError]] = {
    RefusedKind.FENCED: LeaseFenced,
    RefusedKind.FULL: QueueFull,
    RefusedKind.EXISTS: RowsExist,
    RefusedKind.PENDING: PutPending,
    RefusedKind.INVALID: PeerRefused,
}


def refused(error: AsyncFlowError) -> CallRefused:
    kind = next((kind for kind, cls in _ERRORS.items() if isinstance(error, cls)), RefusedKind.INVALID)
    return CallRefused(kind, str(error))


def refusal(reply: CallRefused, service: str) -> TransportError:
    """Return the error to raise for a refusal: the same type as at the service."""
    return _ERRORS[reply.kind](f"{service}: {reply.message}")


# The thread that waits for a reply also reads it, so that no other thread has to be woken to hand it over.
#
#     reply.result()             reads until its own reply is there, settles others' on the way, passes the turn on
#     reply.add_done_callback()  no thread waits, so the connection's own thread reads
#     nothing is asked           the own thread watches for the peer's end
#
# `Connection` uses this where frames come through pipes: only there can a reader wait with a deadline and be
# interrupted. Exactly one thread has the turn.

_EXPECTED, _CAME = "RUNNING", "FINISHED"  # states of a `Future`


class ReadingTurns:
    """Gives the turn to read to one thread at a time.

    `read_one` takes in one message and settles its reply; it returns False when none will follow.
    """

    def __init__(self, pipes: Pipes, read_one: Callable[[], bool]) -> None:
        # Take `lock` directly where nothing waits: entering the condition costs more.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # notified when the turn is free or a reply came
        self._pipes = pipes
        self._read_one = read_one
        self._taken = False
        self._waiting = 0
        self._standing_by = False
        self._watched = 0
        self._over = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        os.close(self._bell)

    def end(self) -> None:
        """No message will follow, and all replies are settled. Idempotent."""
        with self.lock:
            self._over = True
            self.changed.notify_all()
        self._ring_bell()

    def read_until(self, reply: "ExpectedReply", timeout_s: float | None) -> None:
        """Read, or let another thread read, until `reply` is settled or the time is up."""
        deadline = time.monotonic() + (threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
        while not reply.settled and self._take_turn(reply, deadline):
            try:
                while not reply.settled and self._pipes.wait_readable(deadline - time.monotonic()):
                    if not self._read_one():
                        break
                    if self._waiting:
                        self._tell_waiting()
                if reply.settled or time.monotonic() >= deadline:
                    return
            finally:
                self._pass_on()

    def watch(self) -> None:
        """A reply has callbacks and perhaps no waiter, so the connection's own thread reads."""
        with self.lock:
            self._watched += 1
        self._ring_bell()

    def remove_watcher(self) -> None:
        with self.lock:
            self._watched -= 1

    def stand_by(self, closed: Callable[[], bool]) -> None:
        """The connection's own thread: read while callbacks are due and once the peer has ended; return at the end."""
        while not self._over:
            self._pipes.watch(self._bell)
            rung = self._clear_bell()
            with self.lock:
                self._standing_by = True
                while self._taken and not self._over:
                    self.changed.wait()
                self._standing_by = False
                if self._over or (rung and not self._watched and not closed()):
                    continue
                self._taken = True
            try:
                going_on = self._read_one()
                while going_on and self._watched:
                    self._tell_waiting()
                    going_on = self._read_one()
            finally:
                self._pass_on()

    def _take_turn(self, reply: "ExpectedReply", deadline: float) -> bool:
        with self.lock:
            self._waiting += 1  # before checking the reply: its reader checks in the reverse order
            try:
                while self._taken and not reply.settled:
                    if not self.changed.wait(min(deadline - time.monotonic(), threading.TIMEOUT_MAX)):
                        return False
                if reply.settled or self._over:
                    return False
                self._taken = True
                return True
            finally:
                self._waiting -= 1

    def _pass_on(self) -> None:
        with self.lock:
            self._taken = False
            if self._waiting or self._standing_by:
                self.changed.notify_all()
            watched = self._watched
        if watched:
            self._ring_bell()

    def _tell_waiting(self) -> None:
        if self._waiting:
            with self.lock:
                self.changed.notify_all()

    def _ring_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)

    def _clear_bell(self) -> bool:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return False
        return True


class ExpectedReply(Future[Any]):
    """A future whose waiter reads the reply. It cannot be cancelled. All of a connection share one lock: that is
    cheaper.
    """

    def __init__(self, turns: ReadingTurns) -> None:
        self._condition = turns.changed  # skips the base's __init__, which costs as much as a system call
        self._state = _EXPECTED
        self._result = self._exception = None
        self._waiters = []
        self._done_callbacks: list[Callable[[Future[Any]], Any]] = []
        # Like `done`, but without its lock: the waiter checks often.
        self.settled = False
        self._turns = turns

    def set_result(self, result: Any) -> None:
        with self._turns.lock:
            # Fast path: nobody waits inside the base class, and no callback is due.
            if not self._waiters and not self._done_callbacks:
                self._result, self._state = result, _CAME
                self.settled = True
                return
        super().set_result(result)
        self.settled = True

    def set_exception(self, exception: BaseException | None) -> None:
        super().set_exception(exception)
        self.settled = True

    def result(self, timeout: float | None = None) -> Any:
        """Return the reply, reading until it comes; see `Future.result`."""
        if not self.settled and self._state == _EXPECTED:  # inside a callback: it came but is not settled yet
            self._turns.read_until(self, timeout)
            timeout = 0.0 if timeout is not None else None
        if self.settled and self._exception is None:
            return self._result
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return why there is no reply, or None; see `Future.exception`."""
        if not self.settled and self._state == _EXPECTED:
            self._turns.read_until(self, timeout)
            timeout = 0.0 if timeout is not None else None
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[["Future[Any]"], object]) -> None:
        """Have `fn` called by the thread that reads the reply."""
        if not self.done():
            self._turns.watch()
            super().add_done_callback(lambda _: self._turns.remove_watcher())
        super().add_done_callback(fn)


# The calling side of a channel: many requests in flight, each with its own deadline.

Reply = tuple[Any, Tensor]

_SEND_CLOSE_TIMEOUT_S = 5.0
_SPARE_FRAMES = 1  # a goodbye comes without a request


class Connection:
    """A client's channel to one service. Thread-safe. A broken one stays broken: open another.

    Replies are read by the thread that waits for one (`ReadingTurns`), or, with `callbacks_only`, by the connection's
    own thread.

    Args:
        client: this process's name, for messages at the service.
        replies: msgspec type (tagged union) of the service's answers, without `CallRefused`.
        limits: largest reply accepted, and whether memory is shared.
        callbacks_only: all replies have callbacks and none has a waiter, so turns would only cost time.
        timeout_s: for the service to answer, if shorter than the handshake's deadline.
        stop: once set, the constructor stops waiting for an answer.

    Raises:
        PeerRefused: the service has all the clients that it takes.
        TransportError: the service does not answer in time or fails its proof, or no thread can be started.
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
        self.service = service
        self._client = client
        self._decoder = msgpack_decoder(replies | CallRefused)
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
        self._places: dict[int, Callable[[Any], PlacedPayload | None]] = {}
        self._channel.place_payload = self._place_payload
        self._closed = threading.Event()
        self._turns: ReadingTurns | None = None
        if isinstance(self._channel, PipeChannel) and not callbacks_only:
            self._turns = ReadingTurns(self._channel.pipes, self._read_one)
        self._thread = threading.Thread(target=self._receive_replies, name=f"replies-{service}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # out of threads
            self._fail_pending(str(error))
            raise TransportError(f"channel to {service}: {error}") from error

    def submit(
        self,
        message: Any,
        payload: Payload | None = None,
        *,
        timeout_s: float | None = None,
        place: Callable[[Any], PlacedPayload | None] | None = None,
    ) -> "Future[Reply]":
        """Send a request; the future yields (reply, payload uint8) or raises PeerRefused or TransportError.

        Args:
            payload: must not change until this returns. The reply's payload belongs to the caller.
            timeout_s: for a busy service to take the request; once it passes, the channel is given up.
            place: asked with the reply where to receive its payload, which then yields empty; None, or of another size:
                in memory of its own. Payloads that do not come over the wire are always in memory of their own. Until
                the future is settled, or the connection closed, that memory may be written to.

        Raises:
            TransportError: the channel is broken.
        """
        request_id = next(self._ids)
        future: Future[Reply]
        if self._turns is not None:
            future = ExpectedReply(self._turns)
        else:
            future = Future()
            future.set_running_or_notify_cancel()  # not cancellable: that would break the settling thread
        meta = self._encoder.encode(message)
        with self._lock:
            if self._closed.is_set():
                raise TransportError(f"channel to {self.service}: closed")
            # Register before sending: the reply may come at once.
            self._pending[request_id] = future
            if place is not None:
                self._places[request_id] = place
            open_requests = len(self._pending)
        try:
            self._channel.post_receives(open_requests + _SPARE_FRAMES)
            self._channel.send(FrameKind.REQUEST, request_id, meta, payload, timeout_s=timeout_s)
        except TransportError:
            with self._lock:
                self._pending.pop(request_id, None)
                self._places.pop(request_id, None)
            raise
        return future

    def call_service(self, message: Any, payload: Payload | None = None, *, timeout_s: float) -> Reply:
        """Send a request and wait for its reply.

        Raises DeadlineExceeded, and gives the channel up, without a reply within `timeout_s`; TransportError if the
        peer is gone; PeerRefused or LeaseFenced if the service refused the request.
        """
        deadline = time.monotonic() + timeout_s
        future = self.submit(message, payload, timeout_s=timeout_s)
        try:
            return awake_result(future, deadline - time.monotonic())
        except FutureTimeout as error:
            self._fail_pending(f"no reply to {type(message).__name__} within {timeout_s:g} s")
            raise DeadlineExceeded(
                f"{self._client}: {self.service} gave no reply to {type(message).__name__} within {timeout_s:g} s"
            ) from error

    @property
    def closed(self) -> bool:
        """Whether requests are refused from now on: closed here or by the service, or broken."""
        return self._closed.is_set()

    @property
    def ended(self) -> bool:
        """Whether nothing is received any more, so that no memory of `submit` is written to."""
        return not self._thread.is_alive()

    @property
    def shared(self) -> bool:
        """Whether payloads of requests go through shared memory, because the service runs on this host."""
        return self._channel.shared

    def wait_closed(self, timeout_s: float | None = None) -> bool:
        return self._closed.wait(timeout_s)

    def give_up(self, reason: str) -> None:
        """Cut the channel, without a goodbye that the peer may not take; idempotent. Requests in flight fail."""
        self._fail_pending(reason)

    def close(self) -> None:
        """Say goodbye; idempotent. Requests in flight fail."""
        with self._lock:
            closed = self._closed.is_set()
            self._closed.set()
        if not closed:
            self._channel.send_goodbye()
            self._thread.join(timeout=_SEND_CLOSE_TIMEOUT_S)
        self._fail_pending("closed", cut=self._thread.is_alive())
        self._thread.join(timeout=_SEND_CLOSE_TIMEOUT_S)

    def _receive_replies(self) -> None:
        if self._turns is not None:
            self._turns.stand_by(self._closed.is_set)
            return
        while self._read_one():
            pass

    def _read_one(self) -> bool:
        try:
            frame, meta, payload = self._channel.receive()
            if frame.kind is FrameKind.REQUEST:
                raise TransportError(f"channel to {self.service}: a request from the serving side")
            if frame.kind is FrameKind.GOODBYE:
                self._fail_pending("the service closed it", cut=False)
                return False
            with self._lock:
                future = self._pending.pop(frame.request_id, None)
                self._places.pop(frame.request_id, None)
            if future is not None:
                self._settle_reply(future, meta, payload)
        except TransportError as error:
            self._fail_pending(str(error).removeprefix(f"channel to {self.service}: "))
            return False
        except Exception as error:  # the boundary of a thread: waiters must hear of it
            logger.exception("channel to %s", self.service)
            self._fail_pending(one_line(error))
            return False
        return True

    def _place_payload(self, request_id: int, meta: bytes) -> PlacedPayload | None:
        place = self._places.get(request_id)
        if place is None:
            return None
        try:
            return place(self._decoder.decode(meta))
        except UNREADABLE:  # reported once the message is complete
            return None

    def _settle_reply(self, future: "Future[Reply]", meta: bytes, payload: Tensor) -> None:
        try:
            reply = self._decoder.decode(meta)
        except UNREADABLE as error:
            future.set_exception(TransportError(f"channel to {self.service}: a reply that cannot be read ({error})"))
            # Raised as well, so that the whole channel is given up.
            raise TransportError(f"a reply could not be read ({error})") from error
        if not isinstance(reply, CallRefused):
            future.set_result((reply, payload))
        else:
            future.set_exception(refusal(reply, self.service))

    def _fail_pending(self, reason: str, *, cut: bool = True) -> None:
        with self._lock:
            self._closed.set()
            pending, self._pending = self._pending, {}
        if cut:
            self._channel.abort()
        for future in pending.values():
            future.set_exception(TransportError(f"channel to {self.service}: {reason}"))
        if self._turns is not None:
            self._turns.end()
