"""Reads a reply's text: reasoning, tool calls, content. Pure.

What is no call after all stays content, so the agent can tell the model.
"""

import json
import re
from enum import StrEnum
from typing import Any

from workers.agents.messages import Message

MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>")
"""Texts that are read here; tokenizers may have special tokens for them."""

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


_PATTERNS = {
    CallForm.HERMES: re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>\s*", re.DOTALL),
    CallForm.MISTRAL: re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])\s*\Z", re.DOTALL),
    CallForm.LLAMA: re.compile(r"\A\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*\Z", re.DOTALL),
}


def read_reply(text: str, form: CallForm, *, thinks: bool = False) -> Message:
    """Return the assistant's message that a text is; calls have no ids yet.

    Args:
        text: drawn, without end marks.
        form: of the model's calls.
        thinks: the prompt has opened the reasoning.
    """
    reasoning, content = _split_reasoning(text, thinks)
    calls: list[dict[str, Any]] = []

    def take(found: re.Match[str]) -> str:
        read = _calls(found[1])
        calls.extend(read)
        return "" if read else found[0]

    content = _PATTERNS[form].sub(take, content)
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
    except (ValueError, RecursionError):
        return []
    calls = []
    for each in value if isinstance(value, list) else [value]:
        name = each.get("name") if isinstance(each, dict) else None
        given = each.get("arguments", each.get("parameters")) if isinstance(each, dict) else None
        if not isinstance(name, str) or not isinstance(given, dict) or _SURROGATE.search(name):
            return []
        function = {"name": name, "arguments": json.dumps(given)}
        calls.append({"type": "function", "function": function})
    return calls
