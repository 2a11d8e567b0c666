"""Replies as text."""

import json
import time

import pytest

from workers.agents.rendering import CallForm, read_reply

CALL = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("form", "text", "content", "names"),
    [
        ("hermes", f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", "Let me see.", ["add"]),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", ["add", "add"]),
        ("hermes", CALL, CALL, []),
        ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", ["add", "add"]),
        ("llama", '{"name": "add", "parameters": {"a": 1}}', "", ["add"]),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", ["add"]),
        ("llama", 'It is {"name": "add", "parameters": {"a": 1}}', 'It is {"name": "add", "parameters": {"a": 1}}', []),
    ],
)
def test_calls_are_read_in_the_templates_form(form: str, text: str, content: str, names: list[str]) -> None:
    message = read_reply(text, CallForm(form))
    calls = message.get("tool_calls", [])
    assert (message["content"], [call["function"]["name"] for call in calls]) == (content, names)
    assert all(json.loads(call["function"]["arguments"]) == {"a": 1} for call in calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>" + "\n" * 20_000),
        ("hermes", "<tool_call>" * 20_000),
        ("mistral", "[TOOL_CALLS][" * 20_000),
        ("mistral", "[TOOL_CALLS] [" + "] " * 20_000 + "."),
        ("llama", " " * 20_000 + "{"),
        ("llama", "{" + "} " * 20_000 + "."),
    ],
)
def test_what_looks_like_a_call_without_an_end_costs_no_more_than_its_length(form: str, text: str) -> None:
    began = time.process_time()
    assert read_reply(text, CallForm(form)) == {"role": "assistant", "content": text.strip()}
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    "body",
    ["{", "[]", "7", '{"name": "add"}', '{"name": 7, "arguments": {}}', '{"name": "a", "arguments": 1}', "[" * 100_000],
)
def test_a_malformed_call_stays_content_beside_a_good_one(body: str) -> None:
    bad = f"<tool_call>{body}</tool_call>"
    message = read_reply(f"<tool_call>{CALL}</tool_call>{bad}", CallForm.HERMES)
    assert (message["content"], len(message["tool_calls"])) == (bad, 1)


@pytest.mark.parametrize(
    ("text", "thinks", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\n42", False, "hm", "42"),
        ("hm</think>42", True, "hm", "42"),
        ("<think>cut", False, "cut", ""),
        ("cut", True, "cut", ""),
        ("42 <think>no", False, None, "42 <think>no"),
        (f"<think><tool_call>{CALL}</tool_call></think>42", False, f"<tool_call>{CALL}</tool_call>", "42"),
    ],
)
def test_reasoning_is_no_content_and_calls_nothing(
    text: str, thinks: bool, reasoning: str | None, content: str
) -> None:
    message = read_reply(text, CallForm.HERMES, thinks=thinks)
    assert message == {"role": "assistant", "content": content} | (
        {"reasoning_content": reasoning} if reasoning else {}
    )


def test_a_template_tells_its_form() -> None:
    assert CallForm.of_template("<tool_call>") == CallForm.HERMES
    assert CallForm.of_template("[TOOL_CALLS] [") == CallForm.MISTRAL
    assert CallForm.of_template('{"name": "f", "parameters": {}}') == CallForm.LLAMA
    assert CallForm.of_template("{{ m.content }}") == CallForm.HERMES


def test_a_call_with_half_a_character_is_text() -> None:
    """No message could carry its name."""
    text = '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>'
    assert "tool_calls" not in read_reply(text, CallForm.HERMES)
