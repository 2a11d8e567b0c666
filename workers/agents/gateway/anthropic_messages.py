"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`.

Supported: system, messages (text, tool_use, tool_result), tools (own functions), max_tokens, stop_sequences, stream;
cache_control and is_error are ignored. No thinking blocks: reasoning stays in the session. Call arguments that are not
a JSON object are returned as `{"unreadable": text}`.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from workers.agents.gateway.dialect import Body, FinishedTurn, SessionMemory, event, pieces
from workers.agents.gateway.fields import Fields, function_tool, tool_call
from workers.agents.rollout_errors import BadAgentRequest
from workers.agents.turns import ChatRequest, Message

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
NAMES_ANSWERS = False


def read(body: Body, memory: SessionMemory) -> ChatRequest:
    fields = Fields(body)
    max_tokens = fields.take_limit("max_tokens")
    if max_tokens is None:
        raise BadAgentRequest("max_tokens", "is missing")
    stop = fields.stop_strings("stop_sequences")
    fields.take_value("stream", bool)
    request = _conversation(fields, memory)
    return ChatRequest(request.messages, request.tools, max_tokens, stop)


def read_count(body: Body, memory: SessionMemory) -> ChatRequest:
    return _conversation(Fields(body), memory)


def write(answer: FinishedTurn) -> Body:
    blocks: list[Body] = [{"type": "text", "text": answer.reply.text}] if answer.reply.text else []
    for call in answer.reply.tool_calls:
        name, drawn = call["function"]["name"], call["function"]["arguments"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": _input(drawn)})
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.body.get("model"),
        "content": blocks,
        "stop_reason": _reason(answer),
        "stop_sequence": answer.reply.stop or None,
        "usage": {
            "input_tokens": answer.reply.prompt_tokens,
            "output_tokens": len(answer.reply.token_ids),
        },
    }


def events(answer: FinishedTurn) -> Iterator[bytes]:
    whole = write(answer)
    begun = {
        **whole,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**whole["usage"], "output_tokens": 0},
    }
    yield event({"type": "message_start", "message": begun})
    for place, block in enumerate(whole["content"]):
        if block["type"] == "text":
            start = {**block, "text": ""}
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
        else:
            start = {**block, "input": {}}
            drawn = msgspec.json.encode(block["input"]).decode()
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(drawn)]
        yield event({"type": "content_block_start", "index": place, "content_block": start})
        yield from (event({"type": "content_block_delta", "index": place, "delta": delta}) for delta in deltas)
        yield event({"type": "content_block_stop", "index": place})
    delta = {field: whole[field] for field in ("stop_reason", "stop_sequence")}
    yield event({"type": "message_delta", "delta": delta, "usage": whole["usage"]})
    yield event({"type": "message_stop"})


def error(message: str, *, kind: str, param: str | None, code: str | None) -> Body:
    """Return Anthropic's error object; the message carries the code, which has no field of its own."""
    return {"type": "error", "error": {"type": kind, "message": f"{code}: {message}" if code else message}}


def _conversation(fields: Fields, memory: SessionMemory) -> ChatRequest:
    messages: list[Message] = []
    if system := fields.text("system", "text"):
        messages.append({"role": "system", "content": system})
    turns = fields.take_objects("messages")
    if not turns:
        raise BadAgentRequest("messages", "must contain a message")
    for turn in turns:
        messages += _messages(turn, memory)
    tools = []
    for tool in fields.take_objects("tools"):
        if (kind := tool.take_value("type", str)) not in (None, "custom"):
            raise BadAgentRequest(tool.name("type"), f"{kind!r} is not served; declare tools of your own")
        tools.append(function_tool(tool, "input_schema"))
    fields.end_of_body(tool_choice={"type": "auto"}, thinking={"type": "disabled"})
    return ChatRequest(messages, tools or None)


def _messages(turn: Fields, memory: SessionMemory) -> list[Message]:
    """Translate one message; each tool result becomes a message of its own."""
    role = turn.take_required("role", str)
    if role not in ("user", "assistant", "system"):
        raise BadAgentRequest(turn.name("role"), f"{role!r} is not one of user, assistant, system")
    if turn.peek_value("content", list) is None:
        text = turn.take_required("content", str)
        turn.end()
        return [{"role": role, "content": text}]
    texts, calls, results = [], [], []
    for block in turn.take_objects("content"):
        kind = block.peek_value("type", str)
        if kind == "tool_use" and role == "assistant":
            calls.append(_call(block, memory))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block))
        else:
            texts.append(block.block_text("text"))
    turn.end()
    message: Message = {"role": role, "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if texts or calls or not results else results


def _call(block: Fields, memory: SessionMemory) -> Any:
    call_id, name, given = (
        block.take_required("id", str),
        block.take_required("name", str),
        block.take_required("input", dict),
    )
    block.end("type", "cache_control", "caller")
    # Use the arguments exactly as the model drew them, as long as the client did not change their value.
    drawn = memory.arguments.get(call_id)
    same = drawn is not None and _input(drawn) == given
    return tool_call(call_id, name, drawn if same and drawn is not None else msgspec.json.encode(given).decode())


def _result(block: Fields) -> Message:
    result = {
        "role": "tool",
        "tool_call_id": block.take_required("tool_use_id", str),
        "content": block.text("content", "text"),
    }
    block.end("type", "cache_control", "is_error")
    return result


def _reason(answer: FinishedTurn) -> str:
    stopped = answer.reply.stop and answer.reply.finish_reason == "stop"
    return "stop_sequence" if stopped else _REASONS[answer.reply.finish_reason]


def _input(arguments: str) -> Body:
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"unreadable": arguments}
