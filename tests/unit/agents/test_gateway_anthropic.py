"""Anthropic's own client at the gateway."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import anthropic
import pytest

from tests.support.scripted_sessions import DEADLINE_S, Draw, ScriptedSessions, completion, multiplying, serving
from workers.agents.rollout_errors import ContextLengthExceeded
from workers.agents.turns import Reply

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
MULTIPLY: Any = {"name": "multiply", "description": "a * b", "input_schema": SCHEMA}
ASK: Any = {"role": "user", "content": "37*64?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "multiply", "arguments": '{"a":37,  "b":64}'}}
Body = Callable[[anthropic.AsyncAnthropic, ScriptedSessions], Awaitable[None]]


def run(body: Body, draw: Draw = lambda _: completion("hi")) -> None:
    """Run a test's body with a client of a session."""

    async def connected() -> None:
        sessions = ScriptedSessions(draw)
        async with serving(sessions) as gateway:
            key = gateway.open()
            async with anthropic.AsyncAnthropic(base_url=gateway.base_url, api_key=key, max_retries=0) as client:
                await body(client, sessions)

    asyncio.run(asyncio.wait_for(connected(), DEADLINE_S))


def test_tool_call_makes_a_round_trip_letter_by_letter() -> None:
    async def body(client: anthropic.AsyncAnthropic, sessions: ScriptedSessions) -> None:
        said: Any = {"model": "any", "max_tokens": 9, "system": "Multiply.", "tools": [MULTIPLY]}
        first = await client.messages.create(messages=[ASK], stop_sequences=["\n"], **said)
        assert (first.stop_reason, first.usage.input_tokens, first.usage.output_tokens) == ("tool_use", 11, 3)
        call = first.content[1]
        assert call.type == "tool_use" and call.input == {"a": 37, "b": 64}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "2368"}]}
        history: Any = [ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await client.messages.create(messages=history, **said)
        assert [block.text for block in second.content if block.type == "text"] == ["It is 2368."]
        assert second.stop_reason == "end_turn"
        one, two = sessions.requests
        assert (one.max_tokens, one.stop) == (9, ("\n",))
        assert two.messages == [
            {"role": "system", "content": "Multiply."},
            ASK,
            {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "2368"},
        ]
        function = {"name": "multiply", "description": "a * b", "parameters": SCHEMA}
        assert two.tools == [{"type": "function", "function": function}]

    run(body, multiplying)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_that_ended_the_reply_is_named(stream: bool) -> None:
    async def body(client: anthropic.AsyncAnthropic, sessions: ScriptedSessions) -> None:
        asked: Any = {"model": "any", "max_tokens": 9, "messages": [ASK], "stop_sequences": ["Observation:"]}
        if stream:
            async with client.messages.stream(**asked) as streamed:
                said = await streamed.get_final_message()
        else:
            said = await client.messages.create(**asked)
        assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", "Observation:")

    run(body, lambda _: replace(completion("So"), stop="Observation:"))


def test_arguments_that_a_client_changed_are_the_clients() -> None:
    async def body(client: anthropic.AsyncAnthropic, sessions: ScriptedSessions) -> None:
        await client.messages.create(model="any", max_tokens=9, messages=[ASK])
        changed: Any = {"type": "tool_use", "id": "call_1", "name": "multiply", "input": {"a": 1}}
        result: Any = {"type": "tool_result", "tool_use_id": "call_1", "content": "2"}
        history: Any = [ASK, {"role": "assistant", "content": [changed]}, {"role": "user", "content": [result]}]
        await client.messages.create(model="any", max_tokens=9, messages=history)
        assert sessions.requests[1].messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a":1}'

    run(body, multiplying)


def test_arguments_that_are_no_json_come_back_as_they_were_drawn() -> None:
    async def body(client: anthropic.AsyncAnthropic, sessions: ScriptedSessions) -> None:
        first = await client.messages.create(model="any", max_tokens=9, messages=[ASK])
        assert first.content[0].type == "tool_use" and first.content[0].input == {"unreadable": "{37"}
        history: Any = [ASK, {"role": "assistant", "content": first.content}, ASK]
        await client.messages.create(model="any", max_tokens=9, messages=history)
        assert sessions.requests[1].messages[1]["tool_calls"][0]["function"]["arguments"] == "{37"

    run(body, lambda _: completion("", ("call_1", "multiply", "{37")))


def test_stream_adds_up_to_the_message() -> None:
    text = "päö" * 300

    async def body(client: anthropic.AsyncAnthropic, sessions: ScriptedSessions) -> None:
        async with client.messages.stream(model="any", max_tokens=9, messages=[ASK]) as stream:
            num_pieces = len([piece async for piece in stream.text_stream])
            whole = await stream.get_final_message()
        assert whole.content[0].type == "text" and whole.content[0].text == text
        assert num_pieces > 1
        assert whole.content[1].type == "tool_use" and whole.content[1].input == {"a": 37, "b": 64}
        assert (whole.stop_reason, whole.usage.output_tokens) == ("tool_use", 3)

    run(body, lambda _: completion(text, ("call_1", "multiply", '{"a": 37, "b": 64}')))


def test_tokens_are_counted() -> None:
    async def body(client: anthropic.AsyncAnthropic, sessions: ScriptedSessions) -> None:
        counted = await client.messages.count_tokens(model="any", system="Multiply.", messages=[ASK])
        assert counted.input_tokens == len("Multiply.37*64?")
        assert not sessions.requests

    run(body)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        ("max_tokens", {"max_tokens": 0}),
    ],
)
def test_field_that_is_not_served_is_named(field: str, values: dict[str, Any]) -> None:
    async def body(client: anthropic.AsyncAnthropic, sessions: ScriptedSessions) -> None:
        with pytest.raises(anthropic.BadRequestError) as raised:
            await client.messages.create(**{"model": "any", "max_tokens": 9, "messages": [ASK], **values})
        assert f"{field}: " in raised.value.message

    run(body)


def test_overlong_conversation_and_wrong_key_are_anthropics_errors() -> None:
    def draw(_: object) -> Reply:
        raise ContextLengthExceeded("49 tokens, 48 fit")

    async def body(client: anthropic.AsyncAnthropic, sessions: ScriptedSessions) -> None:
        with pytest.raises(anthropic.BadRequestError, match="context_length_exceeded: 49 tokens"):
            await client.messages.create(model="any", max_tokens=9, messages=[ASK])
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="sk-other").messages.create(model="any", max_tokens=9, messages=[ASK])

    run(body, draw)
