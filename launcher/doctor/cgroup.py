"""What control groups (of a container, a Slurm job, a systemd unit) allow this process, in both versions."""

from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 2**60
"""Version 1 writes a number near 2**63 where nothing is limited."""


@dataclass(frozen=True)
class Allowance:
    """A limit of one control group.

    Attributes:
        limit: bytes, or processes.
        used: of it.
    """

    limit: int
    used: int

    @property
    def free(self) -> int:
        """What is left; never below 0."""
        return max(0, self.limit - self.used)


def memory_allowance(
    *, cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Allowance | None:
    """Return the tightest limit of memory, less what the page cache holds and would give back; None: there is none."""
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


def _groups(controller: str, cgroup: Path, root: Path) -> list[Path]:
    """Return the directories of this process's group and of those above it, in either version's place."""
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
