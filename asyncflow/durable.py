"""What must outlive a crash: of a process, of the machine."""

import errno
import os
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, and of a full quota."""


def sync(path: Path) -> None:
    """Make a file's content, or a directory's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a file at once: who reads it, also after a crash of this process, finds the text before or this one."""
    beside = path.with_suffix(".tmp")
    beside.write_text(text)
    beside.replace(path)
