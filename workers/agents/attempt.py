"""One attempt at a rollout in the session service: its session, its budgets, and its result."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from asyncflow.errors import AsyncFlowError, UserCodeFailed
from workers.agents.rendering import Renderer
from workers.agents.rollout_errors import BadAgentRequest, ContextLengthExceeded, SessionGone
from workers.agents.session import Session
from workers.agents.turns import ChatRequest, Message, Reply
from workers.agents.wire import AttemptDone, Begin, Drawn, Finished, Setup
from workers.rewards.base import summed

DrawCall = Callable[[int, Sequence[int], int, int, Sequence[str]], Awaitable[Drawn]]
"""(ticket, prompt ids, most tokens, seed, stop strings) -> what the policy drew."""


class BudgetIsSpent(AsyncFlowError):
    """The rollout may draw no more; says which budget is spent."""


class Attempt:
    """One attempt; used in the service's event loop.

    Attributes:
        number: identifies it.
        key: of its session, void once it has ended.
        nth: from 0, as `Context.attempt` says it.
        num_deaths: workers that died under this rollout (all attempts) with no rollout's code running.
        ended: its outcome no longer matters.
        spent: its latest call was refused because turns, tokens or context are used up.
    """

    def __init__(self, number: int, begin: Begin, *, key: str, nth: int, setup: Setup, renderer: Renderer) -> None:
        self.number = number
        self.begin = begin
        self.key = key
        self.nth = nth
        self.num_deaths = 0
        self.ended = False
        self.spent = False
        self._setup = setup
        self._session = Session(renderer, seed=begin.seed + nth)
        # By node, since a sample may end at any. Common messages are shared, not copied.
        self._conversations: dict[int, list[Message]] = {}
        self._new_messages: dict[int, list[Message]] = {}  # by node, if asked for
        self._began: float | None = None
        self._turns = 0
        self._num_drawn = 0
        self._num_reserved = 0
        self._settled = asyncio.Event()  # a call that had reserved tokens has ended
        self._num_drawing = 0
        self._model_s = 0.0
        self._drawing_since = 0.0
        self._cut = False
        self._response = ""

    async def complete_turn(self, request: ChatRequest, *, draw: DrawCall) -> Reply:
        """Have the policy reply.

        Raises:
            BudgetIsSpent: the rollout may draw no more.
            ContextLengthExceeded: the prompt leaves no room.
            BadAgentRequest: the conversation cannot be rendered.
            SessionGone: the rollout ended meanwhile.
        """
        session = self._session
        if request.token_ids is None:
            prompt = session.make_prompt(request.messages, request.tools, request.replies)
        else:
            prompt = session.prompt_of_ids(request.token_ids)
        await self._until_tokens_are_free()
        try:
            room = self._tokens_left(len(prompt.ids), request.max_tokens)
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
        node, message = session.record_reply(prompt, drawn)
        before = [] if prompt.parent is None else self._conversations[prompt.parent]
        shared = [old if old == new else new for old, new in zip(before, request.messages, strict=False)]
        self._conversations[node] = [*shared, *request.messages[len(shared) :], message]
        if self._setup.tells_turns:
            self._new_messages[node] = [*request.messages[len(before) :], message]
        self._cut = drawn.truncated
        self._response = message["content"]
        reason = "length" if drawn.truncated else "tool_calls" if message.get("tool_calls") else "stop"
        tokens = drawn.token_ids
        return Reply(message, reason, tokens, node, self.number, drawn.log_probs, len(prompt.ids), drawn.stop)

    def result(self, done: AttemptDone, *, spent: bool) -> Finished:
        """Return the outcome; `spent`: a budget ended the rollout. Raises BadAgentRequest if nothing was drawn, or
        `done` names pieces that were not; UserCodeFailed if it rewards other turns than those that are trained."""
        ends = self._session.sample_ends(done.nodes or None)
        samples = self._session.collect_samples(ends)
        if not any(sample.log_probs for sample in samples):
            raise BadAgentRequest("rollout", "the policy was never asked for a reply")
        turns = self._session.trained_turns(ends)
        turn_rewards = None if done.turn_rewards is None else _rewards_of_turns(done.turn_rewards, turns)
        now = time.monotonic()
        # Time since the first call minus the time with calls in flight.
        tool_s = now - (self._began or now) - self._model_s - (now - self._drawing_since if self._num_drawing else 0.0)
        return Finished(
            ticket=self.begin.ticket,
            samples=samples,
            reward=done.reward if turn_rewards is None else summed(turn_rewards),
            response=self._response,
            truncated=spent or self._cut,
            metrics=done.metrics,
            conversations=[self._conversations[end] for end in ends],
            turns=self._turns,
            tool_s=max(0.0, tool_s),
            bridge_failures=self._session.num_bridge_failures,
            num_trained_turns=len(turns),
            turn_rewards=turn_rewards,
            turn_messages=[self._new_messages[node] for node in turns] if self._setup.tells_turns else [],
        )

    async def _until_tokens_are_free(self) -> None:
        """Wait for concurrent calls, which may draw fewer tokens than they reserved, if their reservations exhaust the
        budget."""
        most = self._setup.max_tokens
        while most and self._num_reserved and self._num_drawn + self._num_reserved >= most:
            self._settled.clear()
            await self._settled.wait()
            if self.ended:
                raise SessionGone("this rollout has ended")

    def _tokens_left(self, num_prompt: int, max_tokens: int | None) -> int:
        setup = self._setup
        if setup.max_turns and self._turns >= setup.max_turns:
            raise BudgetIsSpent(f"rollout.max_turns: this rollout has used its {setup.max_turns} turns")
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


def _rewards_of_turns(given: Mapping[int, float], turns: Sequence[int]) -> list[float]:
    """Return the rewards of the trained turns, in order; each must have one, and no other."""
    if set(given) != set(turns):
        raise UserCodeFailed(
            f"rewards for {len(given)} turns, but the rollout trains {len(turns)}"
            f"{_example(given, turns)}; give one number for each reply, in order, or one for the whole rollout"
        )
    return [given[node] for node in turns]


def _example(given: Mapping[int, float], turns: Sequence[int]) -> str:
    missing = [place for place, node in enumerate(turns, 1) if node not in given]
    return f" (turn {missing[0]} has none)" if missing else ""
