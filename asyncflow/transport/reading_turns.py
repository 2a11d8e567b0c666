"""The thread that waits for a reply reads it, so that no other thread has to be woken to hand it over.

    reply.result()             reads until its own reply is there, settles others' on the way, passes the turn on
    reply.add_done_callback()  no thread waits: the connection's own thread reads
    nothing is asked           the own thread watches for the peer's end

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

from asyncflow.transport.pipe_channel import Pipes

_EXPECTED, _CAME = "RUNNING", "FINISHED"  # states of a `Future`


class ReadingTurns:
    """Gives the turn to read to one thread at a time."""

    def __init__(self, pipes: Pipes, read_one: Callable[[], bool]) -> None:
        """Args:
        pipes: where frames come from.
        read_one: takes in one message and settles its reply; False when none will follow.
        """
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # entering it costs more than its lock
        """The turn is free, or a reply came."""
        self._pipes = pipes
        self._read_one = read_one
        self._taken = False
        self._waiting = 0
        self._standing_by = False
        self._watched = 0
        self._over = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        os.close(self._bell)

    def end(self) -> None:
        """No message will follow; all replies are settled. Idempotent."""
        with self.lock:
            self._over = True
            self.changed.notify_all()
        self._ring()

    def read_until(self, reply: "ExpectedReply", timeout_s: float | None) -> None:
        """Read, or let another thread read, until `reply` is settled or the time is up."""
        deadline = time.monotonic() + (threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
        while not reply.settled and self._take(reply, deadline):
            try:
                while not reply.settled and self._pipes.readable(deadline - time.monotonic()):
                    if not self._read_one():
                        break
                    if self._waiting:
                        self._tell_waiting()
                if reply.settled or time.monotonic() >= deadline:
                    return
            finally:
                self._pass_on()

    def watch(self) -> None:
        """A reply has callbacks and perhaps no waiter: the own thread reads."""
        with self.lock:
            self._watched += 1
        self._ring()

    def unwatch(self) -> None:
        """Stop waiting for a reply that came."""
        with self.lock:
            self._watched -= 1

    def stand_by(self, closed: Callable[[], bool]) -> None:
        """The own thread: read while replies with callbacks are due, and once the peer has ended; return at the end."""
        while not self._over:
            self._pipes.watch(self._bell)
            rung = self._hear()
            with self.lock:
                self._standing_by = True
                while self._taken and not self._over:
                    self.changed.wait()
                self._standing_by = False
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

    def _take(self, reply: "ExpectedReply", deadline: float) -> bool:
        with self.lock:
            self._waiting += 1  # before the reply is looked at: its reader looks in the other order
            try:
                while self._taken and not reply.settled:
                    if not self.changed.wait(min(deadline - time.monotonic(), threading.TIMEOUT_MAX)):
                        return False
                if reply.settled or self._over:
                    return False
                self._taken = True
                return True
            finally:
                self._waiting -= 1

    def _pass_on(self) -> None:
        with self.lock:
            self._taken = False
            if self._waiting or self._standing_by:
                self.changed.notify_all()
            watched = self._watched
        if watched:
            self._ring()

    def _tell_waiting(self) -> None:
        if self._waiting:
            with self.lock:
                self.changed.notify_all()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)

    def _hear(self) -> bool:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return False
        return True


class ExpectedReply(Future[Any]):
    """Waiting for it is reading. It cannot be cancelled, and all of a connection share one lock, which is cheaper."""

    def __init__(self, turns: ReadingTurns) -> None:
        self._condition = turns.changed  # instead of the base's own fields, which cost as much as a system call
        self._state = _EXPECTED
        self._result = self._exception = None
        self._waiters = []
        self._done_callbacks: list[Callable[[Future[Any]], Any]] = []
        self.settled = False
        """As `done`, without its lock: the waiter looks often."""
        self._turns = turns

    def set_result(self, result: Any) -> None:
        """The reply is there."""
        with self._turns.lock:
            if not self._waiters and not self._done_callbacks:
                self._result, self._state = result, _CAME
                self.settled = True
                return
        super().set_result(result)
        self.settled = True

    def set_exception(self, exception: BaseException | None) -> None:
        """There will be none."""
        super().set_exception(exception)
        self.settled = True

    def result(self, timeout: float | None = None) -> Any:
        """Return the reply; see `Future.result`."""
        if not self.settled and self._state == _EXPECTED:  # inside a callback it came, but is not marked as settled
            self._turns.read_until(self, timeout)
            timeout = 0.0 if timeout is not None else None
        if self.settled and self._exception is None:
            return self._result
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return why there is no reply, or None; see `Future.exception`."""
        if not self.settled and self._state == _EXPECTED:
            self._turns.read_until(self, timeout)
            timeout = 0.0 if timeout is not None else None
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[["Future[Any]"], object]) -> None:
        """Have `fn` called when the reply is there, by the thread that reads it."""
        if not self.done():
            self._turns.watch()
            super().add_done_callback(lambda _: self._turns.unwatch())
        super().add_done_callback(fn)
