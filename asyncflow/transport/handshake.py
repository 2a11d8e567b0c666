"""Challenge-response before a channel exists, and the key with which both ends prove themselves again inside it.

    client                         store                          server
      |- push ask(id, name, nonce_c) ->|                              |
      |                                |<- pop --- one thread each ---|
      |<------------------------- offer = nonce_s --------------------|
      |- answer = nonce_s ------------>|------------------------------> it is the one, only then the pair is built

All of it is sealed (`asyncflow.sealed_store`): a stranger can neither ask nor answer, and what he wrote down of one
exchange is of no use in another, since both ends chose a nonce. From both the two derive the pair's key, which never
leaves the processes: the first frames inside the pair are proved with it (`meeting`), so another
process that got hold of its socket is found out. The secret is never written to the store, to argv or to a log. Keys
are deleted after use.
"""

import hmac
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from asyncflow.errors import DeadlineExceeded, PeerRefused, SealBroken, TransportError
from asyncflow.mac import Mac
from asyncflow.sealed_store import SealedStore

_NONCE_BYTES = 16
_MEETING_S = 60.0
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.1


class Ask(msgspec.Struct):
    """A client's wish for a channel."""

    channel_id: str
    client: str
    nonce: bytes


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
    _idle: list[SealedStore] = field(default_factory=list, init=False, repr=False, compare=False)

    def own_store(self, timeout_s: float | None = None) -> SealedStore:
        """Return a store client of its own, since a blocked wait stalls other calls on the same client.

        Raises:
            TransportError: the job store cannot be reached.
        """
        return SealedStore(self.group_store(timeout_s), self.secret)

    def group_store(self, timeout_s: float | None = None) -> dist.TCPStore:
        """Return a store client of its own for a process group of torch's, whose keys are not sealed.

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
    def borrowed_store(self) -> Iterator[SealedStore]:
        """Lend a store client to one borrower at a time; it is kept for the next one.

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

    def call_store(self, method: str, *arguments: Any) -> Any:
        """Call a method of a borrowed store client.

        Raises:
            TransportError: the job store is gone.
        """
        try:
            with self.borrowed_store() as store:
                return getattr(store, method)(*arguments)
        except dist.DistError as error:
            raise TransportError("the job store is gone, so the launcher is") from error


def ask_key(service: str) -> str:
    """Return the queue in which clients ask `service` for a channel."""
    return f"channel/{service}/ask"


def pair_store(store: SealedStore, service: str, key: bytes) -> SealedStore:
    """Return where the two ends of the pair with this key find each other."""
    return store.under(f"channel/{service}/pair/{Mac(key, 'name').of().hex()}")


def ask_for_channel(
    store: SealedStore,
    secret: bytes,
    service: str,
    client: str,
    *,
    timeout_s: float = 60.0,
    stop: threading.Event | None = None,
) -> bytes:
    """Run the client's side; returns the pair's key.

    Args:
        store: of this thread alone.
        secret: the job's.
        service: whom to ask.
        client: this process's name.
        timeout_s: for the service to answer.
        stop: once set, no answer is waited for.

    Raises:
        DeadlineExceeded: no answer in time.
        PeerRefused: the server takes no further client.
        TransportError: a stop, or another process answered.
    """
    ask = Ask(secrets.token_hex(8), client, secrets.token_bytes(_NONCE_BYTES))
    base = f"channel/{service}/{ask.channel_id}"
    try:
        store.queue_push(ask_key(service), msgspec.msgpack.encode(ask))
        if not key_appears(store, f"{base}/offer", timeout_s, stop or threading.Event()):
            if stop is not None and stop.is_set():
                raise TransportError(f"{client}: closed while {service} was asked for a channel")
            raise DeadlineExceeded(f"{client}: {service} did not answer; is it running? (waited {timeout_s:g} s)")
        offer = store.get(f"{base}/offer")
    except dist.DistError as error:
        raise TransportError(f"{client}: {service} did not answer; is it running?") from error
    except SealBroken as error:
        raise TransportError(
            f"{client}: who answered for {service} does not know the job's secret ({error})"
        ) from error
    nonce, refusal = offer[:_NONCE_BYTES], offer[_NONCE_BYTES:].decode()
    if refusal:
        store.delete_key(f"{base}/offer")
        raise PeerRefused(f"{client}: {refusal}")
    try:
        store.set(f"{base}/answer", nonce)
    except dist.DistError as error:
        raise TransportError(f"{client}: the job store is gone, so the launcher is") from error
    return pair_key(secret, service, ask, nonce)


def accept_channel(store: SealedStore, secret: bytes, service: str, ask: Ask) -> bytes:
    """Run the server's side for one ask; returns the pair's key when the client has answered.

    Raises:
        TransportError: the client vanished or does not know the secret; other clients are not affected.
    """
    base = f"channel/{service}/{ask.channel_id}"
    nonce = secrets.token_bytes(_NONCE_BYTES)
    store.set(f"{base}/offer", nonce)
    try:
        answer = store.get(f"{base}/answer")
    except dist.DistError as error:
        raise TransportError(f"{service}: {ask.client} asked for a channel and vanished") from error
    except SealBroken as error:
        raise TransportError(f"{service}: {ask.client} does not know the job's secret ({error})") from error
    finally:
        store.delete_key(f"{base}/offer")
    store.delete_key(f"{base}/answer")
    if not hmac.compare_digest(answer, nonce):
        raise TransportError(f"{service}: {ask.client} answered another offer")
    return pair_key(secret, service, ask, nonce)


def refuse_channel(store: SealedStore, service: str, ask: Ask, reason: str) -> None:
    """Tell a client at once that it gets no channel; it deletes the key."""
    offer = secrets.token_bytes(_NONCE_BYTES) + reason.encode()
    store.set(f"channel/{service}/{ask.channel_id}/offer", offer)


def pair_key(secret: bytes, service: str, ask: Ask, server_nonce: bytes) -> bytes:
    """Return what only the two ends of this exchange can know."""
    who = (service.encode(), ask.channel_id.encode(), ask.client.encode())
    return Mac(secret, "channel").of(*who, ask.nonce, server_nonce)


def key_appears(store: SealedStore, key: str, timeout_s: float, stop: threading.Event) -> bool:
    """Wait for a key. Not with the store's own wait: that cannot be woken, and it prints a warning at its end."""
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_LOOK_S
    while not store.check([key]):
        if time.monotonic() > deadline or stop.wait(pause_s):
            return False
        pause_s = min(2 * pause_s, _LAST_LOOK_S)
    return True
