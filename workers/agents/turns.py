"""A turn: chat messages, and the request and the reply in which they travel. Needs no tokenizer."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from workers.agents.rollout_errors import BadAgentRequest

# Chat messages as dictionaries in OpenAI format: normalizing and comparing them.

Message = dict[str, Any]
"""role, content, and depending on the role: tool_calls [{id, type, function: {name, arguments}}], reasoning_content,
tool_call_id.
"""
Tools = Sequence[Mapping[str, Any]] | None
"""OpenAI format: {type: function, function: {name, description, parameters}}."""

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def normalized(
    messages: Sequence[Mapping[str, Any]], *, arguments: Literal["text", "object"] = "text"
) -> list[Message]:
    """Return messages whose content is a single text, without empty fields.

    `arguments`: form of tool-call arguments: JSON text, as agents see them, or the parsed object, as chat templates
    want it. Text that is not a JSON object is kept. Raises BadAgentRequest if a message has no role, or content other
    than text.
    """
    return [_normalized(message, arguments) for message in messages]


def canonical(message: Mapping[str, Any]) -> str:
    """Return a key that is equal for messages that are the same to the model."""
    plain = _normalized(message, "object")
    calls = [
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in plain.get("tool_calls", [])
    ]
    # No reasoning: clients drop it. Call arguments are compared by value.
    parts = plain["role"], plain["content"].strip(), calls, plain.get("name"), plain.get("tool_call_id")
    return json.dumps(parts, sort_keys=True)


def call_id(token_ids: Sequence[int], index: int) -> str:
    """Return the id of a call in drawn tokens: nine letters and digits, all that Mistral's templates allow."""
    number = int.from_bytes(hashlib.blake2b(json.dumps([*token_ids, index]).encode(), digest_size=8).digest())
    return "".join(_DIGITS[number // 36**place % 36] for place in range(9))


def _normalized(message: Mapping[str, Any], arguments: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadAgentRequest("messages", "each must be an object with a role")
    kept = {key: value for key, value in message.items() if value is not None and value != []}
    kept["content"] = _text(message.get("content"))
    if "tool_calls" in kept:
        kept["tool_calls"] = [_call(call, arguments) for call in kept["tool_calls"]]
    return kept


def _text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, Sequence) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise BadAgentRequest("messages", "content must be text or a list of {type: text, text: ...}")
    return "".join(map(str, texts))


def _call(call: object, arguments: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadAgentRequest("messages", "a tool call must have a function with a name and arguments")
    given: Any = function.get("arguments", "")
    if isinstance(given, str) and arguments == "object":
        try:
            parsed = json.loads(given or "{}")
        except (ValueError, RecursionError):
            parsed = given
        given = parsed if isinstance(parsed, dict) else given
    elif not isinstance(given, str) and arguments == "text":
        given = json.dumps(given)
    return {"type": "function", **call, "function": {**function, "arguments": given}}


# A turn, the same through either door of the session service: the gateway's HTTP or a user worker's socket.

Tool = dict[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`."""


@dataclass(frozen=True)
class ChatRequest:
    """One turn to draw."""

    messages: list[Message]  # the whole history; its last message is not the assistant's. Empty with `token_ids`.
    tools: list[Tool] | None = None
    max_tokens: int | None = None  # None: the run's limit
    # Strings that end the response: the token that completes one is its last, and the message ends before the string
    stop: tuple[str, ...] = ()
    token_ids: list[int] | None = None  # the whole prompt in tokens, instead of messages
    replies: tuple[int, ...] = ()  # nodes of a chat's replies so far: it goes on with its own if others said the same


@dataclass(frozen=True)
class Utterance:
    """What a model said.

    Attributes:
        message: OpenAI format.
        finish_reason: `stop`, `length` (a limit cut it off) or `tool_calls`; other servers have more.
    """

    message: Message
    finish_reason: str

    @property
    def text(self) -> str:
        """The content, or ""."""
        return self.message.get("content") or ""

    @property
    def tool_calls(self) -> list[Message]:
        """Tool calls in OpenAI format."""
        return list(self.message.get("tool_calls") or ())


@dataclass(frozen=True)
class Reply(Utterance):
    """What the policy said.

    Attributes:
        token_ids: as drawn.
        node, attempt_id: identify them: piece `node` of one attempt at the rollout.
        log_probs: of each drawn token, at the time it was drawn.
        prompt_tokens: length of the prompt.
        stop: the string that ended it, or "".
    """

    token_ids: list[int]
    node: int
    attempt_id: int = 0
    log_probs: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    stop: str = ""


class Sessions(Protocol):
    """What the gateway needs of the session service."""

    async def complete_turn(self, key: str, request: ChatRequest) -> Reply:
        """Draw one turn in the session of this key.

        Raises:
            SessionGone, ContextLengthExceeded, BadAgentRequest: see `workers.agents.rollout_errors`.
        """

    def count(self, key: str, request: ChatRequest) -> int:
        """Return the number of tokens that the request's prompt would have; raises as `complete_turn` does."""
