"""The session service's side of one worker process: starts it, tells it what to run, notices its death. Torch-free."""

import asyncio
import contextlib
import mmap
import os
import shutil
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Protocol

from asyncflow.errors import ConfigError, UserCodeNotStarted
from workers.agents.channel import Channel
from workers.agents.command import ended_how
from workers.agents.wire import (
    Ask,
    Broken,
    Done,
    FromWorker,
    Loaded,
    NotTold,
    Ping,
    Pong,
    Raised,
    Setup,
    Start,
    Stop,
    Told,
    ToWorker,
)
from workers.agents.worker import MARK, NOBODY, OUT_OF_MEMORY

START_TIMEOUT_S = 120.0
"""How long a worker may take to import what it needs (s)."""
STALL_S = 10.0
"""How long its event loop may stand still (s)."""
_PING_S = 1.0


@dataclass(frozen=True)
class WorkerDeath:
    """How a worker ended, in words, and whose fault it was: whose code ran then, or did not end (`NOBODY`: unknown)."""

    how: str
    run: int


class Owner(Protocol):
    """What a worker's messages are passed on to."""

    def asked(self, worker: "UserWorker", ask: Ask) -> None:
        """A rollout wants a reply."""

    def done(self, worker: "UserWorker", message: Done) -> None:
        """A rollout returned."""

    def raised(self, worker: "UserWorker", message: Raised) -> None:
        """A rollout raised."""

    def died(self, worker: "UserWorker", death: WorkerDeath) -> None:
        """It is gone, with all its rollouts."""


class UserWorker:
    """One worker process; used in the service's event loop.

    Attributes:
        alive: it takes rollouts.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, channel: Channel[ToWorker, FromWorker], mark: mmap.mmap, owner: Owner
    ) -> None:
        """See `start`."""
        self._process = process
        self._channel = channel
        self._mark = mark
        self._owner = owner
        self._rollouts: dict[int, str] = {}
        """With their scratch directories."""
        self._ending: dict[int, asyncio.TimerHandle] = {}
        self._last_pong = 0.0
        self._how = ""
        self._culprit: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.alive = True

    @staticmethod
    async def start(setup: Setup, owner: Owner) -> "UserWorker":
        """Start a process and have it import the user's function.

        Raises:
            ConfigError: the function cannot be used.
            UserCodeNotStarted: a signal ended the process, or it takes too long; that memory or the machine's time was
                short is not the function's fault.
            OSError: no process can be started now.
        """
        page = os.memfd_create("rollout", os.MFD_CLOEXEC)
        os.ftruncate(page, MARK.size)
        mark = mmap.mmap(page, MARK.size)
        MARK.pack_into(mark, 0, NOBODY)
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-u", "-P", "-m", "workers.agents.worker"),
                *map(str, (os.getpid(), theirs.fileno(), page)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), page],
                process_group=0,
            )
        os.close(page)
        worker = UserWorker(process, await Channel.open(ours, FromWorker), mark, owner)
        worker._channel.send(setup)
        try:
            loaded = await asyncio.wait_for(worker._channel.receive(), START_TIMEOUT_S)
        except TimeoutError as error:
            await worker.gone()
            raise UserCodeNotStarted(f"importing it took longer than {START_TIMEOUT_S:g} s") from error
        if not isinstance(loaded, Loaded):
            if loaded is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), STALL_S)  # it has ended, or is about to
            code = process.returncode or 0
            await worker.gone()
            if isinstance(loaded, Broken):
                raise ConfigError(loaded.text)
            why = f"its process {ended_how(code)} while it was imported; see the log"
            raise UserCodeNotStarted(why) if code < 0 else ConfigError(why)
        loop = asyncio.get_running_loop()
        worker._last_pong = loop.time()
        worker._tasks = [loop.create_task(worker._read()), loop.create_task(worker._watch())]
        return worker

    @property
    def num_rollouts(self) -> int:
        """Rollouts that run in it, those that were told to stop included."""
        return len(self._rollouts)

    def send(self, message: Told | NotTold) -> None:
        """Send what a rollout asked for."""
        self._channel.send(message)

    def begin(self, start: Start) -> None:
        """Call the function."""
        self._rollouts[start.run] = start.scratch
        self._channel.send(start)

    def end(self, run: int, *, within_s: float) -> None:
        """Cancel a rollout if it runs; kill the process if it does not end within `within_s`."""
        if run not in self._rollouts or run in self._ending or not self.alive:
            return
        self._channel.send(Stop(run))
        self._await_end(run, within_s)

    def kill(self, how: str) -> None:
        """Kill the process and all that it started; `died` follows."""
        if self.alive:
            self._how = how
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _await_end(self, run: int, within_s: float) -> None:
        self._channel.send(Ping())
        loop = asyncio.get_running_loop()
        self._ending[run] = loop.call_later(within_s, self._late, run, within_s, loop.time())

    def _late(self, run: int, within_s: float, since: float) -> None:
        """Kill the process for a rollout that did not end, unless the loop stands still for another: see `_watch`."""
        if self._last_pong <= since:
            self._await_end(run, within_s)
            return
        if self.alive:  # else it is being killed for something else
            self._culprit = run
        self.kill(f"did not end a cancelled rollout within {within_s:g} s")

    async def gone(self) -> None:
        """Kill the process and wait until it is gone."""
        self.kill("was ended")
        if self._tasks:
            await asyncio.wait({self._tasks[0]})
            return
        await self._process.wait()
        self._channel.close()

    async def _read(self) -> None:
        try:
            while (message := await self._channel.receive()) is not None:
                self._heard(message)
        finally:
            await self._bury()

    def _heard(self, message: FromWorker) -> None:
        match message:
            case Ask():
                self._owner.asked(self, message)
            case Done():
                if self._ended(message.run):
                    self._owner.done(self, message)
            case Raised():
                if self._ended(message.run):
                    self._owner.raised(self, message)
            case Pong():
                self._last_pong = asyncio.get_running_loop().time()

    async def _bury(self) -> None:
        """Leave nothing of it, and tell whose fault it was."""
        self.alive = False
        for timer in self._ending.values():
            timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        for task in self._tasks[1:]:
            task.cancel()
        self._channel.close()
        (marked,) = MARK.unpack_from(self._mark, 0)
        code = self._process.returncode or 0
        how = "ran out of memory (rollout.max_memory_gb)" if code == OUT_OF_MEMORY else ended_how(code)
        culprit = marked if self._culprit is None else self._culprit
        self._owner.died(self, WorkerDeath(self._how or how, culprit))
        for scratch in self._rollouts.values():
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    def _ended(self, run: int) -> bool:
        """A rollout's function came to its end; return whether its owner still wants to know."""
        self._rollouts.pop(run, None)
        timer = self._ending.pop(run, None)
        if timer is not None:
            timer.cancel()
        return timer is None

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._channel.send(Ping())
            before = loop.time()
            await asyncio.sleep(_PING_S)
            self._last_pong += max(0.0, loop.time() - before - 2 * _PING_S)  # this process stood still itself
            if loop.time() - self._last_pong > STALL_S:
                self.kill(f"held its event loop up for {STALL_S:g} s; blocking code goes into `await context.run(...)`")
