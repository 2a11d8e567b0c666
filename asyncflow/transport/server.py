"""The serving side: accepts channels under a service name and hands every request to one handler.

Threads: one waits for asks; one per handshake, so that a slow or dead one blocks no other; one per channel receives and
runs the handler. A reply may be sent later from any thread (a parked request).
"""

import itertools
import logging
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Protocol

import msgspec
import torch.distributed as dist
from torch import Tensor

from asyncflow.decoding import UNREADABLE, msgpack_decoder
from asyncflow.errors import (
    AsyncFlowError,
    LeaseFenced,
    PeerRefused,
    PutPending,
    QueueFull,
    RowsExist,
    SealBroken,
    TransportError,
    one_line,
)
from asyncflow.sealed_store import SealedStore
from asyncflow.service_threads import ServiceThreads
from asyncflow.transport.channel import Channel
from asyncflow.transport.frame import FrameKind, Limits, Payload
from asyncflow.transport.handshake import Ask, Credentials, accept_channel, ask_key, pair_store, refuse_channel
from asyncflow.transport.meeting import open_channel

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
        session: of the client.
        message: what.
        payload: uint8; belongs to the holder of a view of it.
    """

    def __init__(self, channel: Channel, request_id: int, session: "Session", message: Any, payload: Tensor) -> None:
        self.session = session
        self.message = message
        self.payload = payload
        self._channel = channel
        self._request_id = request_id

    @property
    def shared(self) -> bool:
        """Whether payloads of replies go through shared memory: the client runs on this host."""
        return self._channel.shared

    def reply(self, message: Any, payload: Payload | None = None) -> None:
        """Answer; a client that is gone is not an error here (its session ends on its own).

        A client that does not read delays only payloads that go over the wire; in the end it is given up.
        """
        try:
            meta = _ENCODER.encode(message)
            self._channel.send(FrameKind.REPLY, self._request_id, meta, payload, timeout_s=_REPLY_TIMEOUT_S)
        except TransportError as error:
            logger.info("%s", error)
            self._channel.abort()

    def refuse(self, error: AsyncFlowError) -> None:
        """Answer that the request was not carried out."""
        self.reply(refused(error))


@dataclass(frozen=True)
class Session:
    """One client's channel: the unit of identity and of death.

    Attributes:
        number: unique in this server's life.
        client: the name that the client gave.
    """

    number: int
    client: str


class Handler(Protocol):
    """What a service does with requests; called from many threads at once."""

    def handle(self, call: Call) -> None:
        """Carry out a request and reply, or keep the call and reply later. AsyncFlowError becomes a refusal."""

    def disconnected(self, session: Session) -> None:
        """The client's channel ended, by goodbye or by death."""


class ChannelServer:
    """Serves `service` until `close`."""

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
        """Start listening.

        Args:
            credentials: store and secret.
            service: the name that clients ask for.
            requests: msgspec type (tagged union) of the requests.
            handler: carries them out.
            limits: largest request accepted, and whether memory is shared.
            max_clients: further clients are refused while so many are connected.
            threads: of the service, which fails if it can accept no further clients; None: that is only logged.
        """
        self._credentials = credentials
        self._service = service
        self._decoder = msgpack_decoder(requests)
        self._handler = handler
        self._limits = limits or Limits()
        self._max_clients = max_clients
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._channels: dict[int, tuple[Channel, threading.Thread]] = {}
        self._serving: set[threading.Thread] = set()  # also those whose channel ended, until they are really gone
        self._greeting = 0
        self._closed = threading.Event()
        self._acceptor = (threads or ServiceThreads(service)).start(self._accept, name=f"accept-{service}")

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
            logger.debug("%s: %s", self._service, error)  # then the acceptor notices it, too
        goodbyes = [threading.Thread(target=channel.goodbye, daemon=True) for channel, _ in channels]
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
        """End a client's channel as if the client had died; one that is gone already is passed over."""
        with self._lock:
            channel, _ = self._channels.get(session, (None, None))
        if channel is not None:
            channel.abort()

    def _accept(self) -> None:
        store: SealedStore | None = None
        broken = 0
        while True:
            try:
                store = store or self._credentials.own_store(_IDLE.total_seconds())
                data = store.queue_pop(ask_key(self._service))
                broken = 0
                if data == _CLOSE and self._closed.is_set():  # else it is of a former life of this service
                    return
                ask = msgpack_decoder(Ask).decode(data)
            except (SealBroken, *UNREADABLE) as error:
                logger.warning("%s: an ask was dropped (%s)", self._service, error)
                continue
            except (TransportError, dist.DistError) as error:
                store, broken = None, broken + 1
                if self._closed.wait(_STORE_PAUSE_S):
                    return
                if broken == _STORE_TRIES:
                    raise
                logger.warning("%s: the job store does not answer, tried again (%s)", self._service, one_line(error))
                continue
            try:
                threading.Thread(target=self._greet, args=(ask,), name=f"greet-{ask.client}", daemon=True).start()
            except RuntimeError as error:  # no more threads: this one must go on, the client asks again
                logger.warning("%s: %s was not heard: %s", self._service, ask.client, error)

    def _greet(self, ask: Ask) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            full = self._greeting + len(self._channels) >= self._max_clients
            self._greeting += not full
        if full:
            self._refuse_full(ask)
            return
        try:
            channel = self._meet(ask)
        except (TransportError, dist.DistError) as error:
            logger.warning("%s", error)
            return
        finally:
            with self._lock:
                self._greeting -= 1
        session = Session(next(self._numbers), ask.client)
        name = f"serve-{ask.client}"
        thread = threading.Thread(target=self._serve, args=(channel, session), name=name, daemon=True)
        try:
            with self._lock:
                closed = self._closed.is_set()
                if not closed:
                    thread.start()
                    self._channels[session.number] = (channel, thread)
                    self._serving = {each for each in self._serving if each.is_alive()} | {thread}
        except RuntimeError as error:  # no more threads: the client connects again
            logger.warning("%s: %s is not served: %s", self._service, ask.client, error)
            channel.abort()
            return
        if closed:
            channel.goodbye()

    def _refuse_full(self, ask: Ask) -> None:
        reason = f"{self._service} is full: {self._max_clients} clients; raise max_clients (tq.max_clients of a run)"
        logger.warning("%s: %s was refused", reason, ask.client)
        try:
            with self._credentials.borrowed_store() as store:
                refuse_channel(store, self._service, ask, reason)
        except (TransportError, dist.DistError) as error:
            logger.warning("%s", error)

    def _meet(self, ask: Ask) -> Channel:
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
            finally:  # both ends have met, or never will
                for name in pair.list_keys():
                    pair.delete_key(name)

    def _serve(self, channel: Channel, session: Session) -> None:
        try:
            while True:
                frame, meta, payload = channel.receive()
                if frame.kind is FrameKind.GOODBYE:
                    break
                if frame.kind is not FrameKind.REQUEST:
                    raise TransportError(f"channel to {session.client}: a reply from the asking side")
                self._run(Call(channel, frame.request_id, session, None, payload), meta)
                del payload  # else the last request's bytes live until the next one
        except TransportError as error:
            logger.info("%s: %s", self._service, error)
            channel.abort()
        finally:
            try:
                self._handler.disconnected(session)
            finally:
                with self._lock:
                    self._channels.pop(session.number, None)

    def _run(self, call: Call, meta: bytes) -> None:
        try:
            call.message = self._decoder.decode(meta)
        except UNREADABLE as error:
            logger.warning("%s: %s sent a message that cannot be read (%s)", self._service, call.session.client, error)
            call.refuse(PeerRefused(f"a request of {call.session.client} cannot be read: {error}"))
            return
        try:
            self._handler.handle(call)
        except AsyncFlowError as error:
            call.refuse(error)
        except Exception as error:  # the boundary of the service: one bad request must not end it
            logger.exception("%s: %s failed", self._service, type(call.message).__name__)
            call.refuse(TransportError(f"internal error: {error!r}; see the log of {self._service}"))


class RefusedKind(StrEnum):
    """Why a request was refused."""

    INVALID = "invalid"
    FENCED = "fenced"
    FULL = "full"
    EXISTS = "exists"
    PENDING = "pending"


class Refused(msgspec.Struct, tag=True):
    """The one reply that every service may give: the request was not carried out; nothing changed."""

    kind: RefusedKind
    message: str


_ERRORS: dict[RefusedKind, type[TransportError]] = {
    RefusedKind.FENCED: LeaseFenced,
    RefusedKind.FULL: QueueFull,
    RefusedKind.EXISTS: RowsExist,
    RefusedKind.PENDING: PutPending,
    RefusedKind.INVALID: PeerRefused,
}


def refused(error: AsyncFlowError) -> Refused:
    """Return the reply for an error."""
    kind = next((kind for kind, cls in _ERRORS.items() if isinstance(error, cls)), RefusedKind.INVALID)
    return Refused(kind, str(error))


def refusal(reply: Refused, service: str) -> TransportError:
    """Return the error to raise for a reply: the same as at the service."""
    return _ERRORS[reply.kind](f"{service}: {reply.message}")
