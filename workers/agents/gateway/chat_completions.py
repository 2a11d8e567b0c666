"""OpenAI's `/v1/chat/completions`.

Supported: messages (text; roles system, developer, user, assistant, tool), tools (functions), max_tokens or
max_completion_tokens, stop, stream, stream_options.include_usage, logprobs (tokens are named `token_id:N`; no
top_logprobs). `developer` is treated as `system`; system messages at the start of a history are joined.
"""

from collections.abc import Iterator
from typing import Any

from workers.agents.gateway.dialect import Body, FinishedTurn, SessionMemory, event, pieces
from workers.agents.gateway.fields import Fields, function_tool, tool_call
from workers.agents.rollout_errors import BadAgentRequest
from workers.agents.turns import ChatRequest, Message, Tool

NAMES_ANSWERS = False


def read(body: Body, memory: SessionMemory) -> ChatRequest:
    fields = Fields(body)
    messages = [_message(message) for message in fields.take_objects("messages")]
    if not messages:
        raise BadAgentRequest("messages", "must contain a message")
    tools = [_tool(tool) for tool in fields.take_objects("tools")]
    max_tokens, old_name = fields.take_limit("max_completion_tokens"), fields.take_limit("max_tokens")
    if None not in (max_tokens, old_name) and max_tokens != old_name:
        raise BadAgentRequest("max_tokens", "differs from max_completion_tokens; give one of them")
    stop = fields.stop_strings("stop")
    fields.take_value("stream", bool)
    options = Fields(fields.take_value("stream_options", dict) or {}, "stream_options")
    options.take_value("include_usage", bool)
    options.end(include_obfuscation=False)
    fields.take_value("logprobs", bool)
    fields.end_of_body(
        n=1,
        top_logprobs=0,
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0,
        repetition_penalty=1,
        response_format={"type": "text"},
        modalities=["text"],
        tool_choice="auto",
        parallel_tool_calls=True,
    )
    return ChatRequest(messages, tools or None, max_tokens or old_name, stop)


def write(answer: FinishedTurn) -> Body:
    choice = {
        "index": 0,
        "message": _assistant(answer),
        "logprobs": _logprobs(answer),
        "finish_reason": _reason(answer),
    }
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def events(answer: FinishedTurn) -> Iterator[bytes]:
    head = _head(answer, "chat.completion.chunk")

    def chunk(delta: Body, reason: str | None = None, logprobs: Body | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event({**head, "choices": [choice]})

    message = _assistant(answer)
    yield chunk({"role": "assistant", "content": ""})
    for field in ("reasoning_content", "content"):
        yield from (chunk({field: piece}) for piece in pieces(message.get(field) or ""))
    for place, call in enumerate(answer.reply.tool_calls):
        yield chunk({"tool_calls": [{"index": place, **call}]})
    yield chunk({}, _reason(answer), _logprobs(answer))
    if (answer.body.get("stream_options") or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def error(message: str, *, kind: str, param: str | None, code: str | None) -> Body:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _message(fields: Fields) -> Message:
    role = fields.take_required("role", str)
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise BadAgentRequest(fields.name("role"), f"{role!r} is not one of system, developer, user, assistant, tool")
    message: Message = {"role": "system" if role == "developer" else role, "content": fields.text("content", "text")}
    if role == "assistant":
        if reasoning := fields.take_value("reasoning_content", str):
            message["reasoning_content"] = reasoning
        if calls := [_call(call) for call in fields.take_objects("tool_calls")]:
            message["tool_calls"] = calls
    elif role == "tool":
        message["tool_call_id"] = fields.take_required("tool_call_id", str)
    if (name := fields.take_value("name", str)) is not None:
        message["name"] = name
    fields.end(annotations=[])
    return message


def _call(fields: Fields) -> Any:
    fields.take_value("index", int)  # left over by clients that assemble a stream
    call_id = fields.take_required("id", str)
    function = Fields(fields.take_required("function", dict), fields.name("function"))
    call = tool_call(call_id, function.take_required("name", str), function.take_required("arguments", str))
    function.end()
    fields.end(type="function")
    return call


def _tool(fields: Fields) -> Tool:
    tool = function_tool(Fields(fields.take_required("function", dict), fields.name("function")), "parameters")
    fields.end(type="function")
    return tool


def _assistant(answer: FinishedTurn) -> Message:
    message = answer.reply.message
    kept = {field: message[field] for field in ("reasoning_content", "tool_calls") if message.get(field)}
    return {"role": "assistant", "content": answer.reply.text, "refusal": None, **kept}


def _head(answer: FinishedTurn, kind: str) -> Body:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.body.get("model")}


def _reason(answer: FinishedTurn) -> str:
    return answer.reply.finish_reason


def _logprobs(answer: FinishedTurn) -> Body | None:
    if not answer.body.get("logprobs"):
        return None
    drawn = zip(answer.reply.token_ids, answer.reply.log_probs, strict=True)
    tokens: list[Body] = [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []} for token, value in drawn
    ]
    return {"content": tokens, "refusal": None}


def _usage(answer: FinishedTurn) -> Body:
    prompt, drawn = answer.reply.prompt_tokens, len(answer.reply.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
