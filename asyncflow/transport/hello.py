"""What two ends say before the first request, to find out whether they can share memory.

Same host means: same boot, same namespaces of process ids and of the network (containers with addresses of their own
are hosts of their own), and the peer's arena could really be mapped (which user ids, a sandbox or a limit on addresses
may forbid).
"""

import os
from pathlib import Path

import msgspec

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
