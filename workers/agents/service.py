"""The session service of one instance: holds its rollouts' conversations, between user code and the engine.

    python -m workers.agents.service PARENT_PID SOCKET

    engine process <--- tokens ---> service <--- messages ---> user workers, agents behind the gateway

A rollout ends once: its function returned, a budget is spent (truncated), it was skipped, or it failed `max_attempts`
times. Workers that die or hang are replaced. This costs an attempt only for the rollout whose code was running; the
others restart for free. The service dies with the engine process, and its workers with it.
"""

import asyncio
import logging
import shutil
import socket
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from asyncflow.errors import AsyncFlowError, ConfigError, UserCodeNotStarted, one_line, printable
from asyncflow.process import end_session_with_me
from workers.agents.attempt import Attempt, BudgetIsSpent
from workers.agents.command import run_command
from workers.agents.rendering import load_renderer
from workers.agents.rollout_errors import BadAgentRequest, ContextLengthExceeded, SessionGone
from workers.agents.turns import ChatRequest, Reply
from workers.agents.user_workers import Heard, UserWorker, WorkerDeath
from workers.agents.wire import (
    Abandon,
    Ask,
    AttemptDone,
    Begin,
    Begun,
    Draw,
    Drawn,
    Failed,
    FromService,
    NotDrawn,
    NotStarted,
    NotTold,
    PendingReplies,
    PingLoop,
    PongLoop,
    ProcessorTime,
    Raised,
    Retried,
    ServiceReady,
    Setup,
    Start,
    Told,
    ToService,
    Undraw,
    Warned,
    attempt_done,
)
from workers.agents.worker import NOBODY
from workers.calls.child_process import Refused, StreamChannel, parent_socket

if TYPE_CHECKING:
    from workers.agents.gateway import Gateway

logger = logging.getLogger(__name__)

CANCEL_S = 2.0
"""Time that a cancelled rollout has to end before its process is killed (s)."""
# Deaths of its worker, with no rollout's code running, that a rollout survives before each further one costs an
# attempt
_MOST_DEATHS = 3
_RETRY_S = (1.0, 5.0, 20.0, 0.0)  # pauses after failed starts of a worker (s)


class Service:
    """All sessions of one instance; runs in one event loop. The constructor raises ConfigError if the tokenizer or its
    template is unusable."""

    def __init__(self, engine: StreamChannel[FromService, ToService], setup: Setup) -> None:
        self._engine = engine
        self._setup = setup
        self._renderer = load_renderer(Path(setup.model_dir), setup.renderer, setup.templates)
        self._gateway = self._open_gateway() if setup.agent is not None or setup.command else None
        self._workers: list[UserWorker] = []
        self._worker_came = asyncio.Event()
        self._attempts: dict[int, Attempt] = {}
        self._keys: dict[str, Attempt] = {}
        self._in: dict[Attempt, UserWorker] = {}
        self._work: dict[Attempt, set[asyncio.Task[None]]] = {}  # in this process: its calls, or its program
        self._deadlines: dict[Attempt, asyncio.TimerHandle] = {}
        self._num_attempts = 0
        self._drawing: PendingReplies[Drawn] = PendingReplies()
        self._cpu = ProcessorTime()
        self._replacing: set[asyncio.Task[None]] = set()
        self._num_deaths = 0

    async def serve_engine(self) -> None:
        """Serve until the engine process is gone.

        Raises:
            ConfigError: the user's function is unusable.
            UserCodeNotStarted: its process cannot start at the moment.
        """
        await asyncio.to_thread(shutil.rmtree, self._setup.scratch, ignore_errors=True)  # left by a killed service
        if self._gateway is not None:
            await self._gateway.start()
        if not self._setup.command:
            for _ in range(self._setup.num_workers):
                try:
                    await self._add_worker()
                except OSError as error:
                    raise UserCodeNotStarted(f"a process of rollout functions: {one_line(error)}") from error
        self._engine.send(ServiceReady(0 if self._gateway is None else self._gateway.port))
        while (message := await self._engine.receive()) is not None:
            match message:
                case Begin():
                    self._start_attempt(message, nth=0)
                case Abandon():
                    for attempt in list(self._attempts.values()):
                        self._end_attempt(attempt)
                case PingLoop():
                    self._engine.send(PongLoop())
                case Drawn():
                    self._drawing.settle(message.call, message)
                case NotDrawn():
                    self._drawing.settle(message.call, BadAgentRequest("messages", message.text))

    async def close(self) -> None:
        """Stop all rollouts, workers and the gateway; call after `serve` has returned."""
        for attempt in list(self._attempts.values()):
            self._end_attempt(attempt)
        for replacing in self._replacing:
            replacing.cancel()
        if self._replacing:
            await asyncio.wait(self._replacing)
        workers, self._workers = self._workers, []
        for worker in workers:
            await worker.kill_and_wait()
        if self._gateway is not None:
            await self._gateway.stop()

    # Requests from the gateway.

    async def complete_turn(self, key: str, request: ChatRequest) -> Reply:
        """Have the policy reply in the session of `key`; see `Attempt.complete_turn`. Raises SessionGone if the session
        has ended, also because a budget is spent."""
        attempt = self._attempt_of(key)
        try:
            with _refusing_tools():
                return await attempt.complete_turn(request, draw=self._draw_tokens)
        except BudgetIsSpent as error:
            self._cut_attempt(attempt)
            raise SessionGone(str(error)) from error

    def count(self, key: str, request: ChatRequest) -> int:
        """Return the number of tokens of a conversation; raises SessionGone, or BadAgentRequest if it cannot be
        rendered."""
        self._attempt_of(key)
        with _refusing_tools():
            return len(self._renderer.render(request.messages, request.tools))

    def _open_gateway(self) -> "Gateway":
        from workers.agents.gateway import Gateway

        return Gateway(self, seal=self._setup.seal, port=self._setup.port)

    def _attempt_of(self, key: str) -> Attempt:
        attempt = self._keys.get(key)
        if attempt is None:
            raise SessionGone("this rollout has ended")
        return attempt

    async def _draw_tokens(
        self, ticket: int, prompt: Sequence[int], max_tokens: int, seed: int, stop: Sequence[str]
    ) -> Drawn:
        with self._drawing.call() as (call, drawn):
            stop_ids = list(self._renderer.stop_ids)
            self._engine.send(Draw(call, ticket, list(prompt), max_tokens, stop_ids, seed, list(stop)))
            try:
                return await drawn
            except asyncio.CancelledError:
                # Nobody wants these tokens any longer: free the engine's place.
                self._engine.send(Undraw(call))
                raise

    # Messages from user workers.

    def _heard(self, worker: UserWorker, message: Heard) -> None:
        attempt = self._attempts.get(message.attempt_id)
        match message:
            case WorkerDeath():
                self._bury(worker, message)
            case Ask() if attempt is None:
                worker.send(NotTold(message.number, "this rollout has ended", budget=True))
            case Ask() if attempt is not None:
                _keep(self._work[attempt], self._answer_ask(worker, attempt, message))
            case Begun() if attempt is not None:  # the function was called: its time begins
                self._set_deadline(attempt)
            case AttemptDone() if attempt is not None:
                self._finish_attempt(attempt, message, spent=attempt.spent)
            case Raised() if attempt is not None:
                self._ended_by(attempt, message)

    async def _answer_ask(self, worker: UserWorker, attempt: Attempt, ask: Ask) -> None:
        try:
            worker.send(Told(ask.number, await attempt.complete_turn(ask.request, draw=self._draw_tokens)))
        except (BudgetIsSpent, ContextLengthExceeded, SessionGone) as error:
            worker.send(NotTold(ask.number, str(error), budget=True))
        except Exception as error:  # noqa: BLE001  templates may raise anything at messages that they do not expect
            known = isinstance(error, AsyncFlowError)
            text = str(error) if known else f"model.renderer cannot write these messages and tools: {one_line(error)}"
            worker.send(NotTold(ask.number, printable(text), budget=False))

    def _ended_by(self, attempt: Attempt, message: Raised) -> None:
        if message.spent or attempt.spent:
            self._cut_attempt(attempt)
        elif message.skipped:
            self._end_attempt(attempt)
            self._engine.send(Failed(attempt.begin.ticket, printable(message.text), skipped=True))
        else:
            self._fail_attempt(attempt, message.text)

    def _bury(self, worker: UserWorker, death: WorkerDeath) -> None:
        """A worker is gone: restart its rollouts in other workers."""
        if worker not in self._workers:  # we ended it
            return
        self._workers.remove(worker)
        held = [attempt for attempt, its in self._in.items() if its is worker]
        text = f"a process of rollout functions {printable(death.how)}; its {len(held)} rollouts begin again"
        logger.warning("%s", text)
        self._num_deaths += 1
        if self._num_deaths > 1 and self._num_deaths.bit_count() == 1:  # the 2nd, 4th, 8th ... time
            self._engine.send(Warned(f"{text} (time {self._num_deaths})"))
        _keep(self._replacing, self._replace_worker())
        for attempt in held:
            del self._in[attempt]
            # Nobody's code ran, so any of these rollouts may be the cause.
            attempt.num_deaths += death.attempt_id == NOBODY
            if attempt.number == death.attempt_id or (death.attempt_id == NOBODY and attempt.num_deaths > _MOST_DEATHS):
                self._fail_attempt(attempt, f"its process {death.how}", attempts=len(held))
            else:
                self._restart_attempt(attempt)

    async def _replace_worker(self) -> None:
        for pause_s in _RETRY_S:
            try:
                await self._add_worker()
                return
            except (ConfigError, UserCodeNotStarted, OSError) as error:  # memory may be short for a moment
                logger.warning("a process of rollout functions did not start again: %s", one_line(error))
                why = one_line(error)
            await asyncio.sleep(pause_s)
        self._engine.send(Refused(f"a process of rollout functions did not start again: {why}"))

    async def _add_worker(self) -> None:
        self._workers.append(await UserWorker.start(self._setup, self._heard))
        self._worker_came.set()

    # Lifecycle of an attempt.

    def _start_attempt(self, begin: Begin, *, nth: int, num_deaths: int = 0) -> None:
        self._num_attempts += 1
        key = "" if self._gateway is None else self._gateway.open()
        attempt = Attempt(self._num_attempts, begin, key=key, nth=nth, setup=self._setup, renderer=self._renderer)
        attempt.num_deaths = num_deaths
        self._attempts[attempt.number] = attempt
        if self._gateway is not None:
            self._keys[key] = attempt
        self._work[attempt] = set()
        if self._setup.command:
            self._set_deadline(attempt)  # a function's time begins with `Begun`, since it may queue in the worker
        scratch = str(Path(self._setup.scratch) / f"{begin.index}-{attempt.number}")
        start = Start(attempt.number, begin, nth, self._base_url, key, self._setup.timeout_s, scratch)
        work = self._call_program(attempt, start) if self._setup.command else self._give_to_worker(attempt, start)
        _keep(self._work[attempt], work)

    def _set_deadline(self, attempt: Attempt) -> None:
        self._deadlines[attempt] = asyncio.get_running_loop().call_later(
            self._setup.timeout_s, self._cut_attempt, attempt, "its time (rollout.timeout_s)"
        )

    async def _give_to_worker(self, attempt: Attempt, start: Start) -> None:
        """Have the worker with the fewest rollouts call the function."""
        while not (able := [worker for worker in self._workers if worker.alive]):
            self._worker_came.clear()
            await self._worker_came.wait()
        worker = self._in[attempt] = min(able, key=lambda one: one.num_rollouts)
        worker.begin(start)

    async def _call_program(self, attempt: Attempt, start: Start) -> None:
        try:
            reward, metrics = await run_command(self._setup, start)
        except Exception as error:  # noqa: BLE001  boundary to a user's program and the machine that runs it
            if attempt.spent:
                self._cut_attempt(attempt)
            else:
                self._fail_attempt(attempt, one_line(error))
        else:
            self._finish_attempt(attempt, attempt_done(attempt.number, [], reward, metrics), spent=attempt.spent)

    def _cut_attempt(self, attempt: Attempt, what: str = "its budget") -> None:
        """Budget exhausted: keep what was generated; do not retry."""
        self._finish_attempt(attempt, AttemptDone(attempt.number, [], None, {}), spent=True, what=what)

    def _finish_attempt(self, attempt: Attempt, done: AttemptDone, *, spent: bool = False, what: str = "") -> None:
        try:
            self._engine.send(replace(attempt.result(done, spent=spent), cpu_s=done.cpu_s + self._cpu.since_last()))
        # Including what cannot be encoded: text that is not Unicode.
        except (AsyncFlowError, TypeError, ValueError) as error:
            self._fail_attempt(attempt, f"{what or 'its budget'} was spent, and {error}" if spent else str(error))
            return
        self._end_attempt(attempt)

    def _fail_attempt(self, attempt: Attempt, text: str, *, attempts: int = 1) -> None:
        text = printable(text)
        if attempt.nth + 1 < self._setup.max_attempts:
            self._engine.send(Retried(attempt.begin.ticket, text, attempts))
            self._restart_attempt(attempt, pays=True)
        else:
            self._end_attempt(attempt)
            self._engine.send(Failed(attempt.begin.ticket, text, attempts=attempts))

    def _restart_attempt(self, attempt: Attempt, *, pays: bool = False) -> None:
        self._end_attempt(attempt)
        self._start_attempt(attempt.begin, nth=attempt.nth + pays, num_deaths=attempt.num_deaths)

    def _end_attempt(self, attempt: Attempt) -> None:
        """Drop an attempt: revoke its key, cancel its calls and program, and tell its function to stop."""
        attempt.ended = True
        del self._attempts[attempt.number]
        if self._gateway is not None:
            del self._keys[attempt.key]
            self._gateway.close(attempt.key)
        if (deadline := self._deadlines.pop(attempt, None)) is not None:
            deadline.cancel()
        for task in self._work.pop(attempt):
            # The caller may be one of these tasks.
            if task is not asyncio.current_task():
                task.cancel()
        if (worker := self._in.pop(attempt, None)) is not None:
            worker.end(attempt.number, within_s=CANCEL_S)

    @property
    def _base_url(self) -> str:
        return "" if self._gateway is None else self._gateway.base_url


@contextmanager
def _refusing_tools() -> Iterator[None]:
    """Turn "the template ignores tools" into an error for the agent instead of the run."""
    try:
        yield
    except ConfigError as error:
        raise BadAgentRequest("tools", str(error)) from error


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    """Start a task, referenced by `tasks` while it runs."""
    # The event loop keeps only a weak reference.
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def serve(connection: socket.socket) -> None:
    engine: StreamChannel[FromService, ToService] = await StreamChannel.open(connection, ToService)
    setup = await engine.receive()
    assert isinstance(setup, Setup)
    service = None
    try:
        service = Service(engine, setup)
        await service.serve_engine()
    except ConfigError as error:
        engine.send(Refused(str(error)))
        await engine.drain()
    except UserCodeNotStarted as error:
        logger.warning("%s", error)
        engine.send(NotStarted(str(error)))
        await engine.drain()
    finally:
        if service is not None:
            await service.close()
        engine.close()


def main() -> None:
    connection = parent_socket()
    end_session_with_me()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    asyncio.run(serve(connection))


if __name__ == "__main__":
    main()
