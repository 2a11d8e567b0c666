"""Checks of this host: disk, shared memory, limits, memory and clock.

Disk: is there room for checkpoints in the run directory, and can it do what they rely on (write, fsync, rename, lock,
be shared between nodes)? Shared memory: can a process map what another one made, as queue and weights do?

AsyncFlow's shared memory is anonymous (memfd), opened through `/proc/PID/fd`. It is not in /dev/shm and not bounded by
its size, but by the host's memory and the control group: see the check `memory`. /dev/shm is used by NCCL and engines.
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
from launcher.doctor.findings import Finding, Needs, reason

if TYPE_CHECKING:
    from asyncflow.transport.frame import Arena
import ctypes
import threading

DISK, SHARED_MEMORY = "disk", "shared memory"
_PROBE_BYTES = 2**16
_SLOW_S = 1.0
_ROOM_BYTES = 10**9
_FEWEST_INODES = 1000
# Whether nodes usually share a kind of file system; kinds in neither set are unknown.
_SHARED = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "orangefs", "pvfs2", "wekafs"}
    | {"afs", "ocfs2", "gfs2", "panfs", "quobyte", "daos", "juicefs", "dpc"}
)
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "squashfs"})
_VOLATILE = {"tmpfs": "memory", "ramfs": "memory", "overlay": "the container's own layer", "squashfs": "an image"}
_SHM = Path("/dev/shm")
_DEVICE_SHM_BYTES = 2**30


class Mount(NamedTuple):
    """One line of /proc/self/mounts."""

    point: str
    kind: str
    options: str


@dataclass(frozen=True)
class FileSystem:
    """The file system of a path. `kind` is the kernel's name without `fuse.`, e.g. `ext4`, `nfs4`, `lustre`."""

    kind: str
    mount_point: str
    read_only: bool = False

    @property
    def shared(self) -> bool | None:
        """Whether nodes usually share this kind; None: unknown."""
        return True if self.kind in _SHARED else False if self.kind in _LOCAL else None

    @property
    def volatile(self) -> str:
        """What holds its files, if they do not survive a reboot or the container; otherwise empty."""
        return _VOLATILE.get(self.kind, "")


@dataclass(frozen=True)
class DiskFacts:
    """The disk under the run directory.

    Attributes:
        place: the run directory or its nearest parent that exists.
        free_bytes: free for this user.
        free_inodes: -1: the file system does not count them.
        errors: what failed there (`write`, `fsync`, `rename`, `lock`) -> why.
        fsync_s: seconds until `_PROBE_BYTES` were durable.
    """

    place: str
    file_system: FileSystem
    free_bytes: int
    free_inodes: int = -1
    errors: dict[str, str] = field(default_factory=dict)
    fsync_s: float = 0.0


@dataclass(frozen=True)
class SharingFacts:
    """What could be tried and read about shared memory.

    Attributes:
        own_error: why this process could not make a channel's memory; empty: it could.
        peer_error: why another process could not map it; empty: it could.
        hides_processes: the option `hidepid` of /proc; empty: all processes are visible.
        arena_bytes: address space that each end of a channel reserves.
        wanted: the environment does not turn shared memory off.
        address_limit, file_limit: `ulimit -v` and `-f` (bytes); -1: none.
        shm_free, shm_total: of /dev/shm (bytes); 0: it does not exist.
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
    """Inspect the run directory's place, and try what checkpoints do in a temporary directory there."""
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
    """Return the nearest directory to an absolute path that exists and is accessible."""
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
        text = f"{kind} keeps files in {facts.file_system.volatile}: checkpoints are lost with it"
        findings.append(Finding.warning(DISK, text, "--run-dir DIR on a disk or a mounted volume"))
    wanted = needs.num_checkpoints * needs.checkpoint_bytes
    known = f"; checkpoints take up to {size_text(wanted)}" if wanted else ""
    return findings or [Finding.ok(DISK, f"{kind}: {size_text(facts.free_bytes)} free{known}")]


def try_sharing(needs: Needs) -> SharingFacts:
    """Make a channel's memory, and have another process map it as channels do."""
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
    # Limits do not matter where shared memory does not work at all.
    findings = [*(_judge_memfd(facts) or _judge_limits(facts, needs)), *_judge_shm(facts, needs)]
    if needs.shared_memory and not facts.wanted:
        text = "ASYNCFLOW_SHARED_MEMORY=0: payloads of the queue go over sockets"
        findings.append(Finding.warning(SHARED_MEMORY, text, "unset ASYNCFLOW_SHARED_MEMORY, unless you mean it"))
    if not findings:
        free = f"/dev/shm has {size_text(facts.shm_free)} free"
        shm = free if facts.shm_total else "/dev/shm is missing (not needed on CPU)"
        findings.append(Finding.ok(SHARED_MEMORY, f"another process mapped memory of this one; {shm}"))
    return findings


def read_mounts() -> list[Mount]:
    """Return the mounts that this process sees; later ones lie on top of earlier ones."""
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
    """Return the option `hidepid` of /proc; empty: every process is visible."""
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
        text = f"{kind}: {_PROBE_BYTES // 1024} kB took {facts.fsync_s:.1f} s to become durable"
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
        text = f"{free}; {needs.num_checkpoints} checkpoints of {one} may exist at a time"
        return [Finding.error(DISK, text, "make room, lower checkpoint.keep_last, or choose another --run-dir")]
    if facts.free_bytes < wanted + _ROOM_BYTES:
        text = f"{free}, hardly more than the {size_text(wanted)} of checkpoints"
        return [Finding.warning(DISK, text, "make room: du -xh -d1 | sort -h | tail; or choose another --run-dir")]
    if 0 <= facts.free_inodes < _FEWEST_INODES:
        text = f"{facts.place} has room for only {facts.free_inodes} more files"
        return [Finding.error(DISK, text, "remove small files: df -i; or choose another --run-dir")]
    return []


def _try(place: Path) -> tuple[dict[str, str], float]:
    """Do what a checkpoint does, in a new directory. Return (errors by ability, seconds of the fsync)."""
    errors: dict[str, str] = {}
    fsync_s = 0.0
    try:
        with tempfile.TemporaryDirectory(prefix=".asyncflow-doctor-", dir=place, ignore_cleanup_errors=True) as name:
            root = Path(name)
            # A checkpoint is written under a temporary name, synced, and renamed when it is whole.
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
    # A process maps an arena of its own and the peer's for each channel.
    addresses = 2 * facts.arena_bytes * max(1, needs.channels)
    if 0 <= facts.address_limit < addresses:
        text = (
            f"addresses are limited to {size_text(facts.address_limit)}; channels reserve up to {size_text(addresses)} "
            f"in a process (addresses, not memory)"
        )
        findings.append(Finding.warning(SHARED_MEMORY, text, "ulimit -v unlimited"))
    largest = max(facts.arena_bytes, needs.checkpoint_bytes)
    if 0 <= facts.file_limit < largest:
        text = (
            f"a file or shared memory is limited to {size_text(facts.file_limit)}; the largest has {size_text(largest)}"
        )
        findings.append(Finding.warning(SHARED_MEMORY, text, "ulimit -f unlimited"))
    return findings


def _judge_shm(facts: SharingFacts, needs: Needs) -> list[Finding]:
    # Only NCCL and engines use /dev/shm, so it does not matter on CPU.
    if needs.device == "cpu" or facts.shm_free >= _DEVICE_SHM_BYTES:
        return []
    text = f"/dev/shm has {size_text(facts.shm_free)} free; devices' libraries may want {size_text(_DEVICE_SHM_BYTES)}"
    return [Finding.warning(SHARED_MEMORY, text, "docker run --shm-size=16g; or mount -o remount,size=16G /dev/shm")]


def _peer_error(arena: "Arena") -> str:
    """Have a forked process map the arena through /proc. Return its error; empty: it succeeded."""
    from asyncflow.transport.frame import PeerArena

    owner = os.getpid()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "it died"
        try:
            os.close(arena.offer.fd)  # the child must open it through /proc, not use the inherited descriptor
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


# This host's limits on open files, processes and memory compared with what the run takes, and its clock.

OPEN_FILES, PROCESSES, MEMORY, CLOCK = "open files", "processes", "memory", "clock"
_USUAL_DESCRIPTORS = 1024
_ROOM = 2**16
"""Limit of open files that remedies suggest: more than any run needs."""
_UNLIMITED = 2**60
"""Control groups of version 1 report a number near 2**63 if nothing is limited."""
_LEAST_BYTES = 2 * 10**9
"""The least that any run takes, with the smallest model."""
_TIGHT = 1.25
_WATCHED_S = 0.2
_LARGEST_DRIFT_S = 0.05
_OLDEST = 1_735_689_600.0  # 2025-01-01
_TIME_ERROR = 5
_MICRO = 1e-6


@dataclass(frozen=True)
class Allowance:
    """A limit of one control group (container, Slurm job, systemd unit), in bytes or threads."""

    limit: int
    used: int

    @property
    def free(self) -> int:
        """The rest, never below 0."""
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class LimitFacts:
    """Limits of this process and its surroundings; -1: unlimited.

    Attributes:
        files, files_hard: descriptors per process (`ulimit -n`).
        files_left: descriptors that the whole system may still open.
        threads: threads per user (`ulimit -u`); -1 for root, whom the kernel does not limit.
        threads_used: threads of this user now.
        allowance: threads of the control group; None: unlimited.
        threads_left: threads that the whole system may still start (`kernel.threads-max`).
    """

    files: int
    files_hard: int
    files_left: int
    threads: int
    threads_used: int
    allowance: Allowance | None
    threads_left: int


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes of the machine, and of the control group if it has a limit."""

    total: int
    available: int
    allowance: Allowance | None


@dataclass(frozen=True)
class ClockFacts:
    """Readings of the clocks.

    Attributes:
        now: unix time (s).
        drift_s: wall clock minus monotonic clock over the time that they were watched.
        synchronised: what the kernel says; None: it does not tell.
        error_s: the kernel's bound on the error; 0: unknown.
    """

    now: float
    drift_s: float
    synchronised: bool | None
    error_s: float = 0.0


def read_limits(needs: Needs) -> LimitFacts:
    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allocated, _, most = (int(number) for number in Path("/proc/sys/fs/file-nr").read_text().split())
    threads = resource.getrlimit(resource.RLIMIT_NPROC)[0] if os.geteuid() else -1
    own, everybody = _count_threads()
    threads_max = int(Path("/proc/sys/kernel/threads-max").read_text())
    return LimitFacts(files, files_hard, most - allocated, threads, own, process_allowance(), threads_max - everybody)


def judge_open_files(facts: LimitFacts, needs: Needs) -> list[Finding]:
    """Compare the limits on descriptors with `launcher.doctor.estimate.descriptors`."""
    wanted = needs.descriptors or _USUAL_DESCRIPTORS
    total = needs.processes * needs.descriptors
    room = max(_ROOM, 2 * wanted)
    if 0 <= facts.files_hard < wanted:
        text = f"a process may open {facts.files_hard} files and nobody may raise that; the run opens up to {wanted}"
        remedy = f"'* hard nofile {room}' in /etc/security/limits.conf; docker run --ulimit nofile={room}"
        return [Finding.error(OPEN_FILES, text, remedy)]
    if 0 <= facts.files < wanted:
        text = f"a process may open {facts.files} files; the run opens up to {wanted}"
        most = room if facts.files_hard < 0 else min(room, facts.files_hard)
        return [Finding.error(OPEN_FILES, text, f"ulimit -n {most} before the start, in the same shell")]
    if facts.files_left < total:
        text = f"the system may open {facts.files_left} more files; the run opens up to {total} in all"
        return [Finding.error(OPEN_FILES, text, "sysctl -w fs.file-max=9223372036854775807")]
    limit = "any number" if facts.files < 0 else facts.files
    known = f", the run opens up to {needs.descriptors}" if needs.descriptors else ""
    return [Finding.ok(OPEN_FILES, f"a process may open {limit}{known}")]


def judge_processes(facts: LimitFacts, needs: Needs) -> list[Finding]:
    """Compare the limits on threads, which the kernel counts as processes."""
    rooms = [(facts.threads_left, "the system", "sysctl -w kernel.threads-max=4194304 kernel.pid_max=4194304")]
    if facts.allowance is not None:
        remedy = "docker run --pids-limit=-1; systemd: TasksMax=infinity"
        rooms.append((facts.allowance.free, "the control group", remedy))
    if facts.threads >= 0:
        own = f"the limit of {facts.threads} threads per user"
        remedy = "ulimit -u unlimited; or nproc in /etc/security/limits.conf"
        rooms.append((facts.threads - facts.threads_used, own, remedy))
    left, whose, remedy = min(rooms)
    known = f"; the run starts up to {needs.threads}" if needs.threads else ""
    if left < needs.threads:
        text = f"{whose} leaves room for {max(0, left)} more threads{known}"
        # Measured runs have 0.5 to 0.65 of the estimated threads, so a limit in between may do.
        finding = Finding.error if left < needs.threads // 2 else Finding.warning
        return [finding(PROCESSES, text, remedy)]
    return [Finding.ok(PROCESSES, f"{left} more threads may start{known}")]


def read_memory(needs: Needs) -> MemoryFacts:
    import psutil

    memory = psutil.virtual_memory()
    return MemoryFacts(memory.total, memory.available, memory_allowance())


def judge_memory(facts: MemoryFacts, needs: Needs) -> list[Finding]:
    """Compare free memory with the least that the run takes; shared memory counts as memory."""
    allowance = facts.allowance
    total = facts.total if allowance is None else min(facts.total, allowance.limit)
    free = facts.available if allowance is None else min(facts.available, allowance.free)
    wanted = needs.memory_bytes or _LEAST_BYTES
    parts = f" ({needs.memory_parts})" if needs.memory_parts else ""
    room = f"{size_text(free)} of {size_text(total)} free"
    takes = f"; the run takes {size_text(wanted)} or more{parts}"
    bounded = allowance is not None and allowance.limit < facts.total
    if total < wanted:
        remedy = "launch fewer ranks (--roles), or a smaller model"
        if bounded:
            remedy = "sbatch --mem=0, docker run without --memory; or launch fewer ranks (--roles)"
        return [Finding.error(MEMORY, room + takes, remedy)]
    if free < _TIGHT * wanted:
        remedy = "ps aux --sort=-rss | head shows who has the rest; or launch fewer ranks"
        return [Finding.warning(MEMORY, f"{room}{takes}, without activations and caches", remedy)]
    where = " in this control group" if bounded else ""
    return [Finding.ok(MEMORY, f"{room}{where}{takes if needs.memory_bytes else ''}")]


def watch_clock(needs: Needs) -> ClockFacts:
    """Watch wall and monotonic clock for a moment, and ask the kernel, as timedatectl does."""
    wall, monotonic = time.time(), time.monotonic()
    threading.Event().wait(_WATCHED_S)
    drift = (time.time() - wall) - (time.monotonic() - monotonic)
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    synchronised = None if state < 0 else state != _TIME_ERROR
    return ClockFacts(time.time(), drift, synchronised, timex.maxerror * _MICRO if synchronised else 0.0)


def judge_clock(facts: ClockFacts, needs: Needs) -> list[Finding]:
    """Check that the wall clock is plausible, runs evenly and is kept by NTP: times in logs and of files rely on it."""
    remedy = "timedatectl set-ntp true; or systemctl enable --now chronyd"
    findings = []
    if facts.now < _OLDEST:
        day = time.strftime("%Y-%m-%d", time.gmtime(facts.now))
        findings.append(Finding.error(CLOCK, f"the clock says {day}", remedy))
    if abs(facts.drift_s) > _LARGEST_DRIFT_S:
        text = f"the wall clock jumped by {facts.drift_s:+.2f} s while it was watched for {_WATCHED_S} s"
        findings.append(Finding.warning(CLOCK, text, f"see who sets it: journalctl -u chronyd; {remedy}"))
    if facts.synchronised is False and needs.num_nodes > 1:
        text = "the clock is not synchronised by NTP, so times in logs and of files may differ between nodes"
        findings.append(Finding.warning(CLOCK, text, remedy))
    kept = {True: f"kept by NTP, error up to {facts.error_s:.3f} s", False: "not kept by NTP", None: "NTP unknown"}
    extra = " (several nodes would need it)" if facts.synchronised is False else ""
    return findings or [Finding.ok(CLOCK, f"runs evenly, {kept[facts.synchronised]}{extra}")]


def memory_allowance(
    *, cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Allowance | None:
    """Return the tightest memory limit, not counting page cache that would be freed; None: unlimited."""
    found = []
    for group in _groups("memory", cgroup, root):
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
        if limit is not None and limit < _UNLIMITED:
            found.append(Allowance(limit, max(0, used - _inactive_cache(group / "memory.stat"))))
    return min(found, key=lambda allowance: allowance.free, default=None)


def process_allowance(
    *, cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Allowance | None:
    """Return the tightest limit on processes, which counts threads; None: unlimited."""
    found = []
    for group in _groups("pids", cgroup, root):
        limit = _number(group / "pids.max")
        if limit is not None:
            found.append(Allowance(limit, _number(group / "pids.current") or 0))
    return min(found, key=lambda allowance: allowance.free, default=None)


class _Timex(ctypes.Structure):
    """The first fields of `struct timex` (adjtimex(2)), with room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("rest", ctypes.c_byte * 256),
    )


def _count_threads() -> tuple[int, int]:
    """Return the number of threads of this user, and of all visible processes."""
    import psutil

    own = everybody = 0
    for process in psutil.process_iter(["num_threads", "uids"]):
        threads = process.info["num_threads"] or 0  # None: not permitted to look
        everybody += threads
        own += threads if process.info["uids"] and process.info["uids"].real == os.getuid() else 0
    return own, everybody


def _groups(controller: str, cgroup: Path, root: Path) -> list[Path]:
    """Return the directories of this process's control group and its parents, in the layout of version 1 or 2."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        # Version 2 has one line, `0::PATH`; version 1 has lines `N:CONTROLLERS:PATH`, each under its own mount.
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        own = top / path.lstrip("/")
        groups += [group for group in (own, *own.parents) if group.is_relative_to(top)]
    return groups


def _number(file: Path) -> int | None:
    """Return the number in a file; None: there is no number, or it says `max`."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_cache(file: Path) -> int:
    try:
        fields = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
    except OSError:
        return 0
    # Version 1 counts child groups in `total_...` only; version 2 has just the short name, which includes them.
    return int(fields.get("total_inactive_file") or fields.get("inactive_file") or 0)
