"""File systems of a few megabytes that only one run sees, in a mount namespace of its own.

A process that only sleeps holds the namespace, so what a run wrote can be looked at after its end; with that process
the mounts go. Works for root, and for users who may have user namespaces.
"""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DEADLINE_S = 10.0


class SmallDisks:
    """The mounts of one run."""

    def __init__(self, holder: int) -> None:
        """Args:
        holder: process whose namespace it is.
        """
        self._enter = ("nsenter", "--target", str(holder), "--user", "--mount", "--preserve-credentials")
        self.root = Path(f"/proc/{holder}/root")
        """The file system of the run, as seen from here."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """A command that runs another one among these mounts."""
        return self._enter

    def mount(self, where: Path, size: str) -> Path:
        """Mount a new disk over an existing directory; returns it as seen from here."""
        subprocess.run([*self._enter, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where], check=True)
        return Path(f"{self.root}{where}")


@contextmanager
def small_disks() -> Iterator[SmallDisks]:
    """Hold a mount namespace while the enclosed block runs."""
    command = ["unshare", "--map-root-user", "--mount", "sleep", "infinity"]
    holder = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        _wait_for_namespace(holder.pid)
        yield SmallDisks(holder.pid)
    finally:
        holder.kill()
        holder.wait()


def fill(disk: Path) -> Path:
    """Write until nothing fits any more; returns the file that takes the room."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def _wait_for_namespace(pid: int) -> None:
    """`unshare` becomes `sleep` once it is where it should be."""
    never = threading.Event()
    for _ in range(int(_DEADLINE_S / 0.02)):
        command = Path(f"/proc/{pid}/comm").read_text().strip()
        if command == "sleep" and Path(f"/proc/{pid}/ns/mnt").stat() != Path("/proc/self/ns/mnt").stat():
            return
        never.wait(0.02)
    raise TimeoutError("unshare did not make a mount namespace; are user namespaces allowed?")
