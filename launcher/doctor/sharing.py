"""Shared memory: can one process of a run map what another one made, as queue and weights do; is /dev/shm large enough.

Ours is anonymous (memfd), opened through `/proc/PID/fd`. It is not in /dev/shm and not bounded by its size, but by the
host's memory and the control group: see the check `memory`. What is in /dev/shm is NCCL's and the engines'.
"""

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncflow.errors import TransportError
from asyncflow.size_text import size_text
from launcher.doctor.finding import Finding, reason
from launcher.doctor.needs import Needs

if TYPE_CHECKING:
    from asyncflow.transport.arena import Arena

CHECK = "shared memory"
_SHM = Path("/dev/shm")
_DEVICE_SHM_BYTES = 2**30


@dataclass(frozen=True)
class SharingFacts:
    """What was tried and read.

    Attributes:
        own_error: why memory for a channel could not be made here; empty: it could.
        peer_error: why another process could not map it; empty: it could.
        hides_processes: how /proc is mounted with `hidepid`; empty: it is not.
        arena_bytes: addresses that an end of a channel reserves.
        wanted: the switch in the environment is not off.
        address_limit, file_limit: `ulimit -v` and `-f` (bytes); -1: none.
        shm_free, shm_total: of /dev/shm (bytes); 0: it is not there.
    """

    own_error: str = ""
    peer_error: str = ""
    hides_processes: str = ""
    arena_bytes: int = 0
    wanted: bool = True
    address_limit: int = -1
    file_limit: int = -1
    shm_free: int = 0
    shm_total: int = 0


def check(needs: Needs) -> list[Finding]:
    """Look and judge."""
    return judge(gather(), needs)


def gather() -> SharingFacts:
    """Make a channel's memory and have another process map it, as channels do."""
    from asyncflow.transport.arena import Arena
    from asyncflow.transport.frame import Limits
    from asyncflow.transport.meeting import wants_sharing

    own_error = peer_error = ""
    arena_bytes = Limits().arena_bytes
    try:
        arena = Arena(arena_bytes)
    except (OSError, RuntimeError) as error:
        own_error = reason(error)
    else:
        peer_error = _peer_error(arena)
        arena.close()
    shm = os.statvfs(_SHM) if _SHM.is_dir() else None
    return SharingFacts(
        own_error,
        peer_error,
        hidepid(Path("/proc/self/mounts").read_text()),
        arena_bytes,
        wants_sharing(configured=True),
        resource.getrlimit(resource.RLIMIT_AS)[0],
        resource.getrlimit(resource.RLIMIT_FSIZE)[0],
        shm.f_bavail * shm.f_frsize if shm else 0,
        shm.f_blocks * shm.f_frsize if shm else 0,
    )


def judge(facts: SharingFacts, needs: Needs) -> list[Finding]:
    """Say what keeps processes from sharing memory."""
    findings = [*(_judge_memfd(facts) or _judge_limits(facts, needs)), *_judge_shm(facts, needs)]
    if needs.shared_memory and not facts.wanted:
        text = "ASYNCFLOW_SHARED_MEMORY=0: payloads of the queue go over sockets"
        findings.append(Finding.warning(CHECK, text, "unset ASYNCFLOW_SHARED_MEMORY, unless you mean it"))
    if not findings:
        shm = (
            f"/dev/shm has {size_text(facts.shm_free)} free"
            if facts.shm_total
            else "no /dev/shm, which the CPU needs not"
        )
        findings.append(Finding.ok(CHECK, f"another process mapped memory of this one; {shm}"))
    return findings


def hidepid(mounts: str) -> str:
    """Return the option `hidepid` of /proc in the text of /proc/self/mounts; empty: every process is seen."""
    options = [line.split()[3].split(",") for line in mounts.splitlines() if line.split()[1:3] == ["/proc", "proc"]]
    hiding = [option for each in options[-1:] for option in each if option.startswith("hidepid=")]
    return next((option for option in hiding if option not in ("hidepid=0", "hidepid=off")), "")


def _judge_memfd(facts: SharingFacts) -> list[Finding]:
    if facts.own_error:
        remedy = "ulimit -v unlimited; ulimit -f unlimited; in a container, a seccomp profile that allows memfd_create"
        return [Finding.error(CHECK, f"no shared memory can be made ({facts.own_error})", remedy)]
    if not facts.peer_error:
        return []
    remedy = "run all of it as one user in one container, with /proc mounted and no sandbox that hides /proc/PID/fd"
    if facts.hides_processes:
        remedy = f"mount -o remount,hidepid=0 /proc (now {facts.hides_processes})"
    text = f"processes cannot map each other's memory, so weights do not reach their readers ({facts.peer_error})"
    return [Finding.error(CHECK, text, remedy)]


def _judge_limits(facts: SharingFacts, needs: Needs) -> list[Finding]:
    findings = []
    addresses = 2 * facts.arena_bytes * max(1, needs.channels)
    if 0 <= facts.address_limit < addresses:
        text = (
            f"addresses are limited to {size_text(facts.address_limit)}; channels reserve up to {size_text(addresses)} "
            f"in a process (addresses, not memory)"
        )
        findings.append(Finding.warning(CHECK, text, "ulimit -v unlimited"))
    largest = max(facts.arena_bytes, needs.checkpoint_bytes)
    if 0 <= facts.file_limit < largest:
        text = f"a file, or shared memory, may have {size_text(facts.file_limit)}; the largest has {size_text(largest)}"
        findings.append(Finding.warning(CHECK, text, "ulimit -f unlimited"))
    return findings


def _judge_shm(facts: SharingFacts, needs: Needs) -> list[Finding]:
    if needs.device == "cpu" or facts.shm_free >= _DEVICE_SHM_BYTES:
        return []
    text = f"/dev/shm has {size_text(facts.shm_free)} free; devices' libraries may want {size_text(_DEVICE_SHM_BYTES)}"
    return [Finding.warning(CHECK, text, "docker run --shm-size=16g; or mount -o remount,size=16G /dev/shm")]


def _peer_error(arena: "Arena") -> str:
    """Have a forked process map the arena through /proc; returns what it could not do, or nothing."""
    from asyncflow.transport.arena import PeerArena

    owner = os.getpid()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "it died"
        try:
            os.close(arena.offer.fd)  # the inherited one must not help
            PeerArena(owner, arena.offer)
            answer = ""
        except TransportError as error:
            answer = str(error)
        finally:
            os.write(write, answer.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer
