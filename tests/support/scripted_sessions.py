"""A session service of a few lines for the gateway's tests: answers as a test says, when it says."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from workers.agents.gateway import Gateway
from workers.agents.turns import ChatRequest, Message, Reply

Draw = Callable[[ChatRequest], Reply]
DEADLINE_S = 30


class ScriptedSessions:
    """Implements `Sessions`.

    Attributes:
        requests: of `complete_turn`, with their keys in `keys`.
        open: no turn ends while it is not set.
        begun: one release per turn.
        cancelled: one release per turn that was.
    """

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.requests: list[ChatRequest] = []
        self.keys: list[str] = []
        self.open = asyncio.Event()
        self.open.set()
        self.begun = asyncio.Semaphore(0)
        self.cancelled = asyncio.Semaphore(0)

    async def complete_turn(self, key: str, request: ChatRequest) -> Reply:
        self.requests.append(request)
        self.keys.append(key)
        self.begun.release()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.release()
            raise
        return self.draw(request)

    def count(self, key: str, request: ChatRequest) -> int:
        return sum(len(message["content"]) for message in request.messages)


def completion(text: str = "", *calls: tuple[str, str, str], reason: Any = None, num_tokens: int = 3) -> Reply:
    """Return a turn with a text and calls `(id, name, arguments)`."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        functions = [(call_id, {"name": name, "arguments": arguments}) for call_id, name, arguments in calls]
        message["tool_calls"] = [{"id": call_id, "type": "function", "function": each} for call_id, each in functions]
    tokens = list(range(num_tokens))
    finished = reason or ("tool_calls" if calls else "stop")
    return Reply(message, finished, tokens, 0, log_probs=[-0.5 * token for token in tokens], prompt_tokens=11)


def multiplying(request: ChatRequest) -> Reply:
    """Call the tool `multiply` once, then say what it said."""
    last = request.messages[-1]
    if last["role"] == "tool":
        return completion(f"It is {last['content']}.")
    return completion("Let me see.", ("call_1", "multiply", '{"a":37,  "b":64}'))


@asynccontextmanager
async def serving(sessions: ScriptedSessions, **settings: Any) -> AsyncIterator[Gateway]:
    """Run a gateway."""
    gateway = Gateway(sessions, **settings)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()
