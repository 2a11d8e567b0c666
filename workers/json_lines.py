"""Files of JSON objects, a line each, that a run appends to: ledger, metrics, evaluations.

A disk without room holds the run up as little as it can: lines that cannot be written wait in memory, in their order,
and are written before the next ones. What was written of a torn line is continued, so the file stays whole.
"""

import json
import logging
import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class JsonLines:
    """Appends to one file. One thread writes; another may call `sync`."""

    def __init__(self, path: Path) -> None:
        """Open the file, made when new."""
        self._path = path
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._waiting = b""

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append the lines with one write, and hand them to the operating system; if it refuses, later."""
        data = "".join(json.dumps(_finite(line), allow_nan=False) + "\n" for line in lines).encode()
        with self._lock:
            late = bool(self._waiting)
            self._waiting += data
            try:
                self._write()
            except OSError as error:
                if not late:
                    logger.warning("%s cannot be written (%s): its lines wait", self._path, error)

    def sync(self) -> None:
        """Make everything written durable.

        Raises:
            OSError: the file system refuses, also what it refused before.
        """
        with self._lock:
            self._write()
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Make durable and close; idempotent.

        Raises:
            OSError: see `sync`.
        """
        if self._descriptor >= 0:
            self.sync()
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self) -> None:
        while self._waiting:
            size = os.write(self._descriptor, self._waiting)
            self._waiting = self._waiting[size:]


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    """Turn infinities and NaN, which JSON does not have, into null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()
    }
