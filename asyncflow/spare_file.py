"""Files that a run can do without: timelines, samples."""

import logging
import os
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)


def open_spare(path: Path, *, what: str, loss: str) -> BinaryIO:
    """Open a file to append to, and make its directory, which somebody may have removed to make room.

    Where that cannot be, what is written goes nowhere.

    Args:
        path: whose directory's directory exists.
        what: is in it, for the warning.
        loss: what this process does without it.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        return path.open("ab")
    except OSError as error:
        logger.warning("%s: %s; this process %s", what, error, loss)
        return Path(os.devnull).open("ab")
