"""Challenge-response before a channel exists: both ends prove that they know the job's secret.

    client                         store                          server
      |- push ask(id, name, nonce_c) ->|                              |
      |                                |<- pop --- one thread each ---|
      |                                |<- offer = nonce_s, HMAC("server", ...)
      |<-------------------------------|                              |
      |- answer = HMAC("client", ...) >|                              |
      |                                |------------------------------> verify, only then the pair is built

The secret itself is never written to the store, to argv or to a log. Keys are deleted after use.
"""

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
import torch.distributed as dist

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import DeadlineExceeded, PeerRefused, TransportError
from asyncflow.transport.frame import UNREADABLE

_NONCE_BYTES = 16
_MEETING_S = 60.0
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.1


class Ask(msgspec.Struct):
    """A client's wish for a channel."""

    channel_id: str
    client: str
    nonce: bytes


class Offer(msgspec.Struct):
    """The server's challenge and its own proof. `refusal`: why it takes no further client; its proof covers that."""

    nonce: bytes
    proof: bytes
    refusal: str = ""


@dataclass(frozen=True)
class Credentials:
    """What a process needs to open and accept channels.

    Attributes:
        store: the job store; cloned for every blocking use.
        secret: the job's secret.
        timeout_s: deadline of one handshake.
    """

    store: dist.TCPStore
    secret: bytes
    timeout_s: float = 60.0
    _idle: list[dist.TCPStore] = field(default_factory=list, init=False, repr=False, compare=False)

    def own_store(self, timeout_s: float | None = None) -> dist.TCPStore:
        """Return a store client of its own, since a blocked wait stalls other calls on the same client.

        Raises:
            TransportError: the job store cannot be reached.
        """
        try:
            store: dist.TCPStore = self.store.clone()  # type: ignore[attr-defined]
        except dist.DistError as error:
            reason = str(error).partition("\n")[0]
            raise TransportError(f"the job store cannot be reached; is the launcher gone? ({reason})") from error
        store.set_timeout(timedelta(seconds=timeout_s or self.timeout_s))
        return store

    @property
    def meeting_s(self) -> float:
        """How long two ends that proved themselves may take to meet (s); both are there, so less than for a start."""
        return min(self.timeout_s, _MEETING_S)

    @contextmanager
    def borrowed_store(self) -> Iterator[dist.TCPStore]:
        """Lend a store client that nobody else uses meanwhile; it is kept for the next borrower.

        A fresh one costs a reverse DNS lookup in PyTorch, which takes seconds where the resolver does not answer.

        Raises:
            TransportError: the job store is gone.
        """
        try:
            store = self._idle.pop()
        except IndexError:
            store = self.own_store()
        yield store
        self._idle.append(store)  # not after an error: the client may be in the middle of an answer


def ask_key(service: str) -> str:
    """Return the queue in which clients ask `service` for a channel."""
    return f"channel/{service}/ask"


def pair_store(store: dist.Store, service: str, pair_key: str) -> dist.PrefixStore:
    """Return the store prefix under which the pair's two ends find each other."""
    return dist.PrefixStore(f"channel/{service}/pair/{pair_key}", store)


def prove(secret: bytes, side: str, service: str, ask: Ask, server_nonce: bytes) -> bytes:
    """Return HMAC-SHA256 over who proves, to which service, in which exchange."""
    fields = [side.encode(), service.encode(), ask.channel_id.encode(), ask.client.encode(), ask.nonce, server_nonce]
    message = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    return hmac.new(secret, message, hashlib.sha256).digest()


def ask_for_channel(
    store: dist.TCPStore,
    secret: bytes,
    service: str,
    client: str,
    *,
    timeout_s: float = 60.0,
    stop: threading.Event | None = None,
) -> str:
    """Run the client's side; returns the pair's key, which only who knows the secret can derive.

    Args:
        store: of this thread alone.
        secret: the job's.
        service: whom to ask.
        client: who asks.
        timeout_s: for the service to answer.
        stop: once set, no answer is waited for.

    Raises:
        DeadlineExceeded: no answer in time.
        PeerRefused: the server takes no further client.
        TransportError: a stop, or the server does not know the secret.
    """
    ask = Ask(secrets.token_hex(8), client, secrets.token_bytes(_NONCE_BYTES))
    base = f"channel/{service}/{ask.channel_id}"
    try:
        store.queue_push(ask_key(service), msgspec.msgpack.encode(ask))
        if not key_appears(store, f"{base}/offer", timeout_s, stop or threading.Event()):
            if stop is not None and stop.is_set():
                raise TransportError(f"{client}: closed while {service} was asked for a channel")
            raise DeadlineExceeded(f"{client}: {service} did not answer; is it running? (waited {timeout_s:g} s)")
        offer = msgpack_decoder(Offer).decode(store.get(f"{base}/offer"))
    except dist.DistError as error:
        raise TransportError(f"{client}: {service} did not answer; is it running?") from error
    except UNREADABLE as error:
        raise TransportError(f"{client}: {service} sent an offer that cannot be read") from error
    if not hmac.compare_digest(offer.proof, prove(secret, f"server{offer.refusal}", service, ask, offer.nonce)):
        raise TransportError(f"{client}: {service} does not know the job's secret")
    if offer.refusal:
        store.delete_key(f"{base}/offer")
        raise PeerRefused(f"{client}: {offer.refusal}")
    answer = prove(secret, "client", service, ask, offer.nonce)
    try:
        store.set(f"{base}/answer", answer)  # type: ignore[arg-type]  # the stub lacks bytes
    except dist.DistError as error:
        raise TransportError(f"{client}: the job store is gone, so the launcher is") from error
    return _pair_key(secret, service, ask, offer.nonce)


def accept_channel(store: dist.TCPStore, secret: bytes, service: str, ask: Ask) -> str:
    """Run the server's side for one ask; returns the pair's key when the client has proved itself.

    Raises:
        TransportError: the client vanished or does not know the secret; nobody else is affected.
    """
    base = f"channel/{service}/{ask.channel_id}"
    nonce = secrets.token_bytes(_NONCE_BYTES)
    offer = Offer(nonce, prove(secret, "server", service, ask, nonce))
    store.set(f"{base}/offer", msgspec.msgpack.encode(offer))  # type: ignore[arg-type]  # the stub lacks bytes
    try:
        answer = store.get(f"{base}/answer")
    except dist.DistError as error:
        raise TransportError(f"{service}: {ask.client} asked for a channel and vanished") from error
    finally:
        store.delete_key(f"{base}/offer")
    store.delete_key(f"{base}/answer")
    if not hmac.compare_digest(answer, prove(secret, "client", service, ask, nonce)):
        raise TransportError(f"{service}: {ask.client} does not know the job's secret")
    return _pair_key(secret, service, ask, nonce)


def refuse_channel(store: dist.TCPStore, secret: bytes, service: str, ask: Ask, reason: str) -> None:
    """Tell a client at once that it gets no channel; it deletes the key."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    offer = Offer(nonce, prove(secret, f"server{reason}", service, ask, nonce), reason)
    store.set(f"channel/{service}/{ask.channel_id}/offer", msgspec.msgpack.encode(offer))  # type: ignore[arg-type]


def key_appears(store: dist.TCPStore, key: str, timeout_s: float, stop: threading.Event) -> bool:
    """Wait for a key. Not with the store's own wait: nobody could wake that, and it prints a warning at its end."""
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_LOOK_S
    while not store.check([key]):
        if time.monotonic() > deadline or stop.wait(pause_s):
            return False
        pause_s = min(2 * pause_s, _LAST_LOOK_S)
    return True


def _pair_key(secret: bytes, service: str, ask: Ask, server_nonce: bytes) -> str:
    # Not the channel id, which is public: whoever else writes to the store must not meet either end under it.
    return prove(secret, "pair", service, ask, server_nonce).hex()
