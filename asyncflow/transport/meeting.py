"""How two ends that know a pair's key become a channel: they connect, prove it, and agree on what to share."""

#     client                                server
#       |-- hello ------><------------ hello -|   proved identity; each tries to open the other's arena and pipe
#       |-- capability --><------ capability -|   whether it could
#       PipeChannel, if both could; else GlooChannel
#
# Two ends are on the same host if they have the same boot and the same namespaces of process ids and network (so
# containers with their own addresses are separate hosts), and if the peer's arena can really be mapped (which user ids,
# a sandbox or limited address space may forbid).

import hmac
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from asyncflow.decoding import UNREADABLE, msgpack_decoder
from asyncflow.errors import DeadlineExceeded, PeerRefused, SealBroken, TransportError
from asyncflow.mac import MAC_BYTES, Mac
from asyncflow.sealed_store import GlooStore, SealedStore
from asyncflow.transport.channel import Channel, GlooChannel, GlooPair, HostLink, PipeChannel, PipeOffer, Pipes
from asyncflow.transport.frame import (
    FRAME_BYTES,
    Arena,
    ArenaOffer,
    Frame,
    FrameKind,
    Limits,
    PeerArena,
    decode_frame,
    encode_frame,
    seal_frame,
)

logger = logging.getLogger(__name__)

SWITCH = "ASYNCFLOW_SHARED_MEMORY"  # environment variable: `0` sends everything over the wire


class ChannelEnd(msgspec.Struct):
    """One end of a future channel."""

    host: str  # identifies boot and namespaces
    pid: int  # in that namespace
    arena: ArenaOffer | None  # where this end will write payloads; None: shared memory is switched off
    pipe: PipeOffer | None = None  # where this end reads frames; None like `arena`


class Capability(msgspec.Struct):
    """Whether an end can share with its peer."""

    obstacle: str  # why the peer's arena or pipe cannot be opened; empty: it can share


M = TypeVar("M", bound=msgspec.Struct)


class Introductions:
    """One end's hello and capability, each with a proof that its sender took part in the handshake.

    The key contains a nonce of each end, so a proof recorded in an earlier exchange fails. A proof also covers the
    sender's side and the kind of message, so a message reflected to its own sender fails, too.
    """

    def __init__(self, key: bytes, *, is_server: bool) -> None:
        self._own, self._peers = (
            Mac(key, side) for side in (("server", "client") if is_server else ("client", "server"))
        )

    def seal_message(self, message: ChannelEnd | Capability) -> bytes:
        body = msgspec.msgpack.encode(message)
        return self._own.compute_proof(type(message).__name__.encode(), body) + body

    def open(self, data: bytes, kind: type[M]) -> M:
        """Return what the peer sent. Raises TransportError if the peer did not send it."""
        body = data[MAC_BYTES:]
        if not self._peers.verify_proof(data[:MAC_BYTES], kind.__name__.encode(), body):
            raise TransportError("it does not know the job's secret")
        return msgpack_decoder(kind).decode(body)


class Sharing:
    """What one end of a channel offers to a peer on the same host, until both know whether they can use it."""

    def __init__(self, peer: str, limits: Limits) -> None:
        self._arena: Arena | None = None
        self._pipes: Pipes | None = None
        self._peer_arena: PeerArena | None = None
        host = ""
        if wants_sharing(configured=limits.shared_memory):
            try:
                host = this_host()
                self._arena = Arena(limits.arena_bytes)
                self._pipes = Pipes()
            except (OSError, RuntimeError) as error:
                self._arena = None
                logger.warning("channel to %s: no shared memory here (%s)", peer, error)
        arena = None if self._arena is None else self._arena.offer
        self.hello = ChannelEnd(host, os.getpid(), arena, None if self._pipes is None else self._pipes.offer)

    def negotiate_sharing(self, hello: ChannelEnd) -> Capability:
        """Open what the peer offers, if possible."""
        if self._pipes is None or self.hello.arena is None or hello.arena is None or hello.pipe is None:
            return Capability("switched off")
        if self.hello.host != hello.host:
            return Capability("another host")
        try:
            peer_arena = PeerArena(hello.pid, hello.arena)
            self._pipes.open_peer(hello.pid, hello.pipe)
        except TransportError as error:
            return Capability(str(error))
        self._peer_arena = peer_arena
        return Capability("")

    def conclude_sharing(self, peers: Capability) -> HostLink | None:
        """Take in the peer's result; return what the two share: everything or nothing."""
        # By now the peer has mapped the arena or never will, so its descriptor is not needed any more.
        if self._arena is not None:
            self._arena.close()
        if self._arena is None or self._pipes is None or self._peer_arena is None or peers.obstacle:
            return None
        self._pipes.let_end_with_peer()
        return HostLink(self._pipes, self._arena, self._peer_arena)


def open_channel(
    store: SealedStore, key: bytes, *, is_server: bool, peer: str, limits: Limits, timeout_s: float
) -> Channel:
    """Connect; both ends must do so within the deadline.

    Args:
        store: where the pair meets; used by this pair alone.
        key: the pair's; both ends prove that they know it.
        is_server: takes rank 0.
        timeout_s: deadline of the meeting (at least a few seconds), and of the hellos.

    Raises:
        TransportError: the peer did not come, or another process did.
    """
    timeout = timedelta(seconds=timeout_s)
    sharing = Sharing(peer, limits)
    try:
        pair = GlooPair(GlooStore(store), 0 if is_server else 1, frame_bytes=FRAME_BYTES, timeout=timeout)
    except RuntimeError as error:
        raise TransportError(f"channel to {peer}: the peer did not connect") from error
    except SealBroken as error:
        raise TransportError(f"channel to {peer}: another process took its place ({error})") from error
    introductions = Introductions(key, is_server=is_server)
    try:
        _send(pair, introductions.seal_message(sharing.hello), timeout_s)
        own = sharing.negotiate_sharing(introductions.open(_receive(pair, limits, timeout), ChannelEnd))
        _send(pair, introductions.seal_message(own), timeout_s)
        peers = introductions.open(_receive(pair, limits, timeout), Capability)
    except (TransportError, RuntimeError, *UNREADABLE) as error:
        pair.abort()
        reason = error if isinstance(error, (TransportError, *UNREADABLE)) else "the peer is gone"
        raise TransportError(f"channel to {peer}: no valid hello ({reason})") from error
    link = sharing.conclude_sharing(peers)
    path = "shared memory" if link is not None else f"the wire ({own.obstacle or peers.obstacle})"
    logger.info("channel to %s: payloads go through %s", peer, path)
    return GlooChannel(pair, peer, limits) if link is None else PipeChannel(pair, peer, limits, link)


def wants_sharing(*, configured: bool) -> bool:
    return configured and os.environ.get(SWITCH) != "0"


def this_host() -> str:
    """Return a name for this boot and this process's namespaces. Raises OSError where the platform lacks these."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return "/".join([boot, *(str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("pid", "net"))])


def _send(pair: GlooPair, body: bytes, timeout_s: float) -> None:
    out = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
    view = out.numpy().data
    seal_frame(view, encode_frame(Frame(FrameKind.HELLO, body=body), view))
    pair.send_frame(out, timeout_s)


def _receive(pair: GlooPair, limits: Limits, timeout: timedelta) -> bytes:
    buffer = pair.next_frame(timeout)
    body = decode_frame(buffer.numpy().data, limits).body
    pair.reuse_buffer(buffer)
    return body


# Challenge-response before a channel exists, and the key with which both ends prove themselves again inside it.
#
#     client                         store                          server
#       |- push ask(id, name, nonce_c) ->|                              |
#       |                                |<- pop --- one thread each ---|
#       |<------------------------- offer = nonce_s --------------------|
#       |- answer = nonce_s ------------>|------------------------------> it is the one, only then the pair is built
#
# All of it is sealed (`asyncflow.sealed_store`): a stranger can neither ask nor answer, and a recorded exchange is
# useless in another one, since both ends chose a nonce. From both nonces the two derive the pair's key, which never
# leaves the processes. The first frames inside the pair prove it, which exposes a process that hijacked the socket. The
# secret is never written to the store, to argv or to a log. Keys are deleted after use.

_NONCE_BYTES = 16
_MEETING_S = 60.0
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.1


class ChannelAsk(msgspec.Struct):
    """A client's request for a channel."""

    channel_id: str
    client: str
    nonce: bytes


@dataclass(frozen=True)
class Credentials:
    """What a process needs to open and accept channels."""

    store: dist.TCPStore  # the job store; cloned for every blocking use
    secret: bytes  # the job's secret
    timeout_s: float = 60.0  # deadline of one handshake
    _idle: list[SealedStore] = field(default_factory=list, init=False, repr=False, compare=False)

    def own_store(self, timeout_s: float | None = None) -> SealedStore:
        """Return a separate store client, since a blocked wait stalls other calls on the same client.

        Raises TransportError if the job store cannot be reached.
        """
        return SealedStore(self.group_store(timeout_s), self.secret)

    def group_store(self, timeout_s: float | None = None) -> dist.TCPStore:
        """Return a separate store client for a torch process group, whose keys are not sealed.

        Raises TransportError if the job store cannot be reached.
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
        """How long two ends that proved themselves may take to meet (s); both are running, so less than for a start."""
        return min(self.timeout_s, _MEETING_S)

    @contextmanager
    def borrowed_store(self) -> Iterator[SealedStore]:
        """Lend a store client to one borrower at a time; raises TransportError if the job store is gone."""
        # Reuse clients: a new one costs a reverse DNS lookup in PyTorch, which takes seconds if the resolver does not
        # answer.
        try:
            store = self._idle.pop()
        except IndexError:
            store = self.own_store()
        yield store
        self._idle.append(store)  # not after an error: an answer may be half read

    def call_store(self, method: str, *arguments: Any) -> Any:
        """Call a method of a borrowed store client. Raises TransportError if the job store is gone."""
        try:
            with self.borrowed_store() as store:
                return getattr(store, method)(*arguments)
        except dist.DistError as error:
            raise TransportError("the job store is gone, and so is the launcher") from error


def ask_key(service: str) -> str:
    """Return the queue in which clients ask `service` for a channel."""
    return f"channel/{service}/ask"


def pair_store(store: SealedStore, service: str, key: bytes) -> SealedStore:
    """Return where the two ends of the pair with this key meet."""
    return store.with_prefix(f"channel/{service}/pair/{Mac(key, 'name').compute_proof().hex()}")


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
        store: used by this thread alone.
        timeout_s: for the service to answer.
        stop: once set, the wait for an answer ends.

    Raises:
        DeadlineExceeded: no answer in time.
        PeerRefused: the server takes no more clients.
        TransportError: `stop` was set, or another process answered.
    """
    ask = ChannelAsk(secrets.token_hex(8), client, secrets.token_bytes(_NONCE_BYTES))
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
            f"{client}: the process that answered for {service} does not know the job's secret ({error})"
        ) from error
    nonce, refusal = offer[:_NONCE_BYTES], offer[_NONCE_BYTES:].decode()
    if refusal:
        store.delete_key(f"{base}/offer")
        raise PeerRefused(f"{client}: {refusal}")
    try:
        store.set(f"{base}/answer", nonce)
    except dist.DistError as error:
        raise TransportError(f"{client}: the job store is gone, and so is the launcher") from error
    return pair_key(secret, service, ask, nonce)


def accept_channel(store: SealedStore, secret: bytes, service: str, ask: ChannelAsk) -> bytes:
    """Run the server's side for one ask; returns the pair's key once the client has answered.

    Raises TransportError if the client vanished or does not know the secret; other clients are not affected.
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


def refuse_channel(store: SealedStore, service: str, ask: ChannelAsk, reason: str) -> None:
    """Tell a client at once that it gets no channel; the client deletes the key."""
    offer = secrets.token_bytes(_NONCE_BYTES) + reason.encode()
    store.set(f"channel/{service}/{ask.channel_id}/offer", offer)


def pair_key(secret: bytes, service: str, ask: ChannelAsk, server_nonce: bytes) -> bytes:
    """Return a key that only the two ends of this exchange can know."""
    who = (service.encode(), ask.channel_id.encode(), ask.client.encode())
    return Mac(secret, "channel").compute_proof(*who, ask.nonce, server_nonce)


def key_appears(store: SealedStore, key: str, timeout_s: float, stop: threading.Event) -> bool:
    """Wait for a key; False: not in time, or `stop` was set."""
    # Polls, since the store's own wait cannot be woken and prints a warning when it times out.
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_LOOK_S
    while not store.check([key]):
        if time.monotonic() > deadline or stop.wait(pause_s):
            return False
        pause_s = min(2 * pause_s, _LAST_LOOK_S)
    return True
