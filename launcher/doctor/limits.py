"""Limits of open files and of processes, against what the run opens and starts."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from launcher.doctor.cgroup import Allowance, process_allowance
from launcher.doctor.finding import Finding
from launcher.doctor.needs import Needs

OPEN_FILES, PROCESSES = "open files", "processes"
_USUAL_DESCRIPTORS = 1024
_ROOM = 2**16
"""What remedies ask for: more than any run needs."""


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


def check_files(needs: Needs) -> list[Finding]:
    """Look and judge."""
    return judge_files(gather(), needs)


def check_processes(needs: Needs) -> list[Finding]:
    """Look and judge."""
    return judge_processes(gather(), needs)


def gather() -> LimitFacts:
    """Read the limits."""
    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allocated, _, most = (int(number) for number in Path("/proc/sys/fs/file-nr").read_text().split())
    threads = resource.getrlimit(resource.RLIMIT_NPROC)[0] if os.geteuid() else -1
    own, everybody = _count_threads()
    threads_max = int(Path("/proc/sys/kernel/threads-max").read_text())
    return LimitFacts(files, files_hard, most - allocated, threads, own, process_allowance(), threads_max - everybody)


def judge_files(facts: LimitFacts, needs: Needs) -> list[Finding]:
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
    known = f", the run opens up to {needs.descriptors}" if needs.descriptors else ""
    return [Finding.ok(OPEN_FILES, f"a process may open {_number(facts.files)}{known}")]


def judge_processes(facts: LimitFacts, needs: Needs) -> list[Finding]:
    """Compare the limits of threads, which is what the kernel counts as processes.

    Measured runs have 0.5 to 0.65 of the estimate, so a limit in between may do.
    """
    rooms = [(facts.threads_left, "the system", "sysctl -w kernel.threads-max=4194304 kernel.pid_max=4194304")]
    if facts.allowance is not None:
        rooms.append(
            (facts.allowance.free, "the control group", "docker run --pids-limit=-1; systemd: TasksMax=infinity")
        )
    if facts.threads >= 0:
        own = f"the limit of {facts.threads} threads per user"
        rooms.append(
            (facts.threads - facts.threads_used, own, "ulimit -u unlimited; or nproc in /etc/security/limits.conf")
        )
    left, whose, remedy = min(rooms)
    known = f"; the run starts up to {needs.threads}" if needs.threads else ""
    if left < needs.threads:
        text = f"{whose} leaves room for {max(0, left)} more threads{known}"
        judge = Finding.error if left < needs.threads // 2 else Finding.warning
        return [judge(PROCESSES, text, remedy)]
    return [Finding.ok(PROCESSES, f"{left} more threads may start{known}")]


def _number(limit: int) -> str:
    return "any number" if limit < 0 else str(limit)


def _count_threads(proc: Path = Path("/proc")) -> tuple[int, int]:
    """Return the threads of this user's processes, and of all that are seen."""
    own = everybody = 0
    user = os.getuid()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines() if ":" in line)
        except OSError:  # it ended
            continue
        threads = int(fields.get("Threads", 0))
        everybody += threads
        own += threads if int(fields["Uid"].split()[0]) == user else 0
    return own, everybody
