"""A turn, as the session service takes it from each door: the gateway's HTTP or a user worker's socket. Torch-free."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from workers.agents.messages import Message

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
