"""Calls of users' code, in child processes: a function that hangs, holds Python's lock or crashes costs its own call.

    any thread   submit --.                         .--> Future
                          v                         |
    pool thread  waiting calls -> a child with room -> its reply, its deadline, or its death
                                    |        ^
    child                           '- call -'          (`workers.calls.child`)

A `def` gets up to `concurrency` children, one call at a time in each, started as they are needed; at its deadline the
child is killed. An `async def` gets one child with a loop of its own and `concurrency` calls at a time; at its deadline
a call is cancelled, and if the loop does not hear that within a second, the child is killed. Where a child ends with
several calls in its hands, each of them is made once more, alone, so that only the guilty one fails. Children die with
this process. Nothing here knows what is called: rewards, users' tasks and whatever else calls users' code have one
pool each. Torch-free.
"""

import asyncio
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from asyncflow.errors import AsyncFlowError, ConfigError, UserCodeFailed, UserCodeNotStarted, one_line
from workers.calls.frames import Load
from workers.calls.process import CallRaised, ChildDied, ChildProcess, ResultUnusable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """What children call.

    Attributes:
        function: `module:function` of ours, torch-free, which returns a `workers.calls.user_function.Callee` in the
            child.
        settings: its arguments; what JSON has.
        memory_bytes: limit of a child's address space; None: none.
    """

    function: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    memory_bytes: int | None = None


@dataclass(eq=False)
class _Call:
    """One call.

    Attributes:
        arguments: what JSON has.
        on: what it is called on, in words.
        outcome: of the caller.
        alone: it was in the hands of a child that died with several; now it gets one for itself.
    """

    arguments: Sequence[Any]
    on: str
    outcome: "Future[Any]"
    alone: bool = False


class CallPool:
    """Children that call one function. Thread-safe."""

    def __init__(self, entry: Entry, *, what: str, limit: str, timeout_s: float, concurrency: int) -> None:
        """Begin to start the first child.

        Args:
            entry: names the function.
            what: begins every message, e.g. `reward.function: my_rewards:score`.
            limit: name of the setting that holds the deadline.
            timeout_s: deadline of a call (s).
            concurrency: calls at a time.
        """
        self._entry = entry
        self._what = what
        self._limit = limit
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._closed = False
        self._ready: Future[None] = Future()
        # All below is the pool thread's.
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._waiting: deque[_Call] = deque()
        self._children: list[ChildProcess] = []
        self._dead: list[ChildProcess] = []
        self._starting = 0
        self._most_children = 1  # until the first one says what the function is
        self._refusal: ConfigError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="calls", daemon=True)
        self._thread.start()

    def until_ready(self) -> None:
        """Wait for the first child.

        Raises:
            ConfigError: the function cannot be imported.
            UserCodeNotStarted: the process did not start, twice.
        """
        self._ready.result()

    def submit(self, *arguments: Any, on: str) -> "Future[Any]":
        """Call the function.

        Args:
            arguments: what JSON has.
            on: what they are, in words, for messages: `response '7'`.

        Returns:
            The result, or `UserCodeFailed`, which names function and argument; cancelled once the pool is closed.
        """
        call = _Call(arguments, on, Future())
        with self._lock:
            if self._closed:
                call.outcome.cancel()
                return call.outcome
            self._calls.add(call)
            self._loop.call_soon_threadsafe(self._add, call)
        return call.outcome

    def call(self, *arguments: Any, on: str) -> Any:
        """Call the function and wait.

        Raises:
            UserCodeFailed: it raised, hung, or returned what cannot be used.
        """
        return self.submit(*arguments, on=on).result()

    def close(self) -> None:
        """Kill the children; what is not done is cancelled. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            with self._lock:
                self._closed = True
            self._ready.cancel()
            for call in list(self._calls):
                if not call.outcome.cancel() and not call.outcome.done():  # it was made
                    call.outcome.set_exception(CancelledError())

    async def _serve(self) -> None:
        self._grow()
        await self._closing.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in (*self._children, *self._dead):
            await child.gone()

    async def _bury(self, child: ChildProcess) -> None:
        await child.gone()
        self._dead.remove(child)

    def _add(self, call: _Call) -> None:
        if self._refusal is not None:
            self._settle(call, error=self._refusal)
            return
        self._waiting.append(call)
        self._assign()

    def _assign(self) -> None:
        """Give waiting calls to children with room."""
        for dead in [child for child in self._children if not child.alive]:
            self._children.remove(dead)
            self._dead.append(dead)
            self._begin(self._bury(dead))
        while self._waiting:
            call = self._waiting[0]
            child = next((child for child in self._children if child.has_room(alone=call.alone)), None)
            if child is None:
                self._grow()
                return
            self._waiting.popleft()
            if not _is_wanted(call):
                self._calls.discard(call)
                continue
            try:
                number = child.begin(call.arguments, alone=call.alone)
            except (TypeError, ValueError, OverflowError) as error:
                self._settle(call, error=UserCodeFailed(f"{self._what} cannot be called on {call.on}: {error}"))
            else:
                self._begin(self._await(call, child, number))

    def _grow(self) -> None:
        """Start a child if there is work for it and the limit allows one more."""
        most = min(self._most_children - len(self._children), max(1, len(self._waiting)))
        if self._starting < most:
            self._starting += 1
            self._begin(self._start_child())

    async def _start_child(self) -> None:
        try:
            child = await _started(self._entry)
        except Exception as error:  # noqa: BLE001  the boundary of a task: the call that waits for the child raises it
            self._starting -= 1
            self._not_started(error)
        else:
            self._starting -= 1
            self._most_children = 1 if child.is_async else self._concurrency
            child.capacity = self._concurrency if child.is_async else 1
            self._children.append(child)
            if not self._ready.done():
                self._ready.set_result(None)
        self._assign()

    def _not_started(self, error: Exception) -> None:
        """A function that is not there costs all calls; a later child that does not start, the one it was for."""
        why = f" ({error})" if str(error) else ""
        told: AsyncFlowError = UserCodeNotStarted(f"{self._what}: its process did not start{why}; see this log")
        if not self._ready.done():
            if isinstance(error, ConfigError):
                told = self._refusal = error
            self._ready.set_exception(told)
        for _ in range(len(self._waiting) if self._refusal else min(1, len(self._waiting))):
            self._settle(self._waiting.popleft(), error=told)

    async def _await(self, call: _Call, child: ChildProcess, number: int) -> None:
        try:
            self._settle(call, value=await child.result(number, self._timeout_s))
        except CallRaised as error:
            self._fail(call, f"raised {error} on {call.on}")
        except ResultUnusable as error:
            self._settle(call, error=UserCodeFailed(str(error)))
        except TimeoutError:
            self._fail(
                call,
                f"took longer than {self._limit} = {self._timeout_s:g} s on {call.on}; make it faster or raise the "
                f"limit",
            )
        except ChildDied:
            if child.crowded:
                call.alone = True
                self._waiting.appendleft(call)
            else:
                self._fail(call, f"ended its process on {call.on}; its last words are in this log")
        except Exception as error:  # noqa: BLE001  the boundary of a task: its caller raises it
            self._settle(call, error=error)
        self._assign()

    def _fail(self, call: _Call, how: str) -> None:
        self._settle(call, error=UserCodeFailed(f"{self._what} {how}"))

    def _settle(self, call: _Call, *, value: Any = None, error: Exception | None = None) -> None:
        self._calls.discard(call)
        if not _is_wanted(call):
            return
        if error is None:
            call.outcome.set_result(value)
        else:
            call.outcome.set_exception(error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_wanted(call: _Call) -> bool:
    """Whether its caller has not cancelled it, and from now on cannot."""
    return call.outcome.running() or call.outcome.set_running_or_notify_cancel()


async def _started(entry: Entry) -> ChildProcess:
    """Start a child, a second time if it dies or takes too long: memory or a disk may have been short for a moment."""
    path = [os.fsencode(place) for place in sys.path]
    load = Load(entry.function, entry.settings, path, entry.memory_bytes)
    try:
        return await _started_once(load)
    except (ChildDied, TimeoutError, OSError) as error:
        logger.warning("a process for users' code did not start (%s); starting it again", one_line(error))
        return await _started_once(load)


async def _started_once(load: Load) -> ChildProcess:
    child = ChildProcess(load)
    try:
        await child.until_loaded()
    except BaseException:
        await child.gone()
        raise
    return child
