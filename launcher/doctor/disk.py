"""Checks of this host: open files, processes, memory, disk and shared memory.

Disk: is there room for checkpoints in the run directory, and can it do what they rely on (write, fsync, rename, lock,
be shared between nodes)? Shared memory: can a process map what another one made, as queue and weights do?

AsyncFlow's shared memory is anonymous (memfd), opened through `/proc/PID/fd`. It is not in /dev/shm and not bounded by
its size, but by the host's memory and the control group: see the check `memory`. /dev/shm is used by NCCL and engines.
"""

import contextlib
import fcntl
import math
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncflow.errors import TransportError
from launcher.doctor.findings import Facts, MachineCheck, Needs, Size, error, fatal, reason, warning

if TYPE_CHECKING:
    from asyncflow.transport.frame import Arena

_USUAL_DESCRIPTORS = 1024
_ROOM = 2**16
"""Limit of open files that remedies suggest: more than any run needs."""
_UNLIMITED = 2**60
"""Control groups of version 1 report a number near 2**63 if nothing is limited."""
_LEAST_BYTES = 2 * 10**9
"""The least that any run takes, with the smallest model."""
_TIGHT = 1.25
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
_DEVICE_SHM_BYTES = Size(2**30)


class Allowance(NamedTuple):
    """A limit of one control group (container, Slurm job, systemd unit), in bytes or threads."""

    limit: int
    used: int

    @property
    def free(self) -> int:
        """The rest, never below 0."""
        return max(0, self.limit - self.used)


def look_at_open_files(needs: Needs) -> Facts:
    soft, hard = limits(resource.RLIMIT_NOFILE)
    allocated, _, most = kernel_numbers("fs/file-nr")
    wanted = needs.descriptors or _USUAL_DESCRIPTORS
    room = max(_ROOM, 2 * wanted)
    return {
        "soft": soft, "hard": hard, "wanted": wanted, "room": room, "raised": min(room, hard), "left": most - allocated,
        "total": needs.processes * needs.descriptors, "may": "any number" if soft == math.inf else soft,
        "known": f", the run opens up to {needs.descriptors}" if needs.descriptors else "",
    }  # fmt: skip


OPEN_FILES = MachineCheck(
    "open files", look_at_open_files, (
        fatal(lambda f: f.hard < f.wanted,
              "a process may open {hard} files and nobody may raise that; the run opens up to {wanted}",
              "'* hard nofile {room}' in /etc/security/limits.conf; docker run --ulimit nofile={room}"),
        fatal(lambda f: f.soft < f.wanted, "a process may open {soft} files; the run opens up to {wanted}",
              "ulimit -n {raised} before the start, in the same shell"),
        error(lambda f: f.left < f.total,
              "the system may open {left} more files; the run opens up to {total} in all",
              "sysctl -w fs.file-max=9223372036854775807"),
    ),
    "a process may open {may}{known}",
    10, "does ls /proc answer?",
)  # fmt: skip


def look_at_threads(needs: Needs) -> Facts:
    """Find the tightest of the limits on threads, which the kernel counts as processes."""
    own, everybody = count_threads()
    soft = limits(resource.RLIMIT_NPROC)[0] if os.geteuid() else math.inf  # the kernel does not limit root
    group = process_allowance()
    left, whose, advice = min(
        (kernel_numbers("kernel/threads-max")[0] - everybody, "the system",
         "sysctl -w kernel.threads-max=4194304 kernel.pid_max=4194304"),
        (math.inf if group is None else group.free, "the control group",
         "docker run --pids-limit=-1; systemd: TasksMax=infinity"),
        (soft - own, f"the limit of {soft} threads per user",
         "ulimit -u unlimited; or nproc in /etc/security/limits.conf"),
    )  # fmt: skip
    known = f"; the run starts up to {needs.threads}" if needs.threads else ""
    return {"left": left, "room": max(0, left), "whose": whose, "advice": advice, "known": known}


_FEW_THREADS = "{whose} leaves room for {room} more threads{known}"
PROCESSES = MachineCheck(
    "processes", look_at_threads, (
        # Measured runs have 0.5 to 0.65 of the estimated threads, so a limit in between may do.
        fatal(lambda f: f.left < f.threads // 2, _FEW_THREADS, "{advice}"),
        warning(lambda f: f.left < f.threads, _FEW_THREADS, "{advice}"),
    ),
    "{left} more threads may start{known}",
    10, "does ls /proc answer?",
)  # fmt: skip


def look_at_memory(needs: Needs) -> Facts:
    """Compare with the least that the run takes; shared memory counts as memory."""
    import psutil

    memory, group = psutil.virtual_memory(), memory_allowance() or Allowance(_UNLIMITED, 0)
    wanted = Size(needs.memory_bytes or _LEAST_BYTES)
    parts = f" ({needs.memory_parts})" if needs.memory_parts else ""
    takes, bounded = f"; the run takes {wanted} or more{parts}", group.limit < memory.total
    fewer = "launch fewer ranks (--roles)"
    advice = f"sbatch --mem=0, docker run without --memory; or {fewer}" if bounded else f"{fewer}, or a smaller model"
    return {
        "total": Size(min(memory.total, group.limit)), "free": Size(min(memory.available, group.free)),
        "wanted": wanted, "takes": takes, "known": takes if needs.memory_bytes else "",
        "where": " in this control group" * bounded, "advice": advice,
    }  # fmt: skip


MEMORY = MachineCheck(
    "memory", look_at_memory, (
        fatal(lambda f: f.total < f.wanted, "{free} of {total} free{takes}", "{advice}"),
        warning(lambda f: f.free < _TIGHT * f.wanted, "{free} of {total} free{takes}, without activations and caches",
                "ps aux --sort=-rss | head shows who has the rest; or launch fewer ranks"),
    ),
    "{free} of {total} free{where}{known}",
    10, "does cat /proc/meminfo answer?",
)  # fmt: skip


def limits(what: int) -> tuple[float, float]:
    """Return a soft and a hard limit of this process; infinite: unlimited."""
    soft, hard = (math.inf if limit < 0 else limit for limit in resource.getrlimit(what))
    return soft, hard


def kernel_numbers(name: str) -> list[int]:
    return [int(number) for number in Path("/proc/sys", name).read_text().split()]


def count_threads() -> tuple[int, int]:
    """Return the number of threads of this user, and of all visible processes."""
    import psutil

    own = everybody = 0
    for process in psutil.process_iter(["num_threads", "uids"]):
        threads = process.info["num_threads"] or 0  # None: not permitted to look
        everybody += threads
        own += threads if process.info["uids"] and process.info["uids"].real == os.getuid() else 0
    return own, everybody


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
    groups = [(_number(group / "pids.max"), group) for group in _groups("pids", cgroup, root)]
    found = [Allowance(limit, _number(group / "pids.current") or 0) for limit, group in groups if limit is not None]
    return min(found, key=lambda allowance: allowance.free, default=None)


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


def look_at_disk(needs: Needs) -> Facts:
    """Inspect the run directory's place, and try what checkpoints do in a temporary directory there."""
    place = nearest(Path(needs.run_dir))
    system, numbers = file_system_of(place.resolve(), read_mounts()), os.statvfs(place)
    errors, fsync_s = try_disk(place)
    wanted = Size(needs.num_checkpoints * needs.checkpoint_bytes)
    remount = f"mount -o remount,rw {system.mount_point}; or " if system.read_only else ""
    return {
        "place": place, "kind": f"{place} ({system.kind})",
        "unwritable": errors.get("write"), "lockless": errors.get("lock"),
        "unable": [{"ability": each, "why": errors[each]} for each in ("fsync", "rename") if each in errors],
        "fsync_s": fsync_s, "free": Size(numbers.f_bavail * numbers.f_frsize), "wanted": wanted,
        "one": Size(needs.checkpoint_bytes), "inodes": numbers.f_favail if numbers.f_files else math.inf,
        "shared": needs.num_nodes == 1 or system.shared, "volatile": _VOLATILE.get(system.kind),
        "elsewhere": f"{remount}{_ELSEWHERE}", "known": f"; checkpoints take up to {wanted}" if wanted else "",
    }  # fmt: skip


_ELSEWHERE = "choose another place with --run-dir"
_SHARE = "--run-dir DIR on NFS, Lustre or the like"
DISK = MachineCheck(
    "disk", look_at_disk, (
        fatal("unwritable", "{kind} cannot be written: {unwritable}", "{elsewhere}"),
        error("unable", "{kind} cannot {ability} ({why}), which keeps checkpoints whole", _ELSEWHERE),
        warning("lockless", "{kind} has no locks ({lockless}): nothing keeps a second launcher out of a run",
                "mount it with locks (NFS: not nolock; Lustre: -o flock)"),
        warning(lambda f: f.fsync_s > _SLOW_S,
                f"{{kind}}: {_PROBE_BYTES // 1024} kB took {{fsync_s:.1f}} s to become durable",
                "who else writes there: iostat -x 1; or another --run-dir"),
        error(lambda f: f.free < f.wanted,
              "{place} has {free} free; {num_checkpoints} checkpoints of {one} may exist at a time",
              "make room, lower checkpoint.keep_last, or choose another --run-dir"),
        warning(lambda f: f.wanted <= f.free < f.wanted + _ROOM_BYTES,
                "{place} has {free} free, hardly more than the {wanted} of checkpoints",
                "make room: du -xh -d1 | sort -h | tail; or choose another --run-dir"),
        error(lambda f: 0 <= f.inodes < _FEWEST_INODES, "{place} has room for only {inodes} more files",
              "remove small files: df -i; or choose another --run-dir"),
        error(lambda f: f.shared is False,
              "{kind} is this node's own, and all {num_nodes} nodes write checkpoints there", _SHARE),
        warning(lambda f: f.shared is None,
                "{kind}: is it the same on all {num_nodes} nodes? They write checkpoints there",
                f"touch a file there, look for it on another node; else {_SHARE}"),
        warning("volatile", "{kind} keeps files in {volatile}: checkpoints are lost with it",
                "--run-dir DIR on a disk or a mounted volume"),
    ),
    "{kind}: {free} free{known}",
    20, "does df answer? A network file system that hangs: umount -l it, or another --run-dir",
)  # fmt: skip


def nearest(run_dir: Path) -> Path:
    """Return the nearest directory to an absolute path that exists and is accessible."""
    for path in (run_dir, *run_dir.parents):
        with contextlib.suppress(PermissionError):
            if path.is_dir():
                return path
    return Path("/")


def try_disk(place: Path) -> tuple[dict[str, str], float]:
    """Do what a checkpoint does, in a new directory. Return (errors by ability, seconds of the fsync)."""
    from asyncflow.json_lines import sync

    errors: dict[str, str] = {}
    fsync_s = 0.0

    def attempt(ability: str, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as raised:
            errors[ability] = reason(raised)

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
                attempt("fsync", lambda: os.fsync(file.fileno()))
                fsync_s = time.monotonic() - began
                attempt("lock", lambda: fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB))
            attempt("rename", lambda: half.rename(root / "whole"))
            attempt("fsync", lambda: sync(root))
    except OSError as raised:
        errors["write"] = reason(raised)
    return errors, fsync_s


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


def look_at_sharing(needs: Needs) -> Facts:
    """Make a channel's memory, and have another process map it as channels do."""
    from asyncflow.transport.frame import Arena, Limits
    from asyncflow.transport.meeting import wants_sharing

    own = peer = ""
    arena_bytes = Limits().arena_bytes
    try:
        arena = Arena(arena_bytes)
    except (OSError, RuntimeError) as raised:
        own = reason(raised)
    else:
        peer = peer_error(arena)
        arena.close()
    hides = hidepid(read_mounts())
    shm = os.statvfs(_SHM) if _SHM.is_dir() else None
    shm_free = Size(shm.f_bavail * shm.f_frsize if shm else 0)
    # Limits do not matter where shared memory does not work at all.
    bounds = (math.inf if own or peer else limits(what)[0] for what in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE))
    addresses, length = (bound if bound == math.inf else Size(bound) for bound in bounds)
    return {
        "own": own, "peer": peer, "addresses": addresses, "length": length, "shm_free": shm_free,
        # A process maps an arena of its own and the peer's for each channel.
        "reserved": Size(2 * arena_bytes * max(1, needs.channels)),
        "longest": Size(max(arena_bytes, needs.checkpoint_bytes)),
        "advice": f"mount -o remount,hidepid=0 /proc (now {hides})" if hides else _ONE_CONTAINER,
        "switched_off": needs.shared_memory and not wants_sharing(configured=True),
        "shm": f"/dev/shm has {shm_free} free" if shm and shm.f_blocks else "/dev/shm is missing (not needed on CPU)",
    }  # fmt: skip


_ONE_CONTAINER = "run all of it as one user in one container, with /proc mounted and no sandbox that hides /proc/PID/fd"
SHARED_MEMORY = MachineCheck(
    "shared memory", look_at_sharing, (
        error("own", "no shared memory can be made ({own})",
              "ulimit -v unlimited; ulimit -f unlimited; in a container, a seccomp profile that allows memfd_create"),
        error("peer", "processes cannot map each other's memory, so weights do not reach their readers ({peer})",
              "{advice}"),
        warning(lambda f: f.addresses < f.reserved,
                "addresses are limited to {addresses}; channels reserve up to {reserved} in a process (addresses, not "
                "memory)", "ulimit -v unlimited"),
        warning(lambda f: f.length < f.longest,
                "a file or shared memory is limited to {length}; the largest has {longest}", "ulimit -f unlimited"),
        # Only NCCL and engines use /dev/shm, so it does not matter on CPU.
        warning(lambda f: f.device != "cpu" and f.shm_free < _DEVICE_SHM_BYTES,
                f"/dev/shm has {{shm_free}} free; devices' libraries may want {_DEVICE_SHM_BYTES}",
                "docker run --shm-size=16g; or mount -o remount,size=16G /dev/shm"),
        warning("switched_off", "ASYNCFLOW_SHARED_MEMORY=0: payloads of the queue go over sockets",
                "unset ASYNCFLOW_SHARED_MEMORY, unless you mean it"),
    ),
    "another process mapped memory of this one; {shm}",
    20, "does ls /proc/self/fd answer?",
)  # fmt: skip


def peer_error(arena: "Arena") -> str:
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
