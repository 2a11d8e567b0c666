"""The session service's side of one worker process: starts it, gives it rollouts, notices its death. Torch-free."""

import asyncio
import logging
import mmap
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncflow.errors import ConfigError, UserCodeNotStarted
from workers.agents import worker as worker_module
from workers.agents.wire import (
    Ask,
    AttemptDone,
    Begun,
    FromWorker,
    PingLoop,
    PongLoop,
    Raised,
    Setup,
    Start,
    StopAttempt,
    ToWorker,
)
from workers.agents.worker import MARK, NOBODY, OUT_OF_MEMORY, STACK_SIGNAL
from workers.calls.child_process import ChildDied, ChildProcess, ended_how

logger = logging.getLogger(__name__)

_PING_S = 1.0
_STACK_S = 2.0  # time that a process has to write its stack (s)
_LOOK_S = 0.05
_PARTS = 4  # of the time that a rollout has to end
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LONGEST_STACK = 2**16


@dataclass(frozen=True)
class WorkerDeath:
    """How a worker ended, in words, and the attempt whose code was running or did not end (`NOBODY`: unknown)."""

    how: str
    attempt_id: int


Heard = Ask | Begun | AttemptDone | Raised | WorkerDeath


class UserWorker(ChildProcess[ToWorker, FromWorker]):
    """One worker process; used in the service's event loop. `alive`: it accepts rollouts."""

    def __init__(self, tell: "Callable[[UserWorker, Heard], None]", *, stall_timeout_s: float) -> None:
        # Shared with the worker: the mark, followed by the worker's stack when requested.
        self._page = os.memfd_create("rollout", os.MFD_CLOEXEC)
        os.ftruncate(self._page, MARK.size)
        os.pwrite(self._page, MARK.pack(NOBODY, 0), 0)
        self._mark = mmap.mmap(self._page, MARK.size)
        super().__init__("workers.agents.worker", FromWorker, self._page)
        self._tell = tell
        self._stall_timeout_s = stall_timeout_s
        self._rollouts: dict[int, str] = {}  # attempt -> its scratch directory
        self._ending: dict[int, asyncio.TimerHandle] = {}
        self._last_pong = 0.0
        self._last_turn = 0.0  # when its loop was last known to run: it answered, or a rollout took a step
        self._steps = 0
        self._how = ""
        self._culprit: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.alive = True

    @staticmethod
    async def start(setup: Setup, tell: "Callable[[UserWorker, Heard], None]") -> "UserWorker":
        """Start a process and have it import the user's function; `tell` is called with what its rollouts say, and
        last with its death.

        Raises:
            ConfigError: the function is unusable.
            UserCodeNotStarted: a signal ended the process, or it takes too long: memory or time of the machine may be
                short, which is not the function's fault.
            OSError: no process can be started at the moment.
        """
        worker = UserWorker(tell, stall_timeout_s=setup.stall_timeout_s)
        try:
            await worker.load(setup)
        except TimeoutError as error:
            raise UserCodeNotStarted(str(error)) from error
        except ChildDied as error:
            why = f"its process {ended_how(worker.exit_code)} while it was imported; see the log"
            raise (UserCodeNotStarted(why) if worker.exit_code < 0 else ConfigError(why)) from error
        loop = asyncio.get_running_loop()
        worker._last_pong = worker._last_turn = loop.time()
        worker._tasks = [loop.create_task(worker._read_messages()), loop.create_task(worker._watch_stalls())]
        return worker

    @property
    def num_rollouts(self) -> int:
        """Rollouts in this worker, including those that were told to stop."""
        return len(self._rollouts)

    def begin(self, start: Start) -> None:
        self._rollouts[start.attempt_id] = start.scratch
        self.send(start)

    def end(self, attempt_id: int, *, within_s: float) -> None:
        """Cancel a rollout if it runs; kill the process if the rollout does not end within `within_s`."""
        if attempt_id not in self._rollouts or attempt_id in self._ending or not self.alive:
            return
        self.send(StopAttempt(attempt_id))
        self._await_end(attempt_id, within_s)

    def kill(self, how: str) -> None:
        """Kill the process and everything that it started; `WorkerDeath` follows."""
        if self.alive:
            self._how = how
        self.alive = False
        self.kill_process()

    def _await_end(self, attempt_id: int, within_s: float, parts: int = _PARTS) -> None:
        self.send(PingLoop())
        loop = asyncio.get_running_loop()
        self._ending[attempt_id] = loop.call_later(
            within_s / _PARTS, self._kill_if_late, attempt_id, within_s, parts, loop.time()
        )

    def _kill_if_late(self, attempt_id: int, within_s: float, parts: int, since: float) -> None:
        """Kill the process because a rollout did not end; only those parts of the time count in which the loop ran. A
        loop that hangs, maybe in another rollout's code, is left to `_watch_stalls`."""
        if self._last_pong > since:
            parts -= 1
        if parts:
            self._await_end(attempt_id, within_s, parts)
            return
        if self.alive:  # otherwise it is already being killed for another reason
            self._culprit = attempt_id
        self.kill(f"did not end a cancelled rollout within {within_s:g} s")

    async def kill_and_wait(self, *, within_s: float = 0.0) -> None:
        if self._tasks:  # `_read_messages` cleans up
            self.kill("was ended")
            await asyncio.wait({self._tasks[0]})
        else:
            await super().kill_and_wait(within_s=within_s)
            self._close_page()

    async def _read_messages(self) -> None:
        try:
            while (message := await self.receive()) is not None:
                self._handle_message(message)
        finally:
            await self._bury_process()

    def _handle_message(self, message: FromWorker) -> None:
        match message:
            case PongLoop():
                self._last_pong = self._last_turn = asyncio.get_running_loop().time()
            case Ask() | Begun():
                self._tell(self, message)
            case AttemptDone() | Raised() if self._forget_rollout(message.attempt_id):
                self._tell(self, message)

    async def _bury_process(self) -> None:
        """Clean up after the process, and report whose fault its death was."""
        self.alive = False
        for timer in self._ending.values():
            timer.cancel()
        await super().kill_and_wait()
        for task in self._tasks[1:]:
            task.cancel()
        marked, _ = MARK.unpack_from(self._mark, 0)
        self._close_page()
        is_full = self.exit_code == OUT_OF_MEMORY
        how = "ran out of memory (rollout.max_memory_gb)" if is_full else ended_how(self.exit_code)
        culprit = marked if self._culprit is None else self._culprit
        self._tell(self, WorkerDeath(self._how or how, culprit))
        for scratch in self._rollouts.values():
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    def _forget_rollout(self, attempt_id: int) -> bool:
        """Forget a rollout that ended; return whether its owner still wants to know."""
        self._rollouts.pop(attempt_id, None)
        timer = self._ending.pop(attempt_id, None)
        if timer is not None:
            timer.cancel()
        return timer is None

    async def _watch_stalls(self) -> None:
        loop, pause_s = asyncio.get_running_loop(), min(_PING_S, self._stall_timeout_s / 4)
        while True:
            self.send(PingLoop())
            before = loop.time()
            await asyncio.sleep(pause_s)
            # The time in which this process itself was stalled does not count.
            self._last_turn += max(0.0, loop.time() - before - 2 * pause_s)
            _, steps = MARK.unpack_from(self._mark, 0)
            if steps != self._steps:  # many short steps in one turn of the loop do not count as blocking
                self._steps, self._last_turn = steps, loop.time()
            if loop.time() - self._last_turn > self._stall_timeout_s:
                turn, where = self._last_turn, held_by(await self._read_stack())
                if self._last_turn != turn or MARK.unpack_from(self._mark, 0)[1] != steps:
                    continue  # it runs again
                self.kill(
                    f"blocked its event loop for {self._stall_timeout_s:g} s (rollout.stall_timeout_s)"
                    f"{where and f' in {where}'}; blocking code goes into `await context.run(...)`"
                )
                return

    async def _read_stack(self) -> str:
        """Make the process write its main thread's stack, which works even in the middle of native code."""
        os.ftruncate(self._page, MARK.size)  # drop an earlier stack; the processes share the file offset
        os.lseek(self._page, MARK.size, os.SEEK_SET)
        if self._process.returncode is None:  # a process that has ended ignores it
            os.kill(self._process.pid, STACK_SIGNAL)
        stack, end = b"", asyncio.get_running_loop().time() + _STACK_S
        while asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_LOOK_S)
            before, stack = stack, os.pread(self._page, _LONGEST_STACK, MARK.size)
            # Complete once it no longer grows.
            if stack and stack == before:
                break
        text = stack.decode(errors="replace")
        logger.warning(
            "what blocks the event loop of a process of rollout functions:\n%s", text or "(no stack was written)"
        )
        return text

    def _close_page(self) -> None:
        self._mark.close()
        os.close(self._page)


def held_by(stack: str) -> str:
    """Return the user's part of a faulthandler stack, outermost call first: `agent (my_agent.py:12) > ... > load
    (ssl.py:717)`."""
    frames = [(file, f"{name} ({Path(file).name}:{line})") for file, line, name in _FRAME.findall(stack)]
    ours = next((at for at, (file, _) in enumerate(frames) if file == worker_module.__file__), len(frames))
    # faulthandler prints the innermost call first.
    calls = [call for _, call in frames[:ours]][::-1]
    return " > ".join(calls if len(calls) <= 4 else [*calls[:2], "...", *calls[-2:]])
