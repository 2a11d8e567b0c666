"""The session service of one instance: holds the conversations of its rollouts, between users' code and the engine.

    python -u -P -m workers.agents.service PARENT_PID SOCKET

    engine process <--- tokens ---> service <--- messages ---> user workers, agents behind the gateway

Each rollout has a session (`workers.agents.session`), which knows every token that was drawn in it. All doors end in
`complete`. A rollout ends once: its function returned, a budget is spent (truncated), it was skipped, or it failed
`max_attempts` times. Workers that die or stand still are replaced; the rollout whose code ran pays an attempt, the
others begin again for nothing. It dies with the engine process, and its workers with it.
"""

import asyncio
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncflow.errors import AsyncFlowError, ConfigError, one_line
from asyncflow.process import die_with_parent
from workers.agents.channel import Channel
from workers.agents.command import run_command
from workers.agents.errors import BadAgentRequest, ContextLengthExceeded, SessionGone
from workers.agents.gateway import Gateway
from workers.agents.messages import (
    Abandon,
    Ask,
    Begin,
    Broken,
    Done,
    Draw,
    Drawn,
    Failed,
    Finished,
    FromService,
    NotDrawn,
    NotTold,
    Raised,
    Ready,
    SampleTokens,
    Setup,
    Start,
    Told,
    ToService,
    Undraw,
)
from workers.agents.rendering import load_renderer
from workers.agents.requests import ChatRequest, Completion
from workers.agents.session import Session, call_seed
from workers.agents.user_workers import UserWorker, WorkerDeath
from workers.calls.child import outlive_stop_signals

logger = logging.getLogger(__name__)

CANCEL_S = 2.0
"""How long a cancelled rollout may take to end before its process is killed (s)."""
_MOST_DEATHS = 3
"""Workers that die one after the other, with no rollout finished in between and nobody's code running, before all that
they held pay an attempt."""


class BudgetIsSpent(AsyncFlowError):
    """The rollout may draw no more; says what it has spent."""


@dataclass(eq=False)
class _Rollout:
    """One rollout in progress; an attempt has a session and a key of its own."""

    begin: Begin
    run: int
    session: Session
    key: str
    attempt: int = 0
    worker: UserWorker | None = None
    command: "asyncio.Task[None] | None" = None
    deadline: asyncio.TimerHandle | None = None
    began: float = field(default_factory=time.monotonic)
    turns: int = 0
    num_drawn: int = 0
    num_drawing: int = 0
    model_s: float = 0.0
    model_since: float = 0.0
    cut: bool = False
    response: str = ""
    asks: "set[asyncio.Task[None]]" = field(default_factory=set)


class Service:
    """All sessions of one instance; runs in one event loop."""

    def __init__(self, engine: Channel[FromService, ToService], setup: Setup) -> None:
        """Load the tokenizer.

        Raises:
            ConfigError: it, or its template, cannot be used.
        """
        self._engine = engine
        self._setup = setup
        self._renderer = load_renderer(Path(setup.model_dir), setup.renderer)
        self._gateway = Gateway(self) if setup.agent is not None or setup.command else None
        self._workers: list[UserWorker] = []
        self._rollouts: dict[int, _Rollout] = {}
        """By `_Rollout.run`, which names an attempt."""
        self._num_runs = 0
        self._keys: dict[str, _Rollout] = {}
        self._drawing: dict[int, asyncio.Future[Drawn]] = {}
        self._num_calls = 0
        self._deaths = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Serve until the engine process is gone.

        Raises:
            ConfigError: the user's function cannot be used.
        """
        if self._gateway is not None:
            await self._gateway.start()
        if not self._setup.command:
            for _ in range(self._setup.num_workers):
                self._workers.append(await self._new_worker())
        self._engine.send(Ready(self._base_url))
        while (message := await self._engine.receive()) is not None:
            match message:
                case Begin():
                    self._begin(message)
                case Abandon():
                    for rollout in list(self._rollouts.values()):
                        self._end(rollout)
                case Drawn():
                    self._settle(message.call, message)
                case NotDrawn():
                    self._settle(message.call, BadAgentRequest("messages", message.text))

    # What the doors ask for.

    async def complete(self, key: str, request: ChatRequest) -> Completion:
        """Have the policy reply in the session of `key`.

        Raises:
            SessionGone: it has ended.
            ContextLengthExceeded: the conversation is longer than a call may be.
            BudgetIsSpent: the rollout may draw no more.
            BadAgentRequest: the conversation cannot be rendered.
        """
        rollout = self._keys.get(key)
        if rollout is None:
            raise SessionGone("this rollout has ended")
        _, completion = await self._complete(rollout, request, None)
        return completion

    def count(self, key: str, request: ChatRequest) -> int:
        """Return the tokens of a conversation.

        Raises:
            SessionGone: the session has ended.
        """
        if key not in self._keys:
            raise SessionGone("this rollout has ended")
        return len(self._renderer.render(request.messages, request.tools))

    async def _complete(
        self, rollout: _Rollout, request: ChatRequest, token_ids: Sequence[int] | None
    ) -> tuple[int, Completion]:
        session, setup = rollout.session, self._setup
        if token_ids is None:
            prompt = session.prompt(request.messages, request.tools)
        else:
            prompt = session.prompt_of_tokens(token_ids)
        room = self._room(rollout, len(prompt.ids), request.max_tokens)
        rollout.turns += 1
        seed = call_seed(rollout.begin.seed + rollout.attempt, prompt.ids, session.repetition(prompt.ids))
        drawn = await self._draw(rollout, prompt.ids, room, seed)
        if rollout.key not in self._keys:
            raise SessionGone("this rollout has ended")
        rollout.num_drawn += len(drawn.token_ids)
        recorded = session.record(
            prompt,
            token_ids=drawn.token_ids,
            log_probs=drawn.log_probs,
            versions=drawn.versions,
            truncated=drawn.truncated,
            stop=request.stop,
        )
        rollout.cut = drawn.truncated
        rollout.response = recorded.message.get("content") or ""
        return recorded.node, Completion(
            message=recorded.message,
            finish_reason=recorded.finish_reason,
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(drawn.token_ids),
            token_ids=drawn.token_ids,
            log_probs=drawn.log_probs,
        )

    def _room(self, rollout: _Rollout, num_prompt: int, max_tokens: int | None) -> int:
        """Return how many tokens a call may draw."""
        setup = self._setup
        if setup.max_turns and rollout.turns >= setup.max_turns:
            raise BudgetIsSpent(f"rollout.max_turns: this rollout has had its {setup.max_turns} turns")
        room = min(max_tokens or setup.max_response_tokens, setup.max_response_tokens)
        if setup.max_tokens:
            room = min(room, setup.max_tokens - rollout.num_drawn)
            if room <= 0:
                raise BudgetIsSpent(f"rollout.max_tokens: this rollout has drawn its {setup.max_tokens} tokens")
        if setup.max_context:
            room = min(room, setup.max_context - num_prompt)
            if room <= 0:
                raise ContextLengthExceeded(
                    f"this model's maximum context length is {setup.max_context} tokens; the messages have {num_prompt}"
                )
        return room

    async def _draw(self, rollout: _Rollout, prompt: Sequence[int], room: int, seed: int) -> Drawn:
        self._num_calls += 1
        call = self._num_calls
        drawn = self._drawing[call] = asyncio.get_running_loop().create_future()
        stop_ids = list(self._renderer.stop_ids)
        self._engine.send(Draw(call, rollout.begin.ticket, list(prompt), room, stop_ids, seed))
        if not rollout.num_drawing:
            rollout.model_since = time.monotonic()
        rollout.num_drawing += 1
        try:
            return await drawn
        finally:
            rollout.num_drawing -= 1
            if not rollout.num_drawing:
                rollout.model_s += time.monotonic() - rollout.model_since
            if self._drawing.pop(call, None) is not None and not (drawn.done() and not drawn.cancelled()):
                self._engine.send(Undraw(call))

    def _settle(self, call: int, outcome: Drawn | Exception) -> None:
        waiting = self._drawing.get(call)
        if waiting is None or waiting.done():
            return
        if isinstance(outcome, Drawn):
            waiting.set_result(outcome)
        else:
            waiting.set_exception(outcome)

    # What user workers say.

    def asked(self, worker: UserWorker, ask: Ask) -> None:
        """A worker's rollout wants a reply."""
        rollout = self._rollouts.get(ask.run)
        if rollout is None:
            worker.send(NotTold(ask.number, "this rollout has ended", budget=True))
            return
        self._keep(rollout.asks, self._answer(worker, rollout, ask))

    async def _answer(self, worker: UserWorker, rollout: _Rollout, ask: Ask) -> None:
        request = ChatRequest(
            messages=ask.messages, tools=ask.tools, max_tokens=ask.max_tokens, stop=tuple(ask.stop), repeat_key=None
        )
        try:
            node, reply = await self._complete(rollout, request, ask.prompt)
        except (BudgetIsSpent, ContextLengthExceeded, SessionGone) as error:
            worker.send(NotTold(ask.number, str(error), budget=True))
        except (AsyncFlowError, ValueError, TypeError, KeyError) as error:  # what a template makes of odd messages
            worker.send(NotTold(ask.number, one_line(error), budget=False))
        else:
            worker.send(Told(ask.number, node, reply.message, reply.finish_reason, list(reply.token_ids)))

    def done(self, worker: UserWorker, message: Done) -> None:
        """A function returned."""
        rollout = self._rollouts.get(message.run)
        if rollout is not None:
            self._returned(rollout, message)

    def raised(self, worker: UserWorker, message: Raised) -> None:
        """A function raised."""
        rollout = self._rollouts.get(message.run)
        if rollout is None:
            return
        if message.spent:
            self._truncate(rollout)
        elif message.skipped:
            self._end(rollout)
            self._engine.send(Failed(rollout.begin.ticket, message.text, skipped=True))
        else:
            self._failed(rollout, message.text)

    def died(self, worker: UserWorker, death: WorkerDeath) -> None:
        """A worker is gone: begin its rollouts again in another one."""
        self._workers.remove(worker)
        held = [rollout for rollout in self._rollouts.values() if rollout.worker is worker]
        for rollout in held:
            rollout.worker = None
        culprit = self._rollouts.get(death.run)
        self._deaths += culprit is None
        all_pay = culprit is None and self._deaths > _MOST_DEATHS
        logger.warning("a process of rollout functions %s; its %d rollouts begin again", death.how, len(held))
        self._keep(self._tasks, self._replace(held, culprit, death.how, all_pay))

    async def _replace(self, held: Sequence[_Rollout], culprit: _Rollout | None, how: str, all_pay: bool) -> None:
        try:
            self._workers.append(await self._new_worker())
        except (ConfigError, OSError, TimeoutError) as error:
            self._engine.send(Broken(f"a process of rollout functions did not start again: {one_line(error)}"))
            return
        for rollout in held:
            if rollout.run not in self._rollouts:
                continue
            if rollout is culprit or all_pay:
                self._failed(rollout, f"its process {how}")
            else:
                self._again(rollout)

    async def _new_worker(self) -> UserWorker:
        worker = await UserWorker.start(self._setup, self)
        if worker.tools:
            self._renderer.check_tools(worker.tools)
        return worker

    # A rollout's life.

    def _begin(self, begin: Begin) -> None:
        self._start(begin, attempt=0)

    def _again(self, rollout: _Rollout) -> None:
        """Begin an attempt, with nothing of an earlier one."""
        self._end(rollout)
        self._start(rollout.begin, attempt=rollout.attempt)

    def _start(self, begin: Begin, *, attempt: int) -> None:
        self._num_runs += 1
        rollout = _Rollout(begin, self._num_runs, Session(self._renderer), secrets.token_urlsafe(24), attempt)
        self._rollouts[rollout.run] = self._keys[rollout.key] = rollout
        setup = self._setup
        loop = asyncio.get_running_loop()
        rollout.deadline = loop.call_later(setup.timeout_s, self._truncate, rollout)
        scratch = str(Path(setup.scratch) / f"{begin.index}-{rollout.run}")
        start = Start(rollout.run, begin, attempt, self._base_url, rollout.key, setup.timeout_s, scratch)
        if setup.command:
            rollout.command = loop.create_task(self._run_command(rollout, start))
            return
        live = [worker for worker in self._workers if worker.alive]
        if not live:  # its replacement takes it
            rollout.worker = None
            self._keep(self._tasks, self._when_there_is_a_worker(rollout, start))
            return
        self._give(min(live, key=lambda worker: worker.num_rollouts), rollout, start)

    async def _when_there_is_a_worker(self, rollout: _Rollout, start: Start) -> None:
        while not any(worker.alive for worker in self._workers):
            await asyncio.sleep(0.05)
        if rollout.run in self._rollouts:
            live = [worker for worker in self._workers if worker.alive]
            self._give(min(live, key=lambda worker: worker.num_rollouts), rollout, start)

    def _give(self, worker: UserWorker, rollout: _Rollout, start: Start) -> None:
        rollout.worker = worker
        worker.begin(start)

    async def _run_command(self, rollout: _Rollout, start: Start) -> None:
        try:
            reward, metrics = await run_command(self._setup.command, start)
        except AsyncFlowError as error:
            self._failed(rollout, str(error))
        else:
            self._returned(rollout, Done(rollout.run, [], reward, metrics))

    def _returned(self, rollout: _Rollout, done: Done) -> None:
        try:
            self._finish(rollout, done, truncated=rollout.cut)
        except AsyncFlowError as error:
            self._failed(rollout, str(error))

    def _truncate(self, rollout: _Rollout) -> None:
        """A budget is spent: what was drawn is the rollout, and it is not made again."""
        if rollout.run not in self._rollouts:
            return
        try:
            self._finish(rollout, Done(rollout.run, [], None, {}), truncated=True)
        except AsyncFlowError as error:
            self._failed(rollout, f"its time was up (rollout.timeout_s), and {error}")

    def _finish(self, rollout: _Rollout, done: Done, *, truncated: bool) -> None:
        session = rollout.session
        samples = [
            SampleTokens(one.token_ids, one.response_mask, one.log_probs, one.versions)
            for one in session.samples(done.nodes or None)
        ]
        if not any(sample.log_probs for sample in samples):
            raise BadAgentRequest("rollout", "the policy was asked for nothing")
        if rollout.num_drawing:
            rollout.model_s += time.monotonic() - rollout.model_since
        self._deaths = 0
        self._end(rollout)
        self._engine.send(
            Finished(
                rollout.begin.ticket,
                samples,
                done.reward,
                rollout.response,
                truncated,
                done.metrics,
                session.conversations(done.nodes or None),
                rollout.turns,
                max(0.0, time.monotonic() - rollout.began - rollout.model_s),
            )
        )

    def _failed(self, rollout: _Rollout, text: str) -> None:
        rollout.attempt += 1
        if rollout.attempt < self._setup.max_attempts:
            logger.warning("rollout of row %d: %s; attempt %d", rollout.begin.index, text, rollout.attempt + 1)
            self._again(rollout)
            return
        self._end(rollout)
        self._engine.send(Failed(rollout.begin.ticket, text))

    def _end(self, rollout: _Rollout) -> None:
        """Leave nothing of it: its key is void, its function is told to stop."""
        self._rollouts.pop(rollout.run, None)
        self._keys.pop(rollout.key, None)
        if rollout.deadline is not None:
            rollout.deadline.cancel()
        for ask in list(rollout.asks):
            ask.cancel()
        if rollout.command is not None and rollout.command is not asyncio.current_task():
            rollout.command.cancel()
        if rollout.worker is not None:
            rollout.worker.end(rollout.run, within_s=CANCEL_S)

    @property
    def _base_url(self) -> str:
        return "" if self._gateway is None else self._gateway.base_url

    def _keep(self, tasks: "set[asyncio.Task[None]]", work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def serve(connection: socket.socket) -> None:
    """Serve the engine process at the other end."""
    engine: Channel[FromService, ToService] = await Channel.open(connection, ToService)
    setup = await engine.receive()
    assert isinstance(setup, Setup)
    sys.path[:] = map(os.fsdecode, setup.path)
    try:
        await Service(engine, setup).serve()
    except ConfigError as error:
        engine.send(Broken(str(error)))
        await engine.drain()


def main() -> None:
    """Serve until the engine process is gone."""
    parent_pid, descriptor = (int(text) for text in sys.argv[1:])
    die_with_parent(parent_pid)
    outlive_stop_signals()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    asyncio.run(serve(connection))


if __name__ == "__main__":
    main()
