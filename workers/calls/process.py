"""One child of a pool: its process, its socket, and the calls that are in its hands. Used inside the pool's loop only.

A child is started afresh (`python -m workers.calls.child`), never forked: this process may have torch's threads. It
leads a process group of its own, so that what a user's function started ends with it.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from asyncflow.clock import awake_slices
from asyncflow.errors import ConfigError
from workers.calls.frames import (
    Ask,
    Cancel,
    Load,
    Loaded,
    Raised,
    Refused,
    Returned,
    ToPool,
    Unusable,
    frame,
    read_frame,
    to_pool,
)

START_TIMEOUT_S = 120.0
"""How long a child may take to import what it needs (s)."""
RESPONSE_S = 1.0
"""How long an async child's loop may take to hear that a call is over, and we to read what a dead child sent (s)."""
_LOADED = -1
_LOOK_S = 0.01


class ChildDied(Exception):
    """The process ended, or had to be killed, while it ran this call."""


class CallRaised(Exception):
    """The function raised; type and message."""


class ResultUnusable(Exception):
    """The function returned something that cannot be used; the whole message."""


class ChildProcess:
    """The parent's side of one child.

    Attributes:
        is_async: it takes several calls at a time.
        capacity: how many; the pool says.
        alive: it takes calls.
        crowded: it died with several calls in its hands, and any of them may be the cause.
    """

    def __init__(self, load: Load) -> None:
        """Start the process. It dies with the thread that calls this."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(ours.close)
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-m", "workers.calls.child", str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
            unless_started.pop_all()
        self._socket = ours
        self._load = load
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[ToPool]] = {}
        self._alone = False
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._death = _death_of(self._process.pid)
        self.is_async = False
        self.capacity = 1
        self.alive = True
        self.crowded = False

    async def until_loaded(self) -> None:
        """Wait until it can serve.

        Raises:
            ConfigError: the user's function cannot be imported.
            ChildDied: it ended.
            TimeoutError: it takes too long.
        """
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        if self._death is not None:
            asyncio.get_running_loop().add_reader(self._death, self._died)
        reply = self._replies[_LOADED] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(reader))
        self._writer.write(frame(self._load))
        if not await _done_within(reply, START_TIMEOUT_S):
            raise TimeoutError(f"not ready within {START_TIMEOUT_S:g} s")
        loaded = self._replies.pop(_LOADED).result()
        if isinstance(loaded, Refused):
            raise ConfigError(loaded.text)
        assert isinstance(loaded, Loaded)
        self.is_async = loaded.is_async

    def has_room(self, *, alone: bool) -> bool:
        """Whether it takes one more call now; one that is to be alone needs a child with nothing else to do."""
        if not self.alive or self._alone:
            return False
        return not self._replies if alone else len(self._replies) < self.capacity

    def begin(self, arguments: Sequence[Any], *, alone: bool) -> int:
        """Send it a call that there is room for; returns the call's number.

        Raises:
            ValueError, TypeError: the arguments cannot travel.
        """
        assert self._writer is not None
        number = next(self._numbers)
        data = frame(Ask(number, list(arguments)))
        self._replies[number] = asyncio.get_running_loop().create_future()
        self._alone = alone
        self._writer.write(data)
        return number

    async def result(self, number: int, timeout_s: float) -> Any:
        """Wait for a call's result.

        Raises:
            CallRaised, ResultUnusable: as the names say.
            TimeoutError: it took too long, and is cancelled, or its process killed.
            ChildDied: the process is gone, by itself or since one of its calls took too long.
        """
        try:
            if not await _done_within(self._replies[number], timeout_s):
                await self._end(number)
                raise TimeoutError
            match self._replies[number].result():
                case Returned(value=value):
                    return value
                case Raised(text=text):
                    raise CallRaised(text)
                case Unusable(text=text):
                    raise ResultUnusable(text)
                case other:
                    raise AssertionError(f"{other} is no reply to a call")
        finally:
            self._replies.pop(number, None)
            self._alone = False

    def kill(self) -> None:
        """End it; idempotent. Calls that it runs raise `ChildDied`."""
        if not self.alive:
            return
        self.alive = False
        self.crowded = len(self._replies) > 1
        self._watch_no_more()
        self._kill_group()
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.close()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ChildDied())
                reply.exception()  # its caller may have gone

    async def gone(self) -> None:
        """Kill it and wait until it is gone."""
        self.kill()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self._writer is not None:
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        while self._process.poll() is None:  # killed, so soon
            await asyncio.sleep(_LOOK_S)

    def _died(self) -> None:
        """The process ended. What it sent is still read: end of file follows, unless a process that it forked into a
        session of its own holds the socket open."""
        self._watch_no_more()
        self._kill_group()
        asyncio.get_running_loop().call_later(RESPONSE_S, self.kill)

    def _watch_no_more(self) -> None:
        if self._death is not None:
            asyncio.get_running_loop().remove_reader(self._death)
            os.close(self._death)
            self._death = None

    def _kill_group(self) -> None:
        if self._process.returncode is None:  # else the number may be another group's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _end(self, number: int) -> None:
        """A call is too late: cancel it where the others can go on, else kill the child.

        Raises:
            ChildDied: others were in the child's hands, and one of them may have held this one up.
        """
        if self.is_async and self.alive:
            assert self._writer is not None
            heard = self._replies[number] = asyncio.get_running_loop().create_future()
            self._writer.write(frame(Cancel(number)))
            if await _done_within(heard, RESPONSE_S) and heard.exception() is None:
                return
        self.kill()
        if self.crowded:
            raise ChildDied

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                reply = to_pool(await read_frame(reader))
                waiting = self._replies.get(_LOADED if isinstance(reply, Loaded | Refused) else reply.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (EOFError, ConnectionError):
            self.kill()


def _death_of(pid: int) -> int | None:
    """Return a descriptor that is readable once the process has ended; None before Linux 5.3, where end of file says so
    unless what the child forked keeps the socket open."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


async def _done_within(future: "asyncio.Future[Any]", timeout_s: float) -> bool:
    """Wait for a future, without the time in which this process stood still; returns whether it is done."""
    for slice_s in awake_slices(timeout_s):
        if (await asyncio.wait({future}, timeout=slice_s))[0]:
            return True
    return future.done()
