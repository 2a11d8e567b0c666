"""Calls user code in child processes: a function that hangs, holds the GIL or crashes costs only its own call.

    any thread   submit --.                         .--> Future
                          v                         |
    pool thread  waiting calls -> a child with room -> its reply, its deadline, or its death
                                    |        ^
    child                           '- call -'          (`workers.calls.child`)

A `def` gets up to `concurrency` children, started on demand, with one call at a time in each; at a call's deadline its
child is killed. An `async def` gets one child with an event loop and `concurrency` concurrent calls; at its deadline a
call is cancelled, and if the loop does not confirm that within a second, the child is killed. If a child dies with
several calls in flight, each is repeated alone, so that only the guilty one fails. Children die with this process. The
pool does not know what it calls: rewards, tasks and other user code have one pool each. Torch-free.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from asyncflow.errors import AsyncFlowError, ConfigError, UserCodeFailed, UserCodeNotStarted, one_line
from workers.calls.child import CallFunction, Cancel, Load, Raised, Returned, ToChild, ToPool, Unusable
from workers.calls.child_process import RESPONSE_S, ChildDied, ChildProcess, Loaded, Refused, done_within

# One child of a pool, and its calls in flight. Used inside the pool's loop only.


class CallRaised(Exception):
    """The function raised; type and message."""


class ResultUnusable(Exception):
    """The function returned something unusable; the whole message."""


class PoolChild(ChildProcess[ToChild, ToPool]):
    """One child of a pool.

    Attributes:
        is_async: it accepts concurrent calls.
        capacity: how many; set by the pool.
        alive: it accepts calls.
        crowded: it died with several calls in flight, any of which may be the cause.
    """

    def __init__(self, python: str | None) -> None:
        super().__init__("workers.calls.child", ToPool, python=python)
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[ToPool]] = {}
        self._alone = False
        self._reading: asyncio.Task[None] | None = None
        self.is_async = False
        self.capacity = 1
        self.alive = True
        self.crowded = False

    async def load_entry(self, entry: "Entry") -> None:
        """Have it import what it is to call; see `load`."""
        self.is_async = (await self.load(Load(entry.function, entry.settings, entry.memory_bytes))).is_async
        self._reading = asyncio.create_task(self._read())

    def has_room(self, *, alone: bool) -> bool:
        """Return whether it accepts one more call now; an `alone` call needs an idle child."""
        if not self.alive or self._alone:
            return False
        return not self._replies if alone else len(self._replies) < self.capacity

    def died_idle(self) -> bool:
        """Return whether it died without a call in flight: the loop may not have read its end of file yet, and a call
        that began now would get the blame."""
        return not self._replies and self.has_ended()

    def begin(self, arguments: Sequence[Any], *, alone: bool) -> int:
        """Send a call (see `has_room`); return its number. Raises ValueError or TypeError if arguments cannot be
        encoded."""
        number = next(self._numbers)
        self.send(CallFunction(number, list(arguments)))
        self._replies[number] = asyncio.get_running_loop().create_future()
        self._alone = alone
        return number

    async def result(self, number: int, timeout_s: float) -> Any:
        """Wait for a call's result.

        Raises:
            CallRaised, ResultUnusable: see there.
            TimeoutError: it took too long, and was cancelled or its process killed.
            ChildDied: the process is gone, by itself or because another call took too long.
        """
        try:
            if not await done_within(self._replies[number], timeout_s):
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
                    raise AssertionError(f"{other} is not a reply to a call")
        finally:
            self._replies.pop(number, None)
            self._alone = False

    def terminate(self) -> None:
        """Ask its function to leave, if it has a handler for SIGTERM; see `child_process.parent_socket`."""
        # Not `Popen.terminate`: it would reap a dead child, and `kill` then no longer ends what that one started.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    def ending(self) -> str:
        """Say how the process ended; its own end counts, though `kill` came after it."""
        code = self._process.returncode
        if code is None:
            return "cannot be ended"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def kill(self) -> None:
        """Kill it; idempotent. Its calls raise `ChildDied`."""
        if not self.alive:
            return
        self.alive = False
        # Counted before the replies fail: `result` removes each.
        self.crowded = len(self._replies) > 1
        self.kill_process()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ChildDied())
                reply.exception()  # marks it as retrieved, as its caller may be gone

    async def kill_and_wait(self, *, within_s: float = 0.0) -> None:
        self.kill()
        await super().kill_and_wait(within_s=within_s)
        if self._reading is not None:
            await asyncio.wait({self._reading})

    async def _end(self, number: int) -> None:
        """End an overdue call: cancel it if other calls can continue, else kill the child. Raises ChildDied if other
        calls were in flight, one of which may have delayed this one."""
        if self.is_async and self.alive:
            heard = self._replies[number] = asyncio.get_running_loop().create_future()
            self.send(Cancel(number))
            if await done_within(heard, RESPONSE_S) and heard.exception() is None:
                return
        self.kill()
        if self.crowded:
            raise ChildDied

    async def _read(self) -> None:
        while (reply := await self.receive()) is not None:
            waiting = None if isinstance(reply, Loaded | Refused) else self._replies.get(reply.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(reply)
        self.kill()


logger = logging.getLogger(__name__)

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Entry:
    """What children call."""

    # Our own torch-free `module:function`, which returns a `workers.calls.user_function.Callee` in the child
    function: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # its arguments, JSON
    memory_bytes: int | None = None  # limit of a child's address space; None: unlimited
    python: str | None = None  # the children's interpreter; None: this one


@dataclass(eq=False)
class _Call:
    """One call."""

    arguments: Sequence[Any]  # JSON
    on: str  # the arguments in words
    outcome: "Future[Any]"
    alone: bool = False  # it was in flight in a child that died with several calls, and now gets a child for itself


class CallPool:
    """Children that call one function. Thread-safe.

    Args:
        what: begins every message, e.g. `reward.function: my_rewards:score`.
        limit: name of the setting with the deadline.
        timeout_s: deadline of a call (s).
        concurrency: concurrent calls.
    """

    def __init__(self, entry: Entry, *, what: str, limit: str, timeout_s: float, concurrency: int) -> None:
        self._entry = entry
        self._what = what
        self._limit = limit
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._closed = False
        self._ready: Future[None] = Future()
        # Everything below belongs to the pool thread.
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._waiting: deque[_Call] = deque()
        self._children: list[PoolChild] = []
        self._dead: list[PoolChild] = []
        self._starting = 0
        self._most_children = 1  # until the first child reports whether the function is async
        self._refusal: ConfigError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run_loop, name="calls", daemon=True)
        self._thread.start()

    def until_ready(self) -> None:
        """Wait for the first child; close the pool if there is none.

        Raises:
            ConfigError: the function cannot be imported.
            UserCodeNotStarted: the process did not start, twice.
        """
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    def submit(self, *arguments: Any, on: str) -> "Future[Any]":
        """Call the function with JSON arguments; `on` describes them in messages, e.g. `response '7'`. The future
        raises `UserCodeFailed`, naming function and arguments (or why the function cannot be imported), and is
        cancelled when the pool closes."""
        call = _Call(arguments, on, Future())
        # Under the lock: `close` must not end the loop between the check and the scheduling.
        with self._lock:
            if self._closed and self._refusal is not None:
                call.outcome.set_exception(self._refusal)
            elif self._closed:
                call.outcome.cancel()
            if self._closed:
                return call.outcome
            self._calls.add(call)
            self._loop.call_soon_threadsafe(self._add_call, call)
        return call.outcome

    def call_and_wait(self, *arguments: Any, on: str) -> Any:
        """Call the function and wait; raises UserCodeFailed if it raised, hung, or returned something unusable."""
        return self.submit(*arguments, on=on).result()

    def close(self) -> None:
        """Kill the children and cancel pending calls. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run_loop(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve_until_closed())
        finally:
            with self._lock:
                self._closed = True
            # However the loop ended, no caller may wait forever.
            self._ready.cancel()
            for call in list(self._calls):
                if not call.outcome.cancel() and not call.outcome.done():  # already running
                    call.outcome.set_exception(CancelledError())

    async def _serve_until_closed(self) -> None:
        self._grow_pool()
        await self._closing.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in (*self._children, *self._dead):
            await child.kill_and_wait()

    def _bury_child(self, child: PoolChild) -> None:
        self._children.remove(child)
        self._dead.append(child)
        self._begin_task(self._await_end(child))

    async def _await_end(self, child: PoolChild) -> None:
        await child.kill_and_wait()
        self._dead.remove(child)

    def _add_call(self, call: _Call) -> None:
        if self._refusal is not None:
            self._settle_call(call, error=self._refusal)
            return
        self._waiting.append(call)
        self._assign_calls()

    def _assign_calls(self) -> None:
        """Give waiting calls to children with room."""
        for dead in [child for child in self._children if not child.alive]:
            self._bury_child(dead)
        while self._waiting:
            call = self._waiting[0]
            child = next((child for child in self._children if child.has_room(alone=call.alone)), None)
            if child is None:
                self._grow_pool()
                return
            if child.died_idle():
                self._bury_child(child)
                continue
            self._waiting.popleft()
            if not _is_wanted(call):
                self._calls.discard(call)
                continue
            try:
                number = child.begin(call.arguments, alone=call.alone)
            except (TypeError, ValueError, OverflowError) as error:
                self._settle_call(call, error=UserCodeFailed(f"{self._what} cannot be called on {call.on}: {error}"))
            else:
                self._begin_task(self._await_result(call, child, number))

    def _grow_pool(self) -> None:
        """Start a child if there is work for it and the limit allows one more."""
        most = min(self._most_children - len(self._children), max(1, len(self._waiting)))
        if self._starting < most:
            self._starting += 1
            self._begin_task(self._start_child())

    async def _start_child(self) -> None:
        try:
            child = await _started(self._entry)
        except Exception as error:  # noqa: BLE001  boundary of a task: the call that waits for the child raises it
            self._starting -= 1
            self._not_started(error)
        else:
            self._starting -= 1
            self._most_children = 1 if child.is_async else self._concurrency
            child.capacity = self._concurrency if child.is_async else 1
            self._children.append(child)
            if not self._ready.done():
                self._ready.set_result(None)
        self._assign_calls()

    def _not_started(self, error: Exception) -> None:
        """Fail all calls if the function does not exist; if a later child does not start, fail the call that it was
        for."""
        why = f" ({error})" if str(error) else ""
        told: AsyncFlowError = UserCodeNotStarted(f"{self._what}: its process did not start{why}; see this log")
        if not self._ready.done():
            if isinstance(error, ConfigError):
                told = self._refusal = error
            self._ready.set_exception(told)
        for _ in range(len(self._waiting) if self._refusal else min(1, len(self._waiting))):
            self._settle_call(self._waiting.popleft(), error=told)

    async def _await_result(self, call: _Call, child: PoolChild, number: int) -> None:
        try:
            self._settle_call(call, value=await child.result(number, self._timeout_s))
        except CallRaised as error:
            self._fail_call(call, f"raised {error} on {call.on}")
        except ResultUnusable as error:
            self._settle_call(call, error=UserCodeFailed(str(error)))
        except TimeoutError:
            self._fail_call(
                call,
                f"took longer than {self._limit} = {self._timeout_s:g} s on {call.on}; make it faster or raise the "
                f"limit",
            )
        except ChildDied:
            # Any of the child's calls may be guilty: repeat this one alone.
            if child.crowded:
                call.alone = True
                self._waiting.appendleft(call)
            else:
                self._fail_call(call, f"ended its process on {call.on}; its last words are in this log")
        except Exception as error:  # noqa: BLE001  boundary of a task: its caller raises it
            self._settle_call(call, error=error)
        self._assign_calls()

    def _fail_call(self, call: _Call, how: str) -> None:
        self._settle_call(call, error=UserCodeFailed(f"{self._what} {how}"))

    def _settle_call(self, call: _Call, *, value: Any = None, error: Exception | None = None) -> None:
        self._calls.discard(call)
        if not _is_wanted(call):
            return
        if error is None:
            call.outcome.set_result(value)
        else:
            call.outcome.set_exception(error)

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def converted(done: "Future[A]", convert: "Callable[[Future[A]], B]") -> "Future[B]":
    """Return a future of what `convert` makes of a future that is done, or of the exception that it raises."""
    result: Future[B] = Future()
    result.set_running_or_notify_cancel()

    def settle(done: "Future[A]") -> None:
        try:
            result.set_result(convert(done))
        except Exception as error:  # noqa: BLE001  boundary of a thread: whoever waits for the result raises it
            result.set_exception(error)

    done.add_done_callback(settle)
    return result


def _is_wanted(call: _Call) -> bool:
    """Return whether the caller has not cancelled it; from now on it cannot."""
    return call.outcome.running() or call.outcome.set_running_or_notify_cancel()


async def _started(entry: Entry) -> PoolChild:
    """Start a child, with a second attempt if it dies or takes too long: memory or disk may be short for a moment."""
    try:
        return await _started_once(entry)
    except (ChildDied, TimeoutError, OSError) as error:
        logger.warning("a process for user code did not start (%s); starting it again", one_line(error))
        return await _started_once(entry)


async def _started_once(entry: Entry) -> PoolChild:
    child = PoolChild(entry.python)
    await child.load_entry(entry)
    return child


class CallProcess:
    """One child for one caller, who makes one call after the other. It dies with the thread that constructs this.

    A function that handles SIGTERM gets it when its call's time is up, or the caller is interrupted, and may clean up
    for `LEAVE_S`. Then its process is killed with all that it started. Not thread-safe.
    """

    LEAVE_S = 2.0

    def __init__(self, entry: Entry) -> None:
        self._child = PoolChild(entry.python)
        self._entry = entry
        self._loaded = False
        self._runner = asyncio.Runner()

    def __enter__(self) -> "CallProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._gone())
        self._runner.close()

    def call(self, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call the function with JSON arguments; the first call also waits until it is imported.

        Raises:
            CallRaised, ResultUnusable: see there.
            ConfigError: the function cannot be imported.
            TimeoutError: it took longer; there are no further calls.
            ChildDied: the process ended; says how.
        """
        return self._runner.run(self._call(arguments, timeout_s))

    async def _call(self, arguments: Sequence[Any], timeout_s: float | None) -> Any:
        try:
            if not self._child.alive:
                raise ChildDied
            if not self._loaded:
                self._loaded = True  # it is tried once
                await self._child.load_entry(self._entry)
            return await self._result(self._child.begin(arguments, alone=False), timeout_s)
        except ChildDied:
            await self._gone()
            raise ChildDied(self._child.ending()) from None

    async def _result(self, number: int, timeout_s: float | None) -> Any:
        answer = asyncio.ensure_future(self._child.result(number, math.inf))
        in_time = False
        try:
            in_time = bool((await asyncio.wait({answer}, timeout=timeout_s))[0])
        finally:
            if not in_time:
                self._child.terminate()
                await asyncio.wait({answer}, timeout=self.LEAVE_S)
                self._child.kill()
                await asyncio.gather(answer, return_exceptions=True)
        if not in_time:
            raise TimeoutError(f"timed out after {timeout_s:g} s")
        return answer.result()

    async def _gone(self) -> None:
        with contextlib.suppress(TimeoutError):  # a process that hangs in the kernel ends when the kernel lets it
            await asyncio.wait_for(self._child.kill_and_wait(), self.LEAVE_S)
