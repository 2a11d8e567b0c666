"""Reads a reply's text: reasoning, tool calls, content. Pure.

What is no call after all stays content, so the agent can tell the model. A policy may draw anything, and the session
service reads it in its event loop: the time must grow no faster than the text.
"""

import json
import re
from collections.abc import Callable, Mapping
from enum import StrEnum

from workers.agents.messages import Message

MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>")
"""Texts that are read here; tokenizers may have special tokens for them."""

_OPEN, _CLOSE = MARKS[:2]
_LIST = re.compile(r"\[TOOL_CALLS\]\s*(?=\[)")
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character, as JSON can escape it: no message may have one."""


class CallForm(StrEnum):
    """How a model writes tool calls."""

    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, at the end."""
    LLAMA = "llama"
    """`{"name": ..., "parameters": {...}}`, which is the whole reply."""

    @staticmethod
    def of_template(template: str) -> "CallForm":
        """Return the form that a chat template writes; Hermes' where it knows no tools."""
        if "<tool_call>" in template:
            return CallForm.HERMES
        if "[TOOL_CALLS]" in template:
            return CallForm.MISTRAL
        return CallForm.LLAMA if '"parameters"' in template else CallForm.HERMES


def read_reply(text: str, form: CallForm, *, thinks: bool = False) -> Message:
    """Return the assistant's message that a text is; calls have no ids yet.

    Args:
        text: drawn, without end marks.
        form: of the model's calls.
        thinks: the prompt has opened the reasoning.
    """
    reasoning, content = _split_reasoning(text, thinks)
    content, calls = _READERS[form](content)
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


def _read_hermes(text: str) -> tuple[str, list[Message]]:
    """Return the content and the calls."""
    *closed, last = text.split(_CLOSE)
    kept: list[str] = []
    calls: list[Message] = []
    behind_call = False
    for part in closed:
        part = part.lstrip() if behind_call else part
        content, _, body = part.partition(_OPEN)
        read = _calls(body)
        calls += read
        kept.append(content if read else part + _CLOSE)
        behind_call = bool(read)
    kept.append(last.lstrip() if behind_call else last)
    return "".join(kept), calls


def _read_mistral(text: str) -> tuple[str, list[Message]]:
    found = _LIST.search(text)
    calls = _calls(text[found.end() :]) if found else []
    return text[: found.start()] if found and calls else text, calls


def _read_llama(text: str) -> tuple[str, list[Message]]:
    body = text.strip().removeprefix("<|python_tag|>").lstrip()
    calls = _calls(body) if body.startswith("{") else []
    return "" if calls else text, calls


_READERS: Mapping[CallForm, Callable[[str], tuple[str, list[Message]]]] = {
    CallForm.HERMES: _read_hermes,
    CallForm.MISTRAL: _read_mistral,
    CallForm.LLAMA: _read_llama,
}


def _calls(text: str) -> list[Message]:
    """Return the calls that a JSON text holds: all of them, or none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls: list[Message] = []
    for each in value if isinstance(value, list) else [value]:
        name = each.get("name") if isinstance(each, dict) else None
        given = each.get("arguments", each.get("parameters")) if isinstance(each, dict) else None
        if not isinstance(name, str) or not isinstance(given, dict) or _SURROGATE.search(name):
            return []
        function = {"name": name, "arguments": json.dumps(given)}
        calls.append({"type": "function", "function": function})
    return calls
