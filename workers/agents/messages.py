"""Chat messages as dictionaries of the OpenAI format: made plain, and compared."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from workers.agents.errors import BadAgentRequest

Message = dict[str, Any]
"""role, content, and by role: tool_calls [{id, type, function: {name, arguments}}], reasoning_content, tool_call_id."""
Tools = Sequence[Mapping[str, Any]] | None
"""Of the OpenAI format: {type: function, function: {name, description, parameters}}."""

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def normalized(
    messages: Sequence[Mapping[str, Any]], *, arguments: Literal["text", "object"] = "text"
) -> list[Message]:
    """Return messages with their content as one text and without empty fields.

    Args:
        arguments: of tool calls: JSON text, as agents see them, or what it says, as chat templates want them; text
            that is no JSON object stays.

    Raises:
        BadAgentRequest: one has no role, or something else than text.
    """
    return [_normalized(message, arguments) for message in messages]


def canonical(message: Mapping[str, Any]) -> str:
    """Return what two messages share when they are the same to the model.

    Reasoning is left out, since clients drop it, and so is space around the content; arguments of calls are compared
    by value.
    """
    plain = _normalized(message, "object")
    calls = [
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in plain.get("tool_calls", [])
    ]
    parts = plain["role"], plain["content"].strip(), calls, plain.get("name"), plain.get("tool_call_id")
    return json.dumps(parts, sort_keys=True)


def call_id(token_ids: Sequence[int], index: int) -> str:
    """Return the id of a call in drawn tokens: nine letters and digits, which is all that Mistral's templates allow."""
    number = int.from_bytes(hashlib.blake2b(json.dumps([*token_ids, index]).encode(), digest_size=8).digest())
    return "".join(_DIGITS[number // 36**place % 36] for place in range(9))


def _normalized(message: Mapping[str, Any], arguments: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadAgentRequest("messages", "each is an object with a role")
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
        raise BadAgentRequest(
            "messages", "content is text, or a list of {type: text, text: ...}; nothing else is known"
        )
    return "".join(map(str, texts))


def _call(call: object, arguments: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadAgentRequest("messages", "a tool call has a function with a name and arguments")
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
