"""Files of JSON objects, a line each, that a run appends to: ledger, metrics, updates, evaluations. Torch-free."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends JSON objects to a file, a line each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append the lines with one write, and hand them to the operating system."""
        self._file.write("".join(json.dumps(_finite(line), allow_nan=False) + "\n" for line in lines))
        self._file.flush()

    def sync(self) -> None:
        """Make everything written durable."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Make durable and close; idempotent."""
        if not self._file.closed:
            self.sync()
            self._file.close()


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    """Turn infinities and NaN, which JSON does not have, into null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()
    }
