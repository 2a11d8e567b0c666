"""One attempt at a rollout, as the session service keeps it: its session, its budgets, and what came of it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from asyncflow.errors import AsyncFlowError
from workers.agents.errors import BadAgentRequest, ContextLengthExceeded, SessionGone
from workers.agents.rendering import Message, Renderer
from workers.agents.session import DrawnTokens, Session
from workers.agents.wire import Begin, Done, Drawn, Finished, SampleTokens, Setup

# A turn, as the session service takes it from each door: the gateway's HTTP or a user worker's socket. Torch-free.

Tool = dict[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`."""


@dataclass(frozen=True)
class ChatRequest:
    """One turn to draw.

    Attributes:
        messages: the whole history, its last message not the assistant's.
        tools: that the model may call.
        max_tokens: most tokens to draw; None: the run's limit.
        stop: strings that end the response: the token that completes one is its last, and the message is what stands
            before.
    """

    messages: list[Message]
    tools: list[Tool] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One turn that was drawn.

    Attributes:
        message: the assistant's, which the next history repeats.
        finish_reason: `length`: a limit cut it.
        prompt_tokens, completion_tokens: their numbers.
        token_ids, log_probs: drawn tokens, and of each the log-probability when it was drawn.
        stop: the string that ended it; "": something else did.
    """

    message: Message
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int
    token_ids: list[int]
    log_probs: list[float]
    stop: str = ""


class Sessions(Protocol):
    """What the gateway needs of the session service."""

    async def complete(self, key: str, request: ChatRequest) -> Completion:
        """Draw one turn of the session with this key.

        Raises:
            SessionGone, ContextLengthExceeded, BadAgentRequest: see `workers.agents.errors`.
        """

    def count(self, key: str, request: ChatRequest) -> int:
        """Return how many tokens the request's prompt would have. Raises as `complete` does."""


DrawCall = Callable[[int, Sequence[int], int, int, Sequence[str]], Awaitable[Drawn]]
"""(ticket, prompt ids, most tokens, seed, stop strings) -> what the policy drew behind them."""


class BudgetIsSpent(AsyncFlowError):
    """The rollout may draw no more; says what it has spent."""


class Run:
    """One attempt; used in the service's event loop.

    Attributes:
        number: names it.
        begin: the rollout.
        key: of its session, void at its end.
        attempt: from 0.
        num_deaths: workers that died under this rollout, its earlier attempts included, with nobody's code running.
        ended: nothing more comes of it.
        spent: it was refused a call since it has had its turns, tokens or context.
    """

    def __init__(self, number: int, begin: Begin, *, key: str, attempt: int, setup: Setup, renderer: Renderer) -> None:
        """See the attributes; `setup` has the budgets."""
        self.number = number
        self.begin = begin
        self.key = key
        self.attempt = attempt
        self.num_deaths = 0
        self.ended = False
        self.spent = False
        self._setup = setup
        self._renderer = renderer
        self._session = Session(renderer, seed=begin.seed + attempt)
        self._conversations: dict[int, list[Message]] = {}
        """By node: each may turn out to be where a sample ends. What they share is there once."""
        self._began: float | None = None
        self._turns = 0
        self._num_drawn = 0
        self._num_reserved = 0
        self._settled = asyncio.Event()
        """A call that had tokens reserved has ended."""
        self._num_drawing = 0
        self._model_s = 0.0
        self._drawing_since = 0.0
        self._cut = False
        self._response = ""

    async def complete(
        self, request: ChatRequest, token_ids: Sequence[int] | None, *, draw: DrawCall
    ) -> tuple[int, Completion]:
        """Have the policy reply to a conversation, or go on behind tokens; return the name of what was drawn, too.

        Raises:
            BudgetIsSpent: the rollout may draw no more.
            ContextLengthExceeded: the prompt leaves no room.
            BadAgentRequest: the conversation cannot be rendered.
            SessionGone: it ended meanwhile.
        """
        session = self._session
        if token_ids is None:
            prompt = session.prompt(request.messages, request.tools)
        else:
            prompt = session.prompt_of_ids(token_ids)
        await self._until_tokens_are_free()
        try:
            room = self._room(len(prompt.ids), request.max_tokens)
        except (BudgetIsSpent, ContextLengthExceeded):
            self.spent = True
            raise
        self._turns += 1
        self._count_time(+1)
        self._num_reserved += room
        try:
            drawn = await draw(self.begin.ticket, prompt.ids, room, prompt.seed, request.stop)
        finally:
            self._num_reserved -= room
            self._settled.set()
            self._count_time(-1)
        self.spent = False
        if self.ended:
            raise SessionGone("this rollout has ended")
        self._num_drawn += len(drawn.token_ids)
        tokens = DrawnTokens(drawn.token_ids, drawn.log_probs, drawn.versions)
        shown = drawn.token_ids if drawn.shown is None else drawn.shown
        recorded = session.record(prompt, tokens, shown=shown)
        message = recorded.message or self._renderer.parse(shown)
        before = [] if prompt.parent is None else self._conversations[prompt.parent]
        shared = [old if old == new else new for old, new in zip(before, request.messages, strict=False)]
        self._conversations[recorded.node] = [*shared, *request.messages[len(shared) :], message]
        self._cut = drawn.truncated
        self._response = message["content"]
        return recorded.node, Completion(
            message=message,
            finish_reason="length" if drawn.truncated else "tool_calls" if message.get("tool_calls") else "stop",
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(drawn.token_ids),
            token_ids=drawn.token_ids,
            log_probs=drawn.log_probs,
            stop=drawn.stop,
        )

    def result(self, done: Done, *, spent: bool) -> Finished:
        """Return what came of it.

        Args:
            done: what its function returned.
            spent: a budget ended it.

        Raises:
            BadAgentRequest: nothing was drawn, or it names what was not.
        """
        ends = self._session.ends(done.nodes or None)
        samples = [
            SampleTokens(one.token_ids, one.response_mask, one.log_probs, one.versions)
            for one in self._session.samples(ends)
        ]
        if not any(sample.log_probs for sample in samples):
            raise BadAgentRequest("rollout", "the policy was asked for nothing")
        now = time.monotonic()
        tool_s = now - (self._began or now) - self._model_s - (now - self._drawing_since if self._num_drawing else 0.0)
        return Finished(
            ticket=self.begin.ticket,
            samples=samples,
            reward=done.reward,
            response=self._response,
            truncated=spent or self._cut,
            metrics=done.metrics,
            conversations=[self._conversations[end] for end in ends],
            turns=self._turns,
            tool_s=max(0.0, tool_s),
            bridge_failures=self._session.num_bridge_failures,
        )

    async def _until_tokens_are_free(self) -> None:
        """Wait for calls that may yet draw fewer tokens than they reserved, if nothing is left beside those.

        Raises:
            SessionGone: it ended meanwhile.
        """
        most = self._setup.max_tokens
        while most and self._num_reserved and self._num_drawn + self._num_reserved >= most:
            self._settled.clear()
            await self._settled.wait()
            if self.ended:
                raise SessionGone("this rollout has ended")

    def _room(self, num_prompt: int, max_tokens: int | None) -> int:
        """Return how many tokens a call may draw."""
        setup = self._setup
        if setup.max_turns and self._turns >= setup.max_turns:
            raise BudgetIsSpent(f"rollout.max_turns: this rollout has had its {setup.max_turns} turns")
        room = min(max_tokens or setup.max_response_tokens, setup.max_response_tokens)
        if setup.max_tokens:
            room = min(room, setup.max_tokens - self._num_drawn - self._num_reserved)
            if room <= 0:
                raise BudgetIsSpent(f"rollout.max_drawn_tokens: this rollout has drawn its {setup.max_tokens} tokens")
        if setup.max_context:
            room = min(room, setup.max_context - num_prompt)
            if room <= 0:
                raise ContextLengthExceeded(
                    f"this model's maximum context length is {setup.max_context} tokens; the messages have {num_prompt}"
                )
        return room

    def _count_time(self, change: int) -> None:
        if not self._num_drawing:
            self._drawing_since = time.monotonic()
            self._began = self._began or self._drawing_since
        self._num_drawing += change
        if not self._num_drawing:
            self._model_s += time.monotonic() - self._drawing_since
