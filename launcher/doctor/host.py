"""This host's limits of open files, processes and memory against what the run takes, and its clock."""

import ctypes
import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from asyncflow.errors import size_text
from launcher.doctor.messages import Finding, Needs

OPEN_FILES, PROCESSES, MEMORY, CLOCK = "open files", "processes", "memory", "clock"
_USUAL_DESCRIPTORS = 1024
_ROOM = 2**16
"""What remedies ask for: more files than any run needs."""
_UNLIMITED = 2**60
"""Control groups of version 1 write a number near 2**63 where nothing is limited."""
_LEAST_BYTES = 2 * 10**9
"""What any run takes, with the smallest model."""
_TIGHT = 1.25
_WATCHED_S = 0.2
_LARGEST_DRIFT_S = 0.05
_OLDEST = 1_735_689_600.0  # 2025-01-01
_TIME_ERROR = 5
_MICRO = 1e-6


@dataclass(frozen=True)
class Allowance:
    """A limit of one control group (of a container, a Slurm job, a systemd unit): bytes, or threads."""

    limit: int
    used: int

    @property
    def free(self) -> int:
        """What is left; never below 0."""
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class LimitFacts:
    """Limits of this process and of its surroundings; -1: none.

    Attributes:
        files, files_hard: descriptors per process (`ulimit -n`).
        files_left: descriptors that the whole system may still open.
        threads: of this user (`ulimit -u`); -1 for root, whom the kernel does not hold to it.
        threads_used: by this user now.
        allowance: of the control group; None: no limit.
        threads_left: of the whole system (`kernel.threads-max`).
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
    """What the clocks said.

    Attributes:
        now: unix time (s).
        drift_s: by how much wall and monotonic clock differed over the time that they were watched.
        synchronised: whether the kernel says so; None: it does not tell.
        error_s: the kernel's bound of the error; 0: not known.
    """

    now: float
    drift_s: float
    synchronised: bool | None
    error_s: float = 0.0


def read_limits(needs: Needs) -> LimitFacts:
    """Read the limits."""
    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allocated, _, most = (int(number) for number in Path("/proc/sys/fs/file-nr").read_text().split())
    threads = resource.getrlimit(resource.RLIMIT_NPROC)[0] if os.geteuid() else -1
    own, everybody = _count_threads()
    threads_max = int(Path("/proc/sys/kernel/threads-max").read_text())
    return LimitFacts(files, files_hard, most - allocated, threads, own, process_allowance(), threads_max - everybody)


def judge_open_files(facts: LimitFacts, needs: Needs) -> list[Finding]:
    """Compare the limits of descriptors; see `launcher.doctor.estimate.descriptors`."""
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
    """Compare the limits of threads, which is what the kernel counts as processes.

    Measured runs have 0.5 to 0.65 of the estimate, so a limit in between may do.
    """
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
        finding = Finding.error if left < needs.threads // 2 else Finding.warning
        return [finding(PROCESSES, text, remedy)]
    return [Finding.ok(PROCESSES, f"{left} more threads may start{known}")]


def read_memory(needs: Needs) -> MemoryFacts:
    """Read total and free memory, and the limits on it."""
    import psutil

    memory = psutil.virtual_memory()
    return MemoryFacts(memory.total, memory.available, memory_allowance())


def judge_memory(facts: MemoryFacts, needs: Needs) -> list[Finding]:
    """Compare with the least that the run takes; shared memory counts as memory."""
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
    """Is the wall clock plausible, does it run evenly, is it kept by NTP? Times in logs and of files rest on it."""
    remedy = "timedatectl set-ntp true; or systemctl enable --now chronyd"
    findings = []
    if facts.now < _OLDEST:
        day = time.strftime("%Y-%m-%d", time.gmtime(facts.now))
        findings.append(Finding.error(CLOCK, f"it is {day} here", remedy))
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
    """Return the tightest limit of memory, less what the page cache holds and would free; None: there is none."""
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
    """Return the tightest limit of processes, where threads count; None: there is none."""
    found = []
    for group in _groups("pids", cgroup, root):
        limit = _number(group / "pids.max")
        if limit is not None:
            found.append(Allowance(limit, _number(group / "pids.current") or 0))
    return min(found, key=lambda allowance: allowance.free, default=None)


class _Timex(ctypes.Structure):
    """The first fields of `struct timex`, adjtimex(2), and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("rest", ctypes.c_byte * 256),
    )


def _count_threads() -> tuple[int, int]:
    """Return the threads of this user's processes, and of all that are seen."""
    import psutil

    own = everybody = 0
    for process in psutil.process_iter(["num_threads", "uids"]):
        threads = process.info["num_threads"] or 0  # None: it may not be looked at
        everybody += threads
        own += threads if process.info["uids"] and process.info["uids"].real == os.getuid() else 0
    return own, everybody


def _groups(controller: str, cgroup: Path, root: Path) -> list[Path]:
    """Return the directories of this process's control group and of those above it, in either version's place."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        own = top / path.lstrip("/")
        groups += [group for group in (own, *own.parents) if group.is_relative_to(top)]
    return groups


def _number(file: Path) -> int | None:
    """Return the number in a file; None where there is none, or it says `max`."""
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
    return int(fields.get("total_inactive_file") or fields.get("inactive_file") or 0)
