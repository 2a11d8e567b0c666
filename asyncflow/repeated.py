"""Warnings that recur: a reason is logged the 1st, 10th, 100th ... time, with its count.

Quoted texts, numbers and ids, which vary from one time to the next, are not part of the reason.
"""

import logging
import re
import threading
from collections import Counter

_VARYING = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|0x[0-9a-f]+|\b[0-9a-f]{8,}(?:-[0-9a-f]{4,})*\b|\d+""", re.IGNORECASE
)
# Further reasons are counted as one.
_MOST_REASONS = 1000


class RepeatedWarnings:
    """Counts and logs. Thread-safe."""

    def __init__(self, logger: logging.Logger, level: int = logging.WARNING) -> None:
        self._logger = logger
        self._level = level
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()

    def log_warning(self, text: str, more: str = "") -> None:
        """Log `text` and `more`, which is not part of the reason, if it is this reason's turn."""
        reason = _VARYING.sub("", text)
        with self._counting:
            if reason not in self._counts and len(self._counts) >= _MOST_REASONS:
                reason = ""
            self._counts[reason] += 1
            number = self._counts[reason]
        if number == 1:
            self._logger.log(self._level, "%s%s", text, more)
        elif re.fullmatch("10+", str(number)):
            self._logger.log(self._level, "%s (%d such warnings so far)%s", text, number, more)
