"""A process that runs users' rollout functions: one event loop with many rollouts, started by the session service.

    python -m workers.agents.worker PARENT_PID SOCKET MARK

It holds neither weights nor an engine, and imports torch only if the user's module does. While a step of a rollout's
coroutines executes, the shared file MARK names its attempt. So when the process dies or its loop hangs, the service
knows whose code it was; it then requests the stack with a signal, which is written after the mark.

Rollouts start at the pace that the loop sustains (`StartPace`): otherwise a thousand of them, each blocking the loop
for 40 ms, would block it for 40 s.
"""

import asyncio
import contextvars
import errno
import faulthandler
import itertools
import mmap
import os
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncflow.errors import ConfigError, UserCodeFailed, one_line
from asyncflow.process import limit_resources
from workers.agents.api import Context, Model, Sample, Tool, load_tools, task_of
from workers.agents.other_model import OtherModel
from workers.agents.rollout_errors import BudgetSpent, TaskSkipped
from workers.agents.turns import ChatRequest, Reply
from workers.agents.wire import (
    Ask,
    AttemptDone,
    Begun,
    FromWorker,
    NotTold,
    PendingReplies,
    PingLoop,
    PongLoop,
    ProcessorTime,
    Raised,
    Setup,
    Start,
    StopAttempt,
    Told,
    ToWorker,
    attempt_done,
)
from workers.calls.child_process import Loaded, Refused, StreamChannel, parent_socket
from workers.calls.user_function import is_async, load_function
from workers.rewards.base import metrics_of, reward_of, rewards_of
from workers.settings.rollout import FUNCTIONS

NOBODY = -1
"""In the shared file: no rollout's code is running."""
MARK = struct.Struct("qq")
"""Which attempt's code is running, and how many steps have begun so far. A requested stack is written after it."""
STACK_SIGNAL = signal.SIGUSR2
OUT_OF_MEMORY = 77
"""Exit code."""
_MOST_LAG_S = 0.1  # a turn of the loop longer than this makes fewer rollouts begin in the next one (s)
_MOST_STARTS = 64

# Path prefixes of AsyncFlow's own workers and of Python's library
_NOT_USERS = (str(Path(__file__).parents[1]), str(Path(asyncio.__file__).parents[1]))
_attempt: contextvars.ContextVar[int] = contextvars.ContextVar("attempt", default=NOBODY)
_steps = itertools.count(1)


class StartPace:
    """How many rollouts (`number`, at least 1) begin per turn of the event loop: more while it keeps up, fewer when it
    lags."""

    def __init__(self) -> None:
        self.number = 1

    def turn_took(self, seconds: float) -> None:
        """Account for the last turn, including everything that ran in it."""
        self.number = max(1, self.number // 2) if seconds > _MOST_LAG_S else min(_MOST_STARTS, 2 * self.number)


def main() -> None:
    connection, page = parent_socket(), int(sys.argv[3])
    os.set_inheritable(page, False)  # programs started by the user's code must not hold it open
    # faulthandler writes at the file's offset: after the mark.
    os.lseek(page, MARK.size, os.SEEK_SET)
    faulthandler.register(STACK_SIGNAL, file=page, all_threads=False)
    with mmap.mmap(page, MARK.size) as mark, asyncio.Runner() as runner:
        serving, told = runner.get_loop().create_task(_serve(connection, mark)), False
        while not serving.done():
            try:
                runner.get_loop().run_until_complete(serving)
            except (SystemExit, KeyboardInterrupt) as error:  # from a bare callback: resume the loop where it was
                if not told:
                    traceback.print_exception(error)
                told = True
        serving.result()


async def _serve(connection: socket.socket, mark: mmap.mmap) -> None:
    channel: StreamChannel[FromWorker, ToWorker] = await StreamChannel.open(connection, ToWorker)
    setup = await channel.receive()
    assert isinstance(setup, Setup)
    limit_resources(memory_bytes=setup.max_memory_bytes, file_bytes=setup.max_file_bytes)
    try:
        worker = Worker(channel, setup)
    except ConfigError as error:
        channel.send(Refused(str(error)))
        await channel.drain()
        return
    asyncio.get_running_loop().set_task_factory(lambda loop, coroutine, **more: _marked(loop, coroutine, mark, **more))
    channel.send(Loaded())
    await worker.serve_rollouts()


class Worker:
    """The rollouts of one process. The constructor raises ConfigError if the function, a tool or another model is
    unusable."""

    def __init__(self, channel: StreamChannel[FromWorker, ToWorker], setup: Setup) -> None:
        self._channel = channel
        self._asked: PendingReplies[Reply] = PendingReplies()
        self._in_line: deque[Start] = deque()
        self._came = asyncio.Event()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._told = False
        self.tools: Sequence[Tool] = load_tools(setup.tools)
        self._models = {name: OtherModel(name, settings) for name, settings in setup.models.items()}
        self._rollout = load_rollout(setup.function, setup.agent)
        self._body = self._call_function if setup.agent is None else self._call_agent
        self._cpu = ProcessorTime()

    async def serve_rollouts(self) -> None:
        """Start and stop rollouts and deliver replies, until the service is gone."""
        beginning = asyncio.create_task(self._begin_in_line())
        while (message := await self._channel.receive()) is not None:
            match message:
                case Start():
                    self._in_line.append(message)
                    self._came.set()
                case StopAttempt():
                    self._stop_rollout(message.attempt_id)
                case Told():
                    self._asked.settle(message.number, message.reply)
                case NotTold():
                    error = BudgetSpent(message.text) if message.budget else UserCodeFailed(message.text)
                    self._asked.settle(message.number, error)
                case PingLoop():
                    self._channel.send(PongLoop())
        beginning.cancel()
        for model in self._models.values():
            await model.close()

    async def _begin_in_line(self) -> None:
        """Start queued rollouts, as many per turn of the loop as it keeps up with."""
        loop, pace = asyncio.get_running_loop(), StartPace()
        while True:
            await self._came.wait()
            for _ in range(min(pace.number, len(self._in_line))):
                self._begin_rollout(self._in_line.popleft())
            if not self._in_line:
                self._came.clear()
            before = loop.time()
            await asyncio.sleep(0)  # each takes its first step, and every other task its next one
            pace.turn_took(loop.time() - before)

    def _begin_rollout(self, start: Start) -> None:
        self._channel.send(Begun(start.attempt_id))
        # The task copies the current context, and with it the attempt; see `_marked`.
        token = _attempt.set(start.attempt_id)
        self._running[start.attempt_id] = asyncio.create_task(self._run_rollout(start))
        _attempt.reset(token)

    def _stop_rollout(self, attempt_id: int) -> None:
        if (task := self._running.get(attempt_id)) is not None:
            # After its first step: a task cancelled before that would never report its end.
            asyncio.get_running_loop().call_soon(task.cancel)
            return
        waiting = [start for start in self._in_line if start.attempt_id == attempt_id]
        for start in waiting:
            self._in_line.remove(start)
            self._channel.send(Raised(attempt_id, "it was stopped before it began"))

    async def ask(self, attempt_id: int, request: ChatRequest) -> Reply:
        with self._asked.call() as (number, reply):
            try:
                self._channel.send(Ask(number, attempt_id, request))
            except (TypeError, ValueError, OverflowError, RecursionError) as error:  # not representable in msgpack
                raise UserCodeFailed(f"messages and tools must be plain JSON: {one_line(error)}") from error
            return await reply

    async def _run_rollout(self, start: Start) -> None:
        outcome: AttemptDone | Raised
        try:
            outcome = replace(await self._body(start), cpu_s=self._cpu.since_last())
        except BudgetSpent as error:
            outcome = Raised(start.attempt_id, str(error), spent=True)
        except TaskSkipped as error:
            outcome = Raised(start.attempt_id, str(error), skipped=True)
        except BaseException as error:  # noqa: BLE001  boundary to user code, which may call sys.exit
            outcome = self._make_raised(start.attempt_id, error)
        finally:
            del self._running[start.attempt_id]
        try:
            self._channel.send(outcome)
        except (TypeError, ValueError, OverflowError) as error:  # text that is not Unicode, a number out of range
            self._channel.send(Raised(start.attempt_id, f"its result cannot be passed on: {one_line(error)}"))
        if Path(start.scratch).exists():
            await asyncio.to_thread(shutil.rmtree, start.scratch, ignore_errors=True)

    def _make_raised(self, attempt_id: int, error: BaseException) -> Raised:
        if not self._told and not isinstance(error, asyncio.CancelledError | UserCodeFailed):
            self._told = True
            traceback.print_exception(error)
        if isinstance(error, MemoryError):  # what this process holds would make the next rollout fail too
            os._exit(OUT_OF_MEMORY)
        why = " (rollout.max_file_gb)" if isinstance(error, OSError) and error.errno == errno.EFBIG else ""
        return Raised(attempt_id, one_line(error) + why + _where(error))

    async def _call_function(self, start: Start) -> AttemptDone:
        deadline, scratch = time.monotonic() + start.timeout_s, Path(start.scratch)
        context = Context(deadline, scratch, self.tools, start.attempt, self._models)
        returned = await self._rollout(task_of(start.rollout), Model(partial(self.ask, start.attempt_id)), context)
        return _done(start.attempt_id, returned, context.metrics)

    async def _call_agent(self, start: Start) -> AttemptDone:
        returned = await self._rollout(task_of(start.rollout), f"{start.base_url}/v1", start.key)
        return attempt_done(start.attempt_id, [], *reward_of(returned))


def _where(error: BaseException) -> str:
    """Return the user's line that raised the error, or "" if there is none or our own message says enough."""
    if isinstance(error, UserCodeFailed):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_NOT_USERS)]
    return f" ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else ""


class _Marked(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are marked with the attempt that they belong to."""

    def __init__(self, inner: Coroutine[Any, Any, Any], attempt_id: int, mark: mmap.mmap) -> None:
        self._inner = inner
        self._attempt_id = attempt_id
        self._mark = mark
        self.__name__ = getattr(inner, "__name__", "coroutine")
        self.__qualname__ = getattr(inner, "__qualname__", "coroutine")

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._inner.throw, *error)

    def _step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        number = next(_steps)
        MARK.pack_into(self._mark, 0, self._attempt_id, number)
        try:
            return step(*arguments)
        except (SystemExit, KeyboardInterrupt) as error:  # asyncio would stop the loop, and with it all other rollouts
            raise RuntimeError(f"a task of the rollout raised {one_line(error)}") from error
        finally:
            MARK.pack_into(self._mark, 0, NOBODY, number)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


def _marked(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], mark: mmap.mmap, **more: Any
) -> "asyncio.Task[Any]":
    """Create a task; tasks created by a rollout's code, however deeply nested, inherit its attempt."""
    context = more.get("context")
    attempt_id = _attempt.get() if context is None else context.get(_attempt, NOBODY)
    if attempt_id != NOBODY and asyncio.iscoroutine(coroutine):
        coroutine = _Marked(coroutine, attempt_id, mark)
    return asyncio.Task(coroutine, loop=loop, **more)


def load_rollout(function: str | None, agent: str | None) -> Callable[..., Any]:
    """Import `rollout.function` or `rollout.agent` (exactly one is set); raises ConfigError if it is unusable."""
    if agent is not None:
        field, name, arguments = "rollout.agent", agent, ("task", "base_url", "api_key")
    else:
        assert function is not None, "an agent's program is not called from here"
        field, name, arguments = "rollout.function", FUNCTIONS.locate_class(function), ("task", "model", "context")
    if agent is None and isinstance(load_function(name, field=field, arguments=None), type):
        name += ".rollout"  # an environment
    found = load_function(name, field=field, arguments=arguments)
    if not is_async(found):
        raise ConfigError(f"{field}: {name} is not a coroutine function; write `async def`")
    return found


def _done(attempt_id: int, returned: Any, logged: Mapping[str, float]) -> AttemptDone:
    """Check what a rollout function returned; raises UserCodeFailed if it is unusable."""
    samples = returned if isinstance(returned, list) else [returned]
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        kinds = type(returned).__name__ if not isinstance(returned, list) else [type(one).__name__ for one in returned]
        raise UserCodeFailed(f"the rollout function returned {kinds}; return chat.sample(...), or a list of samples")
    if any(sample.attempt_id != attempt_id for sample in samples):
        raise UserCodeFailed("the rollout function returned a sample of another rollout; return one of its own chats")
    nodes = [sample.node for sample in samples]
    if len(set(nodes)) < len(nodes):
        raise UserCodeFailed("the rollout function returned one sample twice")
    given = {id(sample): rewards_of(sample.reward) for sample in samples if sample.reward is not None}
    rewards = {reward for reward in given.values() if not isinstance(reward, list)}
    turn_rewards = _turn_rewards([(one, reward) for one in samples if isinstance(reward := given.get(id(one)), list)])
    if len(rewards) > 1:
        raise UserCodeFailed(f"the samples of one rollout have rewards {sorted(rewards)}; a rollout has one reward")
    if rewards and turn_rewards is not None:
        raise UserCodeFailed(
            "some samples of the rollout have one reward, others one per reply; give all of them the same kind"
        )
    metrics = dict(logged)
    for sample in samples:
        metrics |= metrics_of(sample.metrics)
    nodes = list(dict.fromkeys(node for sample in samples for node in (*sample.earlier, sample.node)))
    return AttemptDone(attempt_id, nodes, rewards.pop() if rewards else None, metrics, turn_rewards=turn_rewards)


def _turn_rewards(samples: Sequence[tuple[Sample, Sequence[float]]]) -> dict[int, float] | None:
    """Return the reward of each reply, by its node; None without samples."""
    found: dict[int, float] = {}
    for sample, rewards in samples:
        replies = (*sample.earlier, sample.node)
        if len(rewards) != len(replies):
            raise UserCodeFailed(
                f"a sample of {len(replies)} replies has {len(rewards)} rewards; give one for each reply, in order, or "
                f"one number for the whole rollout"
            )
        for node, reward in zip(replies, rewards, strict=True):
            if found.setdefault(node, reward) != reward:
                raise UserCodeFailed(
                    f"two samples share a reply and give it rewards {found[node]:g} and {reward:g}; give it the same"
                )
    return found if samples else None


if __name__ == "__main__":
    main()
