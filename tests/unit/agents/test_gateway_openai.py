"""OpenAI's own client at the gateway: chat completions and responses."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from tests.support.scripted_sessions import DEADLINE_S, Draw, ScriptedSessions, completion, multiplying, serving
from workers.agents.gateway.fields import warn_of_sampling
from workers.agents.rollout_errors import BadAgentRequest, ContextLengthExceeded, SessionGone
from workers.agents.turns import ChatRequest, Reply

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
MULTIPLY: Any = {"type": "function", "function": {"name": "multiply", "parameters": PARAMETERS}}
MULTIPLY_HERE: Any = {"type": "function", "name": "multiply", "parameters": PARAMETERS, "strict": None}
CALL = {"id": "call_1", "type": "function", "function": {"name": "multiply", "arguments": '{"a":37,  "b":64}'}}

Body = Callable[[openai.AsyncOpenAI, ScriptedSessions], Awaitable[None]]


def run(body: Body, draw: Draw = lambda _: completion("hi"), **settings: Any) -> None:
    """Run a test's body with a client of a session."""

    async def connected() -> None:
        sessions = ScriptedSessions(draw)
        async with serving(sessions, **settings) as gateway:
            base_url, key = f"{gateway.base_url}/v1", gateway.open()
            async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
                await body(client, sessions)

    asyncio.run(asyncio.wait_for(connected(), DEADLINE_S))


def test_tool_call_makes_a_round_trip() -> None:
    async def body(client: openai.AsyncOpenAI, sessions: ScriptedSessions) -> None:
        messages: list[Any] = [
            {"role": "developer", "content": "Multiply."},
            {"role": "user", "content": [{"type": "text", "text": "37*"}, {"type": "text", "text": "64?"}]},
        ]
        first = await client.chat.completions.create(model="any", messages=messages, tools=[MULTIPLY])
        reply = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert reply.tool_calls is not None
        messages += [reply, {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "2368"}]
        second = await client.chat.completions.create(model="any", messages=messages, tools=[MULTIPLY])
        assert second.choices[0].message.content == "It is 2368."
        assert second.choices[0].finish_reason == "stop"
        assert second.usage is not None and (second.usage.prompt_tokens, second.usage.total_tokens) == (11, 14)
        assert sessions.requests[1] == ChatRequest(
            messages=[
                {"role": "system", "content": "Multiply."},
                {"role": "user", "content": "37*64?"},
                {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
                {"role": "tool", "content": "2368", "tool_call_id": "call_1"},
            ],
            tools=[MULTIPLY],
        )

    run(body, multiplying)


def test_stream_adds_up_to_the_message() -> None:
    text = "päö" * 300

    def draw(_: ChatRequest) -> Reply:
        return completion(text, ("call_1", "multiply", "{}"), ("call_2", "multiply", "[]"))

    async def body(client: openai.AsyncOpenAI, sessions: ScriptedSessions) -> None:
        async with client.chat.completions.stream(
            model="any", messages=HELLO, stream_options={"include_usage": True}
        ) as stream:
            num_deltas = len([event async for event in stream if event.type == "content.delta"])
            whole = await stream.get_final_completion()
        message = whole.choices[0].message
        assert message.content == text
        assert num_deltas > 1
        assert [call.function.arguments for call in message.tool_calls or ()] == ["{}", "[]"]
        assert whole.choices[0].finish_reason == "tool_calls"
        assert whole.usage is not None and whole.usage.completion_tokens == 3

    run(body, draw)


def test_logprobs_are_those_of_the_drawn_tokens() -> None:
    async def body(client: openai.AsyncOpenAI, sessions: ScriptedSessions) -> None:
        answer = await client.chat.completions.create(model="any", messages=HELLO, logprobs=True)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [(token.token, token.logprob) for token in logprobs.content] == [
            ("token_id:0", 0.0),
            ("token_id:1", -0.5),
            ("token_id:2", -1.0),
        ]

    run(body)


def test_limits_and_stops_reach_the_session_and_its_sampling_stays(caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: openai.AsyncOpenAI, sessions: ScriptedSessions) -> None:
        for temperature in (0.0, 0.3):
            await client.chat.completions.create(
                model="any",
                messages=HELLO,
                max_tokens=7,
                stop="\n",
                temperature=temperature,
                top_p=0.9,
                seed=3,
                user="me",
            )
        await client.chat.completions.create(model="any", messages=HELLO, max_completion_tokens=8, stop=["a", "b"])
        assert [(request.max_tokens, request.stop) for request in sessions.requests] == [
            (7, ("\n",)),
            (7, ("\n",)),
            (8, ("a", "b")),
        ]

    warn_of_sampling.cache_clear()  # another test may have had the process's one warning
    run(body)
    assert len([record for record in caplog.records if "temperature" in record.message]) == 1


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", {"n": 2}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("reasoning_effort", {"reasoning_effort": "low"}),
        ("unheard_of", {"extra_body": {"unheard_of": 1}}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
        ("stop", {"stop": ["a", ""]}),
        ("stop", {"stop": "\ufffd"}),
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"role": "robot", "content": ""}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "2"}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
        ("tools[0].type", {"tools": [{"type": "custom", "function": {"name": "f"}}]}),
        ("stream", {"extra_body": {"stream": "yes"}}),
    ],
)
def test_field_that_is_not_served_is_named(field: str, values: dict[str, Any]) -> None:
    async def body(client: openai.AsyncOpenAI, sessions: ScriptedSessions) -> None:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(**{"model": "any", "messages": HELLO, **values})
        assert raised.value.param == field
        assert field in raised.value.message
        assert not sessions.requests

    run(body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextLengthExceeded("49 tokens, 48 fit"), 400, "context_length_exceeded"),
        (SessionGone("it was lost"), 410, "session_gone"),
        (BadAgentRequest("messages[1]", "the template refuses it"), 400, None),
    ],
)
def test_refusal_of_the_session_has_its_status(error: Exception, status: int, code: str | None, stream: bool) -> None:
    def draw(_: ChatRequest) -> Reply:
        raise error

    async def body(client: openai.AsyncOpenAI, sessions: ScriptedSessions) -> None:
        with pytest.raises(openai.APIStatusError) as raised:
            await client.chat.completions.create(model="any", messages=HELLO, stream=stream)
        assert (raised.value.status_code, raised.value.code) == (status, code)
        assert str(error) in raised.value.message

    run(body, draw)


def test_refusal_after_the_stream_began_is_an_event() -> None:
    def draw(_: ChatRequest) -> Reply:
        raise ContextLengthExceeded("49 tokens, 48 fit")

    async def body(client: openai.AsyncOpenAI, sessions: ScriptedSessions) -> None:
        sessions.open.clear()
        stream = await client.chat.completions.create(model="any", messages=HELLO, stream=True)
        sessions.open.set()  # the first comment has come
        with pytest.raises(openai.APIError, match="48 fit"):
            async for _ in stream:
                pass

    run(body, draw, keep_alive_s=0.01)


def test_model_is_listed() -> None:
    async def body(client: openai.AsyncOpenAI, sessions: ScriptedSessions) -> None:
        assert [model.id async for model in client.models.list()] == ["policy"]

    run(body)


def test_responses_tool_call_goes_on_from_a_previous_response() -> None:
    async def body(client: openai.AsyncOpenAI, sessions: ScriptedSessions) -> None:
        first = await client.responses.create(
            model="any", instructions="Multiply.", input="37*64?", tools=[MULTIPLY_HERE], max_output_tokens=9
        )
        assert first.output_text == "Let me see."
        call = first.output[1]
        assert call.type == "function_call" and call.arguments == '{"a":37,  "b":64}'
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "2368"}]
        second = await client.responses.create(
            model="any", instructions="Be brief.", input=result, previous_response_id=first.id, tools=[MULTIPLY_HERE]
        )
        assert (second.output_text, second.status) == ("It is 2368.", "completed")
        assert sessions.requests[0].max_tokens == 9
        assert sessions.requests[1].tools == [MULTIPLY]
        assert sessions.requests[1].messages == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "37*64?"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "2368"},
        ]

    run(body, multiplying)


def test_responses_history_sent_whole_is_the_same_history() -> None:
    async def body(client: openai.AsyncOpenAI, sessions: ScriptedSessions) -> None:
        history: list[Any] = [{"role": "user", "content": "37*64?"}]
        first = await client.responses.create(model="any", input=history)
        history += [item.to_dict() for item in first.output]
        history.append({"type": "function_call_output", "call_id": "call_1", "output": "2368"})
        await client.responses.create(model="any", input=history)
        assert sessions.requests[1].messages[1:3] == [
            {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "2368"},
        ]

    run(body, multiplying)


def test_responses_stream_adds_up_to_the_response() -> None:
    text = "päö" * 300

    async def body(client: openai.AsyncOpenAI, sessions: ScriptedSessions) -> None:
        async with client.responses.stream(model="any", input="37*64?") as stream:
            kinds = [event.type async for event in stream]
            whole = await stream.get_final_response()
        assert whole.output_text == text
        assert kinds.count("response.output_text.delta") > 1
        assert [item.type for item in whole.output] == ["message", "function_call"]
        assert kinds[-1] == "response.completed"

    run(body, lambda _: completion(text, ("call_1", "multiply", "{}")))


def test_response_that_a_limit_cut_is_incomplete() -> None:
    async def body(client: openai.AsyncOpenAI, sessions: ScriptedSessions) -> None:
        answer = await client.responses.create(model="any", input="?")
        assert answer.status == "incomplete"
        assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"

    run(body, lambda _: completion("cu", reason="length"))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("previous_response_id", {"previous_response_id": "resp_unknown"}),
        ("reasoning", {"reasoning": {"effort": "low"}}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("input[0].type", {"input": [{"type": "reasoning", "id": "x", "summary": []}]}),
        ("background", {"background": True}),
    ],
)
def test_responses_field_that_is_not_served_is_named(field: str, values: dict[str, Any]) -> None:
    async def body(client: openai.AsyncOpenAI, sessions: ScriptedSessions) -> None:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.responses.create(**{"model": "any", "input": "hello", **values})
        assert raised.value.param == field

    run(body)
