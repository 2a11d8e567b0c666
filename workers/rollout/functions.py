"""Rollouts of a user's function or agent on one engine: the engine process's side of the session service.

    rollout loop   begin ---------> service: calls the function
                   step <- Draw 31  (a thread reads; `wake` is set)
                     engine.submit, engine.step
                        Drawn 31 -> service ... Finished -> step returns it

Calls of older rollouts take precedence, so that rollouts finish. A service that dies is restarted, and its rollouts
begin again; they have no effect other than their result.
"""

import heapq
import logging
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from msgspec.structs import replace as replace_fields

from asyncflow.errors import BadRequest, UserCodeFailed
from asyncflow.repeated import RepeatedWarnings
from asyncflow.timeline import NoTimeline, Spans
from workers.agents.wire import (
    Abandon,
    Begin,
    Draw,
    Drawn,
    Failed,
    Finished,
    NotDrawn,
    Retried,
    Setup,
    Undraw,
    Warned,
)
from workers.calls.child_process import Refused
from workers.data.tokenizer import load_tokenizer
from workers.engines.base import GenerateEngine, GenerateRequest, Generation, longest_call
from workers.engines.stop_strings import StopStrings, StopTokenizer
from workers.rank.context import WorkerContext
from workers.rollout.rollouts import Rollouts, SingleTurn
from workers.rollout.room import room
from workers.rollout.session_service import open_service
from workers.rows.finished import FinishedRollout, RolloutRequest
from workers.settings.rollout import SamplingConfig, of_rollout

# What users' rollouts are doing: for `asyncflow status`, and as spans of the timeline. Has no influence on them.
#
# rollout   |------------- id 7, row 112, 2 turns, tool_s 0.8 ---------------|
# turn           |-- 31 tokens --|                    |--- 12 tokens ---|

_FIRST_CALL_S = 1.0  # how long a rollout without a call yet is expected to make its first one any moment (s)


@dataclass
class _Live:
    number: int
    began: float


class LiveRollouts:
    """Is told by `FunctionRollouts` of all events of its rollouts; for one thread. `spans` receives every rollout and
    every turn."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._live: dict[int, _Live] = {}
        self._coming: dict[int, float] = {}  # rollouts without a call yet: ticket -> when they began, in order
        self._num_begun = 0
        self._totals = dict.fromkeys(("turns", "drawing_s", "waiting_s", "in_tools_s"), 0.0)
        self._counted_until = time.monotonic()

    @property
    def num_coming(self) -> int:
        """Rollouts whose first call is imminent; one that takes too long no longer reserves room."""
        since = time.monotonic() - _FIRST_CALL_S
        while self._coming and next(iter(self._coming.values())) <= since:
            del self._coming[next(iter(self._coming))]
        return len(self._coming)

    def figures(self, *, drawing: int, waiting: int) -> dict[str, float]:
        """Return `Rollouts.figures`; counts the time since the previous call for these numbers of calls."""
        live = len(self._live)
        counts = {"drawing": drawing, "waiting": waiting, "in_tools": max(0, live - drawing - waiting)}
        now = time.monotonic()
        for name, number in counts.items():
            self._totals[f"{name}_s"] += (now - self._counted_until) * number
        self._counted_until = now
        return {"live": live, **counts, **self._totals}

    def begin(self, ticket: int) -> None:
        self._num_begun += 1
        self._coming[ticket] = began = time.monotonic()
        self._live[ticket] = _Live(self._num_begun, began)

    def note_call(self, ticket: int) -> None:
        """The rollout wants a reply."""
        self._coming.pop(ticket, None)

    def note_drawn(self, ticket: int, generation: Generation, *, since: float) -> None:
        """The engine has drawn for the rollout since `since` (s, monotonic)."""
        self._totals["turns"] += 1
        if (live := self._live.get(ticket)) is not None:
            tokens = len(generation.response_R)
            self._spans.record_span(
                "turn", time.monotonic() - since, id=live.number, row=generation.index, tokens=tokens
            )

    def end(self, request: RolloutRequest, message: Finished | Failed) -> None:
        self._coming.pop(request.ticket, None)
        live = self._live.pop(request.ticket)
        seconds = time.monotonic() - live.began
        told: dict[str, int | float | str] = {"failed": message.text} if isinstance(message, Failed) else {
            "turns": message.turns, "tool_s": round(message.tool_s, 3)
        }  # fmt: skip
        self._spans.record_span("rollout", seconds, id=live.number, row=request.index, group=request.group, **told)

    def abandon_rollouts(self) -> None:
        self._live.clear()
        self._coming.clear()


logger = logging.getLogger(__name__)

_IDLE_S = 0.5  # how often a step without anything to draw returns (s)
# Deaths of the service during one rollout, or without a finished rollout in between, that end the run
_MOST_RESTARTS = 10
_MOST_SILENCES = 3  # of them, if the last one was a silence: each takes half a minute
_IN_A_ROW = -1


class FunctionRollouts:
    """See `workers.rollout.rollouts.Rollouts`.

    Args:
        max_running: concurrent rollouts.
        on_failure: `rollout.on_failure`.
        wake: set when `step` has something to do.
        what: what makes the rollouts, for messages.
        max_failures: `rollout.max_failures_in_a_row`; 0: unlimited.
        failed: called with one line for every failed attempt.
        warn: called with one line that the user should see.

    Raises ConfigError if the user's function is unusable.
    """

    def __init__(
        self,
        engine: GenerateEngine,
        setup: Setup,
        *,
        max_running: int,
        on_failure: str,
        wake: threading.Event,
        spans: Spans | None = None,
        what: str = "the rollout",
        max_failures: int = 0,
        failed: Callable[[str], None] = lambda why: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._live = LiveRollouts(spans or NoTimeline())
        self._engine = engine
        self._setup = setup
        self._max_running = max_running
        self._on_failure = on_failure
        self._wake = wake
        self._what = what
        self._max_failures = max_failures
        self._failed = failed
        self._failures = 0  # failed attempts since a rollout last finished
        self._most_running = 0  # most concurrent rollouts since then
        self._warnings = RepeatedWarnings(logger)
        self._warn = warn
        self._running: dict[int, RolloutRequest] = {}
        self._waiting: list[tuple[int, int, Draw]] = []
        self._wanted: set[int] = set()  # calls in `_waiting` that have not been withdrawn
        # Calls in the engine: call -> (ticket, start (s, monotonic), stop strings)
        self._drawing: dict[int, tuple[int, float, StopStrings | None]] = {}
        self._tokenizer = StopTokenizer(lambda: load_tokenizer(Path(setup.model_dir)))
        # Processor time of this process (s): inside the engine; outside of it, as far as assigned to rollouts
        self._in_engine_s, self._counted_s = 0.0, time.process_time()
        self._deaths: Counter[int] = Counter()  # of the service, by ticket of each rollout that was running
        self._service = open_service(setup, wake)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_drawing(self) -> int:
        return self._engine.num_running

    @property
    def free_slots(self) -> int:
        drawing = self._engine.num_running
        calls = len(self._wanted) + self._live.num_coming
        places = self._engine.free_slots + drawing
        return room(places=places, drawing=drawing, calls=calls, live=len(self._running), most=self._max_running)

    @property
    def needs_engine(self) -> bool:
        return bool(self._engine.num_running or self._wanted)

    def figures(self) -> dict[str, float]:
        return self._live.figures(drawing=len(self._drawing), waiting=len(self._wanted))

    def begin(self, requests: Sequence[RolloutRequest]) -> None:
        self.figures()
        for one in requests:
            self._live.begin(one.ticket)
            self._running[one.ticket] = one
            self._service.send(_begin(one))
        self._most_running = max(self._most_running, len(self._running))

    def step(self, wake: threading.Event, *, hold: bool = False, asleep: bool = False) -> list[FinishedRollout]:
        """See `Rollouts`; raises UserCodeFailed once the function can no longer be called."""
        self.figures()  # account for the time so far before the numbers change
        finished = self._handle_messages()
        if not hold and not asleep:
            self._submit_calls()
        if finished:
            return finished  # without drawing first, which may take long: their places are free
        if self._engine.num_running and not asleep:
            began_s = time.process_time()
            generations = self._engine.step(wake)
            self._in_engine_s += time.process_time() - began_s
            for generation in generations:
                self._send_drawn(generation)
        else:
            wake.wait(_IDLE_S)
        return []

    def abort(self) -> None:
        self._engine.abort()
        self._running.clear()
        self._deaths.clear()
        self._live.abandon_rollouts()
        self._forget_calls()
        self._service.send(Abandon())

    def close(self) -> None:
        self._service.kill()
        shutil.rmtree(self._setup.scratch, ignore_errors=True)

    def _handle_messages(self) -> list[FinishedRollout]:
        """Handle the service's messages; return the rollouts that finished."""
        finished: list[FinishedRollout] = []
        for message in self._service.take_messages():
            match message:
                case None:
                    self._restart_service()
                case Refused(text=text):
                    raise UserCodeFailed(text)
                case Warned(text=text):
                    self._warn(text)
                case Draw():
                    if message.ticket in self._running:
                        heapq.heappush(self._waiting, (message.ticket, message.call, message))
                        self._wanted.add(message.call)
                        self._live.note_call(message.ticket)
                case Undraw(call=call):
                    self._cancel_call(call)
                case Retried():
                    if (request := self._running.get(message.ticket)) is not None:
                        self._count_failure(request, message, "; it begins again")
                case Finished() | Failed():
                    request = self._running.pop(message.ticket, None)
                    if request is not None:
                        del self._deaths[message.ticket], self._deaths[_IN_A_ROW]
                        self._live.end(request, message)
                        finished.append(self._make_finished(request, message))
        return finished

    def _submit_calls(self) -> None:
        """Fill the engine with calls, those of the oldest rollouts first."""
        while self._waiting and self._engine.free_slots:
            _, _, draw = heapq.heappop(self._waiting)
            # Its rollout was abandoned, or the call withdrawn.
            if draw.ticket not in self._running or draw.call not in self._wanted:
                self._wanted.discard(draw.call)
                continue
            self._wanted.remove(draw.call)
            request = GenerateRequest(
                index=self._running[draw.ticket].index,
                prompt_P=torch.tensor(draw.prompt, dtype=torch.int64),
                seed=draw.seed,
                ticket=draw.call,
                max_tokens=draw.max_tokens,
                stop_ids=tuple(draw.stop_ids),
                stop=self._tokenizer.make_stop_strings(draw.stop),
            )
            began_s = time.process_time()
            try:
                self._engine.submit([request])
            except BadRequest as error:
                self._service.send(NotDrawn(draw.call, str(error)))
            else:
                self._drawing[draw.call] = draw.ticket, time.monotonic(), request.stop
            self._in_engine_s += time.process_time() - began_s

    def _cancel_call(self, call: int) -> None:
        self._wanted.discard(call)
        if call in self._drawing:
            del self._drawing[call]
            self._engine.cancel(call)

    def _send_drawn(self, generation: Generation) -> None:
        # The call was withdrawn meanwhile.
        if generation.ticket not in self._drawing:
            return
        ticket, since, stop = self._drawing.pop(generation.ticket)
        generation, stopped = generation.until(stop)
        self._live.note_drawn(ticket, generation, since=since)
        self._service.send(
            Drawn(
                generation.ticket,
                generation.response_R.tolist(),
                generation.log_probs_R.tolist(),
                generation.versions_R.tolist(),
                generation.truncated,
                stop="" if stopped is None else stopped.text,
                shown=None if stopped is None else stopped.shown_ids,
            )
        )

    def _make_finished(self, request: RolloutRequest, message: Finished | Failed) -> FinishedRollout:
        if isinstance(message, Finished):
            self._came_to_an_end()
            return _finished(request, message, beside_s=self._beside_engine_s())
        nothing = FinishedRollout.without_tokens(request, why=message.text)
        if message.skipped:
            self._came_to_an_end()
            return replace(nothing, leaves=True)
        self._count_failure(request, message)
        if self._on_failure == "zero":
            return FinishedRollout.without_tokens(request, reward=0.0)
        if self._on_failure == "dead_letter":
            return replace(nothing, leaves=True, failures=self._setup.max_attempts)
        return nothing

    def _came_to_an_end(self) -> None:
        self._failures, self._most_running = 0, len(self._running)

    def _count_failure(self, request: RolloutRequest, message: Retried | Failed, then: str = "") -> None:
        """Report a failed attempt; raises UserCodeFailed after too many without a finished rollout."""
        why = of_rollout(self._what, message.text)
        self._warnings.log_warning(f"rollout of row {request.index} failed: {why}{then}")
        self._failed(why)
        # A process that is killed because it blocks takes seconds: counted one by one, thousands would take hours.
        self._failures += message.attempts
        # Failures are quick and successes may be slow: all running rollouts may fail, and those that replace them,
        # before the first success.
        most = max(self._max_failures, 2 * self._setup.max_attempts * self._most_running)
        if self._max_failures and self._failures >= most:
            raise UserCodeFailed(
                f"{self._failures} attempts at rollouts failed in a row (rollout.max_failures_in_a_row), and none "
                f"finished in between; the last one: {why}; correct that and resume"
            )

    def _beside_engine_s(self) -> float:
        """Return this process's time outside the engine since the previous call (s)."""
        before, self._counted_s = self._counted_s, time.process_time() - self._in_engine_s
        return self._counted_s - before

    def _restart_service(self) -> None:
        """Restart a dead service, and the running rollouts."""
        self._deaths.update([_IN_A_ROW, *self._running])
        ticket, number = max(self._deaths.items(), key=lambda each: each[1])
        if self._service.hung and self._deaths[_IN_A_ROW] >= _MOST_SILENCES:
            raise UserCodeFailed(
                f"{self._what}: the session service {self._service.hung}, {_MOST_SILENCES} times without a rollout in "
                f"between; of your code the renderer runs in it (model.renderer): it must return; see this log"
            )
        if number > _MOST_RESTARTS:
            what = "in a row" if ticket == _IN_A_ROW else f"during the rollout of row {self._running[ticket].index}"
            raise UserCodeFailed(f"the session service died {number} times {what}; see this log")
        logger.warning("the session service died; its %d rollouts begin again", len(self._running))
        for call in self._drawing:
            self._engine.cancel(call)
        self._forget_calls()
        self._service.kill()
        # The same port: an agent that outlived the service gets "session gone" from its successor.
        self._service = open_service(replace_fields(self._setup, port=self._service.port), self._wake, worked=True)
        for one in self._running.values():
            self._service.send(_begin(one))

    def _forget_calls(self) -> None:
        self._waiting.clear()
        self._wanted.clear()
        self._drawing.clear()


def _begin(one: RolloutRequest) -> Begin:
    return Begin(one.ticket, one.task, one.index, one.group, one.member, one.seed)


def open_rollouts(
    context: WorkerContext, engine: GenerateEngine, sampling: SamplingConfig, *, wake: threading.Event
) -> Rollouts:
    """Return what turns prompts into responses: single turns, or the user's function. `wake` is set when `step` has
    something to do. Raises ConfigError if the user's function is unusable."""
    config, own = context.config, context.config.rollout
    if not own.is_own:
        return SingleTurn(
            engine, StopTokenizer(lambda: load_tokenizer(Path(config.model.path))).make_stop_strings(own.stop)
        )
    setup = Setup.from_config(
        config,
        max_context=longest_call(config, sampling) or 0,
        max_response_tokens=sampling.max_response_tokens,
        scratch=str(context.run_dir / "scratch" / context.gang.name),
        seal=secrets.token_bytes(32),
    )
    schedule = config.schedule
    # All rows that admission can have open at once.
    admitted = schedule.step_rows * schedule.staleness.steps_in_flight
    return FunctionRollouts(
        engine, setup, max_running=admitted, on_failure=own.on_failure, wake=wake, spans=context.timeline,
        what=own.own_name, max_failures=own.max_failures_in_a_row, failed=context.rollout_failed,
        warn=context.warn_user,
    )  # fmt: skip


def _finished(request: RolloutRequest, message: Finished, *, beside_s: float) -> FinishedRollout:
    samples = message.samples
    return FinishedRollout(
        index=request.index,
        ticket=request.ticket,
        tokens_T=torch.tensor([token for one in samples for token in one.token_ids], dtype=torch.int64),
        sample_lengths=[len(one.token_ids) for one in samples],
        response_mask_T=torch.tensor([bit for one in samples for bit in one.response_mask], dtype=torch.uint8),
        log_probs_A=torch.tensor([number for one in samples for number in one.log_probs], dtype=torch.float32),
        versions_A=torch.tensor([step for one in samples for step in one.versions], dtype=torch.int32),
        turn_ids_A=torch.tensor([turn for one in samples for turn in one.turn_ids], dtype=torch.int32),
        num_trained_turns=message.num_trained_turns,
        turn_rewards=message.turn_rewards,
        turn_messages=message.turn_messages,
        truncated=message.truncated,
        reward=message.reward,
        response=message.response,
        metrics=message.metrics,
        conversations=message.conversations,
        turns=message.turns,
        tool_s=message.tool_s,
        bridge_failures=message.bridge_failures,
        cpu_s=message.cpu_s + beside_s,
    )
