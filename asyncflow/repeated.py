"""Warnings that come again and again: a reason is logged the 1st, 10th, 100th ... time, with how often it came.

What differs from one time to the next, texts in quotes and numbers, is no part of the reason.
"""

import logging
import re
import threading
from collections import Counter

_VARYING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+""")
_MOST_REASONS = 1000
"""Beyond these, all are one."""


class RepeatedWarnings:
    """Counts and logs. Thread-safe."""

    def __init__(self, logger: logging.Logger) -> None:
        """Args:
        logger: that gets them.
        """
        self._logger = logger
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()

    def warn(self, text: str) -> None:
        """Log the text, if it is time for its reason."""
        reason = _VARYING.sub("", text)
        with self._counting:
            if reason not in self._counts and len(self._counts) >= _MOST_REASONS:
                reason = ""
            self._counts[reason] += 1
            number = self._counts[reason]
        if number == 1:
            self._logger.warning("%s", text)
        elif re.fullmatch("10+", str(number)):
            self._logger.warning("%s (such came %d times)", text, number)
