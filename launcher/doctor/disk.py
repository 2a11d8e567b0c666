"""The place of the run directory: room for checkpoints, and what they rest on (write, fsync, rename, lock)."""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from asyncflow.size_text import size_text
from launcher.doctor.file_systems import FileSystem, file_system_of
from launcher.doctor.finding import Finding, reason
from launcher.doctor.needs import Needs

CHECK = "disk"
_PROBE_BYTES = 2**16
_SLOW_S = 1.0
_ROOM_BYTES = 10**9
_FEWEST_INODES = 1000


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


def check(needs: Needs) -> list[Finding]:
    """Look and judge."""
    return judge(gather(Path(needs.run_dir)), needs)


def gather(run_dir: Path) -> DiskFacts:
    """Look at the place and try it in a directory that is removed again."""
    place = nearest(run_dir)
    file_system = file_system_of(place.resolve(), Path("/proc/self/mountinfo").read_text())
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


def judge(facts: DiskFacts, needs: Needs) -> list[Finding]:
    """Compare room and abilities with what checkpoints need."""
    elsewhere = "choose another place with --run-dir"
    kind = f"{facts.place} ({facts.file_system.kind})"
    if "write" in facts.errors:
        text = f"{kind} cannot be written: {facts.errors['write']}"
        remedy = f"mount -o remount,rw {facts.file_system.mount_point}" if facts.file_system.read_only else elsewhere
        return [Finding.error(CHECK, text, f"{remedy}; or {elsewhere}" if remedy != elsewhere else remedy)]
    findings = [*_judge_abilities(facts, kind), *_judge_room(facts, needs)]
    if needs.num_nodes > 1:
        findings += _judge_sharing(facts, kind, needs.num_nodes)
    if facts.file_system.volatile:
        text = f"{kind} keeps files in {facts.file_system.volatile}: checkpoints go with it"
        findings.append(Finding.warning(CHECK, text, "--run-dir DIR on a disk or a mounted volume"))
    wanted = needs.num_checkpoints * needs.checkpoint_bytes
    known = f"; checkpoints take up to {size_text(wanted)}" if wanted else ""
    return findings or [Finding.ok(CHECK, f"{kind}: {size_text(facts.free_bytes)} free{known}")]


def _judge_abilities(facts: DiskFacts, kind: str) -> list[Finding]:
    findings = []
    for ability in ("fsync", "rename"):
        if ability in facts.errors:
            text = f"{kind} cannot {ability} ({facts.errors[ability]}), which keeps checkpoints whole"
            findings.append(Finding.error(CHECK, text, "choose another place with --run-dir"))
    if "lock" in facts.errors:
        text = f"{kind} has no locks ({facts.errors['lock']}): nothing keeps a second launcher out of a run"
        findings.append(Finding.warning(CHECK, text, "mount it with locks (NFS: not nolock; Lustre: -o flock)"))
    if facts.fsync_s > _SLOW_S:
        text = f"{kind}: {_PROBE_BYTES // 1024} kB took {facts.fsync_s:.1f} s to be safe"
        findings.append(Finding.warning(CHECK, text, "who else writes there: iostat -x 1; or another --run-dir"))
    return findings


def _judge_sharing(facts: DiskFacts, kind: str, num_nodes: int) -> list[Finding]:
    remedy = "--run-dir DIR on NFS, Lustre or the like"
    if facts.file_system.shared is False:
        text = f"{kind} is this node's own, and all {num_nodes} nodes write checkpoints there"
        return [Finding.error(CHECK, text, remedy)]
    if facts.file_system.shared is None:
        text = f"{kind}: is it the same on all {num_nodes} nodes? They write checkpoints there"
        return [Finding.warning(CHECK, text, f"touch a file there, look for it on another node; else {remedy}")]
    return []


def _judge_room(facts: DiskFacts, needs: Needs) -> list[Finding]:
    wanted = needs.num_checkpoints * needs.checkpoint_bytes
    free, one = f"{facts.place} has {size_text(facts.free_bytes)} free", size_text(needs.checkpoint_bytes)
    if facts.free_bytes < wanted:
        text = f"{free}; {needs.num_checkpoints} checkpoints of {one} may be there at a time"
        return [Finding.error(CHECK, text, "make room, lower checkpoint.keep_last, or choose another --run-dir")]
    if facts.free_bytes < wanted + _ROOM_BYTES:
        text = f"{free}, hardly more than the {size_text(wanted)} of checkpoints"
        return [Finding.warning(CHECK, text, "make room: du -xh -d1 | sort -h | tail; or choose another --run-dir")]
    if 0 <= facts.free_inodes < _FEWEST_INODES:
        text = f"{facts.place} may hold {facts.free_inodes} more files only"
        return [Finding.error(CHECK, text, "remove small files: df -i; or choose another --run-dir")]
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
            _able(errors, "fsync", lambda: _fsync_directory(root))
    except OSError as error:
        errors["write"] = reason(error)
    return errors, fsync_s


def _able(errors: dict[str, str], ability: str, attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except OSError as error:
        errors[ability] = reason(error)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        os.fsync(descriptor)
