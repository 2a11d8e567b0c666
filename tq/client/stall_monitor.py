"""Watches how long a consumer waits for rows: logs it, and gives up when no producer of them is left.

Pure but for the log: it gets every reply, and its clock is passed in.
"""

import logging
import time
from collections.abc import Callable

from asyncflow.errors import ProducersGone, TransportError
from tq.messages import NoRows

logger = logging.getLogger(__name__)

SAY_EVERY_S = 30.0
LOST_ROWS_S = 60.0


class StallMonitor:
    """The waiting of one consumer: `ask`, then `served` or `waited` or `unreadable`, over and over."""

    def __init__(
        self,
        *,
        producers_timeout_s: float,
        setting: str = "producers_timeout_s",
        narrates: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        producers_timeout_s: no producer for so long without a break is an error (s); 0: wait for ever.
        setting: what the user calls that.
        narrates: whether this consumer logs warnings (one rank of a gang does).
        clock: seconds.
        """
        self._producers_timeout_s = producers_timeout_s
        self._setting = setting
        self._level = logging.WARNING if narrates else logging.DEBUG
        self._clock = clock
        self._what = ""
        self._asked_at: float | None = None
        self._said_at = 0.0
        self._alone_since: float | None = None
        self._unreadable_since: float | None = None

    def ask(self, what: str, timeout_s: float) -> float:
        """Begin to wait for `what`; returns how long the next request may park (s)."""
        self._what = what
        if self._asked_at is None:
            self._asked_at = self._said_at = self._clock()
        return min(timeout_s, SAY_EVERY_S, self._producers_timeout_s or SAY_EVERY_S)

    def served(self) -> None:
        """Rows came and were read."""
        self._asked_at = self._alone_since = self._unreadable_since = None

    def waited(self, answer: NoRows) -> None:
        """A request's deadline passed without rows.

        Raises:
            ProducersGone: there has been no producer for `producers_timeout_s`.
        """
        now = self._clock()
        if answer.producers_alive:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        alone_s = now - self._alone_since if self._alone_since is not None else 0.0
        missing = answer.waiting_for or "rows"
        if self._alone_since is not None and 0 < self._producers_timeout_s <= alone_s:
            raise ProducersGone(
                f"{self._what}: waits for {missing}, but for {alone_s:.0f} s no process was connected that writes them "
                f"or said that it will; see in the logs why the producers ended or have not begun, or raise "
                f"{self._setting} if they only start slowly"
            )
        self._say(now, f"still waits for {missing}" + (" (no producer is connected)" if self._alone_since else ""))

    def unreadable(self, error: TransportError) -> None:
        """Leased rows could not be read: their unit is gone. They come back when a producer puts them again.

        Raises:
            TransportError: `error`, when that has gone on for too long.
        """
        now = self._clock()
        if self._unreadable_since is None:
            self._unreadable_since = now
            logger.warning("%s: rows could not be read, asking for them again: %s", self._what, error)
        if now - self._unreadable_since >= (self._producers_timeout_s or LOST_ROWS_S):
            raise error

    def _say(self, now: float, text: str) -> None:
        if self._asked_at is not None and now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            logger.log(self._level, "%s: %s, for %.0f s so far", self._what, text, now - self._asked_at)
