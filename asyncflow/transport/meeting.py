"""How two ends that know a pair's key become a channel: they connect, prove who they are, and agree on what to share.

    client                                server
      |-- hello ------><------------ hello -|   proved identity; each tries to open the other's arena and pipe
      |-- capability --><------ capability -|   whether it could
      PipeChannel, if both could; else GlooChannel

Same host means: same boot, same namespaces of process ids and of the network (containers with addresses of their own
are hosts of their own), and the peer's arena could really be mapped (which user ids, a sandbox or a limit on addresses
may forbid).
"""

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from asyncflow.decoding import UNREADABLE, msgpack_decoder
from asyncflow.errors import SealBroken, TransportError
from asyncflow.mac import MAC_BYTES, Mac
from asyncflow.sealed_store import GlooStore, SealedStore
from asyncflow.transport.arena import Arena, ArenaOffer, PeerArena
from asyncflow.transport.channel import Channel, GlooChannel
from asyncflow.transport.frame import (
    FRAME_BYTES,
    Frame,
    FrameKind,
    Limits,
    decode_frame,
    encode_frame,
    seal_frame,
)
from asyncflow.transport.gloo import GlooPair
from asyncflow.transport.pipe_channel import HostLink, PipeChannel, PipeOffer, Pipes

logger = logging.getLogger(__name__)

SWITCH = "ASYNCFLOW_SHARED_MEMORY"
"""Environment variable: `0` sends everything over the wire."""


class Hello(msgspec.Struct):
    """One end of a channel to be.

    Attributes:
        host: names boot and namespaces.
        pid: in that namespace.
        arena: what this end will write payloads to; None: shared memory is switched off.
        pipe: where this end reads frames; None as `arena`.
    """

    host: str
    pid: int
    arena: ArenaOffer | None
    pipe: PipeOffer | None = None


class Capability(msgspec.Struct):
    """Whether an end can share with its peer.

    Attributes:
        obstacle: why the peer's arena cannot be read, or its pipe not be written to; empty: it can share.
    """

    obstacle: str


M = TypeVar("M", bound=msgspec.Struct)


class Introductions:
    """One end's hello and capability, each with a proof of the pair's key: their sender took part in the handshake.

    The key contains a nonce of each end, so a proof recorded in an earlier exchange fails here. A proof also covers the
    sender's side and the kind of message, so a reflection fails, too: a message sent back to its own sender.
    """

    def __init__(self, key: bytes, *, is_server: bool) -> None:
        """Args:
        key: the pair's.
        is_server: which end this is.
        """
        self._own, self._peers = (
            Mac(key, side) for side in (("server", "client") if is_server else ("client", "server"))
        )

    def seal(self, message: Hello | Capability) -> bytes:
        """Return the sealed message to send."""
        body = msgspec.msgpack.encode(message)
        return self._own.of(type(message).__name__.encode(), body) + body

    def open(self, data: bytes, kind: type[M]) -> M:
        """Return what the peer sent.

        Raises:
            TransportError: it is not the peer.
        """
        body = data[MAC_BYTES:]
        if not self._peers.proves(data[:MAC_BYTES], kind.__name__.encode(), body):
            raise TransportError("it does not know the job's secret")
        return msgpack_decoder(kind).decode(body)


class Sharing:
    """What one end of a channel offers to a peer on the same host, until both know whether they can use it."""

    def __init__(self, peer: str, limits: Limits) -> None:
        """Args:
        peer: the other end's name, for messages.
        limits: whether to share, and how much.
        """
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
        self.hello = Hello(host, os.getpid(), arena, None if self._pipes is None else self._pipes.offer)

    def negotiate(self, hello: Hello) -> Capability:
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

    def conclude(self, peers: Capability) -> HostLink | None:
        """Hear what the peer could do; returns what the two share: all of it, or nothing."""
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
        store: where the pair meets; for it alone.
        key: the pair's, with which both ends prove themselves.
        is_server: takes rank 0.
        peer: the other end's name, for messages.
        limits: largest parts accepted, and whether memory is shared.
        timeout_s: deadline of the meeting (which has some seconds at least), and of the hellos.

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
        raise TransportError(f"channel to {peer}: somebody else meets it ({error})") from error
    introductions = Introductions(key, is_server=is_server)
    try:
        _send(pair, introductions.seal(sharing.hello), timeout_s)
        own = sharing.negotiate(introductions.open(_receive(pair, limits, timeout), Hello))
        _send(pair, introductions.seal(own), timeout_s)
        peers = introductions.open(_receive(pair, limits, timeout), Capability)
    except (TransportError, RuntimeError, *UNREADABLE) as error:
        pair.abort()
        reason = error if isinstance(error, (TransportError, *UNREADABLE)) else "the peer is gone"
        raise TransportError(f"channel to {peer}: no proper hello ({reason})") from error
    link = sharing.conclude(peers)
    path = "shared memory" if link is not None else f"the wire ({own.obstacle or peers.obstacle})"
    logger.info("channel to %s: payloads go through %s", peer, path)
    return GlooChannel(pair, peer, limits) if link is None else PipeChannel(pair, peer, limits, link)


def wants_sharing(*, configured: bool) -> bool:
    """Return whether this process may share memory."""
    return configured and os.environ.get(SWITCH) != "0"


def this_host() -> str:
    """Return a name for this boot of the machine and the namespaces that this process is in.

    Raises:
        OSError: the platform has no such things.
    """
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
    pair.reuse(buffer)
    return body
