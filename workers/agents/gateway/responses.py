"""OpenAI's `/v1/responses`.

Supported: input (text, or items: text messages, function_call, function_call_output), instructions, tools (functions),
max_output_tokens, previous_response_id (of this session; as with OpenAI, its instructions do not carry over), stream.
No reasoning items: reasoning stays in the session.
"""

from collections.abc import Iterator

from workers.agents.gateway.chat_completions import error
from workers.agents.gateway.dialect import Body, FinishedTurn, SessionMemory, event, pieces
from workers.agents.gateway.fields import Fields, function_tool, tool_call
from workers.agents.rollout_errors import BadAgentRequest
from workers.agents.turns import ChatRequest, Message

__all__ = ["NAMES_ANSWERS", "error", "events", "read", "write"]

_PREFIX = "resp_"
NAMES_ANSWERS = True


def read(body: Body, memory: SessionMemory) -> ChatRequest:
    fields = Fields(body)
    instructions = fields.take_value("instructions", str)
    messages = _earlier(fields.take_value("previous_response_id", str), memory)
    if fields.peek_value("input", list) is not None:
        for item in fields.take_objects("input"):
            _add(messages, item)
    else:
        messages.append({"role": "user", "content": fields.take_required("input", str)})
    tools = []
    for tool in fields.take_objects("tools"):
        if (kind := tool.take_required("type", str)) != "function":
            raise BadAgentRequest(tool.name("type"), f"{kind!r} is not served; declare functions of your own")
        tools.append(function_tool(tool, "parameters"))
    max_tokens = fields.take_limit("max_output_tokens")
    fields.take_value("stream", bool)
    fields.end_of_body(
        text={"format": {"type": "text"}},
        include=[],
        reasoning={},
        background=False,
        truncation="disabled",
        top_logprobs=0,
        tool_choice="auto",
        parallel_tool_calls=True,
        stream_options={},
    )
    first = [{"role": "system", "content": instructions}] if instructions else []
    return ChatRequest([*first, *messages], tools or None, max_tokens)


def write(answer: FinishedTurn) -> Body:
    whole = _head(answer)
    output: list[Body] = []
    cut = answer.reply.finish_reason == "length"
    if answer.reply.text or not answer.reply.tool_calls:
        part = {"type": "output_text", "text": answer.reply.text, "annotations": []}
        status = "incomplete" if cut else "completed"
        ids = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": status}
        output.append({**ids, "content": [part]})
    for place, call in enumerate(answer.reply.tool_calls):
        ids = {"id": f"fc_{answer.id}_{place}", "type": "function_call", "call_id": call["id"], "status": "completed"}
        output.append({**ids, **call["function"]})
    prompt, drawn = answer.reply.prompt_tokens, len(answer.reply.token_ids)
    usage = {"input_tokens": prompt, "output_tokens": drawn, "total_tokens": prompt + drawn}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    ended = {"status": "incomplete" if cut else "completed", "usage": {**usage, **details}}
    return {**whole, **ended, "output": output, "incomplete_details": {"reason": "max_output_tokens"} if cut else None}


def events(answer: FinishedTurn) -> Iterator[bytes]:
    for number, value in enumerate(_events(answer)):
        yield event({**value, "sequence_number": number})


def _events(answer: FinishedTurn) -> Iterator[Body]:
    begun, whole = _head(answer), write(answer)
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for place, item in enumerate(whole["output"]):
        at = {"output_index": place, "item_id": item["id"]}
        hollow: Body = {"content": []} if item["type"] == "message" else {"arguments": ""}
        started = {**item, **hollow, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": place, "item": started}
        if item["type"] == "message":
            part, at = item["content"][0], {**at, "content_index": 0}
            yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
            for piece in pieces(part["text"]):
                yield {"type": "response.output_text.delta", **at, "delta": piece, "logprobs": []}
            yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **at, "part": part}
        else:
            kind, drawn = "response.function_call_arguments", item["arguments"]
            for piece in pieces(drawn):
                yield {"type": f"{kind}.delta", **at, "delta": piece}
            yield {"type": f"{kind}.done", **at, "name": item["name"], "arguments": drawn}
        yield {"type": "response.output_item.done", "output_index": place, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _head(answer: FinishedTurn) -> Body:
    said = {field: answer.body.get(field) for field in ("model", "instructions", "previous_response_id", "metadata")}
    settings = {"tools": answer.body.get("tools") or [], "tool_choice": "auto", "parallel_tool_calls": True}
    ids = {"id": f"{_PREFIX}{answer.id}", "object": "response", "created_at": answer.created, "status": "in_progress"}
    return {**said, **settings, **ids, "output": [], "error": None, "incomplete_details": None, "usage": None}


def _earlier(response_id: str | None, memory: SessionMemory) -> list[Message]:
    """Return the messages up to and including a response, without its instructions."""
    if response_id is None:
        return []
    answer = memory.answers.get(response_id.removeprefix(_PREFIX))
    if answer is None:
        raise BadAgentRequest("previous_response_id", f"{response_id!r} is not a response of this session")
    reply: Message = {"role": "assistant", "content": answer.reply.text}
    if calls := answer.reply.tool_calls:
        reply["tool_calls"] = calls
    messages = [*answer.request.messages, reply]
    return messages[1:] if answer.body.get("instructions") else messages


def _add(messages: list[Message], item: Fields) -> None:
    """Append an item; a function call joins the assistant's message before it."""
    kind = item.take_value("type", str) or "message"
    if kind == "message":
        role = item.take_required("role", str)
        if role not in ("system", "developer", "user", "assistant"):
            raise BadAgentRequest(item.name("role"), f"{role!r} is not one of system, developer, user, assistant")
        content = item.text("content", "input_text", "output_text", "text")
        messages.append({"role": "system" if role == "developer" else role, "content": content})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = tool_call(
            item.take_required("call_id", str), item.take_required("name", str), item.take_required("arguments", str)
        )
        messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), call]}
    elif kind == "function_call_output":
        content = item.text("output", "input_text", "output_text", "text")
        messages.append({"role": "tool", "tool_call_id": item.take_required("call_id", str), "content": content})
    else:
        raise BadAgentRequest(item.name("type"), f"{kind!r} is not served")
    item.end("id", "status")
