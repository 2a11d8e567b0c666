"""Who reads replies: the thread that waits for one, so that no other thread has to be woken to hand it over.

    future.result()             reads until its own reply is there, settles others' on the way, passes the turn on
    future.add_done_callback()  nobody waits: the connection's own thread reads
    nobody asks anything        the own thread watches for the peer's end

Used by `connection.Connection` where frames come through pipes: only there may a reader wait with a deadline, and be
interrupted. Exactly one thread has the turn.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from asyncflow.transport.pipes import Pipes


class ReadingTurns:
    """Gives the turn to read to one thread at a time."""

    def __init__(self, pipes: Pipes, read_one: Callable[[], bool]) -> None:
        """Args:
        pipes: where frames come from.
        read_one: takes in one message and settles its future; False when none will follow.
        """
        self._pipes = pipes
        self._read_one = read_one
        self._turn = threading.Condition()
        self._taken = False
        self._waiting = 0
        self._watched = 0
        self._over = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        os.close(self._bell)

    def future(self) -> "Future[Any]":
        """Return a future whose waiter reads."""
        return _Expected(self)

    def end(self) -> None:
        """No message will follow; all futures are settled. Idempotent."""
        with self._turn:
            self._over = True
            self._turn.notify_all()
        self._ring()

    def read_until(self, future: "_Expected", timeout_s: float | None) -> None:
        """Read, or let another thread read, until `future` is done or the time is up."""
        deadline = time.monotonic() + (threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
        while not future.settled and self._take(future, deadline):
            try:
                while not future.settled and self._pipes.readable(deadline - time.monotonic()):
                    if not self._read_one():
                        break
                    self._tell_waiting()
                if time.monotonic() >= deadline:
                    return
            finally:
                self._pass_on()

    def watch(self) -> None:
        """A future has callbacks and perhaps no waiter: the own thread reads."""
        with self._turn:
            self._watched += 1
        self._ring()

    def unwatch(self) -> None:
        """Such a future is done."""
        with self._turn:
            self._watched -= 1

    def stand_by(self, closed: Callable[[], bool]) -> None:
        """The own thread: read while somebody waits for callbacks, and once the peer has ended; returns at the end."""
        while not self._over:
            self._pipes.watch(self._bell)
            rung = self._hear()
            with self._turn:
                while self._taken and not self._over:
                    self._turn.wait()
                if self._over or (rung and not self._watched and not closed()):
                    continue
                self._taken = True
            try:
                going_on = self._read_one()
                while going_on and self._watched:
                    self._tell_waiting()
                    going_on = self._read_one()
            finally:
                self._pass_on()

    def _take(self, future: "_Expected", deadline: float) -> bool:
        with self._turn:
            self._waiting += 1
            try:
                while self._taken and not future.settled:
                    if not self._turn.wait(min(deadline - time.monotonic(), threading.TIMEOUT_MAX)):
                        return False
                if future.settled or self._over:
                    return False
                self._taken = True
                return True
            finally:
                self._waiting -= 1

    def _pass_on(self) -> None:
        with self._turn:
            self._taken = False
            self._turn.notify_all()
            watched = self._watched
        if watched:
            self._ring()

    def _tell_waiting(self) -> None:
        if self._waiting:
            with self._turn:
                self._turn.notify_all()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)

    def _hear(self) -> bool:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return False
        return True


class _Expected(Future[Any]):
    """A reply. Waiting for it is reading."""

    def __init__(self, turns: ReadingTurns) -> None:
        super().__init__()
        self.settled = False
        """As `done`, without its lock: the waiter looks often."""
        self._turns = turns

    def set_result(self, result: Any) -> None:
        """The reply is there."""
        super().set_result(result)
        self.settled = True

    def set_exception(self, exception: BaseException | None) -> None:
        """There will be none."""
        super().set_exception(exception)
        self.settled = True

    def result(self, timeout: float | None = None) -> Any:
        """Return the reply; see `Future.result`."""
        if not self.settled and not self.done():  # inside a callback it is done, but not marked as settled
            self._turns.read_until(self, timeout)
            timeout = 0.0 if timeout is not None else None
        return super().result(timeout)

    def add_done_callback(self, fn: Callable[["Future[Any]"], object]) -> None:
        """Have `fn` called when the reply is there, from whichever thread reads it."""
        if not self.done():
            self._turns.watch()
            super().add_done_callback(lambda _: self._turns.unwatch())
        super().add_done_callback(fn)
