"""What must outlive a crash of the machine."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file's content, or a directory's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
