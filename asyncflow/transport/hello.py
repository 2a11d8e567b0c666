"""What two ends say before the first request: who they are, proved, and whether they can share memory.

Same host means: same boot, same namespaces of process ids and of the network (containers with addresses of their own
are hosts of their own), and the peer's arena could really be mapped (which user ids, a sandbox or a limit on addresses
may forbid).
"""

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import TransportError
from asyncflow.mac import MAC_BYTES, Mac
from asyncflow.transport.arena import ArenaOffer
from asyncflow.transport.pipes import PipeOffer

SWITCH = "ASYNCFLOW_SHARED_MEMORY"
"""Environment variable: `0` sends everything over the wire."""


class Hello(msgspec.Struct):
    """Who an end is.

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


class Verdict(msgspec.Struct):
    """What an end found.

    Attributes:
        obstacle: why the peer's arena cannot be read, or its pipe not be written to; empty: both can.
    """

    obstacle: str


M = TypeVar("M", bound=msgspec.Struct)


class Introductions:
    """One end's hello and verdict, each with a proof of the pair's key: who sends them took part in the handshake.

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

    def seal(self, message: Hello | Verdict) -> bytes:
        """Return what to send."""
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
