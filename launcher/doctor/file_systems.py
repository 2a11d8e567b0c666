"""Which file system a path is on, and whether other nodes see it, by the kernel's list of mounts. Pure."""

from dataclasses import dataclass
from pathlib import Path

_SHARED = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "orangefs", "pvfs2", "wekafs"}
    | {"afs", "ocfs2", "gfs2", "panfs", "quobyte", "daos", "juicefs", "dpc"}
)
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "squashfs"})
_VOLATILE = {"tmpfs": "memory", "ramfs": "memory", "overlay": "the container's own layer", "squashfs": "an image"}


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
        """Whether several nodes mount this kind; None: nobody knows."""
        return True if self.kind in _SHARED else False if self.kind in _LOCAL else None

    @property
    def volatile(self) -> str:
        """What its files are in, if they do not survive a reboot or the container; else nothing."""
        return _VOLATILE.get(self.kind, "")


def file_system_of(path: Path, mountinfo: str) -> FileSystem:
    """Return the file system of an absolute path without links, from the text of /proc/self/mountinfo.

    The last mount among those with the longest mount point is on top of the others.
    """
    best = FileSystem("unknown", "/")
    for line in mountinfo.splitlines():
        front, _, back = line.partition(" - ")
        mount_point = _unescaped(front.split()[4])
        if path.is_relative_to(mount_point) and len(mount_point) >= len(best.mount_point):
            options = f"{front.split()[5]},{back.split()[2]}".split(",")
            best = FileSystem(back.split()[0].removeprefix("fuse."), mount_point, read_only="ro" in options)
    return best


def _unescaped(text: str) -> str:
    """Undo the kernel's octal escapes of blanks."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text
