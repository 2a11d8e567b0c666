"""Disk: the run directory's place, with room for checkpoints and what they rest on (write, fsync, rename, lock, a file
system that nodes share). Shared memory: can one process map what another one made, as queue and weights do?

Our shared memory is anonymous (memfd), opened through `/proc/PID/fd`. It is not in /dev/shm and not bounded by its
size, but by the host's memory and the control group: see the check `memory`. What is in /dev/shm is NCCL's and the
engines'.
"""

import contextlib
import fcntl
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncflow.errors import TransportError, size_text
from asyncflow.json_lines import sync
from launcher.doctor.messages import Finding, Needs, reason

if TYPE_CHECKING:
    from asyncflow.transport.frame import Arena

DISK, SHARED_MEMORY = "disk", "shared memory"
_PROBE_BYTES = 2**16
_SLOW_S = 1.0
_ROOM_BYTES = 10**9
_FEWEST_INODES = 1000
_SHARED = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "orangefs", "pvfs2", "wekafs"}
    | {"afs", "ocfs2", "gfs2", "panfs", "quobyte", "daos", "juicefs", "dpc"}
)
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "squashfs"})
_VOLATILE = {"tmpfs": "memory", "ramfs": "memory", "overlay": "the container's own layer", "squashfs": "an image"}
_SHM = Path("/dev/shm")
_DEVICE_SHM_BYTES = 2**30


class Mount(NamedTuple):
    """One line of /proc/self/mounts: where, which kind of file system, its options."""

    point: str
    kind: str
    options: str


@dataclass(frozen=True)
class FileSystem:
    """Where a path lies.

    Attributes:
        kind: as the kernel names it, without `fuse.`, e.g. `ext4`, `nfs4`, `lustre`.
        mount_point: of it.
        read_only: it is mounted so.
    """

    kind: str
    mount_point: str
    read_only: bool = False

    @property
    def shared(self) -> bool | None:
        """Whether several nodes mount this kind; None: not known."""
        return True if self.kind in _SHARED else False if self.kind in _LOCAL else None

    @property
    def volatile(self) -> str:
        """What its files are in, if they do not survive a reboot or the container; else nothing."""
        return _VOLATILE.get(self.kind, "")


@dataclass(frozen=True)
class DiskFacts:
    """What the place is like.

    Attributes:
        place: the nearest directory to the run directory that exists.
        file_system: of it.
        free_bytes: for this user.
        free_inodes: -1: the file system does not count them.
        errors: what could not be done there -> why; of `write`, `fsync`, `rename`, `lock`.
        fsync_s: how long `_PROBE_BYTES` took to be safe (s).
    """

    place: str
    file_system: FileSystem
    free_bytes: int
    free_inodes: int = -1
    errors: dict[str, str] = field(default_factory=dict)
    fsync_s: float = 0.0


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


def try_disk(needs: Needs) -> DiskFacts:
    """Look at the place and try it in a directory that is removed again."""
    place = nearest(Path(needs.run_dir))
    file_system = file_system_of(place.resolve(), read_mounts())
    numbers = os.statvfs(place)
    errors, fsync_s = _try(place)
    return DiskFacts(
        str(place),
        file_system,
        numbers.f_bavail * numbers.f_frsize,
        numbers.f_favail if numbers.f_files else -1,
        errors,
        fsync_s,
    )


def nearest(run_dir: Path) -> Path:
    """Return the nearest directory to an absolute path that exists and may be looked at."""
    for path in (run_dir, *run_dir.parents):
        with contextlib.suppress(PermissionError):
            if path.is_dir():
                return path
    return Path("/")


def judge_disk(facts: DiskFacts, needs: Needs) -> list[Finding]:
    """Compare room and abilities with what checkpoints need."""
    elsewhere = "choose another place with --run-dir"
    kind = f"{facts.place} ({facts.file_system.kind})"
    if "write" in facts.errors:
        text = f"{kind} cannot be written: {facts.errors['write']}"
        remedy = f"mount -o remount,rw {facts.file_system.mount_point}" if facts.file_system.read_only else elsewhere
        return [Finding.error(DISK, text, f"{remedy}; or {elsewhere}" if remedy != elsewhere else remedy)]
    findings = [*_judge_abilities(facts, kind), *_judge_room(facts, needs)]
    if needs.num_nodes > 1:
        findings += _judge_nodes(facts, kind, needs.num_nodes)
    if facts.file_system.volatile:
        text = f"{kind} keeps files in {facts.file_system.volatile}: checkpoints go with it"
        findings.append(Finding.warning(DISK, text, "--run-dir DIR on a disk or a mounted volume"))
    wanted = needs.num_checkpoints * needs.checkpoint_bytes
    known = f"; checkpoints take up to {size_text(wanted)}" if wanted else ""
    return findings or [Finding.ok(DISK, f"{kind}: {size_text(facts.free_bytes)} free{known}")]


def try_sharing(needs: Needs) -> SharingFacts:
    """Make a channel's memory and have another process map it, as channels do."""
    from asyncflow.transport.frame import Arena, Limits
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
        hidepid(read_mounts()),
        arena_bytes,
        wants_sharing(configured=True),
        resource.getrlimit(resource.RLIMIT_AS)[0],
        resource.getrlimit(resource.RLIMIT_FSIZE)[0],
        shm.f_bavail * shm.f_frsize if shm else 0,
        shm.f_blocks * shm.f_frsize if shm else 0,
    )


def judge_sharing(facts: SharingFacts, needs: Needs) -> list[Finding]:
    """Say what keeps processes from sharing memory."""
    findings = [*(_judge_memfd(facts) or _judge_limits(facts, needs)), *_judge_shm(facts, needs)]
    if needs.shared_memory and not facts.wanted:
        text = "ASYNCFLOW_SHARED_MEMORY=0: payloads of the queue go over sockets"
        findings.append(Finding.warning(SHARED_MEMORY, text, "unset ASYNCFLOW_SHARED_MEMORY, unless you mean it"))
    if not findings:
        free = f"/dev/shm has {size_text(facts.shm_free)} free"
        shm = free if facts.shm_total else "no /dev/shm, which the CPU needs not"
        findings.append(Finding.ok(SHARED_MEMORY, f"another process mapped memory of this one; {shm}"))
    return findings


def read_mounts() -> list[Mount]:
    """Return what is mounted for this process, later ones over earlier ones."""
    import psutil

    return [Mount(each.mountpoint, each.fstype, each.opts) for each in psutil.disk_partitions(all=True)]


def file_system_of(path: Path, mounts: Iterable[Mount]) -> FileSystem:
    """Return the file system of an absolute path without links.

    The last mount among those with the longest mount point is on top of the others.
    """
    best = FileSystem("unknown", "/")
    for mount in mounts:
        if path.is_relative_to(mount.point) and len(mount.point) >= len(best.mount_point):
            read_only = "ro" in mount.options.split(",")
            best = FileSystem(mount.kind.removeprefix("fuse."), mount.point, read_only=read_only)
    return best


def hidepid(mounts: Iterable[Mount]) -> str:
    """Return the option `hidepid` of /proc; empty: every process is seen."""
    options = [mount.options.split(",") for mount in mounts if (mount.point, mount.kind) == ("/proc", "proc")]
    hiding = [option for option in (options[-1] if options else ()) if option.startswith("hidepid=")]
    return next((option for option in hiding if option not in ("hidepid=0", "hidepid=off")), "")


def _judge_abilities(facts: DiskFacts, kind: str) -> list[Finding]:
    findings = []
    for ability in ("fsync", "rename"):
        if ability in facts.errors:
            text = f"{kind} cannot {ability} ({facts.errors[ability]}), which keeps checkpoints whole"
            findings.append(Finding.error(DISK, text, "choose another place with --run-dir"))
    if "lock" in facts.errors:
        text = f"{kind} has no locks ({facts.errors['lock']}): nothing keeps a second launcher out of a run"
        findings.append(Finding.warning(DISK, text, "mount it with locks (NFS: not nolock; Lustre: -o flock)"))
    if facts.fsync_s > _SLOW_S:
        text = f"{kind}: {_PROBE_BYTES // 1024} kB took {facts.fsync_s:.1f} s to be safe"
        findings.append(Finding.warning(DISK, text, "who else writes there: iostat -x 1; or another --run-dir"))
    return findings


def _judge_nodes(facts: DiskFacts, kind: str, num_nodes: int) -> list[Finding]:
    remedy = "--run-dir DIR on NFS, Lustre or the like"
    if facts.file_system.shared is False:
        text = f"{kind} is this node's own, and all {num_nodes} nodes write checkpoints there"
        return [Finding.error(DISK, text, remedy)]
    if facts.file_system.shared is None:
        text = f"{kind}: is it the same on all {num_nodes} nodes? They write checkpoints there"
        return [Finding.warning(DISK, text, f"touch a file there, look for it on another node; else {remedy}")]
    return []


def _judge_room(facts: DiskFacts, needs: Needs) -> list[Finding]:
    wanted = needs.num_checkpoints * needs.checkpoint_bytes
    free, one = f"{facts.place} has {size_text(facts.free_bytes)} free", size_text(needs.checkpoint_bytes)
    if facts.free_bytes < wanted:
        text = f"{free}; {needs.num_checkpoints} checkpoints of {one} may be there at a time"
        return [Finding.error(DISK, text, "make room, lower checkpoint.keep_last, or choose another --run-dir")]
    if facts.free_bytes < wanted + _ROOM_BYTES:
        text = f"{free}, hardly more than the {size_text(wanted)} of checkpoints"
        return [Finding.warning(DISK, text, "make room: du -xh -d1 | sort -h | tail; or choose another --run-dir")]
    if 0 <= facts.free_inodes < _FEWEST_INODES:
        text = f"{facts.place} may hold {facts.free_inodes} more files only"
        return [Finding.error(DISK, text, "remove small files: df -i; or choose another --run-dir")]
    return []


def _try(place: Path) -> tuple[dict[str, str], float]:
    """Do in a new directory of `place` what a checkpoint does; returns (errors by ability, seconds of the fsync)."""
    errors: dict[str, str] = {}
    fsync_s = 0.0
    try:
        with tempfile.TemporaryDirectory(prefix=".asyncflow-doctor-", dir=place, ignore_cleanup_errors=True) as name:
            root = Path(name)
            half = root / "half.tmp"
            half.mkdir()
            with (half / "data").open("wb") as file:
                file.write(os.urandom(_PROBE_BYTES))
                file.flush()
                began = time.monotonic()
                _able(errors, "fsync", lambda: os.fsync(file.fileno()))
                fsync_s = time.monotonic() - began
                _able(errors, "lock", lambda: fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB))
            _able(errors, "rename", lambda: half.rename(root / "whole"))
            _able(errors, "fsync", lambda: sync(root))
    except OSError as error:
        errors["write"] = reason(error)
    return errors, fsync_s


def _able(errors: dict[str, str], ability: str, attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except OSError as error:
        errors[ability] = reason(error)


def _judge_memfd(facts: SharingFacts) -> list[Finding]:
    if facts.own_error:
        remedy = "ulimit -v unlimited; ulimit -f unlimited; in a container, a seccomp profile that allows memfd_create"
        return [Finding.error(SHARED_MEMORY, f"no shared memory can be made ({facts.own_error})", remedy)]
    if not facts.peer_error:
        return []
    remedy = "run all of it as one user in one container, with /proc mounted and no sandbox that hides /proc/PID/fd"
    if facts.hides_processes:
        remedy = f"mount -o remount,hidepid=0 /proc (now {facts.hides_processes})"
    text = f"processes cannot map each other's memory, so weights do not reach their readers ({facts.peer_error})"
    return [Finding.error(SHARED_MEMORY, text, remedy)]


def _judge_limits(facts: SharingFacts, needs: Needs) -> list[Finding]:
    findings = []
    addresses = 2 * facts.arena_bytes * max(1, needs.channels)
    if 0 <= facts.address_limit < addresses:
        text = (
            f"addresses are limited to {size_text(facts.address_limit)}; channels reserve up to {size_text(addresses)} "
            f"in a process (addresses, not memory)"
        )
        findings.append(Finding.warning(SHARED_MEMORY, text, "ulimit -v unlimited"))
    largest = max(facts.arena_bytes, needs.checkpoint_bytes)
    if 0 <= facts.file_limit < largest:
        text = f"a file, or shared memory, may have {size_text(facts.file_limit)}; the largest has {size_text(largest)}"
        findings.append(Finding.warning(SHARED_MEMORY, text, "ulimit -f unlimited"))
    return findings


def _judge_shm(facts: SharingFacts, needs: Needs) -> list[Finding]:
    if needs.device == "cpu" or facts.shm_free >= _DEVICE_SHM_BYTES:
        return []
    text = f"/dev/shm has {size_text(facts.shm_free)} free; devices' libraries may want {size_text(_DEVICE_SHM_BYTES)}"
    return [Finding.warning(SHARED_MEMORY, text, "docker run --shm-size=16g; or mount -o remount,size=16G /dev/shm")]


def _peer_error(arena: "Arena") -> str:
    """Have a forked process map the arena through /proc; returns what it could not do, or nothing."""
    from asyncflow.transport.frame import PeerArena

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
