"""Runs responses as asyncio tasks: a thread's event loop has one coroutine per response; the caller waits in `step`.

    caller's thread   submit ............ step: waits ....... <- finished responses, a token was drawn, or `wake`
    loop's thread       | coroutine ... token ... token ... done |

`TaskEngine` is the base of engines whose library or server speaks asyncio.
"""

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from asyncflow.errors import DeadlineExceeded
from workers.data.model_files import eos_token_ids
from workers.engines.base import GenerateRequest, Generation
from workers.engines.hf.model import DTYPES, CheckedEngine, empty_causal_lm
from workers.settings.lora import LoraConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig

T = TypeVar("T")
R = TypeVar("R")

_LOOK_S = 0.02  # how often (s) a wait for responses checks `wake`, which another thread sets
_CLOSE_S = 10.0


class ResponseTasks(Generic[T]):
    """Runs coroutines that return a `T`, in a thread called `name`; used by one thread of the caller."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._news = threading.Event()
        self._lock = threading.Lock()
        self._finished: list[tuple[int, T]] = []
        self._failure: BaseException | None = None
        self._running: dict[Future[T], int] = {}
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Coroutines whose end `step` has not reported yet; failed ones count as one."""
        with self._lock:
            return len(self._running) + len(self._finished) + (self._failure is not None)

    def start(self, responses: Sequence[tuple[int, Coroutine[Any, Any, T]]]) -> None:
        """Start coroutines, each under a ticket."""
        for ticket, response in responses:
            future = asyncio.run_coroutine_threadsafe(response, self._loop)
            with self._lock:
                self._running[future] = ticket
            future.add_done_callback(self._take_result)

    def note_progress(self) -> None:
        """Make `step` return; called by a coroutine that made progress."""
        self._news.set()

    def step(self, wake: threading.Event) -> list[T]:
        """Wait until coroutines end, one makes progress, or `wake` is set; return the results of those that ended.

        Raises what a coroutine raised.
        """
        while self.num_running and not self._news.wait(_LOOK_S) and not wake.is_set():
            pass
        with self._lock:
            self._news.clear()
            finished, self._finished = self._finished, []
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return [result for _, result in finished]

    def cancel_ticket(self, ticket: int) -> None:
        """Cancel what runs under a ticket, wait for its end, and forget its result."""
        with self._lock:
            # Forget the future first, so that `_take_result` ignores its result.
            running = [future for future, own in self._running.items() if own == ticket]
            for future in running:
                del self._running[future]
            self._finished = [(own, result) for own, result in self._finished if own != ticket]
        self._cancel_futures(running)

    def abort(self) -> None:
        """Cancel everything, wait for its end, and forget all results."""
        with self._lock:
            running = list(self._running)
            self._running.clear()
            self._finished.clear()
            self._failure = None
        self._cancel_futures(running)

    def run_coroutine(self, coroutine: Coroutine[Any, Any, R], *, what: str, timeout_s: float) -> R:
        """Return a coroutine's result. Raises DeadlineExceeded, which names `what`, after `timeout_s`."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done() and not future.cancelled():
                return future.result()  # it has just finished, or itself raised TimeoutError
            future.cancel()
            raise DeadlineExceeded(f"waited {timeout_s:g} s for {what}") from error

    def call_in_loop(self, function: Callable[[], R], *, what: str, timeout_s: float) -> R:
        """Call a function in the loop's thread and return its result; errors as in `run`."""

        async def call() -> R:
            return function()

        return self.run_coroutine(call(), what=what, timeout_s=timeout_s)

    def close(self) -> None:
        """Cancel what runs and end the thread; idempotent."""
        if self._thread.is_alive():
            self.abort()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)
            if not self._thread.is_alive():
                self._loop.close()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _cancel_futures(self, running: Sequence["Future[T]"]) -> None:
        """Cancel futures, already removed from `_running`, and wait until their coroutines have ended."""
        for future in running:
            future.cancel()
        if running:
            longer_than_itself_s = 2 * _CLOSE_S
            self.run_coroutine(
                self._await_cancelled(), what="responses to be cancelled", timeout_s=longer_than_itself_s
            )

    def _take_result(self, future: "Future[T]") -> None:
        with self._lock:
            if future not in self._running:
                return  # aborted
            ticket = self._running.pop(future)
            failure = CancelledError() if future.cancelled() else future.exception()
            if failure is None:
                self._finished.append((ticket, future.result()))
            else:
                self._failure = self._failure or failure
        self._news.set()

    async def _await_cancelled(self) -> None:
        # A library must handle the cancellation before anything else starts.
        others = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        cancelled = [task for task in others if task.cancelling()]
        if cancelled:
            await asyncio.wait(cancelled, timeout=_CLOSE_S)


class TaskEngine(CheckedEngine):
    """Common to engines that run each response as a task; reads only the JSON files in `model_dir`.

    A subclass opens `_tasks`, after everything that can be refused without starting anything.
    """

    adopts_weights = False  # the model is in other processes
    _tasks: ResponseTasks[Generation]

    def __init__(
        self,
        model_dir: Path,
        model: ModelConfig,
        sampling: SamplingConfig,
        max_length: int | None,
        lora: LoraConfig | None = None,
    ) -> None:
        self._eos = eos_token_ids(model_dir)
        skeleton = empty_causal_lm(model_dir, dtype=DTYPES[model.dtype], attention="eager")
        super().__init__(skeleton, sampling, max_length, lora)

    @property
    def num_running(self) -> int:
        return self._tasks.num_running

    def step(self, wake: threading.Event) -> list[Generation]:
        """Wait until responses finish, some tokens were drawn, or `wake` is set; return those that finished.
        Raises EngineFailed if the model's process or server is gone, or refused a request."""
        return self._tasks.step(wake)

    def cancel(self, ticket: int) -> None:
        self._tasks.cancel_ticket(ticket)

    def abort(self) -> None:
        self._tasks.abort()

    def _start(self, requests: Sequence[GenerateRequest]) -> None:
        self._tasks.start([(request.ticket, self._response_to(request)) for request in requests])

    def _end_tokens(self, request: GenerateRequest) -> list[int]:
        """Return the tokens that end a response: the model's and the request's."""
        return sorted({*self._eos, *request.stop_ids})

    @abstractmethod
    def _response_to(self, request: GenerateRequest) -> Coroutine[Any, Any, Generation]:
        """Return the coroutine that generates a response with the weights of now; cancelled, it drops the rest."""
