"""Reads a reply's text: reasoning, tool calls, content. Pure.

Calls are read in three forms, in which most open models write them:

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>        Hermes, Qwen, SmolLM
    [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]           Mistral
    {"name": ..., "parameters": {...}}                              Llama 3; it is the whole reply

What is no call after all stays content, so the agent can tell the model.
"""

import json
import re
from typing import Any

from workers.agents.messages import Message

MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>")
"""Texts that are read here; tokenizers may have special tokens for them."""

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>\s*", re.DOTALL)
_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])\s*\Z", re.DOTALL)


def read_reply(text: str, *, thinks: bool = False, bare_json: bool = False) -> Message:
    """Return the assistant's message that a text is; calls have no ids yet.

    Args:
        text: drawn, without end marks.
        thinks: the prompt has opened the reasoning.
        bare_json: the whole reply may be a call, as Llama 3 writes it.
    """
    reasoning, content = _split_reasoning(text, thinks)
    calls: list[dict[str, Any]] = []

    def take(found: re.Match[str]) -> str:
        read = _calls(found[1])
        calls.extend(read)
        return "" if read else found[0]

    content = _MISTRAL.sub(take, _HERMES.sub(take, content))
    bare = content.strip().removeprefix("<|python_tag|>")
    if bare_json and bare.startswith("{") and (read := _calls(bare)):
        calls, content = read, ""
    message: Message = {"role": "assistant", "content": content.strip()}
    if reasoning.strip():
        message["reasoning_content"] = reasoning.strip()
    return message | ({"tool_calls": calls} if calls else {})


def _split_reasoning(text: str, thinks: bool) -> tuple[str, str]:
    begun = text.lstrip()
    if not thinks and not begun.startswith("<think>"):
        return "", text
    reasoning, _, content = begun.removeprefix("<think>").partition("</think>")
    return reasoning, content


def _calls(text: str) -> list[dict[str, Any]]:
    """Return the calls that a JSON text holds: all of them, or none."""
    try:
        value = json.loads(text)
    except ValueError:
        return []
    calls = []
    for each in value if isinstance(value, list) else [value]:
        name = each.get("name") if isinstance(each, dict) else None
        given = each.get("arguments", each.get("parameters")) if isinstance(each, dict) else None
        if not isinstance(name, str) or not isinstance(given, dict):
            return []
        function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
        calls.append({"type": "function", "function": function})
    return calls
